"""Putting a collection in order: one built index, no dead rows, no free pages, no files that nobody needs."""

import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hashseek.indexing.catalog.database import BUSY_SECONDS, Database, explained
from hashseek.indexing.collection import FILES, Collection
from hashseek.indexing.maintenance.attribute_indexes import choose_attributes

# Whoever stores an image writes its file first: a younger file may be about to be needed.
SETTLED_SECONDS = 3600
_FREE_SHARE = 0.1  # of the catalog's pages, from which on it is written anew
_CHUNK = 500
# Names that a collection gives, and those of halves that a killed process left. Whatever else lies in its folder, such
# as a backup or somebody's checkpoint, is not the collection's to delete.
_OWN = re.compile(
    rf"\.?checkpoint(-[0-9a-f]{{16}})?\.safetensors(\.\w+)?|{FILES}/[0-9a-f]{{2}}/\.?[0-9a-f]{{64}}(\.\w+)*"
)


@dataclass(frozen=True)
class Optimized:
    """What was done: fresh rows merged, dead ones dropped, removals forgotten, files deleted, bytes given back."""

    n_merged: int
    n_dead: int
    n_forgotten: int
    n_deleted: int
    n_bytes: int


def optimize(collection: Collection) -> Optimized:
    """Merge all segments without the removed rows, write the index, shrink the catalog, delete files without an image.

    Safe while others search and change the collection; writers may have to wait while the catalog is written anew.

    Raises:
        BadCollection: the catalog is locked, damaged, or has no room.
        OSError: no room for the new index; it is rebuilt when there is.
    """
    before = collection.describe_index()
    size = size_of(collection.folder)
    collection.build_index(collection.kind)
    n_forgotten = _forget_removals(collection.catalog.path, collection.describe_index()["generation"])
    choose_attributes(collection.catalog.path)
    _shrink(collection.catalog.path)
    n_deleted = delete_unneeded(collection)
    return Optimized(
        before["fresh"], before["removed"], n_forgotten, n_deleted, max(0, size - size_of(collection.folder))
    )


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    sizes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes += (Path(root) / name).lstat().st_size
            except FileNotFoundError:  # removed since
                continue
    return sizes


def delete_unneeded(collection: Collection) -> int:
    """Delete files that the collection keeps for no image or code space, and halves that a killed process left.

    Returns:
        How many.
    """
    n_deleted = 0
    candidates = iter(_settled(collection.folder))
    while chunk := list(islice(candidates, _CHUNK)):
        if not _without_image(collection, chunk):
            continue
        with collection.catalog.exclusive():  # or one of them could be stored again just now
            for path in _without_image(collection, chunk):
                path.unlink(missing_ok=True)
                n_deleted += 1
    return n_deleted


def _settled(folder: Path) -> Iterator[Path]:
    """Kept files, checkpoints and halves of them that were not written just now."""
    latest = time.time() - SETTLED_SECONDS
    for path in [*folder.glob("*.safetensors"), *folder.glob(".*.safetensors.*"), *_files(folder / FILES)]:
        try:
            named = _OWN.fullmatch(str(path.relative_to(folder)))
            if named and path.is_file() and path.stat().st_mtime < latest:
                yield path
        except FileNotFoundError:  # removed since
            continue


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root) / name for name in names)


def _without_image(collection: Collection, paths: Iterable[Path]) -> list[Path]:
    """Those that neither an image nor a code space names."""
    needed = {space.checkpoint for space in collection.catalog.spaces()}
    by_name = {str(path.relative_to(collection.folder)): path for path in paths}
    needed |= collection.catalog.paths_in_use(by_name)
    return [path for name, path in by_name.items() if name not in needed]


def _forget_removals(path: Path, generation: int) -> int:
    """Forget which ids were removed up to `generation`; how many.

    Whoever still sees an older state reads all codes anew with its next search, see `Catalog.changes`.
    """
    with closing(Database(path, read_only=False)) as database, database.transaction() as db:
        n_forgotten = db.execute("DELETE FROM removed WHERE generation <= ?", (generation,)).rowcount
        n_forgotten += db.execute("DELETE FROM updated WHERE generation <= ?", (generation,)).rowcount
        if n_forgotten:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('forgotten', ?)", (str(generation),))
    return n_forgotten


def _shrink(path: Path) -> None:
    """Give free pages back, and empty the write-ahead log if nobody reads an older state just now."""
    with explained(path), closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
        [(n_pages,)] = db.execute("PRAGMA page_count").fetchall()
        [(n_free,)] = db.execute("PRAGMA freelist_count").fetchall()
        if n_free > _FREE_SHARE * n_pages:
            db.execute("VACUUM")
        db.execute("PRAGMA busy_timeout = 1000")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
