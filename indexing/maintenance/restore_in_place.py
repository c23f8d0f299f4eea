"""Taking a collection that is in use back to a snapshot of it.

The folder is not exchanged, for whoever has it open would go on writing into the old one. The catalog's rows are
replaced in one transaction instead: other processes see the old state, then the new one, of the same file. Kept files
are named by their content, so those of both states can lie side by side until the old ones are not needed any more.
"""

import logging
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from hashseek.indexing.catalog import attributes
from hashseek.indexing.catalog.database import Database
from hashseek.indexing.catalog.spaces import engine_id
from hashseek.indexing.collection import CATALOG, FILES, Collection
from hashseek.indexing.maintenance.attribute_indexes import choose_if_possible
from hashseek.indexing.maintenance.backup import Contents, origin_of, unpack
from hashseek.indexing.maintenance.optimize import delete_unneeded
from hashseek.indexing.maintenance.scratch import workplace
from hashseek.retrieval.errors import BadCollection
from hashseek.retrieval.files import fsync_folder

log = logging.getLogger("hashseek")

# Tables that name neither a space nor an engine, whose numbers may be other ones here.
_COPIED = ("images", "image_labels")


def rewind(file: Path, folder: Path) -> Contents:
    """Make the collection in `folder` hold what its snapshot `file` holds; services that use it need not be stopped.

    Indexes on attributes are made after that; if they cannot be, a warning says so, and searches are as exact.

    Raises:
        BadCollection: `file` is no snapshot of this collection, damaged, or of a newer Hashseek, or another process
            writes for too long.
        BadConfig: no right to write in `folder`.
        OSError: no room; the collection is as it was.
    """
    with closing(Collection(folder)) as collection, workplace(folder) as place:
        unpacked = place / "snapshot"
        unpacked.mkdir()
        contents = unpack(file, unpacked)
        if origin_of(collection.catalog.path) != contents.origin:
            raise BadCollection(
                f"{file} is a snapshot of another collection than {folder}: restore it into a new folder"
            )
        with (
            closing(sqlite3.connect(unpacked / CATALOG)) as source,
            closing(Database(folder / CATALOG, read_only=False)) as database,
            database.transaction() as db,
        ):
            # Files first: they are needed from the moment of the commit. Whoever deletes files waits for this lock.
            _move_kept(unpacked, folder)
            _replace_rows(source, db, database.generation(db) + 1, _move_checkpoints(source, db, unpacked, folder))
    # Until then conditions are answered from the images: as exactly, more slowly.
    if problem := choose_if_possible(folder / CATALOG):
        log.warning("%s", problem)
    with closing(Collection(folder)) as collection:
        delete_unneeded(collection)
        collection.save_index()
    return contents


def _move_kept(unpacked: Path, folder: Path) -> None:
    for path in (unpacked / FILES).glob("*/*"):
        target = folder / path.relative_to(unpacked)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    for made in (unpacked / FILES).glob("*"):
        fsync_folder(folder / made.relative_to(unpacked))
    if (folder / FILES).is_dir():
        fsync_folder(folder / FILES)


def _move_checkpoints(
    source: sqlite3.Connection, db: sqlite3.Connection, unpacked: Path, folder: Path
) -> dict[int, int]:
    """Put the snapshot's spaces and checkpoints beside those that are there: number there -> number here."""
    here = {row[1]: row for row in db.execute("SELECT id, fingerprint, checkpoint, state FROM spaces")}
    numbers = {}
    rows = source.execute(
        "SELECT id, fingerprint, n_bits, checkpoint, state, created_at, calibration FROM spaces ORDER BY id"
    )
    for number, fingerprint, n_bits, name, state, created_at, calibration in rows.fetchall():
        known = here.get(fingerprint)
        here_name = known[2] if known else f"checkpoint-{fingerprint[:16]}.safetensors"
        if known and known[3] == "ready":  # whoever has it open is to hear of every code, however many are back
            state = "ready"
        if (unpacked / name).is_file():
            (unpacked / name).replace(folder / here_name)
        db.execute(
            "INSERT OR REPLACE INTO spaces VALUES (?, ?, ?, ?, ?, ?, ?)",
            (known[0] if known else None, fingerprint, n_bits, here_name, state, created_at, calibration),
        )
        [(numbers[number],)] = db.execute("SELECT id FROM spaces WHERE fingerprint = ?", (fingerprint,)).fetchall()
    fsync_folder(folder)
    return numbers


def _replace_rows(
    source: sqlite3.Connection, db: sqlite3.Connection, generation: int, numbers: Mapping[int, int]
) -> None:
    """Replace all images, labels and codes; `numbers` are those of the spaces."""
    [(last_id,)] = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'images'").fetchall()
    attributes.forget(db)  # the snapshot has names of its own
    for table in ("codes", "image_labels", "removed", "updated", "images"):
        db.execute(f"DELETE FROM {table}")
    for table in _COPIED:
        columns = [row[1] for row in source.execute(f"PRAGMA table_info({table})")]
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        db.executemany(
            f"INSERT INTO {table} ({names}) VALUES ({marks})", source.execute(f"SELECT {names} FROM {table}")
        )
    engines = {row[0]: engine_id(db, row[1]) for row in source.execute("SELECT id, name FROM engines").fetchall()}
    codes = source.execute("SELECT space_id, image_id, code, engine FROM codes ORDER BY space_id, image_id")
    db.executemany(
        "INSERT INTO codes VALUES (?, ?, ?, ?)",
        ((numbers[space], image_id, code, engines.get(engine)) for space, image_id, code, engine in codes),
    )
    [(active,)] = source.execute("SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'space'").fetchall()
    [(last_there,)] = source.execute(
        "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'images'"
    ).fetchall()
    db.execute("DELETE FROM spaces WHERE id NOT IN (SELECT value FROM json_each(?))", (str([*numbers.values()]),))
    db.execute("DELETE FROM sqlite_sequence WHERE name = 'images'")
    db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('images', ?)", (max(last_id, last_there),))
    # Everybody reads all of it anew: what an older view knows of an id does not count any more.
    for key, value in (("space", numbers[active]), ("generation", generation), ("forgotten", generation)):
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(value)))
