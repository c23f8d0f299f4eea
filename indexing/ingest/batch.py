"""Adds any number of images to a collection in constant memory; `index add` and its dry run call `ingest`.

Every batch is one transaction, and an image is reported as added only after its batch is committed. A process that is
killed loses nothing it reported, and running the same command again continues where it stopped.
"""

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hashseek.indexing.catalog import Change, NewImage
from hashseek.indexing.catalog.records import StoredCode, same_attributes, stored_codes
from hashseek.indexing.ingest.loading import Fetch, LoadedImage, Loader, mark_unchanged
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import Found
from hashseek.indexing.remote import fetch
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import Pixels
from hashseek.retrieval.label_files import OnError, Problem
from hashseek.retrieval.vectors import Vectors

if TYPE_CHECKING:
    from hashseek.indexing.dry_run import DryRunEncoder, Target
    from hashseek.retrieval.encoder import Encoder, VectorEncoder

BATCH = 256
_MAX_PIXEL_BYTES = 2**27  # of a batch: large inputs make smaller batches
_PATIENCE = 10.0  # seconds after which a batch is stored even if it is not full


@dataclass
class IngestReport:
    """How many images were added, updated, already known, skipped or removed so far; the problems of the last batch."""

    added: int = 0
    updated: int = 0
    known: int = 0
    skipped: int = 0
    removed: int = 0
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
            self.removed + later.removed,
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
        encoder: an encoder with the collection's checkpoint.
        sources: what `find_sources` yields, read lazily; or images already loaded and encoded with `encoder`.
        on_error: "skip" leaves out images that cannot be used, "stop" raises an error.
        trust_mtime: do not read files whose size and modification time are those of their record.
        fetch: returns the content behind a URL, see `hashseek.indexing.remote.fetch`.

    Raises:
        BadImage: an image cannot be used and `on_error` is "stop"; earlier batches stay committed.
    """
    loader = Loader(collection, encoder, fetch)
    writer, report = Writer(collection), IngestReport()
    batch: list[LoadedImage | Problem] = []
    n_bytes, since = 0, time.monotonic()
    for step in loader.load(mark_unchanged(collection, sources) if trust_mtime else sources):
        batch.append(step)
        if isinstance(step, LoadedImage) and step.pixels is not None:
            n_bytes += step.pixels.nbytes
        if len(batch) >= BATCH or n_bytes >= _MAX_PIXEL_BYTES or time.monotonic() - since > _PATIENCE:
            report = report.plus(_store(batch, writer, encoder, on_error))
            yield report
            batch, n_bytes, since = [], 0, time.monotonic()
    if batch:
        report = report.plus(_store(batch, writer, encoder, on_error))
        yield report
    if (notes := writer.notes_of_run()).problems:
        yield report.plus(notes)


class Writer:
    """Adds images to a collection, batch by batch, and notes those that are not stored as their source specifies."""

    def __init__(self, collection: "Target") -> None:
        self.collection = collection
        self._seen = _SeenIds(collection.in_folder)  # of images with keys
        # id of a record -> path, content, name and URI of a new image whose path it had
        self._same_path: dict[int, tuple[str, str, str, str]] = {}

    def add(self, images: list[NewImage], names: Sequence[tuple[str, str]] | None = None) -> IngestReport:
        """Commit a batch; returns the changes, and notes.

        `names`: what to call each image in a note, and its URI; by default both are its path.
        """
        names = names or [(image.path, image.path) for image in images]
        paths = [image.path for image in images if image.path] if self.collection.in_folder else []
        before = self.collection.records_by_path(paths)
        outcome = self.collection.add(images) if images else []
        notes = self._notes(images, outcome)
        for image, (_, change), name in zip(images, outcome, names, strict=True):
            record = before.get(image.path)
            if change == "added" and record is not None and None in (image.key, record.key):
                self._same_path[record.id] = (image.path, image.sha256, *name)
        report = IngestReport.of(outcome)
        report.problems = [Problem(names[n][0], notes[n], skipped=False, uri=names[n][1]) for n in sorted(notes)]
        return report

    def notes_of_run(self) -> IngestReport:
        """Notes, at the end of a run, on records whose path now belongs to a new image with other content.

        Not earlier: in a series that was renumbered, a later batch moves the record to its own file.
        """
        records = self.collection.get(list(self._same_path))
        problems = []
        for (place, sha256, name, uri), record in zip(self._same_path.values(), records, strict=True):
            if record is not None and record.path == place and record.sha256 != sha256:
                reason = (
                    f"image {record.id} has this path but other content: remove it with "
                    f"`hashseek index remove COLLECTION {record.id}`"
                )
                problems.append(Problem(name, reason, skipped=False, uri=uri))
        return IngestReport(problems=problems)

    def _notes(self, images: list[NewImage], outcome: Sequence[tuple[int, Change]]) -> dict[int, str]:
        """Notes on images that lost their labels or attributes, or that replaced another one of this run, by number."""
        notes: dict[int, str] = {}
        kept: list[int] = []
        for n, (image, (image_id, change)) in enumerate(zip(images, outcome, strict=True)):
            if image.key is not None:
                if change == "updated" and image_id in self._seen:
                    notes[n] = f"the key {image.key!r:.80} was used earlier in this run; this image replaces that one"
                self._seen.add(image_id)
            elif change != "added":
                kept.append(n)
        return {**notes, **self._kept_others([(n, images[n], outcome[n][0]) for n in kept])}

    def _kept_others(self, known: Sequence[tuple[int, NewImage, int]]) -> dict[int, str]:
        """Notes on images (number, image, id of the record) whose content is stored with other labels or attributes."""
        described = [one for one in known if one[1].new_labels is not None or one[1].new_attributes is not None]
        notes = {}
        records = self.collection.get([image_id for _, _, image_id in described])
        for (n, image, image_id), record in zip(described, records, strict=True):
            if record is None:  # removed since
                continue
            differs = {
                "labels": image.new_labels is not None and {*image.new_labels} != {*record.labels},
                "attributes": image.new_attributes is not None
                and not same_attributes(image.new_attributes, record.attributes),
            }
            if changed := " and ".join(name for name, other in differs.items() if other):
                notes[n] = (
                    f"the same content is stored as image {image_id} with different {changed}, which were kept: "
                    "give this image a key to store its own"
                )
        return notes


class _SeenIds:
    """A set of ids. Those of a folder are small numbers, for which a byte per possible id takes less memory."""

    def __init__(self, ids_are_small: bool) -> None:
        self._ids: set[int] | None = None if ids_are_small else set()
        self._flags = bytearray()

    def __contains__(self, image_id: int) -> bool:
        if self._ids is not None:
            return image_id in self._ids
        return image_id < len(self._flags) and bool(self._flags[image_id])

    def add(self, image_id: int) -> None:
        if self._ids is not None:
            self._ids.add(image_id)
            return
        if image_id >= len(self._flags):
            self._flags.extend(bytes(image_id + 1 - len(self._flags)))
        self._flags[image_id] = 1


def _store(
    batch: Sequence[LoadedImage | Problem], writer: Writer, encoder: "Encoder | DryRunEncoder", on_error: OnError
) -> IngestReport:
    """Encode and commit a batch."""
    problems = [step for step in batch if isinstance(step, Problem)]
    bad = [problem for problem in problems if problem.skipped]
    if on_error == "stop" and bad:
        raise BadImage(f"{bad[0]} (use --on-error skip to leave such images out)")
    loaded = [step for step in batch if isinstance(step, LoadedImage)]
    new = _encoded(loaded, writer.collection, encoder)
    stored = writer.add([image for _, image in new], [(source.name, str(source.uri)) for source, _ in new])
    others = IngestReport(known=len(loaded) - len(new), skipped=len(bad), problems=problems + stored.problems)
    return stored.plus(others)


def _encoded(
    loaded: Iterable[LoadedImage], collection: "Target", encoder: "Encoder | DryRunEncoder"
) -> list[tuple[ImageSource, NewImage]]:
    """The images with their codes; content that was stored since it was loaded is not encoded again."""
    pixels = {one.image.sha256: one.pixels for one in loaded if one.image and one.pixels is not None}
    codes = {sha256: known[1] for sha256 in pixels if (known := collection.by_content(sha256)) is not None}
    fresh = [sha256 for sha256 in pixels if sha256 not in codes]
    if fresh:
        codes.update(zip(fresh, encode(encoder, np.stack([pixels[sha256] for sha256 in fresh])), strict=True))
    images = []
    for one in loaded:
        if one.image is not None:
            code = codes.get(one.image.sha256)
            images.append((one.source, one.image if code is None else replace(one.image, **code._asdict())))
    return images


def encode(encoder: "Encoder | VectorEncoder | DryRunEncoder", inputs: Pixels | Vectors) -> list[StoredCode]:
    """The code and the feature of each image or vector; a collection that stores no features ignores them."""
    return stored_codes(encoder.engine, *encoder.features_and_outputs(inputs))
