"""Label files: `labels.csv` or `labels.jsonl`, the list of a folder's images with their labels.

Columns (CSV) or keys (JSONL): `file` (relative to the list's folder), `labels` (separated by `;`, or a JSON array) and
optionally `split` (see `SPLITS`). Training reads whole files with `read_label_file`; indexing reads single rows with
`read_rows`, because its lists may not fit into memory.
"""

import csv
import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from hashseek.retrieval.errors import BadDataset, suggest
from hashseek.retrieval.files import as_csv, write_atomically

OnError = Literal["skip", "stop"]
Row = tuple[int, dict[str, Any]]  # number of its first line, values by column
# Name of a split in a list -> its name here. Validation images become queries; training never uses them.
SPLITS = {
    "train": "train",
    "training": "train",
    "query": "query",
    "test": "query",
    "val": "query",
    "valid": "query",
    "validation": "query",
    "database": "database",
    "retrieval": "database",
}
NAMES = ("labels.csv", "labels.jsonl")
# Columns with a meaning, besides those that name the file; in lists to be indexed, all others are attributes.
COLUMNS = ("labels", "split", "key", "id", "attributes")


@dataclass(frozen=True)
class Item:
    """A labelled image; `line` is its line in the list, from 1, or 0 where there is no list."""

    path: Path
    file: str
    labels: tuple[str, ...]
    split: str | None
    line: int = 0


@dataclass(frozen=True)
class Problem:
    """A problem of an input: `reason` says why it was `skipped`, or what was corrected.

    `where` is the line or file, `uri` the image if known; `missing`: whether its file does not exist.
    """

    where: str
    reason: str
    skipped: bool = True
    uri: str = ""
    missing: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    @property
    def line(self) -> str:
        """The problem as one line, with what became of it."""
        return f"{'skipped' if self.skipped else 'note'}: {self}"


@dataclass(frozen=True)
class LabelFile:
    """The usable images of a label file, and the problems of its other lines."""

    source: Path
    items: tuple[Item, ...]
    problems: tuple[Problem, ...]


def write_label_file(path: Path, rows: Iterable[tuple[str, Sequence[str], str]]) -> None:
    """Write a `labels.csv` with the file, the labels and the split of each image."""
    cells = ((file, _cell(labels), split) for file, labels, split in rows)
    write_atomically(path, as_csv([("file", "labels", "split"), *cells]))


def _cell(labels: Sequence[str]) -> str:
    """Labels as `parse_labels` reads them."""
    text = ";".join(labels)
    return text if parse_labels(text) == (tuple(labels), []) else json.dumps(labels)


def find_label_file(path: Path) -> Path | None:
    """`path` if it is a label file, or the label file in the folder `path`; None if the folder has none.

    Raises:
        BadDataset: `path` does not exist, or is another kind of file.
    """
    if path.is_dir():
        return next((path / name for name in NAMES if (path / name).is_file()), None)
    if not path.is_file():
        raise BadDataset(f"there is no folder or file {path}: correct the path")
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise BadDataset(f"{path} is not a label file: use a .csv or .jsonl file")
    return path


