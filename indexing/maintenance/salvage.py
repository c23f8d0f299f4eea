"""Saving what can be read of a damaged catalog into a new one; the damaged file is kept.

SQLite refuses a whole query when it meets a damaged page. So rows are asked for in ranges of ids, and a range that is
refused is halved until only the rows are left out that cannot be read.
"""

import fcntl
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashseek.indexing.catalog import Catalog, attributes
from hashseek.indexing.catalog.schema import APPLICATION_ID, LATEST, statements_of
from hashseek.indexing.maintenance.scratch import workplace
from hashseek.retrieval.errors import BadCollection
from hashseek.retrieval.files import fsync_folder

_AT_ONCE = 1024  # ids asked for at a time
_HOPELESS = 1000  # so many ranges in a row without a readable row: there will be none behind them
_UNSEEN = 1_000_000  # ids that are skipped where nobody can say any more which were given
# Where SQLite keeps the locks of everybody who has the file open (its file format, "Locking").
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510


@dataclass(frozen=True)
class Salvaged:
    """How many images and codes were saved, and where the damaged file is now."""

    n_images: int
    n_codes: int
    kept_as: Path


def salvage(path: Path) -> Salvaged:
    """Put a new catalog in the place of the damaged one at `path`, with every row that can be read.

    Raises:
        BadCollection: somebody has it open, it is no catalog, or neither its tables nor its code spaces can be read.
        BadConfig: no right to write beside it.
        OSError: no room; the catalog is as it was.
    """
    _check_unused(path)
    with workplace(path.parent) as place:
        saved = place / path.name
        try:
            with (
                closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as old,
                closing(sqlite3.connect(saved, isolation_level=None)) as new,
            ):
                old.execute("PRAGMA writable_schema = ON")  # or a file that was cut short is refused as a whole
                old.text_factory = lambda text: text.decode(errors="replace")
                _copy(old, new)
        except sqlite3.DatabaseError as error:
            raise BadCollection(
                f"{path} is damaged, and nothing of it can be read ({error}): restore a snapshot into a new folder, or "
                "index the images into one"
            ) from None
        with closing(Catalog(saved)) as catalog:  # complete enough to be opened, and brought up to date
            n_images, n_codes = len(catalog), len(catalog) - catalog.n_missing(catalog.space.id)
        kept_as = _free_name(path)
        for companion in ("-wal", "-shm"):  # they belong to the damaged file, and would be taken for the new one's
            with suppress(FileNotFoundError):
                Path(f"{path}{companion}").rename(f"{kept_as}{companion}")
        kept_as.hardlink_to(path)  # so that at no moment there is no catalog
        saved.replace(path)
        fsync_folder(path.parent)
    return Salvaged(n_images, n_codes, kept_as)


