"""Sizes and contents of images, to find equal ones, and the places of cached files, which depend on other files."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hashseek.retrieval.errors import BadDataset, BadImage
from hashseek.retrieval.files import cache_folder
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.tar_members import find_member, stored_in


def digest_files(paths: Sequence[Path]) -> str:
    """Hexadecimal SHA-256 over path, size and modification time of files or tar members, in their order.

    Raises:
        BadDataset: a file is gone or cannot be read.
    """

    @cache
    def stored(file: Path) -> str:
        try:
            status = file.stat()
        except OSError as error:
            raise BadDataset(f"{file} cannot be read: {error.strerror or error}") from None
        return f"{status.st_size} {status.st_mtime_ns}"

    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.absolute()} {stored(stored_in(path))}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def cached_file(folder: str, *parts: object, suffix: str = "") -> Path:
    """The file in `folder` of the cache that depends on `parts`."""
    key = hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
    return cache_folder() / folder / f"{key}{suffix}"


def size_of(path: Path) -> int | None:
    """Bytes of an image file or tar member; None if it is missing."""
    member = find_member(path)
    try:
        return path.stat().st_size if member is None else member.size
    except OSError:
        return None


def digest_content(path: Path) -> bytes | None:
    """SHA-256 of an image file or tar member; None if it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(path)).digest()
    except BadImage:
        return None
