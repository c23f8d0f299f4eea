"""Code spaces of a catalog: the codes that one checkpoint computes for the images, and which space searches use.

One space is active and answers searches; others are being built by a re-encoding, or kept to switch back to.
`Catalog.spaces` is a `CodeSpaces`.
"""

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog.database import CatalogDamaged, Database, now, read_meta, write_meta
from hashseek.indexing.catalog.records import IMAGE_COLUMNS, Space, StoredCode, StoredImage, listed_ids, stored_image
from hashseek.retrieval.codes import check_codes, check_n_bits
from hashseek.retrieval.errors import BadCollection, BadConfig

_SELECT = "SELECT id, fingerprint, n_bits, checkpoint, state FROM spaces"
_HAS_NO_CODE = "NOT EXISTS (SELECT 1 FROM codes WHERE space_id = ? AND image_id = images.id)"


class CodesMissing(BadCollection):
    """Images have no code in the space to switch to."""


class CodeSpaces:
    """All code spaces of an open catalog. `own` is the space that was active when the catalog was opened."""

    def __init__(self, database: Database) -> None:
        """Look up the active space.

        Raises:
            CatalogDamaged: there is none.
        """
        self._db = database
        self.own = self.active()

    def active(self) -> Space:
        """The space that is active now.

        Raises:
            CatalogDamaged: there is none.
        """
        with self._db.reading() as db:
            found = active_space(db)
        if found is None:
            raise CatalogDamaged(self._db.path, "it has no active code space")
        return found

    def all(self) -> list[Space]:
        """Every space, by ascending id."""
        with self._db.reading() as db:
            return _all(db)

    def one(self, space_id: int) -> Space:
        """The space with this id.

        Raises:
            BadConfig: there is none.
        """
        with self._db.reading() as db:
            return _one(db, space_id)

    def begin(self, fingerprint: str, n_bits: int, checkpoint: str) -> Space:
        """Create an empty space for the codes of another checkpoint, whose file is called `checkpoint`."""
        check_n_bits(n_bits)
        with self._db.transaction() as db:
            row = db.execute(
                "INSERT INTO spaces (fingerprint, n_bits, checkpoint, state, created_at) "
                "VALUES (?, ?, ?, 'building', ?) RETURNING id",
                (fingerprint, n_bits, checkpoint, now()),
            ).fetchone()
            return _one(db, int(row[0]))

    def add_codes(self, space_id: int, encoded: Sequence[tuple[StoredImage, StoredCode]]) -> int:
        """Store the codes of images in a space, in one transaction; returns how many. Durable when it returns.

        An image is skipped if it is no longer stored, or if its content has changed since its record was read.

        Raises:
            BadConfig: there is no such space, or a feature is missing in a collection that keeps features.
            BadCodes: a code does not have the space's width.
        """
        with self._db.writing() as (db, generation):
            space = _one(db, space_id)
            if encoded:
                check_codes(np.stack([stored.code for _, stored in encoded]), space.n_bits)
            keep_features = read_meta(db, "keep_features") is not None
            engines = {name: engine_id(db, name) for name in dict.fromkeys(stored.engine for _, stored in encoded)}
            n_stored = 0
            for image, stored in encoded:
                n = db.execute(
                    "INSERT OR REPLACE INTO codes SELECT ?, id, ?, ? FROM images WHERE id = ? AND sha256 = ?",
                    (space.id, stored.code.tobytes(), engines[stored.engine], image.id, image.sha256),
                ).rowcount
                if n and keep_features:
                    insert_feature(db, space.id, image.id, stored.feature)
                if n and space.state == "ready":  # another process may be searching it
                    note_update(db, image.id, generation)
                n_stored += n
            return n_stored

    def missing(self, space_id: int, *, after: int, limit: int) -> list[StoredImage]:
        """At most `limit` images with ids above `after` that have no code in a space, by ascending id."""
        query = f"SELECT {IMAGE_COLUMNS} FROM images WHERE id > ? AND {_HAS_NO_CODE} ORDER BY id LIMIT ?"
        with self._db.reading() as db:
            return [stored_image(row) for row in db.execute(query, (after, space_id, limit)).fetchall()]

    def n_missing(self, space_id: int) -> int:
        """How many images have no code in a space."""
        with self._db.reading() as db:
            return n_missing(db, space_id)

    def switch(self, space_id: int, *, allow_missing: int = 0) -> None:
        """Make a space the active one. Open collections keep the space with which they were opened.

        Raises:
            BadConfig: there is no such space.
            CodesMissing: more than `allow_missing` images have no code in it.
        """
        with self._db.writing() as (db, _):
            space = _one(db, space_id)
            missing = n_missing(db, space_id)
            if missing > allow_missing:
                raise CodesMissing(
                    f"code space {space.id} has no codes for {missing} images, which searches would no longer find: "
                    "run `hashseek index reencode` with its checkpoint, which adds them and switches"
                )
            db.execute("UPDATE spaces SET state = 'ready' WHERE id = ?", (space.id,))
            write_meta(db, "space", str(space.id))

    def drop(self, space_id: int) -> None:
        """Delete a space and its codes. Its checkpoint file stays.

        Raises:
            BadConfig: there is no such space, or it is the active one.
        """
        with self._db.transaction() as db:
            if _one(db, space_id) == active_space(db):
                raise BadConfig(f"code space {space_id} is in use: switch to another space before dropping it")
            db.execute("DELETE FROM spaces WHERE id = ?", (space_id,))

    def codes_of(self, ids: Sequence[int], *, space_id: int | None = None) -> dict[int, StoredCode]:
        """The codes of the images by id, in this space or the given one; images without a code there are left out."""
        with self._db.reading() as db:
            return codes_of(db, self.own.id if space_id is None else space_id, ids)

    def features_of(self, ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
        """The ids (n,) and the features (n, D) of those images that have features in this space, in any order.

        Raises:
            CatalogDamaged: features have different lengths.
        """
        query = (  # one flipped bit turns a BLOB into TEXT of the same bytes
            "SELECT image_id, CAST(feature AS BLOB) FROM features "
            "WHERE space_id = ? AND image_id IN (SELECT value FROM json_each(?))"
        )
        with self._db.reading() as db:
            rows = db.execute(query, (self.own.id, listed_ids(ids))).fetchall()
        sizes = {len(feature) for _, feature in rows}
        if len(sizes) > 1 or any(size % 2 for size in sizes):
            raise CatalogDamaged(self._db.path, f"stored features have {sorted(sizes)} bytes")
        found = np.fromiter((image_id for image_id, _ in rows), np.int64, len(rows))
        joined = np.frombuffer(b"".join(feature for _, feature in rows), np.float16)
        return found, joined.reshape(len(rows), -1 if rows else 0)

    def engines(self) -> dict[str, int]:
        """Number of codes of this space per engine that computed them; "" where the engine is unknown."""
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT coalesce(name, ''), count(*) FROM codes LEFT JOIN engines ON engines.id = codes.engine "
                "WHERE space_id = ? GROUP BY codes.engine ORDER BY 1",
                (self.own.id,),
            ).fetchall()
        return {str(name): int(count) for name, count in rows}

    def calibration(self) -> Any | None:
        """The calibration stored with this space, a JSON value; None if there is none."""
        with self._db.reading() as db:
            row = db.execute("SELECT calibration FROM spaces WHERE id = ?", (self.own.id,)).fetchone()
        return None if row is None or row[0] is None else json.loads(row[0])

    def set_calibration(self, value: Any) -> None:
        """Store a calibration, a JSON value, with this space."""
        with self._db.transaction() as db:
            db.execute("UPDATE spaces SET calibration = ? WHERE id = ?", (json.dumps(value), self.own.id))


