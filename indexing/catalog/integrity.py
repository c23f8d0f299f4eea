"""Problems of a catalog's rows: what `index verify` finds, and what `index verify --repair` does about it."""

import sqlite3

from hashseek.indexing.catalog.database import read_meta
from hashseek.indexing.catalog.records import Space
from hashseek.indexing.catalog.spaces import n_missing
from hashseek.retrieval.codes import code_size

_ORPHANS = {
    "image_labels": "image_id NOT IN (SELECT id FROM images)",
    "updated": "image_id NOT IN (SELECT id FROM images)",
    "codes": "image_id NOT IN (SELECT id FROM images) OR space_id NOT IN (SELECT id FROM spaces)",
    "features": "NOT EXISTS (SELECT 1 FROM codes AS c WHERE c.space_id = features.space_id AND c.image_id = "
    "features.image_id)",
}


def check_rows(db: sqlite3.Connection, space: Space) -> tuple[list[str], bool]:
    """All problems of the rows, read within a transaction of the caller; `space` is the one in use.

    Returns:
        (the problems, whether all records and codes can be read nevertheless).
    """
    found = [str(row[0]) for row in db.execute("PRAGMA integrity_check")]
    if found != ["ok"]:
        return [f"SQLite: {problem}" for problem in found], False
    rows = db.execute("SELECT id FROM images WHERE NOT json_valid(attributes)")
    unreadable = [f"the attributes of image {image_id} are not JSON" for (image_id,) in rows]
    for space_id, n_bits in db.execute("SELECT id, n_bits FROM spaces").fetchall():
        bad_codes, values = _malformed_codes(space_id, n_bits)
        rows = db.execute(f"SELECT image_id {bad_codes}", values)
        place = "" if space_id == space.id else f" in space {space_id}"
        unreadable += [f"the code of image {image_id}{place} is not a code of {n_bits} bits" for (image_id,) in rows]
    problems = []
    for table, clause in _ORPHANS.items():
        if n := _count(db, f"{table} WHERE {clause}"):
            problems.append(f"{n} rows of the table {table} belong to no image or code space")
    if n := n_missing(db, space.id):
        problems.append(f"{n} images have no code, so searches do not find them")
    without_feature, values = _without_feature(db, space.id)
    if n := _count(db, without_feature, values):
        problems.append(f"{n} images have no usable features, though the collection stores them")
    return unreadable + problems, not unreadable


def repair_rows(db: sqlite3.Connection, generation: int) -> list[str]:
    """Delete rows that belong to nothing and malformed codes, within a transaction for `generation`.

    Returns:
        A message for each repair.
    """
    done = []
    for table, clause in _ORPHANS.items():
        if n := db.execute(f"DELETE FROM {table} WHERE {clause}").rowcount:
            done.append(f"deleted {n} rows of the table {table} that belonged to no image or code space")
    n_codes = 0
    for space_id, n_bits in db.execute("SELECT id, n_bits FROM spaces").fetchall():
        bad_codes, values = _malformed_codes(space_id, n_bits)
        db.execute(f"INSERT OR REPLACE INTO updated SELECT image_id, ? {bad_codes}", (generation, *values))
        n_codes += db.execute(f"DELETE {bad_codes}", values).rowcount
        without_feature, values = _without_feature(db, space_id)
        db.execute(f"INSERT OR REPLACE INTO updated SELECT image_id, ? FROM {without_feature}", (generation, *values))
        n_codes += db.execute(f"DELETE FROM {without_feature}", values).rowcount
    if n_codes:
        done.append(f"deleted {n_codes} codes that were malformed or had no features")
    return done


def _malformed_codes(space_id: int, n_bits: int) -> tuple[str, tuple[object, ...]]:
    """SQL for the codes of a space that have another length than its codes, or bits set beyond it."""
    size = code_size(n_bits)
    largest_last_byte = f"{0xFF >> (8 * size - n_bits):02X}"
    return (
        "FROM codes WHERE space_id = ? AND (typeof(code) != 'blob' OR length(code) != ? "
        "OR hex(substr(code, ?, 1)) > ?)",
        (space_id, size, size, largest_last_byte),
    )


def _without_feature(db: sqlite3.Connection, space_id: int) -> tuple[str, tuple[object, ...]]:
    """SQL for the codes of a space without features of the usual length; none if the collection stores no features."""
    if read_meta(db, "keep_features") is None:
        return "codes WHERE FALSE", ()
    query = "SELECT length(feature) FROM features WHERE space_id = ? GROUP BY 1 ORDER BY count(*) DESC LIMIT 1"
    usual = db.execute(query, (space_id,)).fetchone()
    return (
        "codes WHERE space_id = ? AND NOT EXISTS (SELECT 1 FROM features AS f WHERE f.space_id = codes.space_id "
        "AND f.image_id = codes.image_id AND length(f.feature) = ?)",
        (space_id, 0 if usual is None else usual[0]),
    )


def _count(db: sqlite3.Connection, query: str, values: tuple[object, ...] = ()) -> int:
    return int(db.execute(f"SELECT count(*) FROM {query}", values).fetchone()[0])
