"""The SQLite file of a catalog: one connection for reading, one for writing, locks, and errors as sentences.

Reading never waits for a writer. Writers wait for each other, in one process and across processes; a writer notes
itself beside the file, so that one who waited in vain can be told for whom.
"""

import fcntl
import json
import os
import sqlite3
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from hashseek.indexing.catalog.schema import APPLICATION_ID, LATEST, create, migrate
from hashseek.indexing.printing import printable
from hashseek.retrieval.errors import BadCollection

BUSY_SECONDS = 30
_MEND = "save what can be read with `hashseek index verify --repair`, or restore a snapshot"
NOTE = "-writer"  # beside the catalog, as SQLite's own -wal and -shm


class CatalogLocked(BadCollection):
    """Another process is writing; the same request may succeed a moment later."""


class DiskFull(BadCollection):
    """There is no room for what was to be stored."""


class CatalogReplaced(BadCollection):
    """Another file, or none, is at the place of the one that was opened."""


class Database:
    """An open catalog file, with its schema up to date. Safe to use from several threads."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        """Open the file.

        Raises:
            BadCollection: missing, not a Hashseek catalog, damaged, or written by a newer Hashseek.
        """
        self.path = path
        if not path.is_file():
            folder = path.parent
            if folder.is_file():
                raise BadCollection(f"{folder} is a file, and a collection is a folder: correct the path")
            raise BadCollection(
                f"there is no collection {folder}: create it with "
                f"`hashseek index add {folder} IMAGES --checkpoint FILE`"
            )
        self._identity = _identity(path)
        self._read_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._note: int | None = None
        self._frozen: tuple[int, ...] | None = None
        with explained(path):
            self._reader = self._open_reader()
        try:
            version = self._check_kind()
            if version < LATEST:
                self._migrate(version)
            if not read_only:
                with explained(path):
                    self._writer = _connect(path, "rw")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
        if self._note is not None:
            os.close(self._note)
            self._note = None

    def is_in_place(self) -> bool:
        """Whether the file that was opened is still the one at its path: a restored copy may have been put there."""
        try:
            return _identity(self.path) == self._identity
        except OSError:
            return False

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection for reading."""
        with self._read_lock, explained(self.path):
            if self._frozen is not None and self._frozen != self._stamp():
                self._reader.close()
                self._reader = self._open_reader()
            yield self._reader

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """The connection for reading; all that is read belongs to one moment."""
        with self.reading() as db:
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection for writing; what is written is committed at the end, or not at all. Keeps others out."""
        if self._writer is None:
            raise BadCollection(f"{self.path.parent} was opened for reading only: nothing can be added or removed")
        if not self._write_lock.acquire(timeout=BUSY_SECONDS):
            raise _locked(self.path)
        try:
            if not self.is_in_place():
                raise CatalogReplaced(
                    f"{self.path} was moved or replaced by another file since it was opened: nothing was stored, "
                    "try again"
                )
            with explained(self.path):
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    self._check_version(self._writer)
                    with self._noted():
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
        """A transaction that makes a new generation, and its number."""
        with self.transaction() as db:
            generation = self.generation(db) + 1
            yield db, generation
            db.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (str(generation),))

    def generation(self, db: sqlite3.Connection) -> int:
        """How many changes were committed."""
        row = db.execute("SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'generation'").fetchone()
        if row is None:
            raise damaged(self.path, "it counts no changes")
        return int(row[0])

    def forgotten(self, db: sqlite3.Connection) -> int:
        """The generation up to which it is not known any more what was removed or changed; -1 if all is known."""
        row = db.execute("SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'forgotten'").fetchone()
        return -1 if row is None else int(row[0])

    def _check_kind(self) -> int:
        """The version of the catalog's schema, if it is a catalog that can be read."""
        with self.reading() as db:
            application = db.execute("PRAGMA application_id").fetchone()[0]
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if application != APPLICATION_ID:
            empty = self.path.stat().st_size == 0
            wrong = "is empty, which a catalog never is" if empty else "is an SQLite file but not a Hashseek catalog"
            raise BadCollection(f"{self.path} {wrong}: correct the path, put a copy back, or restore a snapshot")
        if version > LATEST:
            raise BadCollection(
                f"{self.path} has catalog version {version}, this Hashseek knows up to {LATEST}: update Hashseek"
            )
        return version

    def _check_version(self, db: sqlite3.Connection) -> None:
        """A newer Hashseek may have changed the tables since the catalog was opened, and keeps more true than this."""
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version != LATEST:
            raise BadCollection(
                f"{self.path} was brought to catalog version {version} since it was opened, and this Hashseek writes "
                f"version {LATEST}: nothing was stored; start it again with the newer Hashseek"
            )

    def _migrate(self, version: int) -> None:
        """Bring an older catalog up to date; who only reads does it too, since it changes nothing that they see."""
        try:
            with explained(self.path):
                writer = _connect(self.path, "rw")
                try:
                    migrate(writer)
                finally:
                    writer.close()
        except CatalogLocked:
            raise
        except BadCollection as error:
            raise BadCollection(
                f"{self.path} has catalog version {version} and could not be brought to version {LATEST}, "
                f"it was left as it is: {error}"
            ) from None

    def _open_reader(self) -> sqlite3.Connection:
        """A connection for reading, with or without the right to write to the folder.

        SQLite reads a WAL file without that right only while a writer is at work, whose files it shares. Without a
        writer the file does not change and can be opened as immutable; `reading` opens it again when it did change.
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
    def _noted(self) -> Iterator[None]:
        """Say beside the file who is writing. The note counts only while its lock is held, so the dead never lie."""
        with suppress(OSError):  # no room for a note is no reason not to write
            if self._note is None:
                self._note = os.open(_note(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = json.dumps({"pid": os.getpid(), "command": _command(), "since": now()}).encode()
            os.ftruncate(self._note, 0)
            os.pwrite(self._note, content, 0)
        try:
            yield
        finally:
            if self._note is not None:
                fcntl.flock(self._note, fcntl.LOCK_UN)


def create_catalog(path: Path, *, fingerprint: str, n_bits: int) -> None:
    """Create an empty catalog for codes of one checkpoint, complete or not at all."""
    meta = {"uuid": str(uuid.uuid4()), "fingerprint": fingerprint, "n_bits": str(n_bits), "generation": "0"}
    with explained(path):
        db = _connect(path, "rwc")
        try:
            create(db, meta)
        finally:
            db.close()


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into sentences about the catalog at `path`."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a damaged name makes SQLite's message no text
        kind, reason = BadCollection, str(error)
        if "locked" in reason:
            raise _locked(path) from None
        if "readonly" in reason or "unable to open" in reason:
            remedy = "check that you may write to the folder"
        elif "full" in reason:
            kind = DiskFull
            remedy = "nothing of the last batch was stored; free some space and run the command again"
        elif "disk I/O" in reason:
            remedy = "nothing of the last change was stored; check that the disk has room and is sound"
        elif any(word in reason for word in ("malformed", "not a database", "decode", "no such index")):
            remedy = f"the file is damaged; {_MEND}"
        else:
            remedy = "nothing of the last change was stored"
        raise kind(f"the catalog {path} answered {reason!r}: {remedy}") from None


def damaged(path: Path, reason: str) -> BadCollection:
    """The error that a catalog holds what it cannot hold."""
    return BadCollection(f"{path} is damaged: {reason}; {_MEND}")


def now() -> str:
    """The time as it is stored: UTC, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def writer_of(path: Path) -> str | None:
    """Who is writing to the catalog at `path` at this moment, if they noted themselves."""
    try:
        handle = os.open(_note(path), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None  # nobody holds it: what it says is about the past
    except OSError:
        pass
    finally:
        content = os.pread(handle, 4096, 0)
        os.close(handle)
    try:
        note = json.loads(content)
        return f"process {int(note['pid'])}, `{printable(str(note['command']))}`, since {note['since']}"
    except (ValueError, KeyError, TypeError):  # just being written
        return None


def _locked(path: Path) -> CatalogLocked:
    who = writer_of(path)
    return CatalogLocked(
        f"the catalog {path} is locked: another process has been writing for more than {BUSY_SECONDS} s"
        f"{f' ({who})' if who else ''}; try again when it is done"
    )


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}{NOTE}")


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _command() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200] if sys.argv else "python"


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
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        db.close()
        raise
    return db
