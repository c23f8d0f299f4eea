"""Conditions on the attributes of images, such as `year>=2015`: parsing them and turning them into SQL."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from hashseek.retrieval.errors import BadConfig

_SYNTAX = "write NAME=VALUE, NAME>=VALUE, NAME<=VALUE, NAME>VALUE, NAME<VALUE, or NAME^=BEGINNING"
_CONDITION = re.compile(r"(?P<path>[^=<>^!~\"\0]*[^=<>^!~\"\0\s])\s*(?P<operator>=|>=|<=|>|<|\^=)(?P<value>[^\0]*)")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
Kind = Literal["text", "number", "spelt number", "boolean"]  # a spelt number is a string
_NUMERIC: tuple[Kind, ...] = ("number", "spelt number")
_TYPES = {"text": "= 'text'", "number": "IN ('integer', 'real')", "spelt number": "= 'text'"}


@dataclass(frozen=True)
class Condition:
    """A condition on one attribute, from `parse_condition`.

    `=` matches a string equal to `value`, and the number or boolean written as `value`. `^=` matches strings that
    start with `value`. The other operators compare numbers, and strings that contain one, if `value` is a number;
    otherwise they compare strings by code point, so that ISO dates compare as dates.

    Args:
        path: name of the attribute; `camera.model` also matches `model` inside the object `camera`.
        operator: =, >=, <=, >, < or ^=.
        value: the value as it was written.
        is_text: compare as strings even if `value` is a number.
    """

    path: str
    operator: str
    value: str
    is_text: bool = False


def parse_condition(text: str) -> Condition:
    """Parse a condition such as `camera=X`, `year>=2015`, `title^=abc` or `zip="01234"`.

    Raises:
        BadConfig: the syntax is wrong.
    """
    match = _CONDITION.fullmatch(text.lstrip())  # `\s*` in front of the path would take quadratic time
    value = match["value"].strip() if match else ""
    is_text = len(value) >= 2 and value[0] == value[-1] == '"'
    if match is None or value[:1] in ("=", "<", ">", "^", "~"):
        raise BadConfig(f"{text[:80]!r} is not a condition on an attribute: {_SYNTAX}")
    return Condition(match["path"], match["operator"], value[1:-1] if is_text else value, is_text)


def ways_to_meet(condition: Condition) -> list[tuple[Kind, list[tuple[str, Any]]]]:
    """The ways to meet a condition: the kind of value that an attribute must have, and the comparisons it must pass."""
    value, operator = condition.value, condition.operator
    if operator == "^=":
        return [("text", [(">=", value), ("<", value + "\U0010ffff")])]  # the last code point, never a character
    number = None if condition.is_text else parse_number(value)
    if operator != "=":
        return [("text", [(operator, value)])] if number is None else [(k, [(operator, number)]) for k in _NUMERIC]
    ways: list[tuple[Kind, list[tuple[str, Any]]]] = [("text", [("=", value)])]
    if number is not None:
        ways.append(("number", [("=", number)]))
    elif value in ("true", "false") and not condition.is_text:
        ways.append(("boolean", [("=", value == "true")]))
    return ways


def alternatives(condition: Condition, path: str) -> list[tuple[str, list[Any]]]:
    """SQL clauses and their values; the condition holds for the attribute at a JSON path if one of the clauses does.

    Each tests the type first and then the value, in the order of the columns of the indexes on attributes.
    """
    found: list[tuple[str, list[Any]]] = []
    for kind, tests in ways_to_meet(condition):
        if kind == "boolean":  # SQLite's type of a JSON boolean is its value
            found.append((f"{json_type(path)} = '{condition.value}'", []))
            continue
        attribute, clauses = json_value(path), [f"{json_type(path)} {_TYPES[kind]}"]
        if kind == "spelt number":  # the string equals the number that SQLite reads from its beginning
            spelt = f"CAST({attribute} AS NUMERIC)"
            clauses, attribute = [*clauses, f"{attribute} = {spelt}"], spelt
        clauses += [f"{attribute} {operator} ?" for operator, _ in tests]
        found.append((" AND ".join(clauses), [value for _, value in tests]))
    return found


def json_type(path: str) -> str:
    """SQL for the JSON type of the attribute at a path."""
    return f"json_type(attributes, {_literal(path)})"


def json_value(path: str) -> str:
    """SQL for the attribute at a path."""
    return f"json_extract(attributes, {_literal(path)})"


def json_paths(name: str) -> list[str]:
    """JSON paths of an attribute's name, see `readings`."""
    return [json_path(*steps) for steps in readings(name)]


def readings(name: str) -> list[tuple[str, ...]]:
    """The steps that an attribute's name can mean: the name as it is, and the parts between its dots."""
    return [(name,), tuple(name.split("."))] if "." in name else [(name,)]


def json_path(*steps: str) -> str:
    """The JSON path of these names. SQLite compares with the stored JSON, where a backslash or line feed is escaped."""
    return "$" + "".join(f'."{json.dumps(step, ensure_ascii=False)[1:-1]}"' for step in steps)


def _literal(text: str) -> str:
    # Not a parameter: SQLite uses an index on an expression only if the query contains exactly that expression.
    return "'" + text.replace("'", "''") + "'"


def parse_number(text: str) -> int | float | None:
    """The number that a string contains; None if it is not a number."""
    if _NUMBER.fullmatch(text) is None:
        return None
    if re.fullmatch(r"[+-]?\d{1,19}", text) and -(2**63) <= int(text) < 2**63:
        return int(text)  # as SQLite stores it; a float could not tell it from its neighbours
    number = float(text)
    return number if math.isfinite(number) else None
