"""What the certificate says of the splits: images that two of them have in common, and hashes."""

import hashlib
from pathlib import Path

from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.tar_members import find_member
from hashseek.training.data.splits import Split, Splits


def overlaps(splits: Splits) -> dict[str, int]:
    """How many images two splits have in common: the same file, or a query that is a byte-for-byte copy.

    A copy has the size of what it copies, so only files of equal size are read.
    """
    files = {name: set(getattr(splits, name).paths) for name in ("query", "train", "database")}
    counts = {
        f"{one}_and_{other}": len(files[one] & files[other])
        for one, other in (("query", "train"), ("query", "database"), ("train", "database"))
    }
    if splits.query.vectors is None:
        of_size: dict[int, list[Path]] = {}
        for path in splits.query.paths:
            of_size.setdefault(_size(path), []).append(path)
        known: dict[int, set[bytes]] = {}
        for other in ("train", "database"):
            copies = 0
            for path in files[other] - files["query"]:
                size = _size(path)
                if size not in of_size:
                    continue
                if size not in known:
                    known[size] = {_content(query) for query in of_size[size]} - {b""}
                copies += _content(path) in known[size]
            counts[f"copies_of_queries_in_{other}"] = copies
    return counts


def digest(split: Split) -> str:
    """SHA-256 over names and labels in their order, wherever the files lie."""
    found = hashlib.sha256()
    for path, labels in zip(split.paths, split.labels, strict=True):
        found.update(path.name.encode(errors="surrogateescape") + b"\t" + labels.tobytes() + b"\n")
    return found.hexdigest()


def _size(path: Path) -> int:
    member = find_member(path)
    try:
        return path.stat().st_size if member is None else member.size
    except OSError:
        return -1


def _content(path: Path) -> bytes:
    """SHA-256 of a file, or nothing for one that cannot be read, which was left out already."""
    try:
        return hashlib.sha256(read_bytes(path)).digest()
    except BadImage:
        return b""
