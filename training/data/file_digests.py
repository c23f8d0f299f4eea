"""The digest of input files that a cached file depends on."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.tar_members import stored_in


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