def read_label_file(source: Path, *, split_column: str = "split", ignore_columns: Sequence[str] = ()) -> LabelFile:
    """Read the images and labels for training from a `.csv` or `.jsonl` file. Bad lines are left out and reported.

    Args:
        source: the file.
        split_column: the column with the split.
        ignore_columns: columns to ignore; other unknown columns are problems.

    Raises:
        BadDataset: the file cannot be read.
    """
    items: list[Item] = []
    problems: list[Problem] = []
    if source.suffix.lower() == ".csv":
        split_column, *ignore_columns = (_column(name, ("file",)) for name in (split_column, *ignore_columns))
    known = {"file", "labels", split_column, *ignore_columns}
    line_of_file: dict[Path, int] = {}
    unknown: dict[str, None] = {}
    for row in read_rows(source, one_of=("file",), errors="strict"):
        if isinstance(row, Problem):
            problems.append(row)
            continue
        line, values = row
        where = f"{source.name} line {line}"
        unknown |= dict.fromkeys(column for column in values if column not in known)
        labels, remarks = parse_labels(values.get("labels"))
        split, reason = parse_split(values.get(split_column)) if split_column not in ignore_columns else (None, None)
        if reason:
            setting = _ignoring([*ignore_columns, split_column])
            reason = f"{reason}; if the column {split_column!r} is not for this, set {setting}"
        file, path = _find_image(source.parent, values.get("file"))
        if not file:
            reason = "it does not name a file"
        elif path is None:
            reason = f"the file {file} does not exist"
        elif path in line_of_file:
            reason = f"{file} is already listed in line {line_of_file[path]}"
        elif reason is None and not labels:
            reason = f"{file} has no label"
        problems += [Problem(where, remark, skipped=False) for remark in remarks]
        if reason is not None:
            problems.append(Problem(where, reason, missing=bool(file) and path is None))
            continue
        assert path is not None
        line_of_file[path] = line
        items.append(Item(path, file, labels, split, line))
    if unknown:
        hint = suggest(next(iter(unknown)), ("file", "labels", split_column))
        columns = ", ".join(map(repr, unknown))
        reason = f"unknown columns: {columns} ({hint}); correct them, or set {_ignoring([*ignore_columns, *unknown])}"
        problems.insert(0, Problem(source.name, reason, skipped=False))
    return LabelFile(source, tuple(items), tuple(problems))


def _ignoring(columns: Sequence[str]) -> str:
    """The setting that ignores these columns, as one writes it on a command line."""
    return shlex.quote(f"data.ignore_columns={json.dumps(columns, ensure_ascii=False)}")


