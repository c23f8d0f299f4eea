"""Writing files so that a crash leaves the old one or the whole new one, never half; and a lock between processes."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary file beside it, fsynced and renamed.

    Raises:
        OSError: the folder cannot be written or the disk is full; nothing half-written stays behind.
    """
    _make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def _make_folder(folder: Path) -> None:
    """Create `folder` and what is missing above it, so that a power loss cannot take them with what is in them."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Keep other processes (and threads) that ask for the lock of `folder` waiting; the system releases it at death.

    Any number may hold it `shared` at a time, while nobody holds it otherwise; who may not open the folder goes on
    without, since who cannot read it cannot hold others up.

    Raises:
        OSError: it cannot be opened, and is not to be `shared`.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        if not shared:
            raise
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
