"""The exceptions. All errors that a user can cause derive from `HashseekError`.

Each message names the value, the limit and the remedy. The CLI prints it and exits with 2; the API answers with a
problem JSON.
"""

import difflib
from collections.abc import Iterable


class HashseekError(Exception):
    """Base of every error that a user can cause and fix."""


class BadConfig(HashseekError):
    """A setting, option or argument is outside its limits."""


class BadCodes(HashseekError):
    """Codes or labels have the wrong shape, type or width."""


class BadImage(HashseekError):
    """A file is not a usable image."""


class BadCheckpoint(HashseekError):
    """A checkpoint or weights file cannot be trusted."""


class BadDataset(HashseekError):
    """A data set is missing, inconsistent or empty."""


class BadCollection(HashseekError):
    """A collection is missing, damaged or locked."""


class ForeignCodes(BadCollection):
    """Codes of one checkpoint were mixed with those of another."""


class UnknownImage(HashseekError):
    """No image with this id is in the collection."""


def first_line(error: Exception) -> str:
    """The first line of another library's message, or the class of the error if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, or the first ten."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (
        f"did you mean {close[0]!r}?" if close else "choose from " + ", ".join(known[:10] + ["..."] * (len(known) > 10))
    )
