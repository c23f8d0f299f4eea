"""Data set `lists`: the list files of the hashing papers, lines of a path and one 0 or 1 a label.

The layout of HashNet's, DeepHash-pytorch's and HyP2's repositories: `train.txt`, `test.txt` (the queries) and
`database.txt`, each line `images/0001.jpg 0 1 0 ... 1`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.label_files import OnError, Problem, refuse
from hashseek.training.data.datasets.folder import expand
from hashseek.training.data.image_table import (
    Incomplete,
    Labels,
    Rows,
    Table,
    check_on_error,
    read_lines,
    split_table,
)
from hashseek.training.data.splits import NAMES, Splits

_REMEDY = "correct root and strip_prefix, which together make a line's path"


def lists(
    *,
    root: str,
    lists: str | None = None,
    train: str = "train.txt",
    query: str = "test.txt",
    database: str = "database.txt",
    label_names: str | Sequence[str] | None = None,
    strip_prefix: str = "",
    train_in_database: bool = False,
    drop_queries: bool = False,
    on_error: str = "stop",
) -> Splits:
    """List files of a hashing paper: train.txt, test.txt, database.txt with lines `path 0 1 0 ...`.

    Args:
        root: folder that the paths in the lists are relative to.
        lists: folder of the lists; None: `root`.
        train: name of the list of training images.
        query: name of the list of queries.
        database: name of the list of the database.
        label_names: names of the columns, or a file with one a line; None numbers them from 0.
        strip_prefix: start of the paths that is taken off, such as `./data/coco/`.
        train_in_database: the protocol has training images in the database too, as DeepHash-pytorch's NUS-WIDE.
        drop_queries: leave queries out of the database, where HashNet's COCO list repeats them.
        on_error: "stop" refuses bad lines and missing images, "skip" leaves them out.

    Raises:
        BadDataset: no lists, lines of another form, labels that contradict each other, or images in two splits.
    """
    folder = Path(expand(root))
    return read_lists(
        folder,
        folder if lists is None else Path(expand(lists)),
        names={"train": train, "query": query, "database": database},
        label_names=read_label_names(label_names),
        strip_prefix=strip_prefix,
        train_in_database=train_in_database,
        drop_queries=drop_queries,
        on_error=check_on_error(on_error),
    )


NAMES_OF_LISTS: Mapping[str, str] = {"train": "train.txt", "query": "test.txt", "database": "database.txt"}


def read_lists(
    root: Path,
    folder: Path,
    *,
    names: Mapping[str, str] = NAMES_OF_LISTS,
    label_names: Sequence[str] | None = None,
    n_labels: int | None = None,
    strip_prefix: str = "",
    train_in_database: bool = False,
    drop_queries: bool = False,
    published: tuple[int, int, int] | None = None,
    remedy: str = _REMEDY,
    on_error: OnError = "stop",
) -> Splits:
    """The splits that the three lists in `folder` make of the images below `root`; see `lists`.

    Raises:
        BadDataset: as `lists` says, or the lists have not the `n_labels` that the set has.
    """
    tables, problems = {}, []
    for split in NAMES:
        file = folder / names[split]
        tables[split], wrong = read_list(file, strip_prefix=strip_prefix)
        if wrong and on_error == "stop":
            refuse(file, wrong)
        problems += wrong
    width = {split: tables[split].labels.shape[1] for split in NAMES}
    wanted = n_labels if label_names is None else len(label_names)
    if len(set(width.values())) > 1 or wanted not in (None, width["train"]):
        found = ", ".join(f"{names[split]} {width[split]}" for split in NAMES)
        ask = "as many in each list" if wanted is None else f"{wanted}, as many as the set has label names"
        raise BadDataset(
            f"the lists in {folder} have other numbers of labels ({found}) than {ask}: take lists of one set"
        )
    if drop_queries:
        tables["database"], repeated = _without(tables["database"], tables["query"])
        if repeated:
            reason = f"{repeated:,} queries that the database repeats were left out of it"
            problems.append(Problem(names["database"], reason, skipped=False))
    table, rows = _united(tables, folder)
    if label_names is not None:
        table = Table(table.files, table.labels, tuple(label_names))
    return split_table(
        table,
        rows,
        root=root,
        source=str(folder),
        remedy=remedy,
        train_in_database=train_in_database,
        published=published,
        problems=problems,
        on_error=on_error,
    )


def read_list(file: Path, *, strip_prefix: str = "") -> tuple[Table, list[Problem]]:
    """The usable lines of one list, their labels named by number, and what is wrong with the others.

    Raises:
        BadDataset: no such file, or a first line without labels.
    """
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        raise Incomplete(f"there is no list {file}: put it there, or name the file that you have") from None
    except OSError as error:
        raise BadDataset(f"{file} cannot be read: {error.strerror or error}") from None
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    kept = [lines[number - 1].rstrip() for number in numbers]
    n_labels = _count_labels(kept[0]) if kept else 0
    if not n_labels:
        raise BadDataset(f"{file} is no list of lines `path 0 1 0 ...`: its first line ends in no label")
    # All labels at once: the last 2C - 1 characters of each line, digits and spaces in turn.
    width = 2 * n_labels - 1
    ends = np.frombuffer(b"".join(line[-width:].rjust(width) for line in kept), np.uint8).reshape(len(kept), width)
    labels = ends[:, ::2] - ord("0")
    spaced = (ends[:, 1::2] == ord(" ")).all(axis=1) & (labels <= 1).all(axis=1)
    files, rows, problems = [], [], []
    for row, line in enumerate(kept):
        name = line[:-width]
        if not (spaced[row] and name[-1:] == b" "):
            parts = line.rsplit(None, n_labels)
            values = parts[1:]
            if len(parts) <= n_labels or not all(value in (b"0", b"1") for value in values):
                where = f"{file.name} line {numbers[row]}"
                problems.append(Problem(where, f"it is not a path and {n_labels} labels of 0 or 1"))
                continue
            name, labels[row] = parts[0], [int(value) for value in values]
        text = name.strip().decode(errors="surrogateescape").removeprefix(strip_prefix).removeprefix("./")
        files.append(text)
        rows.append(row)
    if strip_prefix and not any(line.startswith(strip_prefix.encode(errors="surrogateescape")) for line in kept):
        raise BadConfig(f"no path in {file} starts with strip_prefix = {strip_prefix!r}: correct or remove it")
    return Table(tuple(files), labels[rows], tuple(str(column) for column in range(n_labels))), problems


def _count_labels(line: bytes) -> int:
    count = 0
    for part in reversed(line.split()[1:]):
        if part not in (b"0", b"1"):
            break
        count += 1
    return count


def _without(table: Table, other: Table) -> tuple[Table, int]:
    named = set(other.files)
    rows = np.array([row for row, file in enumerate(table.files) if file not in named], np.int64)
    return table.take(rows), len(table.files) - len(rows)


def _united(tables: Mapping[str, Table], folder: Path) -> tuple[Table, dict[str, Rows]]:
    """One table of all images, and the rows of each list in it."""
    row_of: dict[str, int] = {}
    labels: list[Labels] = []
    rows = {}
    for split in NAMES:
        table = tables[split]
        found = np.empty(len(table.files), np.int64)
        for i, file in enumerate(table.files):
            row = row_of.get(file)
            if row is None:
                row = row_of[file] = len(labels)
                labels.append(table.labels[i])
            elif not np.array_equal(labels[row], table.labels[i]):
                raise BadDataset(f"the lists in {folder} give {file} two different sets of labels: correct one of them")
            found[i] = row
        rows[split] = found
    return Table(tuple(row_of), np.stack(labels), tables["train"].label_names), rows


def read_label_names(label_names: str | Sequence[str] | None) -> Sequence[str] | None:
    """Names as they are given, or the lines of the file that is."""
    if not isinstance(label_names, str):
        return label_names
    return read_lines(Path(expand(label_names)), what="the file of label names", remedy="correct label_names")
