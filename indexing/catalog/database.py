"""The SQLite file of a catalog: connections to read, one to write, and SQLite's errors as errors of Hashseek.

Readers never wait for each other or for a writer. Writers wait for each other, within one process and across processes.
"""

import os
import shlex
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hashseek.indexing.catalog.schema import APPLICATION_ID, VERSION, create_tables
from hashseek.retrieval.errors import BadCollection

BUSY_SECONDS = 30
_KEPT = 4  # read connections that stay open while nobody uses them; each takes up to 2 MB and two file descriptors


class CatalogLocked(BadCollection):
    """Another process is writing; the same request may succeed a moment later."""


class DiskFull(BadCollection):
    """There is no room on the disk; the change was not stored."""


class CatalogReplaced(BadCollection):
    """The catalog file was moved, deleted or replaced since it was opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} has been moved or replaced since it was opened: this change was not stored, try again"
        )


class CatalogDamaged(BadCollection):
    """The catalog file or its content is damaged."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged: {reason}; try `hashseek index verify --repair`; if that does not help, restore a "
            f"snapshot into a new folder, or try SQLite's own `sqlite3 {path.name} .recover`"
        )


@dataclass(frozen=True)
class _Reader:
    """A read connection; `unchanged` is the stamp of the file if it was opened as immutable."""

    connection: sqlite3.Connection
    unchanged: tuple[int, ...] | None = None


