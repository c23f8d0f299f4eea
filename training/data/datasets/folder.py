"""Data set `folder`: any directory with a `labels.csv` or `labels.jsonl`."""

import csv
import difflib
import io
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.label_files import Item, read_listing
from hashseek.training.data.image_table import check_on_error
from hashseek.training.data.splits import Splits, check_label_names, make_splits


def folder(
    *,
    root: str,
    split_column: str = "split",
    ignore_columns: Sequence[str] = (),
    drop_labels: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    on_error: str = "stop",
    query_fraction: float = 0.1,
    train_fraction: float = 0.5,
    split_seed: int = 0,
    split_file: str | None = None,
) -> Splits:
    """A directory of images with a list.

    Args:
        root: the directory, or the list itself; `$NAME` is taken from the environment.
        split_column: column of the list with query/train/database (`retrieval` means database).
        ignore_columns: columns of the list that are known and not wanted.
        drop_labels: patterns of labels to leave out, such as `*_r1`.
        labels: keep only these labels, in this order; None keeps all that occur, sorted.
        on_error: "stop" refuses a list with problems, "skip" leaves bad lines out.
        query_fraction: share of the images that become queries if the list has no split; the rest is split by ...
        train_fraction: ... the share that becomes training images; what remains is the database.
        split_seed: seed of that split.
        split_file: where that split is written, as a list that can be used in place of the first; None: nowhere.

    Raises:
        BadDataset: no list, bad lines under "stop", an empty split, or a label that never occurs.
        BadConfig: fractions that leave a split empty.
    """
    mode = check_on_error(on_error)
    listing = read_listing(
        Path(expand(root)),
        on_error=mode,
        need_labels=True,
        split_column=split_column,
        ignore_columns=ignore_columns,
        drop_labels=drop_labels,
    )
    items, problems = listing.items, list(listing.problems)
    if labels is not None:
        items = tuple(_keep_labels(items, labels, str(listing.source)))
    names = list(labels) if labels is not None else sorted({label for item in items for label in item.labels})
    check_label_names(names, source=str(listing.source))
    if all(item.split is None for item in items):
        items = tuple(_split(items, query_fraction=query_fraction, train_fraction=train_fraction, seed=split_seed))
        if split_file is not None:
            _write_list(Path(split_file), items)
    elif any(item.split is None for item in items):
        unsplit = next(item for item in items if item.split is None)
        raise BadDataset(
            f"{listing.source} line {unsplit.line} has no split while others have: fill the column {split_column}, "
            "or drop it"
        )
    return make_splits(items, names, source=str(listing.source), problems=problems, on_error=mode)


def expand(path: str) -> str:
    """`path` with `~` and `$NAME` filled in.

    Raises:
        BadConfig: a variable is not set.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 - pathlib has no expandvars
    missing = re.search(r"\$\{?(\w+)", expanded)
    if missing:
        raise BadConfig(f"the path {path} needs the environment variable {missing[1]}, which is not set")
    return expanded


def _keep_labels(items: Sequence[Item], labels: Sequence[str], source: str) -> list[Item]:
    occurring = {label for item in items for label in item.labels}
    for label in labels:
        if label not in occurring:
            close = difflib.get_close_matches(label, occurring, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(occurring)[:10])}"
            raise BadDataset(f"the label {label!r} never occurs in {source}: {hint}")
    wanted = set(labels)
    kept = [replace(item, labels=tuple(name for name in item.labels if name in wanted)) for item in items]
    return [item for item in kept if item.labels]


def _split(items: Sequence[Item], *, query_fraction: float, train_fraction: float, seed: int) -> list[Item]:
    n_query, n_train = round(len(items) * query_fraction), round(len(items) * train_fraction)
    if n_query < 1 or n_train < 1 or n_query + n_train >= len(items):
        raise BadConfig(
            f"query_fraction {query_fraction} and train_fraction {train_fraction} of {len(items)} images leave a split "
            "empty: both must be above 0, together below 1, and there must be enough images"
        )
    # Sorted by name first, so that the split depends on the files alone and not on their order in the list.
    by_name = sorted(items, key=lambda item: item.file)
    order = np.random.default_rng(seed).permutation(len(items))
    split = np.full(len(items), "database", dtype=object)
    split[order[:n_query]] = "query"
    split[order[n_query : n_query + n_train]] = "train"
    return [replace(item, split=str(name)) for item, name in zip(by_name, split, strict=True)]


def _write_list(path: Path, items: Sequence[Item]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("file", "labels", "split"))
    for item in items:
        # The list will stand in another folder than the images, so it names them in full.
        writer.writerow((item.path.resolve(), ";".join(item.labels), item.split))
    write_atomically(path, text.getvalue().encode())
