"""Paths in the settings of data sets and weights."""

import os
import re
from pathlib import Path

from hashseek.retrieval.errors import BadConfig


def expand(path: str) -> Path:
    """The path with `~` and `$NAME` expanded, see `expand_text`."""
    return Path(expand_text(path))


def expand_text(path: str) -> str:
    """`path` with `~` and `$NAME` expanded and nothing else changed: for patterns, and names that may not be paths.

    Raises:
        BadConfig: a variable is not set.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 - pathlib has no expandvars
    missing = re.search(r"\$\{?(\w+)", expanded)
    if missing:
        raise BadConfig(f"the path {path} needs the environment variable {missing[1]}, which is not set")
    return expanded
