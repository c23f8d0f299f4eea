"""Scratch directories for unfinished files; those of a killed process are deleted by the next one."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import fsync_folder

_PREFIX = ".hashseek-unfinished-"


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, deleted at the end; finished files can be renamed out of it.

    Raises:
        BadConfig: no permission to write in `parent`.
        OSError: `parent` does not exist, or the disk is full.
    """
    _delete_leftovers(parent)
    try:
        folder, handle = _create_locked(parent)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise BadConfig(
            f"cannot write in the folder {parent} ({error.strerror}): choose another folder, or change its permissions"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


@contextmanager
def new_file(file: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """An open file that becomes `file` at the end, complete and durable, or not at all; and a scratch directory.

    Raises:
        BadConfig: `file` exists already, its folder does not, or no permission to write there.
        OSError: the disk is full.
    """
    parent = file.absolute().parent
    if file.exists() or file.is_symlink():
        raise BadConfig(f"{file} exists already: name a new file, or delete it first")
    if not parent.is_dir():
        raise BadConfig(f"there is no folder {file.parent}: create it first")
    with scratch_directory(parent) as scratch:
        with (scratch / "unfinished").open("wb") as out:
            yield out, scratch
            out.flush()
            os.fsync(out.fileno())
        (scratch / "unfinished").rename(file)
    fsync_folder(parent)


def _create_locked(parent: Path) -> tuple[Path, int]:
    """A new directory and the handle that locks it; the system releases the lock if this process dies."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process took it for a leftover before it was locked
        fcntl.flock(handle, fcntl.LOCK_SH)
        if folder.is_dir():
            return folder, handle
        os.close(handle)


def _delete_leftovers(parent: Path) -> None:
    for leftover in parent.glob(f"{_PREFIX}*"):
        try:
            handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(handle)