def _check_unused(path: Path) -> None:
    with path.open("rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _SHARED_SIZE, _SHARED_FIRST)
        except OSError:
            raise BadCollection(
                f"{path} is damaged, and another process has it open: stop whoever serves or writes it first"
            ) from None


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return name


def _copy(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Copy tables, rows, and then what belongs to them, from a damaged database to an empty one."""
    [(application,)] = old.execute("PRAGMA application_id").fetchall()
    if application != APPLICATION_ID:
        raise BadCollection("this SQLite file is not a Hashseek catalog: there is nothing to save from it")
    [(version,)] = old.execute("PRAGMA user_version").fetchall()
    made = _made(old, int(version))
    tables = {name: sql for kind, name, sql in made if kind == "table"}
    last_id, certain = _last_id(old, tables)
    new.execute("PRAGMA foreign_keys = OFF")
    new.execute("PRAGMA synchronous = FULL")
    new.execute("BEGIN")
    for name, sql in tables.items():
        new.execute(sql)
        rows = _rows_by_key(old, name) if "WITHOUT ROWID" in sql.upper() else _rows_by_id(old, name, last_id)
        for row in rows:
            new.execute(f"INSERT OR IGNORE INTO {name} VALUES ({','.join('?' * len(row))})", row)
    if "codes" in tables:
        _look_up_codes(old, new)
    _forget_orphans(new, tables)
    for kind, name, sql in made:
        if kind != "table" and not name.startswith(attributes.PREFIX):
            new.execute(sql)
    if "attribute_indexes" in tables:
        attributes.forget(new)  # on attributes that may be damaged there can be none before they are mended
    [(last_saved,)] = new.execute("SELECT coalesce(max(id), 0) FROM images").fetchall()
    new.execute("DELETE FROM sqlite_sequence WHERE name = 'images'")
    last_id = max(last_id, last_saved) + (0 if certain else _UNSEEN)  # an id is never given twice
    new.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('images', ?)", (last_id,))
    # It is not the catalog that any index was built from.
    new.execute("INSERT OR REPLACE INTO meta VALUES ('uuid', ?)", (str(uuid.uuid4()),))
    new.execute("INSERT OR IGNORE INTO meta VALUES ('generation', '0')")
    new.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
    new.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    new.execute(f"PRAGMA user_version = {int(version)}")
    new.execute("COMMIT")


def _made(old: sqlite3.Connection, version: int) -> list[tuple[str, str, str]]:
    """(kind, name, SQL) of tables, indexes and triggers; those that cannot be read are as the version has them."""
    with suppress(sqlite3.DatabaseError):  # where a page of it is damaged, the first query only loads what is before it
        old.execute("SELECT 1 FROM sqlite_master").fetchone()
    read = [(row[0], row[1], row[4]) for row in _rows_by_id(old, "sqlite_master", _AT_ONCE)]
    made = [row for row in read if row[2] is not None and not row[1].startswith("sqlite_")]
    known = statements_of(version) if version <= LATEST else []
    return made + [row for row in known if row[1] not in {name for _, name, _ in made}]


def _last_id(old: sqlite3.Connection, tables: dict[str, str]) -> tuple[int, bool]:
    """The highest id that was given, and whether that is certain."""
    found = []
    for query in (
        "SELECT seq FROM sqlite_sequence WHERE name = 'images'",
        "SELECT max(id) FROM images",
        "SELECT max(image_id) FROM removed",
        "SELECT max(image_id) FROM codes" if "codes" in tables else "SELECT 0",
    ):
        try:
            found.append([int(row[0] or 0) for row in old.execute(query).fetchall()])
        except sqlite3.DatabaseError:
            found.append([])
    return max((number for numbers in found for number in numbers), default=0), bool(found[0])


def _rows_by_id(old: sqlite3.Connection, table: str, last_id: int) -> Iterator[tuple[Any, ...]]:
    """What can be read of a table whose rows have numbers."""
    first, n_failed = 0, 0
    while n_failed < _HOPELESS:
        try:  # skip what was never given, or is gone
            row = old.execute(f"SELECT min(rowid) FROM {table} WHERE rowid >= ?", (first,)).fetchone()
            if row[0] is None:
                return
            first = int(row[0])
        except sqlite3.DatabaseError:
            if first > last_id:
                return
        rows, failed = _range(old, table, first, first + _AT_ONCE - 1)
        yield from rows
        n_failed = n_failed + 1 if failed and not rows else 0
        first += _AT_ONCE


def _range(old: sqlite3.Connection, table: str, first: int, last: int) -> tuple[list[tuple[Any, ...]], bool]:
    """The readable rows of a range of numbers, and whether some were not."""
    try:
        return old.execute(f"SELECT * FROM {table} WHERE rowid BETWEEN ? AND ?", (first, last)).fetchall(), False
    except sqlite3.DatabaseError:
        if first == last:
            return [], True
    middle = (first + last) // 2
    return _range(old, table, first, middle)[0] + _range(old, table, middle + 1, last)[0], True


def _rows_by_key(old: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """What can be read of a table without numbers from its beginning and from its end."""
    keys = [row[1] for row in sorted(old.execute(f"PRAGMA table_info({table})"), key=lambda row: row[5]) if row[5]]
    for order in ("ASC", "DESC"):
        try:
            yield from old.execute(f"SELECT * FROM {table} ORDER BY {', '.join(f'{key} {order}' for key in keys)}")
        except sqlite3.DatabaseError:
            continue
        return


def _look_up_codes(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Codes between damaged pages, which neither end leads to: one by one."""
    lacking = new.execute(
        "SELECT spaces.id, images.id FROM spaces, images WHERE NOT EXISTS "
        "(SELECT 1 FROM codes WHERE space_id = spaces.id AND image_id = images.id)"
    ).fetchall()
    one = "SELECT * FROM codes WHERE space_id = ? AND image_id = ?"
    for space_id, image_id in lacking:
        with suppress(sqlite3.DatabaseError):
            for row in old.execute(one, (space_id, image_id)).fetchall():
                new.execute("INSERT OR IGNORE INTO codes VALUES (?, ?, ?, ?)", row)


def _forget_orphans(new: sqlite3.Connection, tables: dict[str, str]) -> None:
    """Rows about images that could not be saved."""
    for table in {"image_labels", "codes", "updated"} & tables.keys():
        new.execute(f"DELETE FROM {table} WHERE image_id NOT IN (SELECT id FROM images)")
    if "codes" in tables:
        new.execute("UPDATE codes SET engine = NULL WHERE engine NOT IN (SELECT id FROM engines)")
