"""Adds any number of images to a collection in constant memory; `index add` and its dry run call `ingest`.

Every batch is one transaction, and an image is reported as added only after its batch is committed. A process that is
killed loses nothing it reported, and running the same command again continues where it stopped.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hashseek.indexing.catalog import Catalog, Change, NewImage, StoredImage
from hashseek.indexing.catalog.records import same_attributes
from hashseek.indexing.ingest.loading import Fetch, LoadedImage, Loader, Step
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.remote import fetch
from hashseek.indexing.ingest.sources import Found
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadImage, HashseekError
from hashseek.retrieval.images import Pixels, Preprocessing
from hashseek.retrieval.label_files import OnError, Problem

log = logging.getLogger("hashseek")

BATCH = 256
_MAX_PIXEL_BYTES = 2**27  # of a batch: large inputs make smaller batches
_PATIENCE = 10.0  # seconds after which a batch is stored even if it is not full


class Target(Protocol):
    """Where images are stored: a collection, or what stands in for it in a dry run."""

    @property
    def catalog(self) -> Catalog:
        """Its catalog."""

    def add(self, images: list[NewImage], *, replaced: set[str] | None = None) -> list[tuple[int, Change]]:
        """See `Collection.add`."""

    def drop_files(self, paths: set[str]) -> None:
        """See `Collection.drop_files`."""


class PixelEncoder(Protocol):
    """What encodes images: an `Encoder`, or what stands in for it in a dry run."""

    engine: str
    batch_size: int
    preprocessing: Preprocessing

    def decoding(self) -> AbstractContextManager[None]:
        """See `Encoder.decoding`."""

    def encode_pixels(self, pixels: Pixels) -> Codes:
        """See `Encoder.encode_pixels`."""


@dataclass
class IngestReport:
    """How many images were added, updated, known already or skipped so far, and the problems of the last batch."""

    added: int = 0
    updated: int = 0
    known: int = 0
    skipped: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Images processed so far."""
        return self.added + self.updated + self.known + self.skipped

    def plus(self, later: "IngestReport") -> "IngestReport":
        """The sum of both, with the problems of the later one."""
        return IngestReport(
            self.added + later.added,
            self.updated + later.updated,
            self.known + later.known,
            self.skipped + later.skipped,
            later.problems,
        )


def ingest(
    collection: Target,
    encoder: PixelEncoder,
    sources: Iterable[Found],
    *,
    on_error: OnError = "skip",
    trust_mtime: bool = False,
    fetch: Fetch = fetch,
) -> Generator[IngestReport, None, None]:
    """Add the images of `sources` to a collection; yields the running report after each committed batch.

    Args:
        collection: where to store them.
        encoder: with the collection's checkpoint.
        sources: from `find_sources`; read lazily.
        on_error: "skip" leaves out images that cannot be used, "stop" raises.
        trust_mtime: do not read files whose size and modification time are those of their record.
        fetch: returns the content behind a URL, see `hashseek.indexing.ingest.remote.fetch`.

    Raises:
        BadImage: an image cannot be used and `on_error` is "stop"; batches committed before stay.
    """
    loader = Loader(collection.catalog, encoder.preprocessing, 2 * encoder.batch_size, fetch, encoder.decoding)
    run = _Run(collection, encoder, loader, on_error)
    batch: list[Step] = []
    n_bytes, since = 0, time.monotonic()
    try:
        for step in loader.load(sources, trust_mtime=trust_mtime):
            batch.append(step)
            n_bytes += 0 if step[1] is None else step[1].nbytes
            if len(batch) >= BATCH or n_bytes >= _MAX_PIXEL_BYTES or time.monotonic() - since > _PATIENCE:
                yield run.store(batch)
                batch, n_bytes, since = [], 0, time.monotonic()
        if batch:
            yield run.store(batch)
    finally:
        run.drop_replaced_files()


