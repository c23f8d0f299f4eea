"""A folder for what is not finished: of this process alone, and swept away by the next one if this one is killed."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hashseek.retrieval.errors import BadConfig

_PREFIX = ".hashseek-unfinished-"


@contextmanager
def workplace(beside: Path) -> Iterator[Path]:
    """A new folder in `beside`, gone when the context ends; what is finished in it can be renamed out of it.

    Raises:
        BadConfig: there is no right to write in `beside`.
        OSError: `beside` is missing, or there is no room.
    """
    _sweep(beside)
    try:
        folder, handle = _make(beside)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise BadConfig(
            f"nothing can be written in the folder {beside} ({error.strerror}): name another place, or get the right "
            "to write there"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _make(beside: Path) -> tuple[Path, int]:
    """A new folder, and the handle that keeps it locked; the system lets go of the lock if this process dies."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=beside, prefix=_PREFIX))
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process has swept it away before it was locked
        fcntl.flock(handle, fcntl.LOCK_SH)
        if folder.is_dir():
            return folder, handle
        os.close(handle)


def _sweep(beside: Path) -> None:
    for leftover in beside.glob(f"{_PREFIX}*"):
        try:
            handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # somebody works there
        else:
            shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(handle)