def without_labels(labels: Iterable[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """The labels that match none of the shell patterns."""
    return tuple(label for label in labels if not any(fnmatchcase(label, pattern) for pattern in patterns))


def check_patterns(patterns: Sequence[str], labels: Collection[str], *, source: Path) -> None:
    """Raise `BadDataset` unless every pattern matches one of the labels of `source`."""
    for pattern in patterns:
        if not any(fnmatchcase(label, pattern) for label in labels):
            raise BadDataset(f"no label of {source} matches drop_labels = {pattern!r}: correct or remove the pattern")


def refuse(
    source: Path, problems: Sequence[Problem], *, skip: str = '--on-error skip (in a config: data.on_error = "skip")'
) -> None:
    """Raise `BadDataset` with the number of problems and the first five; `skip` is the option that leaves them out."""
    shown = "; ".join(str(problem) for problem in problems[:5])
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    raise BadDataset(
        f"{source} has {len(problems)} problem{'s' if len(problems) > 1 else ''}: {shown}{more} "
        f"(fix them, or leave out such lines and images with {skip})"
    )


def spellings(file: str) -> tuple[str, ...]:
    """The name as it is in a list, and with slashes instead of the backslashes that lists from Windows have."""
    return (file, file.replace("\\", "/")) if "\\" in file else (file,)


def _find_image(folder: Path, file: Any) -> tuple[str, Path | None]:
    """(name, path) of the image in a row; the path is None if there is no such file."""
    file = file.strip() if isinstance(file, str) else ""
    for name in spellings(file):
        try:
            if name and (folder / name).is_file():
                return name, folder / name
        except (OSError, ValueError):  # the name is too long or has a NUL
            break
    return file, None


def read_rows(
    source: Path, *, one_of: Sequence[str], errors: Literal["strict", "surrogateescape"]
) -> Iterator[Row | Problem]:
    """The rows of a .csv or .jsonl file one by one, and a problem for each row that cannot be parsed.

    Args:
        source: the file.
        one_of: columns, at least one of which a .csv file must have.
        errors: refuse text that is not UTF-8 ("strict"), or decode it as Python decodes file names ("surrogateescape").

    Raises:
        BadDataset: the file cannot be read, or the first line of a .csv file does not name the columns.
    """
    try:
        with source.open(encoding="utf-8-sig", errors=errors, newline="") as file:
            if source.suffix.lower() == ".csv":
                yield from _csv_rows(file, source, one_of)
            else:
                yield from _jsonl_rows(file, source)
    except UnicodeDecodeError:
        raise BadDataset(f"{source} is not UTF-8 text: save it as UTF-8") from None
    except OSError as error:
        raise BadDataset(f"{source} cannot be read: {error.strerror or error}") from None


def _csv_rows(lines: Iterator[str], source: Path, one_of: Sequence[str]) -> Iterator[Row | Problem]:
    reader = csv.reader(lines, strict=True)  # otherwise an unclosed quote swallows the rest of the file
    names = _column_names(reader, source, one_of)
    while True:
        first = reader.line_num + 1
        reason = None
        try:
            fields = next(reader, None)
        except csv.Error as error:  # reading continues at the next line
            fields, reason = [], f"it is not CSV: {error}"
        if fields is None:
            return
        row = dict(zip(names, fields, strict=False))
        row.pop("", None)  # pandas writes its index without a name
        if fields and len(fields) != len(names):
            reason = f"its number of fields is {len(fields)}, but the first line names {len(names)} columns"
            if len(fields) > len(names):
                reason += " (use semicolons between labels)"
        elif {"\n", "\r"} & set(row.get("labels", "")):  # other columns may have several lines
            reason = "its labels have several lines"
        if reason is not None:
            last = reader.line_num
            swallowed = f"; lines {first} to {last} are skipped: is a closing quote missing?" if last > first else ""
            yield Problem(f"{source.name} line {first}", reason + swallowed)
        elif fields:
            yield first, row


def _column_names(reader: Iterator[list[str]], source: Path, one_of: Sequence[str]) -> list[str]:
    """The columns in the first line of a .csv file; `File` and `ID` are read as `file` and `id`."""
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise BadDataset(f"{source} line 1 is not CSV: {error}; it must name the columns") from None
    if any("\0" in name for name in names):  # UTF-16, read with "surrogateescape"
        raise BadDataset(f"{source} is not UTF-8 text: save it as UTF-8")
    names = [_column(name, one_of) for name in names]
    if not set(one_of) & set(names):
        if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
            raise BadDataset(
                f"{source} does not separate its columns with commas: save it with commas; `;` separates the labels of "
                "one image, as in photo.jpg,dog;grass"
            )
        columns = " or ".join(f"`{name}`" for name in one_of)
        found = ", ".join(f"`{name}`" for name in names)[:200]
        raise BadDataset(f"{source} has no column {columns}: its first line must name it, and is {found or 'empty'}")
    repeated = next((name for name in names if name and names.count(name) > 1), None)
    if repeated is not None:
        raise BadDataset(f"{source} has two columns named `{repeated}`: rename one")
    return names


def _column(name: str, one_of: Sequence[str]) -> str:
    name = name.strip()
    return name.lower() if name.lower() in {*one_of, *COLUMNS} else name


def _jsonl_rows(lines: Iterator[str], source: Path) -> Iterator[Row | Problem]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Problem(f"{source.name} line {number}", f"it is not JSON: {error}")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            yield Problem(f"{source.name} line {number}", "it is not a JSON object")


def parse_labels(value: Any) -> tuple[tuple[str, ...], list[str]]:
    """(labels, corrections) of a cell."""
    if value is None:
        return (), []
    if not isinstance(value, str | list):
        return (), [f"its labels must be text or a list, got {value!r:.80}"]
    remarks = []
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            remarks.append(f"{value!r:.80} begins like a JSON list but is not one: is it a label?")
    if isinstance(value, list) and (odd := [part for part in value if type(part) not in (str, int)]):
        remarks.append(f"the label {odd[0]!r:.40} is neither text nor a whole number and was left out")
        value = [part for part in value if type(part) in (str, int)]
    parts = value.split(";") if isinstance(value, str) else [str(part) for part in value]
    if isinstance(value, str) and len(parts) == 1 and "," in value:
        remarks.append(f"{value!r} was read as one label: separate labels with `;`, or write a JSON list")
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip())), remarks


def parse_split(value: Any) -> tuple[str | None, str | None]:
    """(split, None) of a cell, (None, reason) if it is not a split, (None, None) if it is empty."""
    if value is None or value == "":
        return None, None
    split = SPLITS.get(str(value).strip().lower())
    return split, None if split else f"its split must be train, query (or test, val) or database, got {value!r:.80}"
