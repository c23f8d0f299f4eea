"""Atomic writes, which leave the old or the complete new file after a crash; CSV; hashes; folder locks; the cache."""

import csv
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hashseek.retrieval.errors import BadConfig

CACHE_REMEDY = "point HASHSEEK_CACHE at a writable folder with enough space"


def write_atomically(path: Path, content: bytes | memoryview, *, within: Path | None = None) -> None:
    """Write `content` to `path` through a temporary file next to it, fsynced and renamed.

    Missing folders are created; with `within`, only those inside that folder, which may have been moved away.

    Raises:
        FileNotFoundError: `within` does not exist.
        OSError: the folder is not writable or the disk is full; no partial file remains.
    """
    _make_folder(path.parent, within)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            error.filename, error.filename2 = str(path), None
        raise
    fsync_folder(path.parent)


def _make_folder(folder: Path, within: Path | None) -> None:
    """Create `folder` and its missing parents, so that they survive a power loss."""
    if folder.is_dir() or folder == within:
        return
    _make_folder(folder.parent, within)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


class _Lines(list[str]):
    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")


def as_csv(rows: Iterable[Iterable[object]]) -> bytes:
    """Rows as CSV; numbers keep all their digits, and file names that are not UTF-8 keep their bytes."""
    lines = _Lines()
    csv.writer(lines).writerows(rows)  # with lineterminator="\n", Python 3.11 would not quote a carriage return
    return "".join(lines).encode("utf-8", "surrogateescape")


def sha256_of(file: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def checksum_of(content: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256 of a JSON object without its own field `checksum`."""
    kept = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`; other processes and threads wait. The system releases it if the process dies.

    It locks the folder itself, so that no lock file is left behind.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def mark_used(file: Path) -> None:
    """Set the modification time of a cached file, so that `delete_oldest` keeps it."""
    with suppress(OSError):  # another user's file, or a read-only disk
        os.utime(file)


def delete_oldest(folder: Path, pattern: str, *, keep: int) -> None:
    """Delete files of a cache until the rest, the most recently used ones, have at most `keep` bytes.

    The last one used is kept, whatever its size.

    Raises:
        OSError: a file cannot be deleted.
    """
    files = {}
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process is also deleting
            files[file] = file.stat()
    n_bytes = 0
    for file, status in sorted(files.items(), key=lambda item: -item[1].st_mtime_ns):
        n_bytes += status.st_size
        if status.st_size < n_bytes > keep:
            file.unlink(missing_ok=True)


def cache_folder() -> Path:
    """For files that can be computed again: `$HASHSEEK_CACHE`, `$XDG_CACHE_HOME/hashseek` or `~/.cache/hashseek`.

    Raises:
        BadConfig: none of them is set, and the user has no home folder.
    """
    own = os.environ.get("HASHSEEK_CACHE")
    return Path(own) if own else user_cache() / "hashseek"


def user_cache() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        BadConfig: the user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise BadConfig("this user has no home folder: set HOME, or XDG_CACHE_HOME to a folder for caches") from None


def cached_file(folder: str, *parts: object, suffix: str = "") -> Path:
    """The file in `folder` of the cache that depends on `parts`."""
    key = hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
    return cache_folder() / folder / f"{key}{suffix}"
