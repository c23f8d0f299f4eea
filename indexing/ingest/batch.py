"""Batch database indexing: any number of images into a collection, in constant memory.

Every batch is one transaction. An image is reported as added after its transaction is committed, so a process killed
at any moment has lost nothing that it reported; running the same command again goes on where it stopped.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import Catalog, Change, NewImage, StoredImage
from hashseek.indexing.catalog.records import same_attributes
from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.dry_run import Rehearsal
from hashseek.indexing.ingest.loading import Fetch, Loaded, Step, Trusted, load_sources
from hashseek.indexing.ingest.manifests import Source
from hashseek.indexing.ingest.remote import fetch
from hashseek.indexing.ingest.sources import Found, find_sources
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadImage, HashseekError
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.label_files import OnError, Problem

__all__ = ["BATCH", "Report", "Source", "find_sources", "ingest", "preview"]

log = logging.getLogger("hashseek")

BATCH = 256
_PATIENCE = 10.0  # seconds after which the next image to come ends a batch, full or not
_REMEMBERED = 1024  # codes of the last images: equal content that is not stored yet is not encoded twice


@dataclass
class Report:
    """What became of the images so far, and the problems of the last batch."""

    added: int = 0
    updated: int = 0
    known: int = 0
    skipped: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Images that were looked at."""
        return self.added + self.updated + self.known + self.skipped

    def plus(self, later: "Report") -> "Report":
        """The sum of both, with the problems of the later one."""
        return Report(
            self.added + later.added,
            self.updated + later.updated,
            self.known + later.known,
            self.skipped + later.skipped,
            later.problems,
        )


def ingest(
    collection: Collection,
    encoder: Encoder,
    sources: Iterable[Found],
    *,
    on_error: OnError = "skip",
    trust_mtime: bool = False,
    fetch: Fetch = fetch,
) -> Generator[Report, None, None]:
    """Index `sources`; yields the running report after each committed batch.

    Args:
        collection: where to.
        encoder: of the collection's checkpoint.
        sources: from `find_sources`; drawn from as memory allows.
        on_error: "skip" leaves what is unusable out, "stop" raises.
        trust_mtime: files whose size and modification time are those of their record are not read.
        fetch: gets the content behind an http(s) address, see `hashseek.indexing.ingest.remote.fetch`.

    Raises:
        BadImage: an image is unusable and `on_error` is "stop"; batches committed before stay.
    """
    load = partial(
        load_sources,
        catalog=collection.catalog,
        preprocessing=encoder.preprocessing,
        depth=2 * encoder.batch_size,
        fetch=fetch,
        decoding=encoder.decoding,
    )
    with closing(_Stored(collection)) as place:
        run = _Run(place, lambda sources: chain.from_iterable(_encoded(load(sources), encoder)), on_error)
        ready, since = list[Loaded | Problem](), time.monotonic()
        for encoded in _encoded(load(sources, trust_mtime=trust_mtime), encoder):
            ready += encoded
            while len(ready) >= BATCH or (ready and time.monotonic() - since > _PATIENCE):
                report = run.store(ready[:BATCH])
                del ready[:BATCH]
                yield report
                since = time.monotonic()
        if ready:
            yield run.store(ready)


def preview(
    catalog: Catalog | None,
    preprocessing: Preprocessing,
    sources: Iterable[Found],
    *,
    on_error: OnError = "skip",
    trust_mtime: bool = False,
    fetch: Fetch = fetch,
) -> Iterator[Report]:
    """What `ingest` would report, without a network and without writing; `catalog` is None if there is none yet.

    Every image is read and decoded, so that the ones that are unusable are known.

    Raises:
        BadImage: an image is unusable and `on_error` is "stop".
    """
    load = partial(load_sources, catalog=catalog, preprocessing=preprocessing, depth=64, fetch=fetch)
    with closing(Rehearsal(catalog)) as rehearsal:
        run = _Run(rehearsal, lambda sources: (loaded for loaded, _ in load(sources)), on_error)
        steps = (loaded for loaded, _ in load(sources, trust_mtime=trust_mtime))
        while batch := list(islice(steps, BATCH)):
            yield run.store(batch)


def _encoded(steps: Iterable[Step], encoder: Encoder) -> Iterator[list[Loaded | Problem]]:
    """The images with their codes, in order, encoded as many together as the encoder takes, or as came in time."""
    size = min(encoder.batch_size, BATCH)
    codes: dict[str, NDArray[np.uint8]] = {}
    waiting: list[Step] = []
    n_pixels, since = 0, time.monotonic()
    for step in steps:
        waiting.append(step)
        n_pixels += step[1] is not None
        if n_pixels in (0, size) or len(waiting) >= BATCH or time.monotonic() - since > _PATIENCE:
            yield _with_codes(waiting, encoder, codes)
            waiting, n_pixels, since = [], 0, time.monotonic()
    yield _with_codes(waiting, encoder, codes)


def _with_codes(waiting: list[Step], encoder: Encoder, codes: dict[str, NDArray[np.uint8]]) -> list[Loaded | Problem]:
    """The images with their codes; `codes` are the last ones by content hash, and are kept up to date."""
    new = {
        loaded.image.sha256: pixels
        for loaded, pixels in waiting
        if pixels is not None and isinstance(loaded, Loaded) and loaded.image is not None
        if loaded.image.sha256 not in codes
    }
    if new:
        codes.update(zip(new, encoder.encode_pixels(np.stack(list(new.values()))), strict=True))
    done: list[Loaded | Problem] = []
    for loaded, pixels in waiting:
        if pixels is not None and isinstance(loaded, Loaded) and loaded.image is not None:
            image = replace(loaded.image, code=codes[loaded.image.sha256], engine=encoder.engine)
            loaded = replace(loaded, image=image)
        done.append(loaded)
    while len(codes) > _REMEMBERED:
        del codes[next(iter(codes))]
    return done


