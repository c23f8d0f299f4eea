"""What a record's `path` may be: a file, an image in a tar (`retrieval.tar_members`), or an http(s) address."""

import errno
import os
import stat
from pathlib import Path

from hashseek.indexing.ingest.remote import MAX_BYTES, SECONDS, fetch, is_remote
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.tar_members import stored_in

__all__ = ["is_remote", "is_there", "open_uri", "stored_path"]


def open_uri(uri: str, *, allow_private: bool = False, max_bytes: int = MAX_BYTES, seconds: float = SECONDS) -> bytes:
    """The bytes of the image at `uri`; the options are for http(s) addresses, see `indexing.ingest.remote.fetch`.

    Raises:
        BadImage: it cannot be read, or not within the limits.
    """
    if is_remote(uri):
        return fetch(uri, allow_private=allow_private, max_bytes=max_bytes, seconds=seconds)
    return read_bytes(Path(uri))


def is_there(uri: str) -> bool:
    """Whether the file that holds the image is there; where nobody can know, it is taken to be.

    So it is of an http(s) address, in a folder that may not be entered, and on a disk that answers with an error.
    """
    if is_remote(uri):
        return True
    try:  # not by `Path.is_file`: from Python 3.14 on it answers every error with no
        return stat.S_ISREG(stored_in(Path(uri)).stat().st_mode)
    except ValueError:  # it holds a NUL
        return False
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def stored_path(uri: Path | str) -> str:
    """What the record of an image says of where it is: an address as it stands, a file from the root on."""
    if isinstance(uri, str):
        return uri
    file = stored_in(uri)
    return os.path.realpath(file) + str(uri)[len(str(file)) :]  # unlike Path.resolve, it bears links in a circle
