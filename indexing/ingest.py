"""Batch database indexing: any number of images into a collection, in constant memory.

Every batch is one transaction. An image is reported as added after its transaction is committed, so a process killed
at any moment has lost nothing that it reported; running the same command again goes on where it stopped.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from indexing.catalog import Catalog, Change, NewImage
from indexing.catalog.records import same_attributes
from indexing.collection import Collection
from indexing.reading.loading import Fetch, Loaded, Step, load_sources
from indexing.reading.manifests import Source
from indexing.reading.remote import fetch
from indexing.reading.sources import Found, find_sources
from retrieval.encoder import Encoder
from retrieval.errors import BadImage
from retrieval.images import Preprocessing
from retrieval.listing import OnError, Problem

__all__ = ["BATCH", "Report", "Source", "find_sources", "ingest", "preview"]

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
) -> Iterator[Report]:
    """Index `sources`; yields the running report after each committed batch.

    Args:
        collection: where to.
        encoder: of the collection's checkpoint.
        sources: from `find_sources`; drawn from as memory allows.
        on_error: "skip" leaves what is unusable out, "stop" raises.
        trust_mtime: files whose size and modification time are those of their record are not read.
        fetch: gets the content behind an http(s) address, see `indexing.reading.remote.fetch`.

    Raises:
        BadImage: an image is unusable and `on_error` is "stop"; batches committed before stay.
    """
    steps = load_sources(
        sources,
        catalog=collection.catalog,
        preprocessing=encoder.preprocessing,
        depth=2 * encoder.batch_size,
        trust_mtime=trust_mtime,
        fetch=fetch,
        decoding=encoder.decoding,
    )
    report, ready, since = Report(), list[Loaded | Problem](), time.monotonic()
    for encoded in _encoded(steps, encoder):
        ready += encoded
        while len(ready) >= BATCH or (ready and time.monotonic() - since > _PATIENCE):
            report = _store(collection, ready[:BATCH], report, on_error)
            del ready[:BATCH]
            yield report
            since = time.monotonic()
    if ready:
        yield _store(collection, ready, report, on_error)


def preview(
    catalog: Catalog | None,
    preprocessing: Preprocessing,
    sources: Iterable[Found],
    *,
    trust_mtime: bool = False,
    fetch: Fetch = fetch,
) -> Iterator[Report]:
    """What `ingest` would report, without a network and without writing; `catalog` is None if there is none yet.

    Every image is read and decoded, so that the ones that are unusable are known.
    """
    steps = load_sources(
        sources, catalog=catalog, preprocessing=preprocessing, depth=64, trust_mtime=trust_mtime, fetch=fetch
    )
    # SQLite puts a database without a name into a file of its own when it grows: memory stays as it is.
    with closing(sqlite3.connect("")) as seen:
        seen.execute("CREATE TABLE seen (name TEXT PRIMARY KEY, sha256 TEXT NOT NULL) WITHOUT ROWID")
        report = Report()
        for number, (loaded, _) in enumerate(steps, start=1):
            problem = loaded if isinstance(loaded, Problem) else loaded.problem
            if problem is not None:
                report.skipped += problem.skipped
                report.problems.append(problem)
            elif isinstance(loaded, Loaded):
                change = "known" if loaded.image is None else _would_be(loaded.image, catalog, seen)
                setattr(report, change, getattr(report, change) + 1)
            if number % BATCH == 0:
                yield report
                report = replace(report, problems=[])
        yield report


def _would_be(image: NewImage, catalog: Catalog | None, seen: sqlite3.Connection) -> Change:
    name = f"content {image.sha256}" if image.key is None else f"key {image.key}"
    earlier = seen.execute("SELECT sha256 FROM seen WHERE name = ?", (name,)).fetchone()
    seen.execute("INSERT OR REPLACE INTO seen VALUES (?, ?)", (name, image.sha256))
    if image.key is None:
        return "added" if earlier is None and not len(image.code) else "known"
    if earlier is not None:
        return "known" if earlier[0] == image.sha256 else "updated"
    ids = list(catalog.known_keys([image.key]).values()) if catalog is not None else []
    record = catalog.get(ids)[0] if catalog is not None and ids else None
    if record is None:
        return "added"
    same = record.sha256 == image.sha256 and record.path == image.path
    same = same and (not image.labels or set(image.labels) == set(record.labels))
    return (
        "known"
        if same and (not image.attributes or same_attributes(image.attributes, record.attributes))
        else "updated"
    )


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


def _store(collection: Collection, batch: Sequence[Loaded | Problem], before: Report, on_error: OnError) -> Report:
    """Commit a batch; the report with it."""
    found = [one if isinstance(one, Problem) else one.problem for one in batch]
    problems = [problem for problem in found if problem is not None]
    bad = [problem for problem in problems if problem.skipped]
    if on_error == "stop" and bad:
        raise BadImage(f"{bad[0]} (leave such images out with --on-error skip)")
    loaded = [one for one in batch if isinstance(one, Loaded)]
    new = [(one.source, one.image) for one in loaded if one.image is not None]
    outcome = collection.add([image for _, image in new]) if new else []
    changes = [change for _, change in outcome]
    known = [
        (source, image_id)
        for (source, image), (image_id, change) in zip(new, outcome, strict=True)
        if change == "known" and image.key is None and image.labels
    ]
    records = collection.catalog.get([image_id for _, image_id in known])
    for (source, image_id), record in zip(known, records, strict=True):
        if record is not None and set(source.labels) != set(record.labels):
            reason = f"its content is stored as image {image_id} with other labels, which were kept"
            problems.append(Problem(source.name, reason, skipped=False, uri=str(source.uri)))
    n_unchanged = sum(one.image is None and one.error is None for one in loaded)
    return Report(
        added=before.added + changes.count("added"),
        updated=before.updated + changes.count("updated"),
        known=before.known + changes.count("known") + n_unchanged,
        skipped=before.skipped + len(bad),
        problems=problems,
    )
