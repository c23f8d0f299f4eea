"""Compacts a collection: one merged index, a compact catalog, and no unneeded files."""

import re
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from hashseek.indexing.catalog.database import BUSY_SECONDS, as_hashseek_error
from hashseek.indexing.collection import Collection
from hashseek.indexing.kept_files import FILES

# A file is written before its record: a younger file may be about to get one.
MIN_AGE_SECONDS = 3600
_FREE_SHARE = 0.1  # share of unused pages above which the catalog is rewritten
_CHUNK = 500
# Names of files that a collection creates, and temporary files of a killed process. Anything else in the folder, such
# as a backup or another checkpoint, is left alone.
_OWN = re.compile(
    rf"\.?checkpoint(-[0-9a-f]{{16}})?\.safetensors(\.\w+)?|{FILES}/[0-9a-f]{{2}}/\.?[0-9a-f]{{64}}(\.\w+)*"
)


@dataclass(frozen=True)
class Optimized:
    """What `optimize` did.

    Args:
        n_merged: new rows merged into the index.
        n_removed: removed rows dropped from the index.
        n_deleted: deleted files.
    """

    n_merged: int
    n_removed: int
    n_deleted: int


def optimize(collection: Collection) -> Optimized:
    """Merge all segments, dropping removed rows, write the index, compact the catalog, delete unneeded files.

    Safe while others search and change the collection; writers may wait while the catalog is rewritten.

    Raises:
        BadCollection: the catalog is locked or damaged, or the disk is full.
        OSError: no space for the new index.
    """
    before = collection.describe_index()
    collection.build_index()
    collection.catalog.forget_changes(collection.describe_index()["generation"])
    _compact(collection.catalog.path)
    return Optimized(before["fresh"], before["removed"], delete_unneeded(collection))


def delete_unneeded(collection: Collection) -> int:
    """Delete kept files and checkpoints that no image or code space needs, and temporary files of killed processes.

    Returns:
        How many.
    """
    n_deleted = 0
    candidates = iter(_old_files(collection.folder))
    while chunk := list(islice(candidates, _CHUNK)):
        with collection.catalog.exclusive():  # or one of them could be stored again just now
            for path in _unneeded(collection, chunk):
                path.unlink(missing_ok=True)
                n_deleted += 1
    return n_deleted


def _old_files(folder: Path) -> Iterator[Path]:
    """Kept files, checkpoints and their temporary files that were not written recently."""
    latest = time.time() - MIN_AGE_SECONDS
    for path in chain(folder.glob("*.safetensors"), folder.glob(".*.safetensors.*"), (folder / FILES).rglob("*")):
        try:
            if _OWN.fullmatch(str(path.relative_to(folder))) and path.is_file() and path.stat().st_mtime < latest:
                yield path
        except FileNotFoundError:  # deleted meanwhile
            continue


def _unneeded(collection: Collection, paths: Iterable[Path]) -> list[Path]:
    """The paths that neither an image nor a code space names."""
    needed = {space.checkpoint for space in collection.catalog.spaces.all()}
    by_name = {str(path.relative_to(collection.folder)): path for path in paths}
    needed |= collection.catalog.records_by_path(list(by_name)).keys()
    return [path for name, path in by_name.items() if name not in needed]


def _compact(path: Path) -> None:
    """Return unused pages to the disk, and truncate the write-ahead log unless another process reads an older state."""
    with as_hashseek_error(path), closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
        [(n_pages,)] = db.execute("PRAGMA page_count").fetchall()
        [(n_free,)] = db.execute("PRAGMA freelist_count").fetchall()
        if n_free > _FREE_SHARE * n_pages:
            db.execute("VACUUM")
        db.execute("PRAGMA busy_timeout = 1000")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
