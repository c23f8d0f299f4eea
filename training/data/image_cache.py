"""Decoded images on disk: one memory-mapped array that later epochs and later runs read instead of decoding.

Files are in `$HASHSEEK_CACHE/images` (see `retrieval.files.cache_folder`) and may be deleted at any time; the most
recently used ones are kept. Each is written under a temporary name and renamed when it is complete, so a partial file
is never read.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from filelock import FileLock

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import CACHE_REMEDY, delete_oldest, fsync_folder
from hashseek.retrieval.images import Pixels

# Bytes to leave free for the run's own files.
RESERVE = 2**30
KEPT_BYTES = 64 * 2**30
_REMEDY = f"{CACHE_REMEDY}, or set train.cache = none"


def check_disk(file: Path, n_bytes: int) -> None:
    """Check that `n_bytes` more fit on the disk of `file`.

    Raises:
        BadConfig: they do not, or its folder cannot be created.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(file.parent).free
    except OSError as error:
        raise BadConfig(f"{file.parent} cannot be created: {error.strerror or error}; {_REMEDY}") from None
    if n_bytes + RESERVE > free:
        raise BadConfig(
            f"the decoded images need {n_bytes / 2**30:.1f} GiB, plus {RESERVE / 2**30:.0f} GiB in reserve, but the "
            f"disk of {file.parent} has {free / 2**30:.1f} GiB free; {_REMEDY}"
        )


def write_images(file: Path, rows: Iterable[Pixels], *, shape: tuple[int, ...]) -> None:
    """Write the images `rows` as an array of `shape` (n, size, size, 3), unless another process has just written it.

    Raises:
        BadConfig: the disk is full or cannot be written.
    """
    part = file.with_suffix(".part")
    try:
        with FileLock(file.with_suffix(".lock")):
            if file.is_file():
                return  # another process wrote it while this one waited
            try:
                # Not memory-mapped: on a full disk a mapped write kills the process.
                with part.open("wb") as output:
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_2_0(output, header)
                    for row in rows:
                        output.write(row.tobytes())
                    output.flush()
                    os.fsync(output.fileno())
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
        fsync_folder(file.parent)
        delete_oldest(file.parent, "*.npy", keep=KEPT_BYTES)  # a process that has one mapped keeps it
    except OSError as error:
        raise BadConfig(
            f"the decoded images cannot be written to {file.parent}: {error.strerror or error}; {_REMEDY}"
        ) from None
