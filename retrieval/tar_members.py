"""Images inside tar files, read in place without unpacking; data sets of shards and `index add` use this.

The path of a member is `SHARD.tar::OFFSET+SIZE/NAME`: the image NAME is the SIZE bytes at OFFSET of `SHARD.tar`. The
path is all that is needed to read it, so it can be sorted, hashed, stored and sent to another process.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hashseek.retrieval.errors import BadDataset, BadImage

_MARK = "::"
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_MEMBER = re.compile(r"(.+?\.tar)::(\d{1,18})\+(\d{1,18})/(.+)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Member:
    """The `size` bytes at `offset` of the file `shard`."""

    shard: Path
    offset: int
    size: int


def member_path(shard: Path, place: str) -> Path:
    """The path of the member at `place` (`OFFSET+SIZE/NAME`) of `shard`, whose name must end in `.tar` or `.TAR`."""
    return Path(f"{shard}::{place}")


def without_place(path: str) -> str:
    """The path; that of a member as `SHARD::NAME`, without its place in the tar, which a rewritten tar changes."""
    found = _MEMBER.fullmatch(path) if _MARK in path else None
    return path if found is None else f"{found[1]}{_MARK}{found[4]}"


def find_member(path: Path) -> Member | None:
    """The member that `path` names; None for the path of an ordinary file."""
    text = str(path)
    found = _MEMBER.fullmatch(text) if _MARK in text else None
    return None if found is None else Member(Path(found[1]), int(found[2]), int(found[3]))


def list_members(shard: Path) -> Iterator[tuple[str, Member]]:
    """Name and location of each regular file in a tar, in order and in constant memory.

    Raises:
        BadDataset: the tar is compressed, damaged or truncated; members before the damage were yielded.
        OSError: it is missing or cannot be read.
    """
    with shard.open("rb") as content:
        if content.read(6).startswith(_COMPRESSED):
            raise BadDataset(f"{shard} is compressed, but images are read in place: decompress it")
        content.seek(0)
        try:
            with tarfile.open(fileobj=content, mode="r:") as packed:
                while (found := packed.next()) is not None:
                    packed.members = []  # type: ignore[attr-defined]  # tarfile would keep every member
                    if packed.offset <= found.offset:  # a negative size: the next header would be this one again
                        raise tarfile.ReadError(f"its member at byte {found.offset:,} has a negative size")
                    if found.isreg() and not found.issparse() and PurePosixPath(found.name).stem:
                        yield found.name, Member(shard, found.offset_data, found.size)
                end = packed.offset
        except tarfile.TarError as error:
            raise BadDataset(f"{shard} is damaged or truncated ({error}): write or download it again") from None
        content.seek(end)  # tarfile stops silently at an invalid header
        if content.read(512).strip(b"\0"):
            raise BadDataset(f"{shard} is damaged at byte {end:,}: write or download it again")


def stored_in(path: Path) -> Path:
    """The file on disk that holds the image at `path`: the tar of a member, or `path` itself."""
    member = find_member(path)
    return path if member is None else member.shard


def read_member(member: Member, *, name: str) -> bytes:
    """The bytes of `member`; messages call it `name`.

    Raises:
        BadImage: the tar ends before the member does.
        OSError: the tar is missing or cannot be read.
    """
    with member.shard.open("rb") as file:
        file.seek(member.offset)
        data = file.read(member.size)
    if len(data) != member.size:
        raise BadImage(
            f"{name} is truncated: {member.shard} has changed since it was indexed, or is incomplete; "
            "write or download it again"
        )
    return data
