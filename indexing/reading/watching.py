"""Folders that a collection follows: what is new, changed or gone is found by looking again and again.

Files are compared with their records by size and modification time, so that a round reads none that rests. A file
belongs to its path: the path is its key, and other content under it updates the record in place.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from indexing.catalog.records import MAX_KEY
from indexing.collection import Collection
from indexing.ingest import Report
from indexing.reading.loading import Stamp, is_text, stamp_of
from indexing.reading.manifests import Source
from indexing.reading.sources import Found, walk
from indexing.reading.uris import stored_path
from retrieval.listing import Problem
from retrieval.tar_members import stored_in

_CHUNK = 256  # files looked up together
_SETTLED = 60.0  # seconds since a file was last written to, after which one look is enough
_OFTEN = 60.0  # seconds between two looks through all records where only records have changed
_PAGE = 1000


@dataclass(frozen=True)
class _Handed:
    """A file that was handed out to be ingested."""

    uri: str
    path: str
    stamp: Stamp


class Watch:
    """Watches folders for one collection; remembers files that may still grow and unusable ones, but not the others.

    Args:
        collection: that follows.
        folders: to be watched, with their subfolders; what the collection itself keeps in them is left out.
        labels: that every image gets beside those that it has.
    """

    def __init__(self, collection: Collection, folders: Sequence[Path], *, labels: Sequence[str] = ()) -> None:
        self._collection, self._folders, self._labels = collection, _outermost(folders), tuple(dict.fromkeys(labels))
        self._own = f"{stored_path(collection.folder)}/"
        self._growing: dict[str, Stamp] = {}
        self._unusable: dict[str, Stamp] = {}
        self._closed: set[str] = set()  # folders that cannot be read
        self._handed: deque[_Handed | None] = deque()
        self._n_done = 0
        self._times: dict[str, int] = {}  # when something came into a folder or left it
        self._is_due = True
        self._looked, self._generation = 0.0, -1  # when all records were gone through, and which state they were of
        self._missing: set[int] = set()

    def changes(self) -> Iterator[Found]:
        """New and changed files whose size and time rest; to be ingested, and `settle` told of every report."""
        self._handed.clear()
        self._n_done = 0
        growing, self._growing = self._growing, {}
        closed, times = set[str](), dict[str, int]()

        def enter(folder: Path) -> None:
            stamp = stamp_of(folder)
            times[str(folder)] = 0 if stamp is None else stamp[1]

        found = (one for folder in self._folders for one in walk(folder, entered=enter))
        while chunk := list(islice(found, _CHUNK)):
            for one in chunk:
                if isinstance(one, Problem):
                    closed.add(one.where)
                    if one.where not in self._closed:  # said once
                        self._handed.append(None)
                        yield one
            yield from self._due([one for one in chunk if isinstance(one, Path)], growing)
        self._is_due |= times != self._times
        self._times, self._closed = times, closed

    def settle(self, report: Report) -> None:
        """Take note of what became of the files that `changes` gave: `report` is the running one of `ingest`."""
        bad = {problem.uri for problem in report.problems if problem.skipped}
        for handed in [self._handed.popleft() for _ in range(report.done - self._n_done)]:
            if handed is not None and handed.uri in bad:
                self._unusable[handed.path] = handed.stamp
        self._n_done = report.done

    def gone(self) -> list[int]:
        """Ids of images in these folders whose files were missing twice in a row.

        A folder without a single image is taken for a disk that is not there: what was in it stays.
        """
        generation = self._collection.catalog.generation()
        if generation != self._generation and time.monotonic() - self._looked > _OFTEN:
            self._is_due = True  # somebody may have put records back, as `restore --over` does
        if not self._is_due and not self._missing:
            return []
        self._is_due, self._looked, self._generation = False, time.monotonic(), generation
        roots = tuple(f"{stored_path(folder)}/" for folder in self._folders if _holds_images(folder))
        missing, after = set[int](), 0
        while roots and (page := self._collection.catalog.page(after=after, limit=_PAGE)):
            missing |= {image.id for image in page if image.path.startswith(roots) and _is_gone(image.path)}
            after = page[-1].id
        again, self._missing = missing & self._missing, missing - self._missing
        # Looked at again, as near as can be to the removal: by now a record may name another file.
        records = [image for image in self._collection.catalog.get(sorted(again)) if image is not None]
        return [image.id for image in records if image.path.startswith(roots) and _is_gone(image.path)]

    def _due(self, paths: list[Path], growing: dict[str, Stamp]) -> Iterator[Source]:
        stamps = {
            name: (path, stamp_of(path)) for path in paths if not (name := stored_path(path)).startswith(self._own)
        }
        catalog = self._collection.catalog
        known = catalog.known_files([name for name in stamps if is_text(name)])
        coded = catalog.codes_of([image_id for _, _, image_id in known.values()])
        due: dict[str, _Handed] = {}
        for name, (path, stamp) in stamps.items():
            if name in known and known[name][:2] == stamp and known[name][2] in coded:
                self._unusable.pop(name, None)
            elif stamp is not None and stamp != self._unusable.get(name):
                if growing.get(name) == stamp or _rests(path):
                    due[name] = _Handed(str(path), name, stamp)
                else:
                    self._growing[name] = stamp
        # In place, so that a record keeps its id, labels and attributes, and nothing is lost if this process is killed.
        stored = [name for name in due if name in known]
        keyless = catalog.paths_without_key([name for name in stored if len(name) <= MAX_KEY])
        if keyless:
            records = catalog.get([known[name][2] for name in keyless])
            last = {record.path: record.key for record in records if record is not None}
            catalog.give_keys({name: last.get(name) or name for name in keyless})
        keys = catalog.keys_of(stored)
        labels = self._labels_by_key(list(chain.from_iterable(keys.get(name, [name]) for name in due)))
        for name, handed in due.items():
            for key in keys.get(name, [name]):
                self._handed.append(handed)
                yield Source(Path(handed.uri), labels.get(key, self._labels), key=key)

    def _labels_by_key(self, keys: list[str]) -> dict[str, tuple[str, ...]]:
        """The labels that images with these keys are to have; none if they stay as they are."""
        if not self._labels:
            return {}
        catalog = self._collection.catalog
        known = catalog.known_keys([key for key in keys if is_text(key)])
        records = {key: record for key, record in zip(known, catalog.get(list(known.values())), strict=True) if record}
        return {key: tuple(dict.fromkeys((*record.labels, *self._labels))) for key, record in records.items()}


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """The folders without those that are met on the way through another of them."""
    found: list[Path] = []
    for folder in sorted(dict.fromkeys(folders), key=lambda folder: len(folder.resolve().parts)):
        if not any(_is_walked(folder.resolve(), other.resolve()) for other in found):
            found.append(folder)
    return found


def _is_walked(folder: Path, other: Path) -> bool:
    """Whether what is in `folder` is met on the way through `other`, too, which leaves out what is hidden."""
    return folder.is_relative_to(other) and not any(part.startswith(".") for part in folder.relative_to(other).parts)


def _rests(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_ctime > _SETTLED
    except OSError:
        return False


def _holds_images(folder: Path) -> bool:
    return any(isinstance(found, Path) for found in walk(folder))


def _is_gone(path: str) -> bool:
    try:
        stored_in(Path(path)).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
