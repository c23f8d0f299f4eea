"""Lists of labelled images: a folder's `labels.csv` or `labels.jsonl`, read with every bad line named.

Columns (CSV) or keys (JSONL): `file` (relative to the list's folder), `labels` (separated by `;`, or a JSON array) and
optionally `split` (query, train or database; `retrieval` means database). Both training and indexing read lists here.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from hashseek.retrieval.errors import BadDataset

OnError = Literal["skip", "stop"]
SPLITS = {"query": "query", "train": "train", "database": "database", "retrieval": "database"}
NAMES = ("labels.csv", "labels.jsonl")


@dataclass(frozen=True)
class Item:
    """One labelled image of a list; `line` is its line number there, from 1."""

    path: Path
    file: str
    labels: tuple[str, ...]
    split: str | None
    line: int


@dataclass(frozen=True)
class Problem:
    """Something wrong with a line: `skipped` (not used), or used after a repair that `reason` names.

    `uri` is the image that it is about, where one is known.
    """

    where: str
    reason: str
    skipped: bool = True
    uri: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Listing:
    """The usable items of a list, and what was wrong with the others."""

    source: Path
    items: tuple[Item, ...]
    problems: tuple[Problem, ...]


def find_list(path: Path) -> Path:
    """The list itself if `path` is one, else the `labels.csv` or `labels.jsonl` in the folder `path`.

    Raises:
        BadDataset: there is no such list.
    """
    if path.is_dir():
        for name in NAMES:
            if (path / name).is_file():
                return path / name
        raise BadDataset(f"the folder {path} has neither {NAMES[0]} nor {NAMES[1]}: add one that lists its images")
    if not path.is_file():
        raise BadDataset(f"there is no folder or list {path}: correct the path")
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise BadDataset(f"{path} is no list of images: it must be a .csv or .jsonl file")
    return path


def read_listing(
    path: Path,
    *,
    on_error: OnError,
    need_labels: bool,
    split_column: str = "split",
    ignore_columns: Sequence[str] = (),
    drop_labels: Sequence[str] = (),
) -> Listing:
    """Read the list at `path` (a list, or a folder that holds one).

    Args:
        path: `.csv` or `.jsonl` file, or its folder.
        on_error: "stop" refuses the list if any line has a problem; "skip" leaves bad lines out and reports them.
        need_labels: whether an image without label is left out (training) or kept (indexing); reported either way.
        split_column: the column that holds the split.
        ignore_columns: columns that are known and not wanted.
        drop_labels: shell patterns of labels to leave out, such as `*_r1`.

    Raises:
        BadDataset: no list, an unreadable one, or, with on_error = "stop", one with problems; they are listed.
    """
    source = find_list(path)
    rows, problems = _read_all(source, ("file",))
    known = {"file", "labels", split_column, *ignore_columns}
    problems += _unknown_columns(rows, known, source)
    items: list[Item] = []
    seen: dict[str, int] = {}
    used_patterns: set[str] = set()
    for line, row in rows:
        where = f"{source.name} line {line}"
        file = row.get("file")
        if not isinstance(file, str) or not file.strip():
            problems.append(Problem(where, "it names no file"))
            continue
        if not isinstance(row.get("labels"), str | list | None):
            problems.append(Problem(where, f"its labels are {row['labels']!r}, neither text nor a list"))
            continue
        labels, remarks = parse_labels(row.get("labels"), drop_labels, used_patterns)
        problems += [Problem(where, remark, skipped=False) for remark in remarks]
        file = file.strip()
        split, reason = parse_split(row.get(split_column))
        location = source.parent / file
        if reason is None and file in seen:
            reason = f"{file} was listed before, in line {seen[file]}"
        if reason is None and not _is_file(location):
            reason = f"the file {file} does not exist"
        if reason is None and not labels and need_labels:
            reason = f"{file} has no label"
        if reason is not None:
            problems.append(Problem(where, reason))
            continue
        if not labels:
            problems.append(Problem(where, f"{file} has no label", skipped=False))
        seen[file] = line
        items.append(Item(location, file, labels, split, line))
    for pattern in drop_labels:
        if pattern not in used_patterns:
            raise BadDataset(f"no label of {source} matches drop_labels = {pattern!r}: correct or remove the pattern")
    if problems and on_error == "stop":
        refuse(source, problems)
    return Listing(source, tuple(items), tuple(problems))


def refuse(source: Path, problems: Sequence[Problem], *, skip: str = "on_error = skip") -> None:
    """Raise `BadDataset` with the first problems and their number; `skip` is how the caller leaves such lines out."""
    shown = "; ".join(str(problem) for problem in problems[:5])
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    raise BadDataset(
        f"{source} has {len(problems)} problem{'s' if len(problems) > 1 else ''}: {shown}{more} "
        f"(mend the list, or leave such lines out with {skip})"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL: no file has it
        return False


def read_rows(
    source: Path, *, one_of: Sequence[str], errors: Literal["strict", "surrogateescape"]
) -> Iterator[tuple[int, dict[str, Any]] | Problem]:
    """The rows of a .csv or .jsonl list as (first line, values by column), and a problem for each that is torn.

    Nothing is kept: a list may be longer than memory.

    Args:
        source: the list.
        one_of: columns of which the first line of a .csv file must name at least one.
        errors: what is not UTF-8 is refused ("strict") or read as Python reads such file names ("surrogateescape").

    Raises:
        BadDataset: the file cannot be read, or the first line of a .csv file does not name its columns.
    """
    try:
        with source.open(encoding="utf-8-sig", errors=errors, newline="") as file:
            if source.suffix.lower() == ".csv":
                yield from _csv_rows(file, source, one_of)
            else:
                yield from _jsonl_rows(file, source)
    except UnicodeDecodeError:
        raise BadDataset(f"{source} is not UTF-8 text: save the list as UTF-8") from None
    except OSError as error:
        raise BadDataset(f"{source} cannot be read: {error.strerror or error}") from None


def _read_all(source: Path, one_of: Sequence[str]) -> tuple[list[tuple[int, dict[str, Any]]], list[Problem]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    problems: list[Problem] = []
    for row in read_rows(source, one_of=one_of, errors="strict"):
        if isinstance(row, Problem):
            problems.append(row)
        else:
            rows.append(row)
    return rows, problems


def _csv_rows(
    lines: Iterator[str], source: Path, one_of: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]] | Problem]:
    reader = csv.reader(lines, strict=True)  # not strict, it takes all up to the end for the text of an open quote
    names = _columns(reader, source, one_of)
    while True:
        first = reader.line_num + 1
        reason = None
        try:
            fields = next(reader, None)
        except csv.Error as error:  # the next row begins at the next line
            fields, reason = [], f"it is not CSV: {error}"
        if fields is None:
            return
        row = dict(zip(names, fields, strict=False))
        if fields and len(fields) != len(names):
            reason = f"it has not the {len(names)} fields that the first line names"
        elif {"\n", "\r"} & set(row.get("labels", "")):  # a path or an attribute may have several lines
            reason = "its labels go over several lines"
        if reason is not None:
            yield Problem(f"{source.name} line {first}", reason + _left_open(first, reader.line_num))
        elif fields:
            yield first, row


def _left_open(first: int, last: int) -> str:
    """What to say of a bad row from one line to another: other rows may be in its text."""
    if first == last:
        return ""
    return f"; it goes on to line {last}, and all these lines are left out: is a quote left open in line {first}?"


def _columns(reader: Iterator[list[str]], source: Path, one_of: Sequence[str]) -> list[str]:
    """The columns that the first line of a .csv file names."""
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise BadDataset(f"{source} line 1 is not CSV: {error}; it must name the columns") from None
    if any("\0" in name for name in names):  # read with "surrogateescape", letters of UTF-16 have one each
        raise BadDataset(f"{source} is not UTF-8 text: save the list as UTF-8")
    if not set(one_of) & set(names):
        columns = " or ".join(f"`{name}`" for name in one_of)
        found = f"names {', '.join(f'`{name}`' for name in names)[:200]}" if names else "is empty"
        raise BadDataset(
            f"{source} has no column {columns}: its first line must name {'one of them' if one_of[1:] else 'it'}, "
            f"and {found}"
        )
    twice = [name for name, n in Counter(names).items() if name and n > 1]
    if twice:
        raise BadDataset(f"{source} names the column `{twice[0]}` twice in its first line: name each once")
    return names


def _jsonl_rows(lines: Iterator[str], source: Path) -> Iterator[tuple[int, dict[str, Any]] | Problem]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            many = "a number of too many digits" if isinstance(error, ValueError) else "too many brackets"
            reason = getattr(error, "msg", many)
            yield Problem(f"{source.name} line {number}", f"it is not JSON: {reason}")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            yield Problem(f"{source.name} line {number}", "it is not a JSON object")


def _unknown_columns(rows: list[tuple[int, dict[str, Any]]], known: set[str], source: Path) -> list[Problem]:
    first: dict[str, int] = {}
    for line, row in rows:
        for column in row.keys() - known:
            first.setdefault(column, 1 if source.suffix.lower() == ".csv" else line)
    return [
        Problem(
            f"{source.name} line {line}",
            f"unknown column {column!r} (known: file, labels, split; name it in ignore_columns if it is not needed)",
            skipped=False,
        )
        for column, line in sorted(first.items())
    ]


def parse_labels(
    value: str | list[Any] | None, drop: Sequence[str], used: set[str]
) -> tuple[tuple[str, ...], list[str]]:
    """(labels, remarks on what was mended) of a cell; patterns of `drop` that match a label are put into `used`."""
    if value is None:
        return (), []
    parts = value.split(";") if isinstance(value, str) else [str(part) for part in value]
    stripped = [part.strip() for part in parts]
    remarks = []
    if stripped != parts and any(stripped):
        remarks.append(f"stray spaces around labels in {value!r} were removed")
    labels = []
    for label in dict.fromkeys(filter(None, stripped)):
        matching = [pattern for pattern in drop if fnmatchcase(label, pattern)]
        used.update(matching)
        if not matching:
            labels.append(label)
    return tuple(labels), remarks


def parse_split(value: Any) -> tuple[str | None, str | None]:
    """(split, what is wrong with it) of a cell."""
    if value is None or value == "":
        return None, None
    name = str(value).strip()
    if name not in SPLITS:
        return None, f"its split is {name!r}, not query, train, database or retrieval"
    return SPLITS[name], None
