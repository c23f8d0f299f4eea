"""Digests of paths, sizes and times, to name cached files; and of contents, to find equal files."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from functools import cache
from pathlib import Path

from hashseek.retrieval.errors import BadDataset, BadImage
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.load_ahead import load_ahead
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


def equal_files(
    paths: Collection[Path], *, to: Set[Path] | None = None, advance: Callable[[int], None] = lambda _: None
) -> list[list[Path]]:
    """Groups of image files or tar members with equal content. Only files of equal size are read.

    Args:
        paths: all different; missing and empty files are in no group.
        to: only groups with one of these, so that far fewer files are read; None: all groups.
        advance: called with the number of files finished in each step.
    """
    of_size: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        of_size[_size_of(path)].append(path)
    groups = [group for size, group in of_size.items() if size and len(group) > 1]
    alike = [path for group in groups if to is None or not to.isdisjoint(group) for path in group]
    advance(len(paths) - len(alike))
    of_content: dict[bytes, list[Path]] = defaultdict(list)
    for path, digest in zip(alike, load_ahead(alike, _digest_content, depth=64), strict=True):
        if digest is not None:
            of_content[digest].append(path)
        advance(1)
    found = [sorted(group) for group in of_content.values() if len(group) > 1]
    return sorted(group for group in found if to is None or not to.isdisjoint(group))


def _size_of(path: Path) -> int:
    """Bytes of an image file or tar member; 0 if it is missing."""
    member = find_member(path)
    try:
        return path.stat().st_size if member is None else member.size
    except OSError:
        return 0


def _digest_content(path: Path) -> bytes | None:
    """SHA-256 of an image file or tar member; None if it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(path)).digest()
    except BadImage:
        return None
