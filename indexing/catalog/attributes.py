"""Indexes on the attributes of images, so that a condition is answered without reading every image's JSON.

Every name that an image brings gets an index of its own, on the type and the value of that attribute, up to `MOST` of
them; SQLite keeps them true. Conditions on names beyond these are answered from the images themselves, as exactly.

`meta` says in `attributes_beyond` whether there may be names without an index. Where it is missing there are none, so
that a name without an index is one that no image has. Where it is a mark, whoever stores an image with such a name
wipes the mark: if it is still there after all images were read, what was read holds for the images of today.
"""

import json
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog.conditions import Condition, alternatives, json_path, json_paths, json_type, json_value
from hashseek.indexing.sorted_ids import union

Ids = NDArray[np.int64]

MOST = 32
# Making an index reads every image: from so many on that takes seconds, and waits for `index optimize`.
AT_ONCE = 50_000
# Characters of a JSON path that gets an index. Names inside a long one would take that length each.
LONGEST = 512
_MOST_COUNTED = 100_000
PREFIX = "images_by_attribute_"  # of the names of indexes
_SCALARS = (str, int, float)
_BEYOND = "attributes_beyond"  # in meta where some name has no index


def create(db: sqlite3.Connection) -> None:
    """Make the table of indexes, and those for the images that are there, in a transaction of the caller's.

    Of many images none: whoever opens the catalog meanwhile would wait too long. `index optimize` makes them.
    """
    db.execute("CREATE TABLE attribute_indexes (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL UNIQUE)")
    counts = None if _is_large(db) else count_names(db)
    _add_paths(db, most_frequent(counts or Counter(), set()))
    if counts is None or len(counts) > MOST:  # many images, attributes that are to be mended, or many names
        _set_beyond(db)


def ids_with(db: sqlite3.Connection, condition: Condition) -> Ids | None:
    """The ids (ascending) of the images that fulfil a condition; None if there is no index that would say.

    Raises:
        BadConfig: the condition cannot be asked.
    """
    queries = []
    for path in json_paths(condition.path):
        clauses = alternatives(condition, path)
        number = index_of(db, path)
        if number is not None:
            queries += [(f"SELECT id AS i FROM images INDEXED BY {_name(number)} WHERE {c}", v) for c, v in clauses]
        elif is_beyond(db) or len(path) > LONGEST:
            return None
    return union([fetch_ids(db, query, values) for query, values in queries])


def condition_clause(condition: Condition) -> tuple[str, list[Any]]:
    """A condition as SQL on the table of images, and its parameters.

    Raises:
        BadConfig: the condition cannot be asked.
    """
    found = [one for path in json_paths(condition.path) for one in alternatives(condition, path)]
    return f"({' OR '.join(f'({clause})' for clause, _ in found)})", [value for _, values in found for value in values]


def fetch_ids(db: sqlite3.Connection, query: str, values: list[Any]) -> Ids:
    """Column i of a query; one long text is three times as quick as a row per id."""
    (text,) = db.execute(f"SELECT group_concat(i) FROM ({query})", values).fetchone()
    return np.fromstring(text, np.int64, sep=",") if text else np.zeros(0, np.int64)


def index_of(db: sqlite3.Connection, path: str) -> int | None:
    """The number of the index on a JSON path, or None."""
    row = db.execute("SELECT id FROM attribute_indexes WHERE path = ?", (path,)).fetchone()
    return None if row is None else int(row[0])


def is_beyond(db: sqlite3.Connection) -> bool:
    """Whether attributes may have names without an index."""
    return _mark(db) is not None


def known_paths(db: sqlite3.Connection) -> set[str] | None:
    """The JSON paths that have an index; None if it makes no difference whether an image brings others."""
    return None if _mark(db) == "" else _indexed(db)


def index_new(db: sqlite3.Connection, paths: Iterable[str]) -> None:
    """Index JSON paths that no image had so far, in a transaction of the caller's, unless the catalog is large."""
    if _is_large(db):
        _set_beyond(db)
    else:
        _add_paths(db, paths)


