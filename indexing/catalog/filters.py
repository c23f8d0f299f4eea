"""Filters: which images a search may return, by labels, attributes, ids, keys and the time they were added.

    Filter(all_labels=("cat",), attributes=(parse_condition("year>=2015"),))

The catalog evaluates a filter exactly, before anything is ranked.
"""

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from hashseek.indexing.catalog.attributes import Ids, condition_clause, fetch_ids, ids_with, union
from hashseek.indexing.catalog.conditions import Condition, parse_condition
from hashseek.indexing.catalog.records import is_utf8, listed_ids, listed_texts, placeholders
from hashseek.retrieval.errors import BadConfig

# If at most this share of all images is left, further conditions are tested on those images one by one.
_FEW = 0.05
MAX_CONDITIONS = 64  # or required labels, in one filter; below SQLite's own limit

# What each argument of `make_filter` means, for the help of the command line and the schema of the service.
FILTER_HELP = {
    "all_labels": "Only images with this label; if repeated, with all of these labels.",
    "any_labels": "Only images with at least one of these labels; may be repeated.",
    "no_labels": "Only images without this label; if repeated, without any of them.",
    "where": (
        "Only images whose attributes meet this condition: camera=X, year>=2015 (also <=, >, <), title^=abc (starts "
        'with), camera.model=X (inside an object), zip="01234" (compare as text); if repeated, all conditions.'
    ),
    "ids": "Only images with this id; if repeated, with any of these ids.",
    "keys": "Only images with this key; if repeated, with any of these keys.",
    "added_after": "Only images added at this ISO 8601 date or time or later (UTC unless it has an offset).",
    "added_before": "Only images added before this date or time.",
}


@dataclass(frozen=True)
class Filter:
    """What an image must match to be found; fields that are empty or None match every image.

    Args:
        any_labels: the image has at least one of them.
        all_labels: it has all of them.
        no_labels: it has none of them.
        attributes: it meets all of these conditions.
        ids: its id is one of them.
        keys: its key is one of them.
        added_after: it was added at this time or later; a time from `parse_time`.
        added_before: it was added before this time.
    """

    any_labels: tuple[str, ...] = ()
    all_labels: tuple[str, ...] = ()
    no_labels: tuple[str, ...] = ()
    attributes: tuple[Condition, ...] = ()
    ids: tuple[int, ...] | None = None
    keys: tuple[str, ...] | None = None
    added_after: str | None = None
    added_before: str | None = None

    def __bool__(self) -> bool:
        return self != Filter()


def make_filter(
    *,
    any_labels: Sequence[str] | None = None,
    all_labels: Sequence[str] | None = None,
    no_labels: Sequence[str] | None = None,
    where: Sequence[str] | None = None,
    ids: Sequence[int] | None = None,
    keys: Sequence[str] | None = None,
    added_after: str | None = None,
    added_before: str | None = None,
) -> Filter | None:
    """The filter for the options of a command or the parameters of a request; None if none is given.

    Raises:
        BadConfig: an invalid condition or time, more than `MAX_CONDITIONS` required labels or conditions, one text
            instead of a list, or an empty list of labels, ids or keys of which an image must have one: no image could.
    """
    lists: dict[str, Sequence[Any] | None] = {
        "any_labels": any_labels,
        "all_labels": all_labels,
        "no_labels": no_labels,
        "where": where,
        "ids": ids,
        "keys": keys,
    }
    for name, values in lists.items():
        if isinstance(values, str):
            raise BadConfig(f"{name} must be a list of strings, not one string: write [{values[:40]!r}]")
        if name in ("any_labels", "ids", "keys") and values is not None and not len(values):
            raise BadConfig(f"{name} is an empty list, which no image can match: leave it out to include all images")
    any_labels, all_labels, no_labels, where, keys = (
        () if values is None else values for values in (any_labels, all_labels, no_labels, where, keys)
    )
    for name, required in (("required labels", all_labels), ("conditions on attributes", where)):
        if len(required) > MAX_CONDITIONS:
            raise BadConfig(f"a filter may have at most {MAX_CONDITIONS} {name}, got {len(required)}")
    for text in (*any_labels, *all_labels, *no_labels, *where, *keys):
        if not is_utf8(text):
            raise BadConfig(f"{text[:40]!r} is not valid Unicode, so nothing stored can match it")
    chosen = Filter(
        tuple(any_labels),
        tuple(all_labels),
        tuple(no_labels),
        tuple(map(parse_condition, where)),
        None if ids is None else tuple(int(one) for one in ids),  # they may be NumPy integers
        tuple(keys) or None,
        None if added_after is None else parse_time(added_after),
        None if added_before is None else parse_time(added_before),
    )
    return chosen or None


