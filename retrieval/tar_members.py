"""Images inside a tar file: named by a path that says where in the tar they lie, and read there without unpacking.

A member's path is `SHARD.tar::OFFSET+SIZE/NAME`: the SIZE bytes at OFFSET of the file `SHARD.tar` are the image
that the tar calls NAME. The path says it all, so that it can be sorted, hashed, stored and sent to another process.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from retrieval.errors import BadImage

_MARK = ".tar::"
_MEMBER = re.compile(r"(.+\.tar)::(\d{1,18})\+(\d{1,18})/.+", re.DOTALL)


@dataclass(frozen=True)
class Member:
    """The `size` bytes at `offset` of the file `shard`."""

    shard: Path
    offset: int
    size: int


def member_path(shard: Path, place: str) -> Path:
    """The path of the member at `place` (`OFFSET+SIZE/NAME`) of `shard`, whose name must end in `.tar`."""
    return Path(f"{shard}::{place}")


def find_member(path: Path) -> Member | None:
    """The member that `path` names; None for the path of an ordinary file."""
    text = str(path)
    found = _MEMBER.fullmatch(text) if _MARK in text else None
    return None if found is None else Member(Path(found[1]), int(found[2]), int(found[3]))


def stored_in(path: Path) -> Path:
    """The file on disk that holds the image at `path`: the tar of a member, else `path` itself."""
    member = find_member(path)
    return path if member is None else member.shard


def read_member(member: Member, *, name: str) -> bytes:
    """The bytes of `member`; `name` is what messages call it.

    Raises:
        BadImage: the tar ends before the member does.
        OSError: the tar is missing or cannot be read.
    """
    with member.shard.open("rb") as file:
        file.seek(member.offset)
        data = file.read(member.size)
    if len(data) != member.size:
        raise BadImage(f"{name} is cut off: {member.shard} has changed since it was indexed, load the data set again")
    return data