def problems(db: sqlite3.Connection) -> list[str]:
    """What the indexes lack, so that conditions are refused or find too little; empty if all is well."""
    found = []
    unmatched = {name for name, _ in _noted(db).items() ^ _made(db).items()}
    if unmatched:
        found.append(f"{len(unmatched)} indexes on attributes are missing, were altered, or belong to no name")
    counts = None if is_beyond(db) else count_names(db)
    lacking = set(counts or ()) - _indexed(db)
    if lacking:
        found.append(f"{len(lacking)} names of attributes have no index, so that no condition on them finds an image")
    return found


def _is_large(db: sqlite3.Connection) -> bool:
    (last,) = db.execute("SELECT max(id) FROM images").fetchone()
    return (last or 0) >= AT_ONCE


def _mark(db: sqlite3.Connection) -> str | None:
    """None if all names have an index; if some may have none, the mark of who counts them, or empty."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (_BEYOND,)).fetchone()
    return None if row is None else str(row[0])


def _set_beyond(db: sqlite3.Connection, mark: str = "") -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_BEYOND, mark))


def _add_paths(db: sqlite3.Connection, paths: Iterable[str]) -> None:
    for path in paths:
        row = db.execute("SELECT count(*) FROM attribute_indexes").fetchone()
        if row[0] >= MOST:
            _set_beyond(db)
            return
        row = db.execute("INSERT INTO attribute_indexes (path) VALUES (?) RETURNING id", (path,)).fetchone()
        db.execute(_statement(int(row[0]), path))


def forget(db: sqlite3.Connection) -> None:
    """Drop all indexes on attributes, in a transaction of the caller's: attributes that are no JSON break them."""
    for name in _made(db):
        db.execute(f"DROP INDEX {name}")
    db.execute("DELETE FROM attribute_indexes")
    _set_beyond(db)


# ---------------------------------------------------------------- one after the other, while others read and write


def watch(db: sqlite3.Connection) -> str | None:
    """Set a mark that whoever stores a name without an index will wipe; None if all names have an index.

    A mark that a killed process left does no harm: nobody asks for it again.
    """
    if not is_beyond(db):
        return None
    mark = uuid.uuid4().hex
    _set_beyond(db, mark)
    return mark


def to_change(db: sqlite3.Connection, counts: Counter[str]) -> tuple[list[str], list[str]]:
    """Names of indexes to `drop`, and then paths to `make` one on, so that the most frequent have one each."""
    made, noted = _made(db), _noted(db)
    sound = {name for name, _ in made.items() & noted.items()}
    wanted = most_frequent(counts, _indexed(db))
    names = {path: _name(number) for path in wanted if (number := index_of(db, path)) is not None}
    kept = {path: name for path, name in names.items() if name in sound}
    return sorted({*made, *noted} - {*kept.values()}), [path for path in wanted if path not in kept]


def drop(db: sqlite3.Connection, name: str) -> None:
    """Drop an index, in a transaction of the caller's, unless all names have one by now."""
    if not is_beyond(db):
        return
    # Images that brought its name since it was last counted wiped no mark, for it had an index.
    _set_beyond(db)
    db.execute(f"DROP INDEX IF EXISTS {name}")
    db.execute("DELETE FROM attribute_indexes WHERE ? || id = ?", (PREFIX, name))


def make(db: sqlite3.Connection, path: str) -> None:
    """Index a path if there is room for it, in a transaction of the caller's, unless all have an index by now."""
    if is_beyond(db) and index_of(db, path) is None:
        _add_paths(db, [path])


def settle(db: sqlite3.Connection, mark: str, names: Iterable[str]) -> bool:
    """Note that all names have an index, in a transaction of the caller's, if that is sure; whether all have one.

    Args:
        mark: from `watch`.
        names: that images had at a moment after it.
    """
    if _mark(db) == mark and _noted(db) == _made(db) and _indexed(db).issuperset(names):
        _unset_beyond(db)
    return not is_beyond(db)


