"""Keeps a collection in step with folders (`index add --watch`): finds new, changed and deleted files.

It looks again and again instead of asking the system for events, which network file systems do not send and which are
lost when too many come at once. Files are compared with their records by size and modification time, so that a round
reads no unchanged file. A file's path is its key: new content under it updates the record in place.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.catalog.records import MAX_KEY, FileRecord
from hashseek.indexing.ingest.batch import IngestReport
from hashseek.indexing.ingest.loading import Stamp, is_utf8, stamp_of
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import Found, walk
from hashseek.indexing.ingest.uris import is_there, stored_path
from hashseek.retrieval.label_files import Problem

_CHUNK = 256  # files looked up together
_SETTLED = 60.0  # seconds since the last change of a file after which one look at it is enough
_CHECK_ALL = 60.0  # seconds between two checks of all records for deleted files while no folder changes
_PAGE = 1000


class Watch:
    """Watches folders for one collection.

    Args:
        catalog: of the collection.
        folders: to watch, with their subfolders.
        ignore: a folder to leave out: the collection's own files.
        labels: of images that are new; stored images keep their labels.
    """

    def __init__(self, catalog: Catalog, folders: Sequence[Path], *, ignore: Path, labels: Sequence[str] = ()) -> None:
        self._catalog, self._folders = catalog, list(dict.fromkeys(folders))
        self._ignored, self._labels = f"{stored_path(ignore)}/", tuple(dict.fromkeys(labels))
        self._growing: dict[str, Stamp] = {}  # files that may still be being written
        self._unusable: dict[str, Stamp] = {}  # files that failed; tried again when they change
        self._unreadable: set[str] = set()  # folders
        self._pending: deque[tuple[str, Stamp] | None] = deque()  # sources that no report has covered yet
        self._n_reported = 0
        self._folder_times: dict[str, int] = {}
        self._check_files, self._checked_at = True, 0.0
        self._missing: set[int] = set()

    def changes(self) -> Iterator[Found]:
        """New and changed files that have stopped changing, for `ingest`. Pass each of its reports to `settle`."""
        self._pending.clear()
        self._n_reported = 0
        growing, self._growing = self._growing, {}
        unusable, self._unusable = self._unusable, {}
        unreadable, times = set[str](), dict[str, int]()

        def note_time(folder: Path) -> None:
            stamp = stamp_of(folder)
            times[str(folder)] = 0 if stamp is None else stamp[1]

        found = (one for folder in self._folders for one in walk(folder, entered=note_time))
        while chunk := list(islice(found, _CHUNK)):
            for problem in chunk:
                if isinstance(problem, Problem):
                    unreadable.add(problem.where)
                    if problem.where not in self._unreadable:  # report it once
                        self._pending.append(None)
                        yield problem
            yield from self._changed([path for path in chunk if isinstance(path, Path)], growing, unusable)
        self._check_files |= times != self._folder_times
        self._folder_times, self._unreadable = times, unreadable

    def settle(self, report: IngestReport) -> None:
        """Remember which files of `changes` could not be used, according to the running report of `ingest`."""
        bad = {problem.uri for problem in report.problems if problem.skipped}
        for pending in [self._pending.popleft() for _ in range(report.done - self._n_reported)]:
            if pending is not None and pending[0] in bad:
                path, stamp = pending
                self._unusable[stored_path(Path(path))] = stamp
        self._n_reported = report.done

    def deleted(self) -> list[int]:
        """Ids of images whose files in these folders were missing in two rounds in a row.

        A folder without a single image counts as a disk that is not mounted: its images stay.
        """
        if time.monotonic() - self._checked_at < _CHECK_ALL and not self._check_files and not self._missing:
            return []
        self._check_files, self._checked_at = False, time.monotonic()
        roots = tuple(f"{stored_path(folder)}/" for folder in self._folders if _has_images(folder))
        missing, after = set[int](), 0
        while roots and (page := self._catalog.page(after=after, limit=_PAGE)):
            missing |= {image.id for image in page if image.path.startswith(roots) and not is_there(image.path)}
            after = page[-1].id
        again, self._missing = missing & self._missing, missing - self._missing
        # Read once more, just before the removal: a record may name another file by now.
        records = [image for image in self._catalog.get(sorted(again)) if image is not None]
        return [image.id for image in records if image.path.startswith(roots) and not is_there(image.path)]

    def _changed(
        self, paths: list[Path], growing: dict[str, Stamp], unusable: dict[str, Stamp]
    ) -> Iterator[ImageSource]:
        """Sources of those files whose records are missing or outdated."""
        names = {path: name for path in paths if not (name := stored_path(path)).startswith(self._ignored)}
        stored = self._catalog.lookup.records_by_path([name for name in names.values() if is_utf8(name)])
        ready: dict[str, tuple[str, Stamp]] = {}
        for path, name in names.items():
            stamp = stamp_of(path)
            if stamp is None or (name in stored and _is_current(stored[name], stamp)):
                continue
            if stamp == unusable.get(name):
                self._unusable[name] = stamp
            elif growing.get(name) == stamp or _is_settled(path):
                ready[name] = (str(path), stamp)
            else:
                self._growing[name] = stamp
        keys = self._give_keys({name: stored.get(name, []) for name in ready})
        for name, pending in ready.items():
            for key in keys[name]:
                self._pending.append(pending)
                yield ImageSource(Path(pending[0]), () if name in stored else self._labels, key=key)

    def _give_keys(self, files: dict[str, list[FileRecord]]) -> dict[str, list[str]]:
        """The keys of the records of each file, by path; records without a key get one first.

        It is set in place, so that a record keeps its id, labels and attributes even if this process is killed.
        """
        keyless = {
            name: records[-1].key or name
            for name, records in files.items()
            if len(name) <= MAX_KEY and any(record.key is None for record in records)
        }
        if keyless:
            self._catalog.give_keys(keyless)
        found: dict[str, list[str]] = {}
        for name, records in files.items():
            keys = [record.key for record in records if record.key is not None]
            keys += [keyless[name]] if name in keyless else []
            found[name] = list(dict.fromkeys(keys)) or [name]
        return found


def _is_current(records: list[FileRecord], stamp: Stamp) -> bool:
    """Whether the records of a file agree with it: all that have a key, or else the last one."""
    keyed = [record for record in records if record.key is not None]
    return all((record.bytes, record.mtime_ns) == stamp and record.has_code for record in keyed or records[-1:])


def _is_settled(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_ctime > _SETTLED
    except OSError:
        return False


def _has_images(folder: Path) -> bool:
    return any(isinstance(found, Path) for found in walk(folder))
