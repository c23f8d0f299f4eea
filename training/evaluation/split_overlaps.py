"""Facts about the splits for the protocol of a report: hashes, and images that are in two of them."""

import hashlib

from hashseek.training.data.file_digests import equal_files
from hashseek.training.data.splits import Split, Splits


def overlaps(splits: Splits) -> dict[str, int]:
    """How many images two splits have in common: the same file, or a byte-for-byte copy of a query."""
    files = {name: set(getattr(splits, name).paths) for name in ("query", "train", "database")}
    counts = {
        f"{one}_and_{other}": len(files[one] & files[other])
        for one, other in (("query", "train"), ("query", "database"), ("train", "database"))
    }
    if splits.query.vectors is None:
        groups = [set(group) for group in equal_files(set().union(*files.values()))]
        copies = set().union(*(group for group in groups if group & files["query"])) - files["query"]
        counts |= {f"copies_of_queries_in_{name}": len(copies & files[name]) for name in ("train", "database")}
    return counts


def hash_split(split: Split) -> str:
    """SHA-256 of the file names and labels in their order; the folder of the files does not matter."""
    found = hashlib.sha256()
    for path, labels in zip(split.paths, split.labels, strict=True):
        found.update(path.name.encode(errors="surrogateescape") + b"\t" + labels.tobytes() + b"\n")
    return found.hexdigest()
