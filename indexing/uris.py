"""URIs of images, as records store them: a file, an image in a tar (`retrieval.tar_members`), or an http(s) URL."""

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from hashseek.indexing.remote import MAX_BYTES, SECONDS, fetch, is_remote
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.tar_members import find_member, stored_in

Stamp = tuple[int, int]  # size in bytes and modification time in nanoseconds


def open_uri(uri: str, *, allow_private: bool = False, max_bytes: int = MAX_BYTES, seconds: float = SECONDS) -> bytes:
    """The bytes of the image at `uri`; the options are for URLs, see `indexing.remote.fetch`.

    Raises:
        BadImage: it cannot be read within the limits.
    """
    if is_remote(uri):
        return fetch(uri, allow_private=allow_private, max_bytes=max_bytes, seconds=seconds)
    return read_bytes(Path(uri))


def is_there(uri: str) -> bool:
    """Whether the file that holds the image exists.

    True if that cannot be known: for a URL, in a folder without permission, on a disk that fails.
    """
    if is_remote(uri):
        return True
    try:  # not `Path.is_file`: since Python 3.14 it returns False for every error
        return stat.S_ISREG(stored_in(Path(uri)).stat().st_mode)
    except ValueError:  # it contains NUL
        return False
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def stamp_of(uri: Path | str) -> Stamp | None:
    """Size of an image and modification time of the file that holds it; None if it does not exist, or for a URL."""
    if isinstance(uri, Path):
        member = find_member(uri)
        with suppress(OSError, ValueError):
            stat = (uri if member is None else member.shard).stat()
            size = stat.st_size if member is None else member.size
            return size, min(stat.st_mtime_ns, 2**63 - 1)  # a later time does not fit into the catalog
    return None


def is_moved(uri: str, new: str, *, sha256: str, stamp: tuple[int, int | None]) -> bool:
    """Whether an image with this content is at `new` and no longer at `uri`.

    A file at `uri` is not read if it has the size and modification time `stamp` of the record.
    """
    if uri == new or is_remote(uri):
        return False
    if not is_there(uri):
        return is_there(new)
    if stamp_of(Path(uri)) in (None, stamp):  # None: it cannot be read now
        return False
    try:
        return hashlib.sha256(open_uri(uri)).hexdigest() != sha256
    except BadImage:
        return True


def stored_path(uri: Path | str) -> str:
    """The path that a record stores: a URL unchanged, a file as an absolute path without symbolic links."""
    if isinstance(uri, str):
        return uri
    file = stored_in(uri)
    return os.path.realpath(file) + str(uri)[len(str(file)) :]  # unlike Path.resolve, it accepts circular links
