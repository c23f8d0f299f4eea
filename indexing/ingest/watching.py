"""Keeps a collection in sync with folders (`index add --watch`): finds new, changed and deleted files.

It polls instead of asking the system for events, which network file systems do not send and which are lost when too
many come at once. Files are compared with their records by size and modification time, so that unchanged
files are not read. A file's path is its key: new content under it updates the record in place.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.catalog.records import is_utf8
from hashseek.indexing.ingest.batch import IngestReport
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import Found, walk
from hashseek.indexing.uris import Stamp, is_there, stamp_of, stored_path
from hashseek.retrieval.label_files import Problem

_CHUNK = 256  # files looked up together
_SETTLED = 2.0  # seconds without a change after which a file counts as completely written
_REST = 10  # the search for deleted files pauses for this many times as long as it took
_PAGE = 1000


class Watch:
    """Watches folders for one collection.

    Args:
        catalog: the catalog of the collection.
        folders: the folders to watch, with their subfolders.
        ignore: a folder to leave out: the collection's own files.
        labels: labels of new images; stored images keep their labels.
    """

    def __init__(self, catalog: Catalog, folders: Sequence[Path], *, ignore: Path, labels: Sequence[str] = ()) -> None:
        self._catalog, self._folders = catalog, list(dict.fromkeys(folders))
        self._ignored, self._labels = f"{stored_path(ignore)}/", tuple(dict.fromkeys(labels))
        self._unusable: dict[str, Stamp] = {}  # files that failed; tried again when they change
        self._unreadable: set[str] = set()  # folders
        self._pending: deque[tuple[Path, Stamp] | None] = deque()  # sources that no report has covered yet
        self._n_reported = 0
        self._missing: set[int] = set()
        self._next_check = 0.0

    def changes(self) -> Iterator[Found]:
        """New and changed files that have stopped changing, for `ingest`. Pass each of its reports to `settle`."""
        self._pending.clear()
        self._n_reported = 0
        unusable, self._unusable = self._unusable, {}
        unreadable = set[str]()
        found = (one for folder in self._folders for one in walk(folder))
        while chunk := list(islice(found, _CHUNK)):
            for problem in chunk:
                if isinstance(problem, Problem):
                    unreadable.add(problem.where)
                    if problem.where not in self._unreadable:  # report it once
                        self._pending.append(None)
                        yield problem
            yield from self._changed([path for path in chunk if isinstance(path, Path)], unusable)
        self._unreadable = unreadable

    def settle(self, report: IngestReport) -> None:
        """Remember which files of `changes` could not be used, according to the running report of `ingest`."""
        bad = {problem.uri for problem in report.problems if problem.skipped}
        for pending in [self._pending.popleft() for _ in range(report.done - self._n_reported)]:
            if pending is not None and str(pending[0]) in bad:
                self._unusable[stored_path(pending[0])] = pending[1]
        self._n_reported = report.done

    def deleted(self) -> list[int]:
        """Ids of images whose files in these folders were missing in two checks in a row.

        A folder without a single image is taken for a disk that is not mounted: its images are kept.
        """
        started = time.monotonic()
        if started < self._next_check and not self._missing:
            return []
        roots = tuple(f"{stored_path(folder)}/" for folder in self._folders if _has_images(folder))
        missing, after = set[int](), 0
        while roots and (page := self._catalog.page(after=after, limit=_PAGE)):
            missing |= {image.id for image in page if image.path.startswith(roots) and not is_there(image.path)}
            after = page[-1].id
        again, self._missing = missing & self._missing, missing - self._missing
        self._next_check = time.monotonic() + _REST * (time.monotonic() - started)
        # Read once more, just before the removal: a record may name another file by now.
        records = [image for image in self._catalog.get(sorted(again)) if image is not None]
        return [image.id for image in records if image.path.startswith(roots) and not is_there(image.path)]

    def _changed(self, paths: list[Path], unusable: dict[str, Stamp]) -> Iterator[ImageSource]:
        """Sources of those files whose records are missing or outdated."""
        names = {path: name for path in paths if not (name := stored_path(path)).startswith(self._ignored)}
        stored = self._catalog.records_by_path([name for name in names.values() if is_utf8(name)])
        ready: dict[Path, Stamp] = {}
        for path, name in names.items():
            stamp, record = stamp_of(path), stored.get(name)
            is_current = record is not None and (record.bytes, record.mtime_ns) == stamp and record.has_code
            if stamp is None or is_current:
                continue
            if stamp == unusable.get(name):
                self._unusable[name] = stamp
            elif _is_settled(path):
                ready[path] = stamp
        # Records without a key get one first, in place, so that they keep their ids, labels and attributes.
        known = {path: record for path in ready if (record := stored.get(names[path])) is not None}
        self._catalog.give_keys({record.id: names[path] for path, record in known.items() if record.key is None})
        for path, stamp in ready.items():
            self._pending.append((path, stamp))
            key = known[path].key if path in known else None
            yield ImageSource(path, () if path in known else self._labels, key=key or names[path])


def _is_settled(path: Path) -> bool:
    try:
        # The clock of a network disk may be ahead. Then the file is not waited for: a later change is seen anyway.
        return abs(time.time() - path.stat().st_ctime) > _SETTLED
    except OSError:
        return False


def _has_images(folder: Path) -> bool:
    return any(isinstance(found, Path) for found in walk(folder))
