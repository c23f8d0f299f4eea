"""URIs of images, as records store them: a file, an image in a tar (`retrieval.tar_members`), or an http(s) URL."""

import errno
import hashlib
import os
import stat
from pathlib import Path

from hashseek.indexing.remote import MAX_BYTES, SECONDS, fetch, is_remote
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.tar_members import find_member, stored_in


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


def is_moved(uri: str, new: str, sha256: str) -> bool:
    """Whether an image with this content is at `new` and no longer at `uri`.

    A file that exists is not read, unless both are in one tar, which may have been rewritten.
    """
    if uri == new:
        return False
    if not is_there(uri):
        return is_there(new)
    before, after = find_member(Path(uri)), find_member(Path(new))
    if before is None or after is None or before.shard != after.shard:
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