# The functions below work within an open transaction of their caller.


def active_space(db: sqlite3.Connection) -> Space | None:
    """The active space; None in a damaged catalog."""
    row = db.execute(f"{_SELECT} WHERE id = (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'space')").fetchone()
    return None if row is None else Space(*row)


def codes_of(db: sqlite3.Connection, space_id: int, ids: Sequence[int]) -> dict[int, StoredCode]:
    """The codes of the images by id in a space; images without a code there are left out."""
    query = (
        "SELECT c.image_id, c.code, coalesce(e.name, ''), f.feature FROM codes AS c "
        "LEFT JOIN engines AS e ON e.id = c.engine "
        "LEFT JOIN features AS f ON f.space_id = c.space_id AND f.image_id = c.image_id "
        "WHERE c.space_id = ? AND c.image_id IN (SELECT value FROM json_each(?))"
    )
    found = {}
    for image_id, code, engine, feature in db.execute(query, (space_id, listed_ids(ids))):
        kept = None if feature is None else np.frombuffer(feature, np.float16)
        found[int(image_id)] = StoredCode(np.frombuffer(code, np.uint8), str(engine), kept)
    return found


def n_missing(db: sqlite3.Connection, space_id: int) -> int:
    """How many images have no code in a space."""
    return int(db.execute(f"SELECT count(*) FROM images WHERE {_HAS_NO_CODE}", (space_id,)).fetchone()[0])


def engine_id(db: sqlite3.Connection, name: str) -> int | None:
    """The id of an engine, which is added if it is new; None for an engine without a name."""
    if not name:
        return None
    db.execute("INSERT OR IGNORE INTO engines (name) VALUES (?)", (name,))
    return int(db.execute("SELECT id FROM engines WHERE name = ?", (name,)).fetchone()[0])


def insert_feature(db: sqlite3.Connection, space_id: int, image_id: int, feature: NDArray[np.float16] | None) -> None:
    """Store the feature (D,) of an image whose code was stored in the same transaction.

    Raises:
        BadConfig: it is missing, for example in an import.
    """
    if feature is None:
        raise BadConfig(
            "this collection stores features, but an image has none; nothing was stored: add the images themselves, or "
            "import into a collection that stores no features"
        )
    db.execute("INSERT OR REPLACE INTO features VALUES (?, ?, ?)", (space_id, image_id, feature.tobytes()))


def note_update(db: sqlite3.Connection, image_id: int, generation: int) -> None:
    """Record that an image has a different code since this generation."""
    db.execute("INSERT OR REPLACE INTO updated VALUES (?, ?)", (image_id, generation))


def _all(db: sqlite3.Connection) -> list[Space]:
    return [Space(*row) for row in db.execute(f"{_SELECT} ORDER BY id").fetchall()]


def _one(db: sqlite3.Connection, space_id: int) -> Space:
    spaces = {space.id: space for space in _all(db)}
    if space_id not in spaces:
        raise BadConfig(f"there is no code space {space_id}: choose from {', '.join(map(str, spaces))}")
    return spaces[space_id]
