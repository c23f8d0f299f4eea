"""Reads lists of images (CSV, JSONL, Parquet, plain text) for `index add`, row by row in constant memory.

A row names an image in the first of its columns `uri`, `path`, `file`, `url`: a file (relative to the list's folder),
an image in a tar (`retrieval.tar_members`), or a URL. `labels` is a list, or text separated by `;`; `split` is query,
train or database; `key` (or else `id`) is the user's own name for the image. Every other column is an attribute, and a
column `attributes` may hold a JSON object with more of them. A plain text file has one file or URL per line.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from hashseek.indexing.remote import is_remote
from hashseek.indexing.uris import is_there
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.label_files import COLUMNS, NAMES, Problem, parse_labels, parse_split, read_rows, spellings

KINDS = (".csv", ".jsonl", ".parquet", ".txt")
PLACES = ("uri", "path", "file", "url")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d{1,17})?")
_BLOCK = 1024  # rows of a Parquet file in memory at a time

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ImageSource:
    """An image or a vector to add: where it is, and its metadata.

    Args:
        uri: the Path of a file or of an image in a tar; a URL as text; empty for a vector.
        labels: its labels.
        where: the line of the list that it comes from, such as "labels.csv line 7"; empty if there is no list.
        key: the user's own name for it.
        attributes: a JSON object.
    """

    uri: Path | str
    labels: tuple[str, ...] = ()
    where: str = ""
    key: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.where or str(self.uri)


def find_manifest(path: Path) -> Path | None:
    """`path` itself if it is a list, or the list `labels.csv` or `labels.jsonl` in the folder `path`; else None."""
    if path.suffix.lower() in KINDS and path.is_file():
        return path
    try:
        return next((path / name for name in NAMES if (path / name).is_file()), None)
    except PermissionError:  # reading the folder will report that
        return None


def read_manifest(path: Path, *, split: str | None) -> Iterator[ImageSource | Problem]:
    """The images in a list, and problems of its lines; with `split`, only images of that split.

    Raises:
        BadDataset: the list cannot be read, or has no image in the split.
    """
    n_rows = n_chosen = 0
    for row in rows_of(path):
        if isinstance(row, Problem):
            yield row
            continue
        n_rows += 1
        line, values = row
        n_chosen += split is not None and parse_split(values.get("split"))[0] == split
        yield from read_row(values, where=f"{path.name} line {line}", folder=path.parent, split=split)
    if split is not None and n_rows and not n_chosen:
        raise BadDataset(f"{path} has no image in the split {split!r}")


def read_row(row: Row, *, where: str, folder: Path, split: str | None) -> Iterator[ImageSource | Problem]:
    """The image that a row names, if it is in the split, and problems of the row."""
    column = next((name for name in PLACES if row.get(name) not in (None, "")), None)
    place = row[column].strip() if column is not None and isinstance(row[column], str) else ""
    if not place:
        yield Problem(where, "does not name a file")
        return
    try:
        if not is_in_split(row, split):
            return
        notes, source = described(_uri(place, folder), row, where=where, beside={column, "split"})
    except ValueError as error:
        is_file = not _SCHEME.match(place)
        name = str(folder / place) if is_file else place
        yield Problem(where, str(error), uri=name, missing=is_file and not is_there(name))
        return
    yield from notes
    yield source


def is_in_split(row: Row, split: str | None) -> bool:
    """Whether the column `split` of a row has this value; always if `split` is None.

    Raises:
        ValueError: it is not the name of a split.
    """
    if split is None:
        return True
    of_row, reason = parse_split(row.get("split"))
    if reason is not None:
        raise ValueError(reason)
    return of_row == split


def described(uri: Path | str, row: Row, *, where: str, beside: set[str | None]) -> tuple[list[Problem], ImageSource]:
    """Notes on corrected metadata of a row, and its image or vector; columns in `beside` are not attributes.

    Raises:
        ValueError: the metadata cannot be used.
    """
    labels, remarks = _labels_of(row)
    source = ImageSource(uri, labels, where, key_of(row), _attributes_of(row, beside))
    return [Problem(where, remark, skipped=False) for remark in remarks], source


def _labels_of(row: Row) -> tuple[tuple[str, ...], list[str]]:
    """The labels of a row, given as a list or as text separated by `;`, and notes on those that were corrected.

    Raises:
        ValueError: they are neither.
    """
    given = row.get("labels")
    if not isinstance(given, str | list | None):
        raise ValueError(f"has labels that are neither text nor a list: {given!r:.80}")
    return parse_labels(given)


def key_of(row: Row) -> str | None:
    """The key of a row's image: its column `key`, or else `id`.

    Raises:
        ValueError: it is neither text nor an integer.
    """
    key = row.get("key") if row.get("key") not in (None, "") else row.get("id")
    if key is None or key == "":
        return None
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise ValueError(f"has a key that is neither text nor an integer: {key!r:.80}")
    return str(key)


def _attributes_of(row: Row, beside: set[str | None]) -> dict[str, Any]:
    """The attributes of a row: its columns except `beside`, the key and the labels; empty values and NaN are left out.

    Raises:
        ValueError: its column `attributes` is not a JSON object.
    """
    own = row.get("attributes")
    if isinstance(own, str) and own:
        try:
            own = json.loads(own)
        except (ValueError, RecursionError):
            own = False
    if own not in (None, "") and not isinstance(own, dict):
        raise ValueError(f"has an `attributes` column that is not a JSON object: {row['attributes']!r:.80}")
    key = "key" if row.get("key") not in (None, "") else "id"
    taken = {*beside, "labels", "attributes", "key", key}
    others = {name: value for name, value in row.items() if name and name not in taken and not _is_empty(value)}
    return others | (own or {})


def _is_empty(value: object) -> bool:
    return value in (None, "") or value != value  # NaN, which tables use for a missing number


def _uri(place: str, folder: Path) -> Path | str:
    if is_remote(place):
        return place
    if _SCHEME.match(place):
        raise ValueError(f"{place} is not supported: use a file or an http(s) URL")
    for name in spellings(place):
        if is_there(str(folder / name)):
            return folder / name
    raise ValueError(f"the file {place} does not exist")


def rows_of(
    path: Path, *, one_of: tuple[str, ...] = PLACES, beside: str | None = None
) -> Iterator[tuple[int, Row] | Problem]:
    """The rows of a list with their line numbers, from 1, and problems of its lines.

    Args:
        path: the list.
        one_of: columns, at least one of which must be present.
        beside: a column of a Parquet file to skip.

    Raises:
        BadDataset: the list cannot be read.
    """
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _parquet_rows(path, one_of, beside)
    elif kind == ".txt":
        yield from _text_rows(path, one_of[0])
    else:
        for row in read_rows(path, one_of=one_of, errors="surrogateescape"):
            if kind == ".csv" and not isinstance(row, Problem):  # CSV has no types
                yield row[0], {name: value if name in _TEXT else _typed(value) for name, value in row[1].items()}
            else:
                yield row


_TEXT = frozenset((*PLACES, *COLUMNS))


def _typed(text: str) -> str | int | float:
    if not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)


def _text_rows(path: Path, column: str) -> Iterator[tuple[int, Row]]:
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and not (line.startswith("#") and column in PLACES):  # an id may begin so
                    yield number, {column: line.strip()}
    except OSError as error:
        raise BadDataset(f"{path} cannot be read: {error.strerror or error}") from None


def _parquet_rows(path: Path, one_of: tuple[str, ...], beside: str | None) -> Iterator[tuple[int, Row]]:
    pa = load_pyarrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name != beside]
            if not set(one_of) & set(names):
                raise BadDataset(f"{path} has no column {' or '.join(one_of)}: it needs one of them")
            number = 0
            for batch in file.iter_batches(batch_size=_BLOCK, columns=names):
                for row in _converted(batch, pa).to_pylist():
                    number += 1
                    yield number, {name: _plain(value) for name, value in row.items()}
    except FileNotFoundError:
        raise BadDataset(f"there is no file {path}: correct the path") from None
    except (pa.ArrowException, OSError) as error:
        raise BadDataset(f"{path} is not a valid Parquet file ({error}): write or download it again") from None
    except (ValueError, OverflowError) as error:  # such as the year 10,000
        raise BadDataset(f"{path} has a value that Python cannot represent: {error}") from None


def _converted(batch: Any, pa: Any) -> Any:
    """A batch with float32 as float64, so that 0.7 stays 0.7, and with nanoseconds, which Python lacks, cut off."""
    for place, column in enumerate(batch.schema):
        values = batch.column(place)
        if column.type == pa.float32():
            values = values.cast(pa.string()).cast(pa.float64())
        elif pa.types.is_timestamp(column.type) and column.type.unit == "ns":
            values = values.cast(pa.timestamp("us", column.type.tz), safe=False)
        elif pa.types.is_time64(column.type) and column.type.unit == "ns":
            values = values.cast(pa.time64("us"), safe=False)
        else:
            continue
        batch = batch.set_column(place, column.name, values)
    return batch


def load_pyarrow() -> Any:
    """The module `pyarrow` with its parts for Parquet files.

    Raises:
        BadConfig: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise BadConfig("Parquet files need pyarrow: run pip install 'hashseek[parquet]'") from None
    return pyarrow


def _plain(value: Any) -> Any:
    """Dates and times as text and decimals as numbers, for JSON; other unsupported values are refused later."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return [_plain(part) for part in value] if isinstance(value, list) else value