@dataclass
class _Run:
    """The state of one run of `ingest`."""

    collection: Target
    encoder: PixelEncoder
    loader: Loader
    on_error: OnError
    report: IngestReport = field(default_factory=IngestReport)
    replaced: set[str] = field(default_factory=set)  # files that the collection kept and no longer needs
    first_added: int | None = None  # id; ids only grow, so images with a higher one were added since

    def store(self, batch: Sequence[Step]) -> IngestReport:
        """Encode and commit a batch; the running report that includes it."""
        results = self._read_outdated(self._encode(batch))
        problems = [result for result in results if isinstance(result, Problem)]
        bad = [problem for problem in problems if problem.skipped]
        if self.on_error == "stop" and bad:
            raise BadImage(f"{bad[0]} (use --on-error skip to leave such images out)")
        loaded = [result for result in results if isinstance(result, LoadedImage)]
        new = [(one.source, one.image) for one in loaded if one.image is not None]
        images = [image for _, image in new]
        outcome = self.collection.add(images, replaced=self.replaced) if images else []
        changes = [change for _, change in outcome]
        self.report = self.report.plus(
            IngestReport(
                added=changes.count("added"),
                updated=changes.count("updated"),
                known=changes.count("known") + sum(one.unchanged is not None for one in loaded),
                skipped=len(bad),
                problems=problems + list(self._notes(new, outcome)),
            )
        )
        return self.report

    def drop_replaced_files(self) -> None:
        """Delete kept files that the run replaced; only at its end, because a later source may name one of them."""
        try:
            self.collection.drop_files(self.replaced)
        except (HashseekError, OSError) as error:  # the run ends with its own error, if it has one
            log.warning("replaced files were not deleted (`hashseek index optimize` will): %s", error)

    def _encode(self, batch: Iterable[Step]) -> list[LoadedImage | Problem]:
        """The images with their codes; content that was stored since it was loaded is not encoded again."""
        catalog = self.collection.catalog
        new = {
            result.image.sha256: pixels
            for result, pixels in batch
            if pixels is not None and isinstance(result, LoadedImage) and result.image is not None
        }
        codes = {sha256: code for sha256 in new if (code := catalog.lookup.code_by_hash(sha256)) is not None}
        fresh = [sha256 for sha256 in new if sha256 not in codes]
        if fresh:
            encoded = self.encoder.encode_pixels(np.stack([new[sha256] for sha256 in fresh]))
            codes.update(zip(fresh, encoded, strict=True))
        results: list[LoadedImage | Problem] = []
        for result, pixels in batch:
            if pixels is not None and isinstance(result, LoadedImage) and result.image is not None:
                sha256 = result.image.sha256
                engine = self.encoder.engine if sha256 in fresh else ""
                result = replace(result, image=replace(result.image, code=codes[sha256], engine=engine))
            results.append(result)
        return results

    def _read_outdated(self, results: list[LoadedImage | Problem]) -> list[LoadedImage | Problem]:
        """Read the unchanged files after all if one of their records has changed since, or changes with this batch.

        Records are looked up well ahead: this run may have given a record to another file in the meantime.
        """
        unchanged = [
            (result.source, result.unchanged)
            for result in results
            if isinstance(result, LoadedImage) and result.unchanged is not None
        ]
        keys = {result.source.key for result in results if isinstance(result, LoadedImage) and result.image is not None}
        now = self.collection.catalog.get([record.id for _, record in unchanged])
        if all(
            _is_same(record, current) and (record.key is None or record.key not in keys)
            for (_, record), current in zip(unchanged, now, strict=True)
        ):
            return results
        again = iter(self._encode(list(self.loader.load([source for source, _ in unchanged]))))
        return [
            next(again) if isinstance(result, LoadedImage) and result.unchanged is not None else result
            for result in results
        ]

    def _notes(
        self, new: Sequence[tuple[ImageSource, NewImage]], outcome: Sequence[tuple[int, Change]]
    ) -> Iterator[Problem]:
        """Notes on images that were not stored as their source says, or that replaced another one of this run."""
        kept: list[tuple[ImageSource, int]] = []
        for (source, image), (image_id, change) in zip(new, outcome, strict=True):
            if change == "added" and self.first_added is None:
                self.first_added = image_id
            elif change == "updated" and self.first_added is not None and image_id >= self.first_added:
                reason = f"the key {image.key!r:.80} was used earlier in this run; this image replaces that one"
                yield Problem(source.name, reason, skipped=False, uri=str(source.uri))
            elif change == "known" and image.key is None and image.labels:
                kept.append((source, image_id))
        records = self.collection.catalog.get([image_id for _, image_id in kept])
        for (source, image_id), record in zip(kept, records, strict=True):
            if record is not None and set(source.labels) != set(record.labels):
                reason = f"the same content is stored as image {image_id} with other labels, which were kept"
                yield Problem(source.name, reason, skipped=False, uri=str(source.uri))


def _is_same(record: StoredImage, now: StoredImage | None) -> bool:
    """Whether a record still says the same about its image."""
    return (
        now is not None
        and (now.sha256, now.path, now.key, now.labels) == (record.sha256, record.path, record.key, record.labels)
        and same_attributes(now.attributes, record.attributes)
    )
