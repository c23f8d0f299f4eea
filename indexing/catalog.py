"""The catalog: an SQLite file that is the truth about a collection.

It holds every image's path, content hash, size, labels and code. The generation counts committed changes; together
with the ids, which are never given twice, it tells an index what it has missed.
"""

import json
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.codes import Codes, check_n_bits, code_size
from retrieval.errors import BadCodes, BadCollection, UnknownImage

APPLICATION_ID = 0x48534B31  # "HSK1"
BUSY_SECONDS = 30

# Migration number i leads to user_version i + 1. Old ones are never edited.
MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE images (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        sha256 TEXT NOT NULL UNIQUE,
        path TEXT NOT NULL,
        width INTEGER NOT NULL,
        height INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        media_type TEXT NOT NULL,
        added_at TEXT NOT NULL,
        code BLOB NOT NULL
    );
    CREATE TABLE image_labels (
        label TEXT NOT NULL,
        image_id INTEGER NOT NULL REFERENCES images(id) ON DELETE CASCADE,
        PRIMARY KEY (label, image_id)
    ) WITHOUT ROWID;
    CREATE INDEX image_labels_by_image ON image_labels(image_id);
    CREATE TABLE removed (image_id INTEGER PRIMARY KEY, generation INTEGER NOT NULL);
    CREATE INDEX removed_by_generation ON removed(generation);
    """,
)


class CatalogLocked(BadCollection):
    """Another process is writing; the same request may succeed a moment later."""


class DiskFull(BadCollection):
    """There is no room for what was to be stored."""


@dataclass(frozen=True)
class NewImage:
    """An image to be added. `code` is packed (code_size,)."""

    path: str
    sha256: str
    width: int
    height: int
    bytes: int
    media_type: str
    labels: tuple[str, ...]
    code: NDArray[np.uint8]


@dataclass(frozen=True)
class StoredImage:
    """An image of the catalog, without its code."""

    id: int
    path: str
    sha256: str
    width: int
    height: int
    bytes: int
    media_type: str
    labels: tuple[str, ...]
    added_at: str


@dataclass(frozen=True)
class Changes:
    """What happened since a generation: images added (ascending ids, their codes) and ids removed."""

    generation: int
    ids: NDArray[np.int64]
    codes: Codes
    removed: NDArray[np.int64]


class Catalog:
    """An open catalog. Safe to use from several threads; other processes may read and write the same file.

    Reads have a connection of their own, so that they never wait for a writer, here or elsewhere.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open an existing catalog and bring its schema up to date.

        Raises:
            BadCollection: missing, not a Hashseek catalog, damaged, or written by a newer Hashseek.
        """
        self.path = path
        if not path.is_file():
            folder = path.parent
            raise BadCollection(f"there is no collection {folder}: create it with `hashseek index add {folder} IMAGES`")
        self._read_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._frozen: tuple[int, ...] | None = None
        with explained(path):
            self._reader = self._open_reader()
        try:
            version = self._check_kind()
            if not read_only:
                with explained(path):
                    self._writer = _connect(path, "rw")
                    _migrate(self._writer, version)
            meta = self._meta()
            self.uuid, self.fingerprint = meta["uuid"], meta["fingerprint"]
            self.n_bits = check_n_bits(int(meta["n_bits"]))
        except (KeyError, ValueError, BadCodes) as error:
            self.close()
            raise _damaged(path, f"its table meta says {error}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()

    def generation(self) -> int:
        """How many changes were committed."""
        with self._reading() as db:
            return self._generation(db)

    def __len__(self) -> int:
        with self._reading() as db:
            return int(db.execute("SELECT count(*) FROM images").fetchone()[0])

    def add(self, images: Sequence[NewImage]) -> list[tuple[int, bool]]:
        """Store images in one transaction; (id, whether it is new) for each. Durable when it returns.

        An image whose content is there already keeps its record, and its id is given.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        outcome = []
        with self._writing() as db:
            for image in images:
                row = db.execute(
                    "INSERT INTO images (sha256, path, width, height, bytes, media_type, added_at, code) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (sha256) DO NOTHING RETURNING id",
                    (
                        image.sha256,
                        image.path,
                        image.width,
                        image.height,
                        image.bytes,
                        image.media_type,
                        now,
                        image.code.tobytes(),
                    ),
                ).fetchone()
                if row is None:
                    known = db.execute("SELECT id FROM images WHERE sha256 = ?", (image.sha256,)).fetchone()
                    outcome.append((int(known[0]), False))
                    continue
                db.executemany(
                    "INSERT OR IGNORE INTO image_labels (label, image_id) VALUES (?, ?)",
                    [(label, row[0]) for label in image.labels],
                )
                outcome.append((int(row[0]), True))
        return outcome

    def remove(self, ids: Sequence[int]) -> None:
        """Forget images, all or none.

        Raises:
            UnknownImage: an id is not in the catalog.
        """
        with self._writing() as db:
            generation = self._generation(db)
            for image_id in ids:
                if db.execute("DELETE FROM images WHERE id = ?", (image_id,)).rowcount == 0:
                    raise UnknownImage(f"there is no image {image_id} in the collection")
                db.execute("INSERT OR REPLACE INTO removed VALUES (?, ?)", (image_id, generation + 1))

    def get(self, ids: Sequence[int]) -> list[StoredImage | None]:
        """Records by id, in that order; None for an id that is not there."""
        found: dict[int, StoredImage] = {}
        with self._reading() as db:
            for start in range(0, len(ids), 500):  # SQLite limits the number of placeholders
                chunk = [int(i) for i in ids[start : start + 500]]
                rows = db.execute(f"{_SELECT} WHERE id IN ({','.join('?' * len(chunk))})", chunk)
                found.update((row[0], _stored(row)) for row in rows)
        return [found.get(int(i)) for i in ids]

    def one(self, image_id: int) -> StoredImage:
        """The record of one image.

        Raises:
            UnknownImage: it is not in the catalog.
        """
        # An id beyond 64 bits cannot be stored, and SQLite would refuse to compare it.
        found = self.get([image_id])[0] if 0 <= image_id < 2**63 else None
        if found is None:
            raise UnknownImage(f"there is no image {image_id} in the collection")
        return found

    def code(self, image_id: int) -> Codes:
        """Packed code (1, code_size) of one image."""
        self.one(image_id)
        with self._reading() as db:
            row = db.execute("SELECT code FROM images WHERE id = ?", (image_id,)).fetchone()
        if row is None:  # removed since
            raise UnknownImage(f"there is no image {image_id} in the collection")
        return self._codes([row[0]])

    def page(self, *, after: int, limit: int, label: str | None = None) -> list[StoredImage]:
        """At most `limit` records with ids above `after`, ascending; with `label`, only those that carry it."""
        where = "WHERE id > ?" + (
            "" if label is None else " AND id IN (SELECT image_id FROM image_labels WHERE label = ?)"
        )
        arguments: list[Any] = [after] if label is None else [after, label]
        with self._reading() as db:
            rows = db.execute(f"{_SELECT} {where} ORDER BY id LIMIT ?", [*arguments, limit]).fetchall()
        return [_stored(row) for row in rows]

    def known_hashes(self, hashes: Sequence[str]) -> dict[str, int]:
        """Ids of those content hashes that are stored."""
        known: dict[str, int] = {}
        with self._reading() as db:
            for start in range(0, len(hashes), 500):
                chunk = hashes[start : start + 500]
                rows = db.execute(
                    f"SELECT sha256, id FROM images WHERE sha256 IN ({','.join('?' * len(chunk))})", chunk
                )
                known.update((str(sha256), int(image_id)) for sha256, image_id in rows)
        return known

    def label_counts(self) -> dict[str, int]:
        """Number of images per label, by name."""
        with self._reading() as db:
            rows = db.execute("SELECT label, count(*) FROM image_labels GROUP BY label ORDER BY label").fetchall()
        return {str(label): int(count) for label, count in rows}

    def changes(self, *, after_id: int, after_generation: int) -> Changes:
        """Images with ids above `after_id`, and ids removed after `after_generation`, read as of one moment."""
        with self._reading() as db:
            db.execute("BEGIN")  # one snapshot for the three reads
            try:
                generation = self._generation(db)
                rows = db.execute("SELECT id, code FROM images WHERE id > ? ORDER BY id", (after_id,)).fetchall()
                removed = db.execute(
                    "SELECT image_id FROM removed WHERE generation > ?", (after_generation,)
                ).fetchall()
            finally:
                db.execute("COMMIT")
        codes = self._codes([code for _, code in rows])
        ids = np.fromiter((image_id for image_id, _ in rows), np.int64, len(rows))
        return Changes(generation, ids, codes, np.fromiter((row[0] for row in removed), np.int64, len(removed)))

    def integrity_problems(self) -> list[str]:
        """What SQLite's own check of the file finds; empty if nothing."""
        with self._reading() as db:
            found = [str(row[0]) for row in db.execute("PRAGMA integrity_check").fetchall()]
            orphans = db.execute("PRAGMA foreign_key_check").fetchall()
        problems = [] if found == ["ok"] else [f"SQLite: {problem}" for problem in found]
        return problems + ([f"SQLite: {len(orphans)} labels belong to no image"] if orphans else [])

    def _codes(self, blobs: Sequence[bytes]) -> Codes:
        size = code_size(self.n_bits)
        if not all(isinstance(blob, bytes) and len(blob) == size for blob in blobs):
            raise _damaged(self.path, f"a code has not the {size} bytes of {self.n_bits} bits")
        return np.frombuffer(b"".join(blobs), np.uint8).reshape(-1, size)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every other writer out, of other processes too, while something is done that rests on the catalog."""
        with self._transaction():
            yield

    def _check_kind(self) -> int:
        """The version of the catalog's schema, if it is a catalog that can be read."""
        with self._reading() as db:
            application = db.execute("PRAGMA application_id").fetchone()[0]
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if application != APPLICATION_ID:
            raise BadCollection(f"{self.path} is an SQLite file but not a Hashseek catalog")
        if version > len(MIGRATIONS):
            raise BadCollection(
                f"{self.path} has catalog version {version}, this Hashseek knows up to {len(MIGRATIONS)}: "
                "update Hashseek"
            )
        return version

    def _meta(self) -> dict[str, str]:
        with self._reading() as db:
            return dict(db.execute("SELECT key, value FROM meta").fetchall())

    def _generation(self, db: sqlite3.Connection) -> int:
        row = db.execute("SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'generation'").fetchone()
        if row is None:
            raise _damaged(self.path, "it counts no changes")
        return int(row[0])

    def _open_reader(self) -> sqlite3.Connection:
        """A connection for reading, with or without the right to write to the folder.

        SQLite reads a WAL file without that right only while a writer is at work, whose files it shares. Without a
        writer the file does not change and can be opened as immutable; `_reading` opens it again when it did change.
        """
        self._frozen = None
        try:
            return _connect(self.path, "ro")
        except sqlite3.OperationalError:
            self._frozen = self._stamp()
            if self._frozen is None or os.access(self.path.parent, os.W_OK):
                raise
        return _connect(self.path, "ro&immutable=1")

    def _stamp(self) -> tuple[int, ...] | None:
        """What is different after the file has changed; None while a writer is at work."""
        if self.path.with_name(f"{self.path.name}-wal").exists():
            return None
        stat = self.path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, explained(self.path):
            if self._frozen is not None and self._frozen != self._stamp():
                self._reader.close()
                self._reader = self._open_reader()
            yield self._reader

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._writer is None:
            raise BadCollection(f"{self.path.parent} was opened for reading only: nothing can be added or removed")
        if not self._write_lock.acquire(timeout=BUSY_SECONDS):
            raise CatalogLocked(f"the catalog {self.path} is locked: {_LOCKED}")
        try:
            with explained(self.path):
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    yield self._writer
                    self._writer.execute("COMMIT")
                except BaseException:
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    raise
        finally:
            self._write_lock.release()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._transaction() as db:
            yield db
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")


