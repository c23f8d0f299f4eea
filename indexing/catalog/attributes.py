"""SQLite indexes on the attributes of images, so that a filter need not read every image's JSON.

The first `MAX_INDEXED` attribute names in the images get an index each, over the type and the value of that
attribute; SQLite keeps them up to date. Filters on other names read all images: just as exact, but slower. As long
as there is room for another index, a name without one is a name that no image has.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog.conditions import Condition, alternatives, json_path, json_paths, json_type, json_value

Ids = NDArray[np.int64]

MAX_INDEXED = 32


def ids_with(db: sqlite3.Connection, condition: Condition) -> Ids | None:
    """The ids (ascending) of the images that meet a condition; None if there is no index to look them up."""
    indexed = indexed_paths(db)
    queries = []
    for path in json_paths(condition.path):
        if path in indexed:
            source = f"images INDEXED BY {_index_name(indexed[path])}"
            queries += [(f"SELECT id AS i FROM {source} WHERE {c}", v) for c, v in alternatives(condition, path)]
        elif len(indexed) >= MAX_INDEXED:
            return None
    return union([fetch_ids(db, query, values) for query, values in queries])


def condition_clause(condition: Condition) -> tuple[str, list[Any]]:
    """A condition as SQL on the table of images, and its parameters."""
    found = [one for path in json_paths(condition.path) for one in alternatives(condition, path)]
    return f"({' OR '.join(f'({clause})' for clause, _ in found)})", [value for _, values in found for value in values]


def fetch_ids(db: sqlite3.Connection, query: str, values: list[Any]) -> Ids:
    """Column `i` of a query. Fetching one long string is three times as fast as one row per id."""
    (text,) = db.execute(f"SELECT group_concat(i) FROM ({query})", values).fetchone()
    return np.fromstring(text, np.int64, sep=",") if text else np.zeros(0, np.int64)


def union(parts: Sequence[Ids]) -> Ids:
    """The ids (ascending, each once) that are in one of the parts; `np.unique` takes many times as long."""
    ids = np.sort(np.concatenate(parts), kind="stable") if parts else np.zeros(0, np.int64)
    new = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=new[1:])
    return ids[new]


def indexed_paths(db: sqlite3.Connection) -> dict[str, int]:
    """JSON paths that have an index, and the number of that index."""
    return {str(path): int(number) for number, path in db.execute("SELECT id, path FROM attribute_indexes")}


def add_indexes(db: sqlite3.Connection, paths: Iterable[str]) -> None:
    """Index JSON paths that have no index yet, as long as there is room. Call it within a transaction."""
    indexed = indexed_paths(db)
    for path in [path for path in paths if path not in indexed][: MAX_INDEXED - len(indexed)]:
        [number] = db.execute("INSERT INTO attribute_indexes (path) VALUES (?) RETURNING id", (path,)).fetchone()
        kind, name = json_type(path), _index_name(number)
        db.execute(f"CREATE INDEX {name} ON images({kind}, {json_value(path)}) WHERE {kind} IS NOT NULL")


def paths_of(attributes: Mapping[str, Any], outer: tuple[str, ...] = ()) -> list[str]:
    """The JSON paths of all strings, numbers and booleans that a condition can name.

    Args:
        attributes: the attributes of an image, or an object within them.
        outer: names that lead to this object.
    """
    paths = []
    for name, value in attributes.items():
        steps = (*outer, name)
        # A condition cannot contain quotes, and reads a dot within a nested name as another step.
        if '"' in name or (len(steps) > 1 and any("." in step for step in steps)):
            continue
        if isinstance(value, str | int | float):
            paths.append(json_path(*steps))
        elif isinstance(value, Mapping):
            paths += paths_of(value, steps)
    return paths


def _index_name(number: int) -> str:
    return f"images_by_attribute_{int(number)}"