class Database:
    """An open catalog file. Safe to use from several threads."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        """Open the file.

        Raises:
            BadCollection: missing, not writable, not a Hashseek catalog, damaged, or written by another version of
                Hashseek.
        """
        self.path = path
        if not path.is_file():
            folder = shlex.quote(str(path.parent))
            raise BadCollection(
                f"there is no collection in {folder}: create it with `hashseek index add {folder} IMAGES`"
            )
        self._identity = _identity(path)
        # Reentrant, because the garbage collector may close the file in the middle of a statement.
        self._read_lock, self._write_lock = threading.RLock(), threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._idle: list[_Reader] = []
        self._is_closed = False
        try:
            self._check_format()
            if not read_only:
                for place in (path.parent, path):  # otherwise SQLite creates files before it fails
                    if not os.access(place, os.W_OK):
                        raise BadCollection(f"{place} is not writable by this user: change its permissions or owner")
                with as_hashseek_error(path):
                    self._writer = _connect(path, "rw")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Statements that other threads are executing are finished: ending them would crash Python."""
        with self._read_lock:
            self._is_closed = True  # a connection in use is closed when it is no longer needed
            while self._idle:
                self._idle.pop().connection.close()
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()

    def is_in_place(self) -> bool:
        """Whether the open file is still the one at its path, and has not been replaced by a restored copy."""
        try:
            return _identity(self.path) == self._identity
        except OSError:
            return False

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A read connection that nobody else uses at the same time."""
        with as_hashseek_error(self.path):
            reader = self._take_reader()
            try:
                yield reader.connection
            finally:
                with self._read_lock:
                    is_kept = not self._is_closed and len(self._idle) < _KEPT
                    if is_kept:
                        self._idle.append(reader)
                if not is_kept:
                    reader.connection.close()

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A read connection within a read transaction: all queries see the same state."""
        with self.reading() as db:
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The write connection: everything is committed at the end, or nothing. Other writers wait.

        Raises:
            CatalogLocked: another writer did not finish within `BUSY_SECONDS`.
            CatalogReplaced: the file is no longer the one that was opened.
        """
        if self._writer is None:
            raise BadCollection(f"{self.path.parent} was opened read-only: it cannot be changed")
        if not self._write_lock.acquire(timeout=BUSY_SECONDS):
            raise _locked(self.path)
        try:
            with as_hashseek_error(self.path):
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    if not self.is_in_place():  # checked last: it may have happened while this writer waited
                        raise CatalogReplaced(self.path)
                    yield self._writer
                    self._writer.execute("COMMIT")
                except BaseException:
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    raise
        finally:
            self._write_lock.release()

    @contextmanager
    def writing(self) -> Iterator[tuple[sqlite3.Connection, int]]:
        """A transaction that starts a new generation, and the number of that generation."""
        with self.transaction() as db:
            generation = self.generation(db) + 1
            yield db, generation
            write_meta(db, "generation", str(generation))

    def generation(self, db: sqlite3.Connection) -> int:
        """The number of committed changes."""
        return self.number(db, "generation")

    def number(self, db: sqlite3.Connection, key: str, *, default: str = "") -> int:
        """A number in the table meta.

        Raises:
            CatalogDamaged: there is none.
        """
        value = read_meta(db, key) or default
        if not value.isdecimal():
            raise CatalogDamaged(self.path, f"its table meta has no number {key}")
        return int(value)

    def copy_to(self, copy: Path) -> None:
        """Copy the catalog, which others may be using, to a single file without a write-ahead log."""
        with self.reading() as db, as_hashseek_error(copy), closing(sqlite3.connect(copy)) as target:
            db.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")

    def _check_format(self) -> None:
        with self.reading() as db:
            application = db.execute("PRAGMA application_id").fetchone()[0]
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if application != APPLICATION_ID:
            raise BadCollection(f"{self.path} is not a Hashseek catalog: check the path, or restore a snapshot")
        if version != VERSION:
            raise BadCollection(
                f"{self.path} has catalog version {version}, but this Hashseek reads version {VERSION}: export the "
                "collection with the Hashseek version that wrote it, then import it"
            )

    def _take_reader(self) -> _Reader:
        """A reader that is idle and up to date, or a new one."""
        with self._read_lock:
            if self._is_closed:
                raise BadCollection(f"{self.path.parent} was closed: open the collection again")
            reader = self._idle.pop() if self._idle else None
        if reader is None:
            return self._open_reader()
        if reader.unchanged is not None and reader.unchanged != self._stamp():
            reader.connection.close()
            return self._open_reader()
        return reader

    def _open_reader(self) -> _Reader:
        """A new reader, also without permission to write, or on a full disk.

        Then SQLite can read a WAL file only while a writer is active, whose files it shares. Without a writer the file
        does not change and can be opened as immutable; it is reopened after a change.
        """
        if not os.access(self.path, os.W_OK) and not self.path.with_name(f"{self.path.name}-shm").exists():
            # If the folder is writable, SQLite would create files there that the catalog's owner cannot write.
            unchanged = self._stamp()
            if unchanged is not None:
                return _Reader(_connect(self.path, "ro&immutable=1"), unchanged)
        try:
            return _Reader(_connect(self.path, "ro"))
        except sqlite3.OperationalError as error:
            may_write = os.access(self.path.parent, os.W_OK)
            if may_write and error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:
                _connect(self.path, "rw").close()  # undoes a change to WAL that a kill or a power cut interrupted
                return _Reader(_connect(self.path, "ro"))
            unchanged, is_full = self._stamp(), error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR
            if unchanged is None or (may_write and not is_full):
                raise
        return _Reader(_connect(self.path, "ro&immutable=1"), unchanged)

    def _stamp(self) -> tuple[int, ...] | None:
        """A value that differs after the file has changed; None while a writer is active, or without a file."""
        with suppress(FileNotFoundError):
            if self.path.with_name(f"{self.path.name}-wal").stat().st_size:  # a failed reader leaves an empty one
                return None
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns


def create_catalog(path: Path, *, fingerprint: str, n_bits: int, keep_features: bool = False) -> None:
    """Create an empty catalog for codes of one checkpoint, complete or not at all.

    Args:
        path: the path of the new file.
        fingerprint: the fingerprint of the checkpoint.
        n_bits: the length of its codes.
        keep_features: also store the features of every image.
    """
    path.touch()  # SQLite would not let members of the group write it, whatever the umask
    # Without a write-ahead log: on a full disk, SQLite would leave the tables there, and the file could not be renamed.
    with as_hashseek_error(path), closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        create_tables(db)
        db.execute(
            "INSERT INTO spaces (id, fingerprint, n_bits, checkpoint, state, created_at) "
            "VALUES (1, ?, ?, 'checkpoint.safetensors', 'ready', ?)",
            (fingerprint, n_bits, now()),
        )
        meta = {"uuid": str(uuid.uuid4()), "generation": "0", "space": "1"}
        meta |= {"keep_features": "1"} if keep_features else {}
        db.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        db.execute("COMMIT")


def read_meta(db: sqlite3.Connection, key: str) -> str | None:
    """A value of the table meta; None if there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def write_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    """Set a value of the table meta."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


@contextmanager
def as_hashseek_error(path: Path) -> Iterator[None]:
    """Raise SQLite's errors about the catalog at `path` as `BadCollection`, with a remedy."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", None)  # None: an error of Python's, such as text that is not UTF-8
        primary = None if code is None else code & 0xFF
        answer = f"SQLite reports {str(error)!r} for the catalog {path}"
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise _locked(path) from None
        if primary == sqlite3.SQLITE_FULL:
            raise DiskFull(f"{answer}; this change was not stored: free some space and try again") from None
        not_text = primary is None and not isinstance(error, sqlite3.ProgrammingError)
        if not_text or primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise CatalogDamaged(path, str(error)) from None
        raise BadCollection(
            f"{answer}: check the permissions of the folder and of the files in it, and that the disk has space"
        ) from None


def now() -> str:
    """The current time as it is stored: UTC, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _locked(path: Path) -> CatalogLocked:
    return CatalogLocked(
        f"the catalog {path} is locked: another process has been writing for more than {BUSY_SECONDS} s; try again "
        "when it is done"
    )


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection in SQLite's mode ro or rw that works, or an error."""
    db = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        db.execute("PRAGMA foreign_keys = ON")
        if mode == "rw":
            db.execute("PRAGMA synchronous = EXTRA")  # changes survive a power cut, and so does the change to WAL
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        db.close()
        raise
    return db
