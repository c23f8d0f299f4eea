"""Statistics of a data set, for `hashseek data inspect`."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.training.data.file_digests import equal_files
from hashseek.training.data.splits import NAMES, Split, Splits, never_in_training

_SHOWN = 10


def inspect_splits(
    splits: Splits, *, duplicates: bool = True, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Counts, labels, pairs of labels, missing files and duplicates of a data set, ready for JSON.

    Args:
        splits: the data set, read with on_error = skip so that missing files are reported instead of refused.
        duplicates: compare the contents of all images.
        advance: called with the number of images that were compared.
    """
    everything = distinct(splits)
    counts = {split: getattr(splits, split).labels.sum(axis=0, dtype=np.int64) for split in NAMES}
    overall = everything.labels.sum(axis=0, dtype=np.int64)
    per_image = Counter(everything.labels.sum(axis=1, dtype=np.int64).tolist())
    missing = [problem for problem in splits.problems if problem.missing]
    return {
        "splits": splits.fingerprint,
        "images": {**{split: len(getattr(splits, split)) for split in NAMES}, "distinct": len(everything)},
        "vectors": None if everything.vectors is None else int(everything.vectors.shape[1]),
        "labels": [
            {
                "name": name,
                **{split: int(counts[split][column]) for split in NAMES},
                "distinct": int(overall[column]),
                "share": round(float(overall[column]) / len(everything), 4),
            }
            for column, name in enumerate(splits.label_names)
        ],
        "never_in_training": never_in_training(splits),
        "labels_per_image": {
            "mean": round(float(everything.labels.sum()) / len(everything), 3),
            "images": {str(count): per_image[count] for count in sorted(per_image)},
        },
        "pairs": _pairs(everything.labels, splits.label_names),
        "missing": {"count": len(missing), "examples": [str(problem) for problem in missing[:_SHOWN]]},
        "problems": [problem.line for problem in splits.problems if not problem.missing],
        "duplicates": _duplicates(splits, everything, advance) if duplicates and everything.vectors is None else None,
    }


def listed(splits: Splits) -> list[tuple[str, list[str], str]]:
    """(full path, labels, split) of each image, for a label file; training images in the database are listed once."""
    rows: dict[Path, tuple[str, list[str], str]] = {}
    for split in NAMES:
        part: Split = getattr(splits, split)
        for path, row in zip(part.paths, part.labels, strict=True):
            labels = [splits.label_names[column] for column in np.flatnonzero(row)]
            rows.setdefault(path, (str(path.resolve()), labels, split))
    return list(rows.values())


def as_text(facts: dict[str, Any]) -> str:
    """The statistics of `inspect_splits` as text."""
    images = facts["images"]
    lines = [
        ("rows: " if facts["vectors"] else "images: ")
        + ", ".join(f"{split} {images[split]:,}" for split in NAMES)
        + (f" ({images['distinct']:,} different ones)" if sum(images[s] for s in NAMES) != images["distinct"] else ""),
        f"splits: {facts['splits']}",
    ]
    if facts["vectors"]:
        lines.append(f"vectors of {facts['vectors']} numbers instead of images")
    of_images = facts["labels_per_image"]
    histogram = ", ".join(f"{count} on {n:,}" for count, n in of_images["images"].items())
    lines += [f"labels per image: {of_images['mean']} on average; {histogram}", ""]
    width = max(len(name) for name in ("label", *(label["name"] for label in facts["labels"])))
    lines.append(f"{'label':{width}} {'train':>8} {'query':>8} {'database':>8} {'share':>7}")
    for label in sorted(facts["labels"], key=lambda label: -label["distinct"]):
        numbers = " ".join(f"{label[split]:8,}" for split in NAMES)
        lines.append(f"{label['name']:{width}} {numbers} {label['share']:7.1%}")
    if facts["never_in_training"]:
        lines.append(f"never used in training: {', '.join(facts['never_in_training'])}")
    if facts["pairs"]:
        lines += ["", "most frequent pairs of labels (images; how many times more often than by chance):"]
    for pair in facts["pairs"][:_SHOWN]:
        lines.append(f"  {pair['labels'][0]} + {pair['labels'][1]}: {pair['images']:,}; {pair['lift']}")
    lines += ["", f"missing files: {facts['missing']['count']:,}"]
    lines += [f"  {example}" for example in facts["missing"]["examples"]]
    found = facts["duplicates"]
    if found is not None:
        lines.append(
            f"duplicate files: {found['groups']:,} images in {found['files']:,} files; "
            f"{found['across']:,} of them both in the query split and in another"
        )
        lines += [f"  {' = '.join(group)}" for group in found["examples"]]
    return "\n".join([*lines, *facts["problems"]])


def distinct(splits: Splits) -> Split:
    """Every image once: training images may be in the database too."""
    taken: set[Path] = set()
    parts = []
    for split in NAMES:
        part: Split = getattr(splits, split)
        rows = [row for row, path in enumerate(part.paths) if path not in taken]
        taken.update(part.paths)
        parts.append(part.take(rows) if len(rows) < len(part) else part)
    vectors = [part.vectors for part in parts if part.vectors is not None]
    return Split(
        tuple(path for part in parts for path in part.paths),
        np.concatenate([part.labels for part in parts]),
        tuple(where for part in parts for where in part.where),
        np.concatenate(vectors) if vectors else None,
    )


def _pairs(labels: NDArray[np.uint8], names: Sequence[str]) -> list[dict[str, Any]]:
    """Pairs of labels by the number of images with both; independent labels would have lift 1."""
    as_float = labels.astype(np.float32)
    together = as_float.T @ as_float
    alone = np.diag(together)
    first, second = np.nonzero(np.triu(together, k=1))  # few of all pairs, if there are many labels
    order = np.argsort(-together[first, second], kind="stable")
    return [
        {
            "labels": [names[a], names[b]],
            "images": int(together[a, b]),
            "lift": round(float(together[a, b]) * len(labels) / float(alone[a] * alone[b]), 2),
        }
        for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True)
    ]


def _duplicates(splits: Splits, everything: Split, advance: Callable[[int], None]) -> dict[str, Any]:
    """Groups of files with equal content."""
    queries, groups = set(splits.query.paths), equal_files(everything.paths, advance=advance)
    across = [0 < sum(path in queries for path in group) < len(group) for group in groups]
    shown = [groups[i] for i in np.argsort(np.logical_not(across), kind="stable")[:_SHOWN]]
    return {
        "groups": len(groups),
        "files": sum(map(len, groups)),
        "across": sum(across),
        "examples": [[str(path) for path in group] for group in shown],
    }
