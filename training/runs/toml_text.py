"""A configuration's content as TOML; the standard library only reads it."""

import json
import re
from collections.abc import Mapping
from typing import Any


def as_toml(content: Mapping[str, Any], *, header: str = "") -> str:
    """TOML of sections of values; values that are None, which TOML has no word for, are left out.

    Args:
        content: section -> key -> value, where a value may be a number, word, truth value, list or table.
        header: lines of a comment in front.
    """
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for section, values in content.items():
        lines += ["", f"[{_key(section)}]"]
        lines += [f"{_key(key)} = {as_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines).lstrip("\n") + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def as_value(value: Any) -> str:
    """One value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {as_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(as_value(inner) for inner in value) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
