"""What the protocol of a report says about the splits: hashes, and images that are in two of them."""

import hashlib

from hashseek.training.data.file_digests import digest_content, size_of
from hashseek.training.data.splits import Split, Splits


def overlaps(splits: Splits) -> dict[str, int]:
    """How many images two splits have in common: the same file, or a byte-for-byte copy of a query."""
    files = {name: set(getattr(splits, name).paths) for name in ("query", "train", "database")}
    counts = {
        f"{one}_and_{other}": len(files[one] & files[other])
        for one, other in (("query", "train"), ("query", "database"), ("train", "database"))
    }
    if splits.query.vectors is None:
        sizes = {path: size_of(path) for paths in files.values() for path in paths}
        of_query = {sizes[path] for path in files["query"]}
        # A copy has the size of its original, so other files need not be read.
        alike = {name: [path for path in paths if sizes[path] in of_query] for name, paths in files.items()}
        others = {sizes[path] for name in ("train", "database") for path in alike[name] if path not in files["query"]}
        queries = {digest_content(path) for path in files["query"] if sizes[path] in others} - {None}
        for name in ("train", "database"):
            copies = [path for path in alike[name] if path not in files["query"] and digest_content(path) in queries]
            counts[f"copies_of_queries_in_{name}"] = len(copies)
    return counts


def hash_split(split: Split) -> str:
    """SHA-256 of the file names and labels in their order; the folder of the files does not matter."""
    found = hashlib.sha256()
    for path, labels in zip(split.paths, split.labels, strict=True):
        found.update(path.name.encode(errors="surrogateescape") + b"\t" + labels.tobytes() + b"\n")
    return found.hexdigest()
