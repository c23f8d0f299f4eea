"""New files that appear complete or not at all, and the scratch directories in which they are written."""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import fsync_folder

_PREFIX = ".hashseek-unfinished-"
MAX_IDLE_SECONDS = 86_400  # a directory in which nothing was written for longer belongs to a process that was killed


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, deleted at the end; finished files can be renamed out of it.

    Raises:
        BadConfig: no permission to write in `parent`.
        OSError: `parent` does not exist, or the disk is full.
    """
    for leftover in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process may also delete it
            if max(path.stat().st_mtime for path in (leftover, *leftover.rglob("*"))) < time.time() - MAX_IDLE_SECONDS:
                shutil.rmtree(leftover)
    try:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise BadConfig(
            f"cannot write in the folder {parent} ({error.strerror}): choose another folder, or change its permissions"
        ) from None
    try:
        yield folder
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            error.filename = str(parent)  # a failed write does not name its file
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_file(file: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """An open file that becomes `file` at the end, complete and durable, or not at all; and a scratch directory.

    Raises:
        BadConfig: `file` already exists, its folder does not, or there is no permission to write there.
        OSError: the disk is full.
    """
    parent = file.absolute().parent
    if file.exists() or file.is_symlink():
        raise BadConfig(f"{file} already exists: choose another name, or delete it first")
    if not parent.is_dir():
        raise BadConfig(f"there is no folder {file.parent}: create it first")
    with scratch_directory(parent) as scratch:
        with (scratch / "unfinished").open("wb") as out:
            yield out, scratch
            out.flush()
            os.fsync(out.fileno())
        (scratch / "unfinished").rename(file)
    fsync_folder(parent)
