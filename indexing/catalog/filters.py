"""Which images a search may find: by labels, attributes, ids, keys and the time they were added.

    Filter(all_labels=("cat",), attributes=(parse_condition("year>=2015"),))

A filter is answered from the catalog, exactly, before anything is ranked.
"""

import json
import math
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import BadConfig

Ids = NDArray[np.int64]

OPERATORS = ("=", ">=", "<=", ">", "<", "^=")
_SYNTAX = "write NAME=VALUE, NAME>=VALUE, NAME<=VALUE, NAME>VALUE, NAME<VALUE, or NAME^=BEGINNING"
_CONDITION = re.compile(r"\s*(?P<path>[^=<>^!~\"\0]*[^=<>^!~\"\0\s])\s*(?P<operator>=|>=|<=|>|<|\^=)(?P<value>[^\0]*)")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
# Up to this share of all images, the other conditions are looked up for each of the images that labels left.
_FEW = 0.05


@dataclass(frozen=True)
class Condition:
    """What an attribute must be.

    `=` compares with the attribute as text, or as the number, truth value that `value` spells; `^=` asks whether the
    attribute is a text that begins so. The other operators compare numbers if `value` is one, with numbers and with
    texts that spell one, and else texts, letter by letter; so an ISO date compares with ISO dates.

    Args:
        path: name of the attribute; `camera.model` is looked for as it stands and then as `model` inside `camera`.
        operator: one of `OPERATORS`.
        value: as it is written.
        is_text: compare as text even if `value` spells a number.
    """

    path: str
    operator: str
    value: str
    is_text: bool = False


@dataclass(frozen=True)
class Filter:
    """What an image must be to be found; what is empty or None asks nothing.

    Args:
        any_labels: at least one of them.
        all_labels: each of them.
        no_labels: none of them.
        attributes: each of these conditions.
        ids: one of them.
        keys: one of them.
        added_after: at this time or later: a date or time as ISO 8601 writes it, UTC unless it says otherwise.
        added_before: earlier than this.
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
    any_labels: Sequence[str] = (),
    all_labels: Sequence[str] = (),
    no_labels: Sequence[str] = (),
    where: Sequence[str] = (),
    ids: Sequence[int] = (),
    keys: Sequence[str] = (),
    added_after: str | None = None,
    added_before: str | None = None,
) -> Filter | None:
    """The filter that options of a command or parameters of a request spell; None if they ask nothing.

    Raises:
        BadConfig: a condition or time cannot be read; the sentence shows how it is written.
    """
    for text in (*any_labels, *all_labels, *no_labels, *where, *keys):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadConfig(f"{text[:40]!r} is not valid UTF-8, so nothing that is stored can be meant") from None
    chosen = Filter(
        tuple(any_labels),
        tuple(all_labels),
        tuple(no_labels),
        tuple(map(parse_condition, where)),
        tuple(ids) or None,
        tuple(keys) or None,
        None if added_after is None else parse_time(added_after),
        None if added_before is None else parse_time(added_before),
    )
    return chosen or None


def parse_condition(text: str) -> Condition:
    """A condition as it is written on the command line: `camera=X`, `year>=2015`, `title^=abc`, `zip="01234"`.

    Raises:
        BadConfig: it is no condition.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise BadConfig(f"{text[:80]!r} is no condition on an attribute: {_SYNTAX}")
    value = match["value"].strip()
    is_text = len(value) >= 2 and value[0] == value[-1] == '"'
    if not is_text and value[:1] in ("=", "<", ">", "^", "~"):
        raise BadConfig(f"{text[:80]!r} is no condition on an attribute: {_SYNTAX}")
    return Condition(match["path"], match["operator"], value[1:-1] if is_text else value, is_text)


def parse_time(text: str) -> str:
    """A date or time of ISO 8601 as the catalog writes times; UTC unless it says otherwise.

    Raises:
        BadConfig: it is neither.
    """
    try:
        time = datetime.fromisoformat(text.strip())
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        if time.microsecond:  # stored times are whole seconds: "from 0.5 s on" is "from 1 s on"
            time = time.replace(microsecond=0) + timedelta(seconds=1)
    except (ValueError, OverflowError):
        raise BadConfig(f"{text[:40]!r} is no time: write it as in 2026-01-31 or 2026-01-31T15:00:00+01:00") from None
    return time.isoformat(timespec="seconds").replace("+00:00", "Z")


