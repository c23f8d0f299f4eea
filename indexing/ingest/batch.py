"""Adds any number of images to a collection in constant memory; `index add` and its dry run call `ingest`.

Every batch is one transaction, and an image is reported as added only after its batch is committed. A process that is
killed loses nothing it reported, and running the same command again continues where it stopped.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hashseek.indexing.catalog import Change, NewImage
from hashseek.indexing.catalog.records import FileRecord, StoredCode, same_attributes
from hashseek.indexing.ingest.loading import Fetch, LoadedImage, Loader
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import Found
from hashseek.indexing.remote import fetch
from hashseek.retrieval.errors import BadImage, HashseekError
from hashseek.retrieval.images import Pixels
from hashseek.retrieval.label_files import OnError, Problem

if TYPE_CHECKING:
    from hashseek.indexing.dry_run import DryRunEncoder, Target
    from hashseek.retrieval.encoder import Encoder

log = logging.getLogger("hashseek")

BATCH = 256
_MAX_PIXEL_BYTES = 2**27  # of a batch: large inputs make smaller batches
_PATIENCE = 10.0  # seconds after which a batch is stored even if it is not full


@dataclass
class IngestReport:
    """How many images were added, updated, already known or skipped so far, and the problems of the last batch."""

    added: int = 0
    updated: int = 0
    known: int = 0
    skipped: int = 0
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def of(cls, outcome: Sequence[tuple[int, Change]]) -> "IngestReport":
        """Count the changes that `add` reports."""
        changes = [change for _, change in outcome]
        return cls(changes.count("added"), changes.count("updated"), changes.count("known"))

    @property
    def done(self) -> int:
        """Images processed so far."""
        return self.added + self.updated + self.known + self.skipped

    def plus(self, later: "IngestReport") -> "IngestReport":
        """The sum of both reports, with the problems of the later one."""
        return IngestReport(
            self.added + later.added,
            self.updated + later.updated,
            self.known + later.known,
            self.skipped + later.skipped,
            later.problems,
        )


def ingest(
    collection: "Target",
    encoder: "Encoder | DryRunEncoder",
    sources: Iterable[Found | LoadedImage],
    *,
    on_error: OnError = "skip",
    trust_mtime: bool = False,
    fetch: Fetch = fetch,
) -> Generator[IngestReport, None, None]:
    """Add the images of `sources` to a collection; yields the running report after each committed batch.

    Args:
        collection: where to store them.
        encoder: with the collection's checkpoint.
        sources: from `find_sources`, read lazily; or already loaded and encoded with `encoder`.
        on_error: "skip" leaves out images that cannot be used, "stop" raises an error.
        trust_mtime: do not read files whose size and modification time are those of their record.
        fetch: returns the content behind a URL, see `hashseek.indexing.remote.fetch`.

    Raises:
        BadImage: an image cannot be used and `on_error` is "stop"; earlier batches stay committed.
    """
    loader = Loader(collection, encoder.preprocessing, 2 * encoder.batch_size, fetch)
    run = _Run(collection, encoder, on_error)
    batch: list[LoadedImage | Problem] = []
    n_bytes, since = 0, time.monotonic()
    try:
        for step in loader.load(sources, trust_mtime=trust_mtime):
            batch.append(step)
            if isinstance(step, LoadedImage) and step.pixels is not None:
                n_bytes += step.pixels.nbytes
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

    collection: "Target"
    encoder: "Encoder | DryRunEncoder"
    on_error: OnError
    report: IngestReport = field(default_factory=IngestReport)
    replaced: set[str] = field(default_factory=set)  # files that the collection kept and no longer needs
    first_added: int | None = None  # id; ids only grow, so images with a higher one were added since

    def store(self, batch: Sequence[LoadedImage | Problem]) -> IngestReport:
        """Encode and commit a batch; the running report that includes it."""
        problems = [step for step in batch if isinstance(step, Problem)]
        bad = [problem for problem in problems if problem.skipped]
        if self.on_error == "stop" and bad:
            raise BadImage(f"{bad[0]} (use --on-error skip to leave such images out)")
        loaded = [step for step in batch if isinstance(step, LoadedImage)]
        new = self._encode(loaded)
        keys = [image.key for _, image in new if image.key is not None]
        stored_keys = set(self.collection.ids_by_key(keys) if keys and self.first_added is not None else ())
        paths = [image.path for _, image in new] if self.collection.indexes_paths else []
        before = self.collection.records_by_path(paths)
        outcome = self.collection.add([image for _, image in new], replaced=self.replaced) if new else []
        others = IngestReport(
            known=len(loaded) - len(new),
            skipped=len(bad),
            problems=[*problems, *_other_contents(new, outcome, before), *self._notes(new, outcome, stored_keys)],
        )
        self.report = self.report.plus(IngestReport.of(outcome)).plus(others)
        return self.report

    def drop_replaced_files(self) -> None:
        """Delete kept files that the run replaced; only at its end, because a later source may name one of them."""
        try:
            self.collection.drop_files(self.replaced)
        except (HashseekError, OSError) as error:  # if the run fails, its own error is the one to report
            log.warning("replaced files were not deleted (`hashseek index optimize` will): %s", error)

    def _encode(self, loaded: Iterable[LoadedImage]) -> list[tuple[ImageSource, NewImage]]:
        """The images with their codes; content that was stored since it was loaded is not encoded again."""
        pixels = {one.image.sha256: one.pixels for one in loaded if one.image and one.pixels is not None}
        look_up = self.collection.code_by_hash
        codes = {sha256: known for sha256 in pixels if (known := look_up(sha256)) is not None}
        fresh = [sha256 for sha256 in pixels if sha256 not in codes]
        if fresh:
            codes.update(zip(fresh, self._encode_pixels(np.stack([pixels[sha256] for sha256 in fresh])), strict=True))
        images = []
        for source, image in ((one.source, one.image) for one in loaded):
            if image is not None:
                encoded = codes.get(image.sha256)
                images.append((source, image if encoded is None else replace(image, **encoded._asdict())))
        return images

    def _encode_pixels(self, pixels: Pixels) -> list[StoredCode]:
        engine = self.encoder.engine
        if not self.collection.keeps_features:
            return [StoredCode(code, engine, None) for code in self.encoder.encode_pixels(pixels)]
        both = zip(*self.encoder.encode_with_features(pixels), strict=True)
        return [StoredCode(code, engine, feature) for code, feature in both]

    def _notes(
        self, new: Sequence[tuple[ImageSource, NewImage]], outcome: Sequence[tuple[int, Change]], keys: set[str]
    ) -> Iterator[Problem]:
        """Notes on images that were not stored as their source specifies, or that replaced another one of this run.

        `keys`: those of the images that were stored before this batch, if the run has added any image by then.
        """
        kept: list[tuple[ImageSource, int]] = []
        for (source, image), (image_id, change) in zip(new, outcome, strict=True):
            if change == "added" and self.first_added is None:
                self.first_added = image_id
            elif (
                change == "updated"
                and image.key in keys
                and self.first_added is not None
                and image_id >= self.first_added
            ):
                reason = f"the key {image.key!r:.80} was used earlier in this run; this image replaces that one"
                yield Problem(source.name, reason, skipped=False, uri=str(source.uri))
            elif change != "added" and image.key is None and (image.labels or image.attributes):
                kept.append((source, image_id))
            if image.key is not None:
                keys.add(image.key)
        records = self.collection.get([image_id for _, image_id in kept])
        for (source, image_id), record in zip(kept, records, strict=True):
            differs = {
                "labels": record and source.labels and set(source.labels) != set(record.labels),
                "attributes": record
                and source.attributes
                and not same_attributes(source.attributes, record.attributes),
            }
            if names := " and ".join(name for name, other in differs.items() if other):
                reason = (
                    f"the same content is stored as image {image_id} with different {names}, which were kept: give "
                    "this image a key to store its own (--key-from path)"
                )
                yield Problem(source.name, reason, skipped=False, uri=str(source.uri))


def _other_contents(
    new: Sequence[tuple[ImageSource, NewImage]],
    outcome: Sequence[tuple[int, Change]],
    before: Mapping[str, FileRecord],
) -> Iterator[Problem]:
    """Notes on new images whose path also belongs to a record with other content; `before`: the records of paths."""
    for (source, image), (_, change) in zip(new, outcome, strict=True):
        record = before.get(image.path)
        # Under keys, one content may have several records; otherwise the image would be known, or its key be adopted.
        if change == "added" and record is not None and None in (image.key, record.key):
            reason = f"image {record.id} has this path but other content: remove that image"
            yield Problem(source.name, reason, skipped=False, uri=str(source.uri))
