"""Data set `lists`: the list files of the hashing papers; each line has a path and a 0 or 1 per label.

The repositories of HashNet, DeepHash-pytorch and HyP2 have `train.txt`, `test.txt` (the queries) and `database.txt`
with lines such as `images/0001.jpg 0 1 0 ... 1`.
"""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.label_files import OnError, Problem, refuse
from hashseek.training.data.image_table import ImageTable, read_lines, split_table, with_remedy
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import NAMES, Labels, Rows, Splits


@with_remedy("correct root and strip_prefix: the path of an image is root and the line without the prefix")
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
    on_error: OnError = "stop",
) -> Splits:
    """List files of a hashing paper: train.txt, test.txt, database.txt with lines `path 0 1 0 ...`.

    Args:
        root: folder that the paths in the lists are relative to.
        lists: folder of the lists; None: `root`.
        train: name of the list of training images.
        query: name of the list of queries.
        database: name of the list of the database.
        label_names: names of the columns, or a file with one per line; None numbers them from 0.
        strip_prefix: prefix to remove from the paths, such as `./data/coco/`.
        train_in_database: training images are also in the database; those that its list lacks are added.
        drop_queries: leave queries out of the database, where HashNet's COCO list repeats them.
        on_error: "stop" refuses bad lines and missing images, "skip" leaves them out.

    Raises:
        BadDataset: missing lists, malformed lines, contradictory labels, or images in two splits.
    """
    images = expand(root)
    folder = images if lists is None else expand(lists)
    label_names = read_label_names(label_names)
    names = {"train": train, "query": query, "database": database}
    tables, problems = {}, []
    for split in NAMES:
        tables[split], wrong = read_list(folder / names[split], strip_prefix=strip_prefix, on_error=on_error)
        problems += wrong
    width = {split: tables[split].labels.shape[1] for split in NAMES}
    if len(set(width.values())) > 1:
        found = ", ".join(f"{names[split]} {width[split]}" for split in NAMES)
        raise BadDataset(f"the lists in {folder} have different numbers of labels ({found}): use lists of one data set")
    if label_names is not None and len(label_names) != width["train"]:
        raise BadDataset(
            f"there are {len(label_names)} label_names, but the lists in {folder} have {width['train']} labels: name "
            "each of them"
        )
    table, rows = _united(tables, folder)
    if label_names is not None:
        table = ImageTable(table.files, table.labels, tuple(label_names))
    repeated = np.isin(rows["database"], rows["query"])
    if repeated.any():
        n_repeated = f"{int(repeated.sum()):,} queries"
        if not drop_queries:
            example = table.files[rows["database"][repeated][0]]
            raise BadDataset(
                f"{n_repeated} of {folder} are also in its database, for example {example}: set drop_queries = true"
            )
        rows["database"] = rows["database"][~repeated]
        problems.append(Problem(str(folder), f"{n_repeated} were removed from the database", skipped=False))
    return split_table(
        table,
        rows,
        root=images,
        source=str(folder),
        train_in_database=train_in_database,
        problems=problems,
        on_error=on_error,
    )


def read_list(file: Path, *, strip_prefix: str = "", on_error: OnError = "stop") -> tuple[ImageTable, list[Problem]]:
    """The usable lines of one list, with labels named by number, and the problems of the other lines.

    Raises:
        BadDataset: no such file, a first line without labels, or other lines with problems and on_error is "stop".
    """
    try:
        lines = file.read_bytes().removeprefix(BOM_UTF8).splitlines()
    except FileNotFoundError:
        raise BadDataset(f"there is no list {file}: add it, or correct the name") from None
    except OSError as error:
        raise BadDataset(f"{file} cannot be read: {error.strerror or error}") from None
    n_labels = _count_labels(next((line for line in lines if line.strip()), b""))
    if not n_labels:
        raise BadDataset(f"{file} does not have lines `path 0 1 0 ...`: its first line has no labels")
    files, labels, problems = [], [], []
    for number, line in enumerate(lines, start=1):
        name, *values = line.rsplit(None, n_labels) or (b"",)
        if len(values) == n_labels and set(values) <= {b"0", b"1"}:
            files.append(name.strip().decode(errors="surrogateescape"))
            labels.append(b"".join(values))
        elif line.strip():
            problems.append(Problem(f"{file.name} line {number}", f"it is not a path and {n_labels} labels of 0 or 1"))
    if problems and on_error == "stop":
        refuse(file, problems)
    if strip_prefix and not any(name.startswith(strip_prefix) for name in files):
        raise BadConfig(f"no path in {file} starts with strip_prefix = {strip_prefix!r}: correct or remove it")
    matrix = np.frombuffer(b"".join(labels), np.uint8).reshape(-1, n_labels) - ord("0")
    names = tuple(name.removeprefix(strip_prefix).removeprefix("./") for name in files)
    return ImageTable(names, matrix, tuple(str(column) for column in range(n_labels))), problems


def _count_labels(line: bytes) -> int:
    """The number of 0 and 1 at the end of a line, after the path."""
    values = line.split()[:0:-1]
    return next((count for count, value in enumerate(values) if value not in (b"0", b"1")), len(values))


def _united(tables: Mapping[str, ImageTable], folder: Path) -> tuple[ImageTable, dict[str, Rows]]:
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
                raise BadDataset(
                    f"the lists in {folder} have two different sets of labels for {file}: correct one of them"
                )
            found[i] = row
        rows[split] = found
    return ImageTable(tuple(row_of), np.stack(labels), tables["train"].label_names), rows


def read_label_names(label_names: str | Sequence[str] | None) -> Sequence[str] | None:
    """`label_names`, or the lines of the file that it names."""
    if not isinstance(label_names, str):
        return label_names
    with with_remedy("correct label_names"):
        return read_lines(expand(label_names), what="the file of label names")