def create_catalog(path: Path, *, fingerprint: str, n_bits: int) -> None:
    """Create an empty catalog for codes of one checkpoint, complete or not at all."""
    meta = {"uuid": str(uuid.uuid4()), "fingerprint": fingerprint, "n_bits": str(n_bits), "generation": "0"}
    values = ", ".join(f"({_quote(key)}, {_quote(value)})" for key, value in meta.items())
    stamp = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {len(MIGRATIONS)};"
    script = f"BEGIN IMMEDIATE; {''.join(MIGRATIONS)} INSERT INTO meta VALUES {values}; {stamp} COMMIT;"
    with explained(path):
        db = _connect(path, "rwc")
        try:
            db.executescript(script)
        finally:
            db.close()


_LOCKED = f"another process has been writing for more than {BUSY_SECONDS} s; try again when it is done"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into sentences about the catalog at `path`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        kind, reason = BadCollection, str(error)
        if "locked" in reason:
            kind, remedy = CatalogLocked, _LOCKED
        elif "readonly" in reason or "unable to open" in reason:
            remedy = "check that you may write to the folder"
        elif "full" in reason:
            kind = DiskFull
            remedy = "nothing of the last batch was stored; free some space and run the command again"
        elif "malformed" in reason or "not a database" in reason:
            remedy = "the file is damaged; restore it from a copy, or build the collection again"
        else:
            remedy = "nothing of the last change was stored"
        raise kind(f"the catalog {path} answered {reason!r}: {remedy}") from None


def _damaged(path: Path, reason: str) -> BadCollection:
    return BadCollection(f"{path} is damaged: {reason}; restore it from a copy, or build the collection again")


_COLUMNS = "id, path, sha256, width, height, bytes, media_type, added_at"
_SELECT = (
    f"SELECT {_COLUMNS}, (SELECT json_group_array(label) FROM "
    "(SELECT label FROM image_labels WHERE image_id = images.id ORDER BY label)) FROM images"
)


def _stored(row: tuple[Any, ...]) -> StoredImage:
    image_id, path, sha256, width, height, n_bytes, media_type, added_at, labels = row
    return StoredImage(image_id, path, sha256, width, height, n_bytes, media_type, tuple(json.loads(labels)), added_at)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _migrate(db: sqlite3.Connection, version: int) -> None:
    for number in range(version, len(MIGRATIONS)):
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection in SQLite's mode ro, rw or rwc that works, or an error."""
    db = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        db.execute("PRAGMA foreign_keys = ON")
        if mode.startswith("rw"):
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # what was acknowledged survives a power loss
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db