def parse_time(text: str) -> str:
    """An ISO 8601 date or time in the catalog's format, in whole seconds; UTC unless it names a time zone.

    Raises:
        BadConfig: it is not one.
    """
    try:
        time = datetime.fromisoformat(text.strip())
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadConfig(
            f"{text[:40]!r} is not a date or time: write it like 2026-01-31 or 2026-01-31T14:00:00Z"
        ) from None
    return time.isoformat(timespec="seconds").replace("+00:00", "Z")


def ids_where(db: sqlite3.Connection, among: Filter) -> Ids:
    """The ids (ascending) of the images that pass a filter.

    Conditions are looked up in indexes until few images are left; the others are then tested on those images.
    """
    found: Ids | None = None
    few = int(_FEW * int(db.execute("SELECT max(id) FROM images").fetchone()[0] or 0))  # counting reads a whole index
    clauses: list[str] = []
    values: list[Any] = []
    for look_up, clause, clause_values in _conditions(db, among, few):
        indexed = look_up() if found is None or len(found) > few else None
        if indexed is None:
            clauses.append(clause)
            values += clause_values
        else:
            found = indexed if found is None else _both(found, indexed)
    excluded = among.no_labels
    if excluded and found is not None and len(found) <= few:
        clauses.append(f"NOT {_has_label(excluded)}")
        values += excluded
        excluded = ()
    if clauses or found is None:
        by = ""
        if found is not None and len(found) <= few:
            clauses.append("id IN (SELECT value FROM json_each(?))")
            values.append(json.dumps(found.tolist()))
            found, by = None, " NOT INDEXED"  # by id alone: SQLite might start with an index on attributes
        where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
        matching = np.sort(fetch_ids(db, f"SELECT id AS i FROM images{by}{where}", values))
        found = matching if found is None else _both(found, matching)
    return np.setdiff1d(found, _labelled(db, excluded), assume_unique=True) if excluded else found


# A function that looks the ids up in an index, or returns None if there is none; the same as an SQL clause; its values.
_Condition = tuple[Callable[[], Ids | None], str, list[Any]]


def _conditions(db: sqlite3.Connection, among: Filter, few: int) -> list[_Condition]:
    """The conditions of a filter; those that probably few images pass come first."""

    def on_column(clause: str, *values: Any) -> _Condition:
        query = f"SELECT id AS i FROM images WHERE {clause}"
        return lambda: np.sort(fetch_ids(db, query, list(values))), clause, list(values)

    conditions = []
    if among.keys is not None:
        conditions.append(on_column("key IN (SELECT value FROM json_each(?))", listed_texts(among.keys)))
    if among.ids is not None:
        conditions.append(on_column("id IN (SELECT value FROM json_each(?))", listed_ids(among.ids)))
    groups: list[tuple[str, ...]] = [(label,) for label in dict.fromkeys(among.all_labels)]
    if among.any_labels:
        groups.append(among.any_labels)
    if len(groups) > 1:  # rare labels first
        groups.sort(key=lambda labels: _count_labelled(db, labels, most=few))
    conditions += [(partial(_labelled, db, labels), _has_label(labels), list(labels)) for labels in groups]
    exact = [one for one in among.attributes if one.operator in ("=", "^=")]
    ranges = [one for one in among.attributes if one not in exact]
    conditions += [(partial(ids_with, db, one), *condition_clause(one)) for one in exact]
    limits = {"added_at >= ?": among.added_after, "added_at < ?": among.added_before}
    if times := {clause: time for clause, time in limits.items() if time is not None}:
        conditions.append(on_column(" AND ".join(times), *times.values()))
    conditions += [(partial(ids_with, db, one), *condition_clause(one)) for one in ranges]
    return conditions


def _has_label(labels: Sequence[str]) -> str:
    listed = placeholders(labels)
    return f"EXISTS (SELECT 1 FROM image_labels WHERE image_id = images.id AND label IN ({listed}))"


def _count_labelled(db: sqlite3.Connection, labels: Sequence[str], *, most: int) -> int:
    """How often images have one of the labels, counted up to `most` + 1."""
    listed = "SELECT 1 FROM image_labels WHERE label IN (SELECT value FROM json_each(?)) LIMIT ?"
    row = db.execute(f"SELECT count(*) FROM ({listed})", [json.dumps(labels), most + 1]).fetchone()
    return int(row[0])


def _labelled(db: sqlite3.Connection, labels: Sequence[str]) -> Ids:
    """Ids (ascending) of the images that have one of the labels."""
    each = [
        fetch_ids(db, "SELECT image_id AS i FROM image_labels WHERE label = ?", [label])
        for label in dict.fromkeys(labels)
    ]
    return each[0] if len(each) == 1 else union(each)


def _both(first: Ids, second: Ids) -> Ids:
    few, many = sorted((first, second), key=len)
    return few[np.isin(few, many, assume_unique=True)]