def ids_where(db: sqlite3.Connection, chosen: Filter) -> Ids:
    """The ids (ascending) of the images that a filter lets through."""
    parts = [_labelled(db, [label]) for label in dict.fromkeys(chosen.all_labels)]
    if chosen.any_labels:
        parts.append(_labelled(db, chosen.any_labels))
    if chosen.ids is not None:
        parts.append(np.unique(np.array([i for i in chosen.ids if 0 <= i < 2**63], np.int64)))
    found = reduce(_both, sorted(parts, key=len)) if parts else None
    clauses, values = _clauses(chosen)
    if chosen.ids is not None or clauses or found is None:
        if found is not None and len(found) <= _FEW * _count(db):
            clauses.append("id IN (SELECT value FROM json_each(?))")
            values.append(json.dumps(found.tolist()))
            found = None
        where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
        of_table = np.sort(_fetch(db, f"SELECT id AS i FROM images{where}", values))
        found = of_table if found is None else _both(found, of_table)
    if chosen.no_labels and len(found):
        found = np.setdiff1d(found, _labelled(db, chosen.no_labels), assume_unique=True)
    return found


def _labelled(db: sqlite3.Connection, labels: Sequence[str]) -> Ids:
    """Ids (ascending) of the images that carry one of the labels."""
    each = [
        _fetch(db, "SELECT image_id AS i FROM image_labels WHERE label = ?", [label]) for label in dict.fromkeys(labels)
    ]
    return each[0] if len(each) == 1 else np.unique(np.concatenate(each))


def _both(first: Ids, second: Ids) -> Ids:
    return np.intersect1d(first, second, assume_unique=True)


def _count(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT max(id) FROM images").fetchone()  # counting would read a whole index
    return int(row[0] or 0)


def _fetch(db: sqlite3.Connection, query: str, values: Sequence[Any]) -> Ids:
    """Column i of a query; one long text is three times as quick as a row per id."""
    (text,) = db.execute(f"SELECT group_concat(i) FROM ({query})", values).fetchone()
    return np.fromstring(text, np.int64, sep=",") if text else np.zeros(0, np.int64)


def _clauses(chosen: Filter) -> tuple[list[str], list[Any]]:
    """Conditions on the table of images, and their values."""
    clauses: list[str] = []
    values: list[Any] = []
    if chosen.keys is not None:
        clauses.append("key IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(chosen.keys))
    for operator, time in ((">=", chosen.added_after), ("<", chosen.added_before)):
        if time is not None:
            clauses.append(f"added_at {operator} ?")
            values.append(parse_time(time))
    for condition in chosen.attributes:
        clause, of_clause = _on_attribute(condition)
        clauses.append(clause)
        values += of_clause
    return clauses, values


def _on_attribute(condition: Condition) -> tuple[str, list[Any]]:
    if condition.operator not in OPERATORS:
        raise BadConfig(f"there is no operator {condition.operator!r}: {_SYNTAX}")
    paths = _json_paths(condition.path)
    clauses, values = [], []
    for path in paths:
        clause, of_clause = _compare(condition, path)
        clauses.append(clause)
        values += of_clause
    return f"({' OR '.join(clauses)})", values


def _compare(condition: Condition, path: str) -> tuple[str, list[Any]]:
    """SQL that says whether the attribute at a JSON path is as the condition wants it."""
    value, operator = condition.value, condition.operator
    attribute, kind = "json_extract(attributes, ?)", "json_type(attributes, ?)"
    if operator == "^=":
        return f"({kind} = 'text' AND substr({attribute}, 1, ?) = ?)", [path, path, len(value), value]
    number = None if condition.is_text else _number(value)
    if operator == "=":
        clause, values = f"({kind} = 'text' AND {attribute} = ?)", list[Any]((path, path, value))
        if number is not None:
            clause += f" OR ({kind} IN ('integer', 'real') AND {attribute} = ?)"
            values += [path, path, number]
        elif value in ("true", "false") and not condition.is_text:
            clause += f" OR {kind} = ?"
            values += [path, value]
        return f"({clause})", values
    if number is None:
        return f"({kind} = 'text' AND {attribute} {operator} ?)", [path, path, value]
    # A text spells a number if it is equal to the number that SQLite would read from its beginning.
    spells = f"{attribute} = CAST({attribute} AS NUMERIC)"
    return (
        f"({kind} IN ('integer', 'real', 'text') AND {spells} AND CAST({attribute} AS NUMERIC) {operator} ?)",
        [path, path, path, path, number],
    )


def _json_paths(path: str) -> list[str]:
    """JSON paths of an attribute's name: as it stands, and with its dots as steps."""
    if not path or '"' in path or "\0" in path:
        raise BadConfig(f"{path[:80]!r} is no name of an attribute that can be asked for: it may have no quotes")
    # SQLite compares with the text as it is stored, where a backslash or a line feed in a name is escaped.
    escaped = json.dumps(path, ensure_ascii=False)[1:-1]
    whole = f'$."{escaped}"'
    return [whole] if "." not in path else [whole, "$" + "".join(f'."{step}"' for step in escaped.split("."))]


def _number(text: str) -> int | float | None:
    if _NUMBER.fullmatch(text) is None:
        return None
    if re.fullmatch(r"[+-]?\d{1,19}", text) and -(2**63) <= int(text) < 2**63:
        return int(text)  # as SQLite keeps it; a float would take its neighbours for it
    number = float(text)
    return number if math.isfinite(number) else None