class _Place(Protocol):
    """Where a run's images go: a collection, or the rehearsal of what it would do."""

    def add(self, images: list[NewImage], /) -> list[tuple[int, Change]]: ...

    def labels_of(self, ids: Sequence[int], /) -> list[set[str]]:
        """The labels of each of these images."""

    def touched(self, found: Sequence[Trusted], /) -> list[bool]:
        """Of each file that is as its record says, whether that record was changed since."""


@dataclass
class _Stored:
    """The place of a real run."""

    collection: Collection
    _replaced: set[str] = field(default_factory=set)

    def add(self, images: list[NewImage]) -> list[tuple[int, Change]]:
        return self.collection.add(images, replaced=self._replaced)

    def close(self) -> None:
        """Delete the kept files that the run replaced: until its end, a later source may be one of them.

        Their names are what a run keeps in memory, some 100 bytes of each.
        """
        try:
            self.collection.drop_files(self._replaced)
        except (HashseekError, OSError) as error:  # the run is to end with the reason that it has
            log.warning("replaced files were not deleted (`hashseek index optimize` will): %s", error)
        self._replaced.clear()

    def labels_of(self, ids: Sequence[int]) -> list[set[str]]:
        return [set() if record is None else set(record.labels) for record in self.collection.catalog.get(ids)]

    def touched(self, found: Sequence[Trusted]) -> list[bool]:
        catalog = self.collection.catalog
        generation = catalog.generation()
        doubtful = [one.record.id for one in found if one.generation != generation]
        now = dict(zip(doubtful, catalog.get(doubtful), strict=True))
        return [one.generation != generation and not _is_same(one.record, now[one.record.id]) for one in found]


def _is_same(record: StoredImage, now: StoredImage | None) -> bool:
    """Whether a record still says of its image what it said."""
    return (
        now is not None
        and (now.sha256, now.path, now.key, now.labels) == (record.sha256, record.path, record.key, record.labels)
        and same_attributes(now.attributes, record.attributes)
    )


@dataclass
class _Run:
    """What a run did so far.

    Args:
        place: where its images go.
        read: the images of sources, whatever their records say, in order.
        on_error: see `ingest`.
    """

    place: _Place
    read: Callable[[list[Source]], Iterable[Loaded | Problem]]
    on_error: OnError
    report: Report = field(default_factory=Report)
    first_added: int | None = None  # id; ids grow, so what has a higher one was added since

    def store(self, batch: Sequence[Loaded | Problem]) -> Report:
        """Commit a batch; the report with it."""
        batch = self._as_of_now(batch)
        found = [one if isinstance(one, Problem) else one.problem for one in batch]
        problems = [problem for problem in found if problem is not None]
        bad = [problem for problem in problems if problem.skipped]
        if self.on_error == "stop" and bad:
            raise BadImage(f"{bad[0]} (leave such images out with --on-error skip)")
        loaded = [one for one in batch if isinstance(one, Loaded)]
        new = [(one.source, one.image) for one in loaded if one.image is not None]
        outcome = self.place.add([image for _, image in new]) if new else []
        changes = [change for _, change in outcome]
        self.report = self.report.plus(
            Report(
                added=changes.count("added"),
                updated=changes.count("updated"),
                known=changes.count("known") + sum(one.trusted is not None for one in loaded),
                skipped=len(bad),
                problems=problems + list(self._notes(new, outcome)),
            )
        )
        return self.report

    def _as_of_now(self, batch: Sequence[Loaded | Problem]) -> Sequence[Loaded | Problem]:
        """The batch, with files read after all whose records were changed, or will be by the batch itself.

        They were looked up well before: what this run stored since may have taken the record for another file.
        """
        resting = {n: one.trusted for n, one in enumerate(batch) if isinstance(one, Loaded) and one.trusted is not None}
        touched = dict(zip(resting, self.place.touched(list(resting.values())), strict=True))
        read = [one.source for n, one in enumerate(batch) if isinstance(one, Loaded) and touched.get(n, True)]
        keys = {source.key for source in read} - {None}
        again = [n for n, trusted in resting.items() if touched[n] or trusted.record.key in keys]
        if not again:
            return batch
        sources = [one.source for one in (batch[n] for n in again) if isinstance(one, Loaded)]
        renewed = dict(zip(again, self.read(sources), strict=True))
        return [renewed.get(n, one) for n, one in enumerate(batch)]

    def _notes(
        self, new: Sequence[tuple[Source, NewImage]], outcome: Sequence[tuple[int, Change]]
    ) -> Iterator[Problem]:
        """What was stored otherwise than its source says, or instead of what another one said."""
        kept: list[tuple[Source, int]] = []
        for (source, image), (image_id, change) in zip(new, outcome, strict=True):
            if change == "added" and self.first_added is None:
                self.first_added = image_id
            elif change == "updated" and self.first_added is not None and image_id >= self.first_added:
                reason = f"the key {image.key!r:.80} came earlier in this run, and this later one counts"
                yield Problem(source.name, reason, skipped=False, uri=str(source.uri))
            elif change == "known" and image.key is None and image.labels:
                kept.append((source, image_id))
        labels = self.place.labels_of([image_id for _, image_id in kept])
        for (source, image_id), stored in zip(kept, labels, strict=True):
            if set(source.labels) != stored:
                reason = f"its content is stored as image {image_id} with other labels, which were kept"
                yield Problem(source.name, reason, skipped=False, uri=str(source.uri))
