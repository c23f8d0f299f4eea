"""What a catalog takes and gives: images, code spaces, changes; and the limits of what a caller may say of an image."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadConfig

MAX_KEY = 512  # characters
MAX_ATTRIBUTES = 16 * 1024  # bytes of JSON
MAX_DEPTH = 32
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON writes it; a backslash that is meant is doubled

Change = Literal["added", "updated", "known"]


@dataclass(frozen=True)
class NewImage:
    """An image to be added. `code` is packed (code_size,).

    Args:
        labels: none given: those of a stored image with this key stay.
        key: the caller's own name for the image, see `check_key`.
        attributes: a JSON object, see `check_attributes`; empty: those of a stored image with this key stay.
        mtime_ns: modification time of the file when it was read, None if it is no file.
        engine: what computed the code, see `hashseek.retrieval.encoder`; empty: unknown.
    """

    path: str
    sha256: str
    width: int
    height: int
    bytes: int
    media_type: str
    labels: tuple[str, ...]
    code: NDArray[np.uint8]
    key: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    mtime_ns: int | None = None
    engine: str = ""


@dataclass(frozen=True)
class StoredImage:
    """An image of the catalog, without its code. Times are UTC, as in 2026-11-21T17:50:32Z."""

    id: int
    path: str
    sha256: str
    width: int
    height: int
    bytes: int
    media_type: str
    labels: tuple[str, ...]
    added_at: str
    key: str | None
    attributes: dict[str, Any]
    changed_at: str


@dataclass(frozen=True)
class OfFile:
    """What a record says of its file: bytes, and nanoseconds if known; and whether it has a code."""

    id: int
    key: str | None
    bytes: int
    mtime_ns: int | None
    has_code: bool


@dataclass(frozen=True)
class Changes:
    """What happened since a generation.

    `ids` (ascending) were added, or have another code than before: `codes` (N, code_size). What was known of the ids
    in `removed` no longer counts: they are gone, or among `ids`. With `whole`, `ids` are all that there are.
    """

    generation: int
    ids: NDArray[np.int64]
    codes: Codes
    removed: NDArray[np.int64]
    whole: bool


@dataclass(frozen=True)
class Space:
    """A code space: the codes that one checkpoint gives to the images. `checkpoint` is its file in the folder."""

    id: int
    fingerprint: str
    n_bits: int
    checkpoint: str
    state: str
    created_at: str


def check_key(key: str) -> str:
    """Return `key` if it can be the key of an image.

    Raises:
        BadConfig: it is empty, longer than `MAX_KEY` characters, no text that can be written as UTF-8, or holds a NUL
            character, at which SQLite ends a text: "a\\0b" would pass for "a".
    """
    if not 1 <= len(key) <= MAX_KEY:
        raise BadConfig(f"a key has 1 to {MAX_KEY} characters, not {len(key)}: {key[:40]!r}")
    if "\0" in key:
        raise BadConfig(f"the key {key[:40]!r} holds a NUL character (U+0000): leave it out")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise BadConfig(f"the key {key[:40]!r} is not valid UTF-8: choose another") from None
    return key


def check_attributes(attributes: Mapping[str, Any]) -> str:
    """The JSON text of `attributes` as it is stored.

    Raises:
        BadConfig: it is no JSON object, has names that are no texts, more than `MAX_ATTRIBUTES` bytes, nests more than
            `MAX_DEPTH` deep, or holds a NUL character, at which SQLite ends a text: "a\\0b" would pass for "a".
    """
    if not isinstance(attributes, Mapping):
        raise BadConfig(f"attributes are a JSON object, not {attributes!r:.40}")
    # Checked first: what nests without end cannot be written, and SQLite reads no more than 1,000 levels.
    if _is_deeper(attributes, MAX_DEPTH):
        raise BadConfig(f"attributes nest at most {MAX_DEPTH} deep: put them flatter")
    if not _has_text_names(attributes):
        raise BadConfig("names of attributes are texts, and one here is none: write it as text")
    try:
        text = json.dumps(dict(attributes), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        n_bytes = len(text.encode())
    except (TypeError, ValueError) as error:
        raise BadConfig(f"attributes are a JSON object, and these cannot be written as one: {error}") from None
    if n_bytes > MAX_ATTRIBUTES:
        raise BadConfig(f"the attributes of an image have at most {MAX_ATTRIBUTES:,} bytes as JSON, not {n_bytes:,}")
    if _NUL.search(text):
        raise BadConfig("attributes hold a NUL character (U+0000), which no filter could tell apart: leave it out")
    return text


def _has_text_names(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _has_text_names(inner) for name, inner in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_names, value))


def same_attributes(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether both say the same; 1, 1.0 and true are three values, as filters tell them apart."""
    return json.dumps(dict(first), sort_keys=True) == json.dumps(dict(second), sort_keys=True)


def _is_deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return depth < 0 or any(_is_deeper(part, depth - 1) for part in inner)
