"""The three splits of a retrieval data set."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import BadDataset
from retrieval.listing import Item, OnError, Problem


@dataclass(frozen=True)
class Split:
    """Images of one split with their multi-hot labels (n, C), 0/1, and the line of the list each came from."""

    paths: tuple[Path, ...]
    labels: NDArray[np.uint8]
    where: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "Split":
        """The images at `rows`, in that order."""
        index = np.asarray(rows, dtype=np.int64)
        return Split(tuple(self.paths[i] for i in index), self.labels[index], tuple(self.where[i] for i in index))


@dataclass(frozen=True)
class Splits:
    """train, query and database of one protocol. `fingerprint` (SHA-256) changes if any file or label of them does."""

    train: Split
    query: Split
    database: Split
    label_names: tuple[str, ...]
    fingerprint: str
    problems: tuple[Problem, ...] = ()
    on_error: OnError = "stop"


def make_splits(
    items: Sequence[Item],
    label_names: Sequence[str],
    *,
    source: str,
    problems: Sequence[Problem] = (),
    on_error: OnError = "stop",
) -> Splits:
    """Group items that all have a split.

    Raises:
        BadDataset: a split is empty, fewer than two labels occur, or an image is in the query split and in another.
    """
    check_label_names(label_names, source=source)
    column = {name: index for index, name in enumerate(label_names)}
    digest = hashlib.sha256()
    made = {}
    for split in ("train", "query", "database"):
        chosen = [item for item in items if item.split == split]
        if not chosen:
            raise BadDataset(
                f"{source} has no image in its {split} split: all three of train, query, database need some"
            )
        labels = np.zeros((len(chosen), len(label_names)), np.uint8)
        for row, item in enumerate(chosen):
            labels[row, [column[label] for label in item.labels]] = 1
            digest.update(f"{split}\t{item.file}\t{';'.join(sorted(item.labels))}\n".encode())
        made[split] = Split(
            tuple(item.path for item in chosen),
            labels,
            tuple(f"line {item.line} ({item.file})" for item in chosen),
        )
    queries = set(made["query"].paths)
    for other in ("train", "database"):
        shared = queries.intersection(made[other].paths)
        if shared:
            raise BadDataset(
                f"{len(shared)} images of {source} are in the query and in the {other} split, for example "
                f"{min(shared)}: figures would be too good, keep the splits apart"
            )
    return Splits(
        **made,
        label_names=tuple(label_names),
        fingerprint=digest.hexdigest(),
        problems=tuple(problems),
        on_error=on_error,
    )


def check_label_names(label_names: Sequence[str], *, source: str) -> None:
    """Raise `BadDataset` unless there are at least two labels."""
    if len(label_names) < 2:
        only = f" ({label_names[0]!r})" if label_names else ""
        raise BadDataset(
            f"{source} has {len(label_names)} label{only}: with fewer than two labels every image is relevant to "
            "every other and there is nothing to learn"
        )


def never_in_training(splits: Splits) -> list[str]:
    """Labels that occur in query or database but in no training image: the model cannot learn them."""
    missing = splits.train.labels.sum(axis=0) == 0
    return [name for name, absent in zip(splits.label_names, missing, strict=True) if absent]