def most_frequent(counts: Counter[str], indexed: set[str]) -> list[str]:
    """The paths that should have an index; of those as frequent as each other the ones that have it keep it."""
    return sorted(counts, key=lambda path: (-counts[path], path not in indexed, path))[:MOST]


def damaged_ids(db: sqlite3.Connection) -> list[int]:
    """Ids of the images whose attributes are no JSON object in UTF-8."""
    rows = db.execute("SELECT id, CAST(attributes AS BLOB) FROM images WHERE attributes != '{}'")
    return [int(image_id) for image_id, content in rows if _parsed(content) is None]


def count_names(db: sqlite3.Connection) -> Counter[str] | None:
    """How many images have each name; None if some attributes cannot be read.

    Of names without end those that come when there are many already are left out.
    """
    counts: Counter[str] = Counter()
    for (content,) in db.execute("SELECT CAST(attributes AS BLOB) FROM images WHERE attributes != '{}'"):
        parsed = _parsed(content)
        if parsed is None:
            return None
        names = paths_of(parsed)
        counts.update(names if len(counts) < _MOST_COUNTED else names & counts.keys())
    return counts


def _parsed(content: bytes | None) -> dict[str, Any] | None:
    """A JSON object as SQLite reads it too, or None."""
    try:
        parsed = json.loads((content or b"").decode(), parse_constant=_refuse)
        if b"\\u" in (content or b""):
            json.dumps(parsed, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    except (ValueError, RecursionError):  # bytes that are no UTF-8 are a ValueError, too
        return None
    return parsed if isinstance(parsed, dict) else None


def _refuse(constant: str) -> None:
    """NaN and infinity, which only Python reads."""
    raise ValueError(constant)


def _unset_beyond(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM meta WHERE key = ?", (_BEYOND,))


def _indexed(db: sqlite3.Connection) -> set[str]:
    """JSON paths that have an index, as noted."""
    return {str(row[0]) for row in db.execute("SELECT path FROM attribute_indexes")}


def _noted(db: sqlite3.Connection) -> dict[str, str]:
    """The indexes on attributes that there should be: the statement that makes each, by its name."""
    rows = db.execute("SELECT id, path FROM attribute_indexes")
    return {_name(number): _statement(number, str(path)) for number, path in rows}


def _made(db: sqlite3.Connection) -> dict[str, str]:
    """The indexes on attributes that there are: the statement that made each, by its name."""
    rows = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND name GLOB ?", (f"{PREFIX}*",))
    return {str(name): str(statement) for name, statement in rows}


def paths_of(attributes: Mapping[str, Any], before: tuple[str, ...] = (), room: int = LONGEST - 1) -> set[str]:
    """The JSON paths that can have an index: of all texts, numbers and truth values that a condition can name.

    Args:
        attributes: of an image, or some within them.
        before: steps to these.
        room: characters that are left for further steps.
    """
    found = set()
    for name, value in attributes.items():
        left = room - len(name) - len('.""')
        if left < 0:
            continue
        if isinstance(value, _SCALARS):
            found.add(_path_of((*before, name)))
        elif isinstance(value, Mapping):
            found |= paths_of(value, (*before, name), left)
    return found - {""}


@lru_cache(maxsize=10_000)  # most images have the same few names
def _path_of(steps: tuple[str, ...]) -> str:
    """The JSON path, or nothing if it cannot be asked for: with a quote in it, or, inside others, a dot."""
    can_be_named = not any('"' in step or "." in step for step in steps) or (len(steps) == 1 and '"' not in steps[0])
    return json_path(*steps) if can_be_named else ""


def _name(number: int) -> str:
    return f"{PREFIX}{int(number)}"


def _statement(number: int, path: str) -> str:
    of_type = json_type(path)
    return f"CREATE INDEX {_name(number)} ON images({of_type}, {json_value(path)}) WHERE {of_type} IS NOT NULL"
