"""Batch database indexing: files, folders and lists into a collection, in constant memory.

Every batch is one transaction. An image is reported as added after its transaction is committed, so a process killed
at any moment has lost nothing that it reported; running the same command again goes on where it stopped.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexing.catalog import NewImage
from indexing.collection import Collection
from retrieval.encoder import Encoder
from retrieval.errors import BadDataset, BadImage
from retrieval.images import SUFFIXES, Picture, Pixels, Preprocessing, decode_for, read_bytes
from retrieval.listing import OnError, Problem, read_listing

BATCH = 256


@dataclass(frozen=True)
class Source:
    """An image to be indexed: where it is, and what is said about it."""

    path: Path
    labels: tuple[str, ...] = ()
    where: str = ""

    @property
    def name(self) -> str:
        """How a message calls it."""
        return self.where or str(self.path)


@dataclass
class Report:
    """What became of the images."""

    added: int = 0
    known: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def skipped(self) -> list[Problem]:
        """Images that were left out, with the reason."""
        return [problem for problem in self.problems if problem.skipped]


@dataclass(frozen=True)
class _Loaded:
    """What a worker thread made of a source: a picture, the id it is stored under already, or a problem."""

    source: Source
    sha256: str = ""
    n_bytes: int = 0
    picture: Picture | None = None
    known_id: int | None = None
    error: str | None = None


def find_sources(
    paths: Sequence[Path], *, on_error: OnError, split: str | None = None
) -> tuple[list[Source], list[Problem]]:
    """The images that `paths` name: image files, folders (searched with their subfolders), or lists of labelled images.

    Args:
        paths: what to look at; a folder that holds a `labels.csv` or `labels.jsonl` counts as that list.
        on_error: for lists, see `retrieval.listing`.
        split: of a list, take only this split.

    Raises:
        BadDataset: a path does not exist, or a list is refused.
    """
    sources: list[Source] = []
    problems: list[Problem] = []
    for path in paths:
        is_list = path.suffix.lower() in (".csv", ".jsonl") or any(
            (path / name).is_file() for name in ("labels.csv", "labels.jsonl")
        )
        if is_list:
            listing = read_listing(path, on_error=on_error, need_labels=False)
            problems += listing.problems
            chosen = [item for item in listing.items if split is None or item.split == split]
            if split is not None and not chosen:
                raise BadDataset(f"{listing.source} has no image in the split {split!r}")
            sources += [Source(item.path, item.labels, f"{listing.source.name} line {item.line}") for item in chosen]
        elif path.is_dir():
            files, unreadable = _walk(path)
            sources += [Source(file) for file in files]
            problems += unreadable
        elif path.is_file():
            sources.append(Source(path))
        else:
            raise BadDataset(f"there is no file or folder {path}: correct the path")
    return sources, problems


def ingest(
    collection: Collection, encoder: Encoder, sources: Sequence[Source], *, on_error: OnError = "skip"
) -> Iterator[Report]:
    """Index `sources`; yields the running report after each committed batch.

    Raises:
        BadImage: an image is unusable and `on_error` is "stop"; batches committed before stay.
    """
    report = Report()
    remaining = iter(sources)
    while batch := list(islice(remaining, BATCH)):
        _ingest_batch(collection, encoder, batch, report, on_error)
        yield report


def _load(source: Source, collection: Collection, preprocessing: Preprocessing) -> tuple[_Loaded, Pixels | None]:
    try:
        data = read_bytes(source.path)
        _check_text(source)
        sha256 = hashlib.sha256(data).hexdigest()
        known = collection.catalog.known_hashes([sha256])
        if known:
            return _Loaded(source, sha256, known_id=known[sha256]), None
        picture, pixels = decode_for(data, preprocessing, name=str(source.path))
    except BadImage as error:
        return _Loaded(source, error=str(error)), None
    return _Loaded(source, sha256, len(data), picture), pixels


def _check_text(source: Source) -> None:
    """Raise `BadImage` unless path and labels can be stored as text."""
    try:
        "".join((str(source.path.resolve()), *source.labels)).encode()
    except UnicodeEncodeError:
        raise BadImage(f"{source.path} has a name or label that is not valid UTF-8: rename it") from None


def _ingest_batch(
    collection: Collection, encoder: Encoder, batch: list[Source], report: Report, on_error: OnError
) -> None:
    preprocessing = encoder.preprocessing
    new: list[tuple[Source, NewImage]] = []
    known: list[tuple[Source, int]] = []
    problems: list[Problem] = []
    for loaded, code in encoder.encode_stream(batch, lambda source: _load(source, collection, preprocessing)):
        if loaded.error is not None:
            # Where the message is about a path alone, naming it once is enough.
            reason = loaded.error if loaded.source.where else loaded.error.removeprefix(f"{loaded.source.path} ")
            problems.append(Problem(loaded.source.name, reason))
        elif loaded.known_id is not None:
            known.append((loaded.source, loaded.known_id))
        elif loaded.picture is not None and code is not None:
            new.append((loaded.source, _record(loaded, loaded.picture, code)))
    if on_error == "stop" and problems:
        raise BadImage(f"{problems[0]} (leave such images out with --on-error skip)")
    outcome = collection.add([image for _, image in new])
    # Content that came twice, in this batch or through another process, is known by now.
    known += [(source, image_id) for (source, _), (image_id, is_new) in zip(new, outcome, strict=True) if not is_new]
    stored = collection.catalog.get([image_id for _, image_id in known])
    for (source, image_id), image in zip(known, stored, strict=True):
        if image is not None and source.labels and set(source.labels) != set(image.labels):
            reason = f"its content is stored as image {image_id} with other labels, which were kept"
            problems.append(Problem(source.name, reason, skipped=False))
    report.added += sum(is_new for _, is_new in outcome)
    report.known += len(known)
    report.problems += problems


def _record(loaded: _Loaded, picture: Picture, code: NDArray[np.uint8]) -> NewImage:
    return NewImage(
        path=str(loaded.source.path.resolve()),
        sha256=loaded.sha256,
        width=picture.width,
        height=picture.height,
        bytes=loaded.n_bytes,
        media_type=picture.media_type,
        labels=loaded.source.labels,
        code=code,
    )


def _walk(folder: Path) -> tuple[list[Path], list[Problem]]:
    """Image files below `folder`, in a stable order; links to folders are not followed, so there are no loops."""
    found: list[Path] = []
    problems: list[Problem] = []

    def unreadable(error: OSError) -> None:
        problems.append(Problem(str(error.filename), f"this folder cannot be read: {error.strerror}"))

    for root, folders, files in os.walk(folder, onerror=unreadable):
        folders.sort()
        for name in sorted(files):
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                found.append(Path(root) / name)
    return found, problems
