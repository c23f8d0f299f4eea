"""Code spaces of a catalog: one is active and answers searches, others are being built or kept to go back to.

Functions over an open transaction; `hashseek.indexing.catalog.Catalog` has a method for each.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog.database import now
from hashseek.indexing.catalog.records import Space
from hashseek.retrieval.codes import check_codes
from hashseek.retrieval.errors import BadCollection, BadConfig

_SELECT = "SELECT id, fingerprint, n_bits, checkpoint, state, created_at FROM spaces"


def active_space(db: sqlite3.Connection) -> Space | None:
    """The space that searches use; None if the catalog names none that is there."""
    row = db.execute(f"{_SELECT} WHERE id = (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'space')").fetchone()
    return None if row is None else _space(row)


def all_spaces(db: sqlite3.Connection) -> list[Space]:
    """Every space, in the order of their making."""
    return [_space(row) for row in db.execute(f"{_SELECT} ORDER BY id").fetchall()]


def one_space(db: sqlite3.Connection, space_id: int) -> Space:
    """The space with this id.

    Raises:
        BadConfig: there is none.
    """
    known = all_spaces(db)
    for space in known:
        if space.id == space_id:
            return space
    names = ", ".join(str(space.id) for space in known)
    raise BadConfig(f"there is no code space {space_id} in the collection: it has {names}")


def begin_space(db: sqlite3.Connection, fingerprint: str, n_bits: int, checkpoint: str) -> Space:
    """A new, empty space, not active."""
    row = db.execute(
        "INSERT INTO spaces (fingerprint, n_bits, checkpoint, state, created_at) VALUES (?, ?, ?, 'building', ?) "
        "RETURNING id",
        (fingerprint, n_bits, checkpoint, now()),
    ).fetchone()
    return one_space(db, int(row[0]))


def add_codes(
    db: sqlite3.Connection,
    space: Space,
    codes: Sequence[tuple[int, NDArray[np.uint8], str]],
    *,
    hashes: Sequence[str] | None,
    generation: int,
) -> int:
    """Give images of the catalog their codes in `space`; the number stored."""
    if codes:
        check_codes(np.stack([code for _, code, _ in codes]), space.n_bits)
    engines: dict[str, int | None] = {}
    stored = 0
    for row, (image_id, code, engine) in enumerate(codes):
        if engine not in engines:
            engines[engine] = engine_id(db, engine)
        n = db.execute(
            "INSERT OR REPLACE INTO codes SELECT ?, id, ?, ? FROM images WHERE id = ? AND (?5 IS NULL OR sha256 = ?5)",
            (space.id, code.tobytes(), engines[engine], image_id, None if hashes is None else hashes[row]),
        ).rowcount
        if n and space.state == "ready":  # somebody may be searching it
            note_update(db, image_id, generation)
        stored += n
    return stored


def n_missing(db: sqlite3.Connection, space: Space) -> int:
    """How many images have no code in `space`."""
    row = db.execute(
        "SELECT count(*) FROM images WHERE NOT EXISTS "
        "(SELECT 1 FROM codes WHERE space_id = ? AND image_id = images.id)",
        (space.id,),
    ).fetchone()
    return int(row[0])


def switch_space(db: sqlite3.Connection, space: Space, *, allow_missing: bool) -> None:
    """Make `space` the active one.

    Raises:
        BadCollection: an image has no code in it.
    """
    missing = n_missing(db, space)
    if missing and not allow_missing:
        raise BadCollection(
            f"code space {space.id} lacks the codes of {missing} images, which no search would find any more: "
            "finish `hashseek index reencode` first"
        )
    db.execute("UPDATE spaces SET state = 'ready' WHERE id = ?", (space.id,))
    db.execute("UPDATE meta SET value = ? WHERE key = 'space'", (str(space.id),))


def drop_space(db: sqlite3.Connection, space: Space) -> None:
    """Forget a space and its codes.

    Raises:
        BadConfig: it is the active one.
    """
    if space == active_space(db):
        raise BadConfig(f"code space {space.id} is the one that searches use: switch to another before dropping it")
    db.execute("DELETE FROM spaces WHERE id = ?", (space.id,))


def codes_of(db: sqlite3.Connection, space_id: int, ids: Sequence[int]) -> dict[int, tuple[NDArray[np.uint8], str]]:
    """(packed code (code_size,), engine or "") of those images that have one in a space; at most 500 at a time."""
    rows = db.execute(
        "SELECT image_id, code, coalesce(name, '') FROM codes LEFT JOIN engines ON engines.id = codes.engine "
        f"WHERE space_id = ? AND image_id IN ({','.join('?' * len(ids))})",
        (space_id, *ids),
    )
    return {int(image_id): (np.frombuffer(code, np.uint8), str(engine)) for image_id, code, engine in rows}


def engine_id(db: sqlite3.Connection, name: str) -> int | None:
    """The number under which an engine is kept; None for one that is not known by name."""
    if not name:
        return None
    db.execute("INSERT OR IGNORE INTO engines (name) VALUES (?)", (name,))
    return int(db.execute("SELECT id FROM engines WHERE name = ?", (name,)).fetchone()[0])


def note_update(db: sqlite3.Connection, image_id: int, generation: int) -> None:
    """Note that an image's code is another one from this generation on."""
    db.execute("INSERT OR REPLACE INTO updated VALUES (?, ?)", (image_id, generation))


def _space(row: tuple[Any, ...]) -> Space:
    space_id, fingerprint, n_bits, checkpoint, state, created_at = row
    return Space(int(space_id), str(fingerprint), int(n_bits), str(checkpoint), str(state), str(created_at))
