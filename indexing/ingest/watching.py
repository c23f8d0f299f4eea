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

from hashseek.indexing.catalog.records import MAX_KEY, FileRecord
from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.batch import Report
from hashseek.indexing.ingest.loading import Stamp, is_text, stamp_of
from hashseek.indexing.ingest.manifests import Source
from hashseek.indexing.ingest.sources import Found, walk
from hashseek.indexing.ingest.uris import is_there, stored_path
from hashseek.indexing.kept_files import FILES
from hashseek.retrieval.label_files import Problem

_CHUNK = 256  # files looked up together
_SETTLED = 60.0  # seconds since a file was last written to, after which one look is enough
_OFTEN = 60.0  # seconds between two looks through all records where only records have changed
_PAGE = 1000
_TICK = 10**9  # nanoseconds; file systems count time in steps of up to seconds, those of today of milliseconds


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
        self._own = f"{stored_path(collection.folder / FILES)}/"
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
        unusable, self._unusable = self._unusable, {}
        closed, times = set[str](), dict[str, int]()

        def enter(folder: Path) -> None:
            stamp = stamp_of(folder)
            changed = 0 if stamp is None else stamp[1]
            # What changes within the same tick of the clock as a look has the same time: it is looked at again.
            times[str(folder)] = changed if abs(time.time_ns() - changed) > _TICK else time.monotonic_ns()

        found = (one for folder in self._folders for one in walk(folder, entered=enter))
        while chunk := list(islice(found, _CHUNK)):
            for one in chunk:
                if isinstance(one, Problem):
                    closed.add(one.where)
                    if one.where not in self._closed:  # said once
                        self._handed.append(None)
                        yield one
            yield from self._due([one for one in chunk if isinstance(one, Path)], growing, unusable)
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
            missing |= {image.id for image in page if image.path.startswith(roots) and not is_there(image.path)}
            after = page[-1].id
        again, self._missing = missing & self._missing, missing - self._missing
        # Looked at again, as near as can be to the removal: by now a record may name another file.
        records = [image for image in self._collection.catalog.get(sorted(again)) if image is not None]
        return [image.id for image in records if image.path.startswith(roots) and not is_there(image.path)]

    def _due(self, paths: list[Path], growing: dict[str, Stamp], unusable: dict[str, Stamp]) -> Iterator[Source]:
        stamps = {
            name: (path, stamp_of(path)) for path in paths if not (name := stored_path(path)).startswith(self._own)
        }
        catalog = self._collection.catalog
        stored = catalog.lookup.records_by_path([name for name in stamps if is_text(name)])
        due: dict[str, _Handed] = {}
        for name, (path, stamp) in stamps.items():
            if stamp is None or (name in stored and _is_known(stored[name], stamp)):
                continue
            if stamp == unusable.get(name):
                self._unusable[name] = stamp
            elif growing.get(name) == stamp or _rests(path):
                due[name] = _Handed(str(path), name, stamp)
            else:
                self._growing[name] = stamp
        keys = self._give_keys({name: stored.get(name, []) for name in due})
        labels = self._labels_by_key(list(chain.from_iterable(keys.values())))
        for name, handed in due.items():
            for key in keys[name]:
                self._handed.append(handed)
                yield Source(Path(handed.uri), labels.get(key, self._labels), key=key)

    def _give_keys(self, files: dict[str, list[FileRecord]]) -> dict[str, list[str]]:
        """Give records without a key one; the keys of the records of each file, by path.

        In place, so that a record keeps its id, labels and attributes, and nothing is lost if this process is killed.
        """
        keyless = {
            name: records[-1].key or name
            for name, records in files.items()
            if len(name) <= MAX_KEY and any(record.key is None for record in records)
        }
        if keyless:
            self._collection.catalog.give_keys(keyless)
        found: dict[str, list[str]] = {}
        for name, records in files.items():
            keys = [record.key for record in records if record.key is not None]
            keys += [keyless[name]] if name in keyless else []
            found[name] = list(dict.fromkeys(keys)) or [name]
        return found

    def _labels_by_key(self, keys: list[str]) -> dict[str, tuple[str, ...]]:
        """The labels that images with these keys are to have; none if they stay as they are."""
        if not self._labels:
            return {}
        catalog = self._collection.catalog
        known = catalog.lookup.ids_by_key([key for key in keys if is_text(key)])
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


def _is_known(records: list[FileRecord], stamp: Stamp) -> bool:
    """Whether the records of a file say what it is now: all that have a key, or else the last one."""
    keyed = [record for record in records if record.key is not None]
    return all((record.bytes, record.mtime_ns) == stamp and record.has_code for record in keyed or records[-1:])


def _rests(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_ctime > _SETTLED
    except OSError:
        return False


def _holds_images(folder: Path) -> bool:
    return any(isinstance(found, Path) for found in walk(folder))
