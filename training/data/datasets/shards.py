"""Data set `shards`: tar files as webdataset writes them, for sets that are too large for a disk of small files.

A shard holds `NAME.jpg` (or another image) and its labels: `NAME.json` (a list of labels, or an object whose `labels`
is one), `NAME.txt` (labels separated by `;` or lines) or `NAME.cls` (numbers of labels). Images are never unpacked:
each is read from its place in the tar, and an index of the places is cached.
"""

import glob
import json
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.images import SUFFIXES
from hashseek.retrieval.label_files import OnError, Problem, refuse
from hashseek.retrieval.tar_members import Member, list_members, member_path, read_member
from hashseek.training.data.datasets.lists import read_label_names
from hashseek.training.data.image_table import ImageTable, prepared
from hashseek.training.data.paths import expand_text
from hashseek.training.data.splits import NAMES, Labels, Split, Splits, join_splits

_LABEL_SUFFIXES = (".json", ".cls", ".txt")  # in the order of precedence


def shards(
    *,
    train: str | Sequence[str],
    query: str | Sequence[str],
    database: str | Sequence[str],
    label_names: str | Sequence[str] | None = None,
    train_in_database: bool = False,
    on_error: OnError = "stop",
) -> Splits:
    """Tar files of images and labels, as webdataset writes them, read without unpacking.

    Args:
        train: the training shards, such as `/data/train-*.tar`; or several such patterns.
        query: the shards with the queries.
        database: the shards of the database.
        label_names: the labels in the order of the columns, or a file with one per line; a number in a shard is an
            index into them, from 0. None takes all labels that occur, sorted.
        train_in_database: training images are also in the database; those that its shards lack are added.
        on_error: "stop" refuses images without labels and labels without an image, "skip" leaves them out.

    Raises:
        BadDataset: no shard, a damaged or compressed one, unknown or malformed labels, or images in two splits.
    """
    found = {
        split: _find(patterns, split)
        for split, patterns in (("train", train), ("query", query), ("database", database))
    }
    tables = {file: _indexed(file) for file in sorted({file for files in found.values() for file in files})}
    problems = [Problem(f"{file}: {name}", reason) for file, table in tables.items() for name, reason in table.remarks]
    if problems and on_error == "stop":
        refuse(next(file for file, table in tables.items() if table.remarks), problems)
    names = read_label_names(label_names) or _all_names(tables.values())
    labels = {file: _as_columns(table, names, file) for file, table in tables.items()}
    parts, files = {}, {}
    for split in NAMES:
        paths = tuple(member_path(file, place) for file in found[split] for place in tables[file].files)
        parts[split] = Split(paths, np.concatenate([labels[file] for file in found[split]]), tuple(map(str, paths)))
        # The fingerprint does not depend on the folder of the shards or the places in them.
        files[split] = [
            f"{file.name}/{place.partition('/')[2]}" for file in found[split] for place in tables[file].files
        ]
    return join_splits(
        parts,
        files,
        names,
        source="the shards",
        train_in_database=train_in_database,
        problems=problems,
        on_error=on_error,
    )


def _find(patterns: str | Sequence[str], split: str) -> list[Path]:
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = sorted(glob.glob(expand_text(pattern), recursive=True))  # noqa: PTH207 - patterns may be absolute
        if not matching:
            raise BadDataset(f"no file matches {split} = {pattern!r}: correct the pattern, or put the shards there")
        found += map(Path, matching)
    wrong = [file for file in found if file.suffix != ".tar" or not file.is_file()]
    if wrong:
        raise BadDataset(
            f"{wrong[0]} ({split}) is not a .tar file: shards are uncompressed tar files, because images are read from "
            "inside them"
        )
    if len(set(found)) < len(found):
        repeated = next(file for file in found if found.count(file) > 1)
        raise BadConfig(f"{split} lists the shard {repeated} more than once: list each one once")
    return found


def _indexed(shard: Path) -> ImageTable:
    """The images of a shard as `OFFSET+SIZE/NAME`, with their labels by name."""

    def build() -> ImageTable:
        members = dict(list_members(shard))
        suffix = {name: PurePosixPath(name).suffix.lower() for name in members}
        labels_at: dict[str, dict[str, Member]] = {}
        for name, member in members.items():
            if suffix[name] in _LABEL_SUFFIXES:
                labels_at.setdefault(name[: -len(suffix[name])], {})[suffix[name]] = member
        pictures = {name: name[: -len(suffix[name])] for name in members if suffix[name] in SUFFIXES}
        files, rows, remarks = [], [], []
        for name, stem in pictures.items():
            labels = labels_at.get(stem, {})
            try:
                rows.append(_parse({kind: read_member(member, name=name) for kind, member in labels.items()}))
                files.append(f"{members[name].offset}+{members[name].size}/{name}")
            except ValueError as error:
                remarks.append((name, str(error)))
        for key in labels_at.keys() - set(pictures.values()):
            remarks.append((key, "it has labels but no image"))
        names = tuple(sorted({label for row in rows for label in row}))
        column = {label: index for index, label in enumerate(names)}
        matrix = np.zeros((len(rows), len(names)), np.uint8)
        for row, found in enumerate(rows):
            matrix[row, [column[label] for label in found]] = 1
        return ImageTable(tuple(files), matrix, names, tuple(sorted(remarks)))

    return prepared("shard 1", [shard], build)


def _parse(texts: dict[str, bytes]) -> list[str]:
    """The labels of an image, from the first kind of label file that has some; numbers as text.

    Raises:
        ValueError: there are no labels, or they cannot be read.
    """
    for kind in _LABEL_SUFFIXES:
        if kind not in texts:
            continue
        try:
            text = texts[kind].decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"its {kind} file is not UTF-8 text") from None
        if kind == ".json":
            try:
                content = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"its .json file is not JSON: {error}") from None
            found = content.get("labels") if isinstance(content, dict) else content
            if found is None:
                continue  # JSON with a caption, say, but without labels
            if not isinstance(found, list) or not all(isinstance(label, str | int) for label in found):
                raise ValueError("the labels in its .json file are not a list of names or numbers")
            return [str(label) for label in found]
        if kind == ".cls":
            numbers = text.split()
            if not all(number.isascii() and number.isdigit() for number in numbers):
                raise ValueError("its .cls file does not hold label numbers")
            return [str(int(number)) for number in numbers]
        return [stripped for part in text.replace("\n", ";").split(";") if (stripped := part.strip())]
    raise ValueError("it has no labels: there is no .json, .cls or .txt file of the same name")


def _all_names(tables: Iterable[ImageTable]) -> tuple[str, ...]:
    names = {label for table in tables for label in table.label_names}
    return tuple(sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)))


def _as_columns(table: ImageTable, names: Sequence[str], shard: Path) -> Labels:
    """The labels of a shard in the columns of `names`; a number that is not a name is an index into them."""
    column_of = {name: column for column, name in enumerate(names)}
    labels = np.zeros((len(table.files), len(names)), np.uint8)
    for index, label in enumerate(table.label_names):
        column = column_of.get(label, int(label) if label.isascii() and label.isdigit() else -1)
        if not 0 <= column < len(names):
            raise BadDataset(f"{shard} has the label {label!r}, which is not in label_names: add it")
        labels[:, column] |= table.labels[:, index]
    return labels
