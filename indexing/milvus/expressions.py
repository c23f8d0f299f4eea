"""Filters as boolean expressions of Milvus, with the meaning that they have in the catalog of a folder."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hashseek.indexing.catalog.conditions import Condition, parse_number, readings, ways_to_meet
from hashseek.indexing.catalog.filters import Filter


def literal(value: Any) -> str:
    """A string, number, boolean or list in an expression."""
    return json.dumps(value, ensure_ascii=False)


def both(*expressions: str) -> str:
    """An expression that holds where all of these do; an empty one holds everywhere."""
    return " and ".join(f"({one})" for one in expressions if one)


def expression(among: Filter | None) -> str:
    """An expression that selects the same images as a filter; empty for None."""
    if among is None:
        return ""
    parts = []
    if among.any_labels:
        parts.append(f"array_contains_any(labels, {literal(among.any_labels)})")
    if among.all_labels:
        parts.append(f"array_contains_all(labels, {literal(among.all_labels)})")
    if among.no_labels:
        parts.append(f"not array_contains_any(labels, {literal(among.no_labels)})")
    if among.ids is not None:
        parts.append(f"id in {literal([i for i in among.ids if 0 <= i < 2**63])}")
    if among.keys is not None:
        parts.append(f"key in {literal([key for key in among.keys if key])}")  # images without a key have an empty one
    if among.added_after is not None:
        parts.append(f"added_at >= {literal(among.added_after)}")
    if among.added_before is not None:
        parts.append(f"added_at < {literal(among.added_before)}")
    return both(*parts, *map(_condition, among.attributes))


def _condition(condition: Condition) -> str:
    return " or ".join(
        f"({test})" for steps in readings(condition.path) if all(steps) for test in _tests(condition, steps)
    )


def _tests(condition: Condition, steps: tuple[str, ...]) -> Iterable[str]:
    within = "".join(f"[{literal(step)}]" for step in steps)
    for kind, tests in ways_to_meet(condition):  # Milvus itself compares only values of the same type
        attribute = f"{'numbers' if kind == 'spelt number' else 'attributes'}{within}"
        yield " and ".join(f"{attribute} {'==' if name == '=' else name} {literal(value)}" for name, value in tests)


def spelt_numbers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers contained in string attributes, by the same names: Milvus cannot read a number from a string."""
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, Mapping):
            if inner := spelt_numbers(value):
                found[name] = inner
        elif isinstance(value, str) and (number := parse_number(value.strip(" "))) is not None:
            found[name] = number
    return found
