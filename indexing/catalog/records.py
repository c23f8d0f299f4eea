"""Records of a catalog: images, code spaces, changes; and the limits of keys and attributes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes, pack
from hashseek.retrieval.errors import BadCollection, BadConfig
from hashseek.retrieval.scores import stored_features

VECTOR_TYPE = "application/x-vector"  # media type of records of vectors, which have no file
MAX_KEY = 512  # characters
MAX_LABELS = 1000  # of an image
MAX_LABEL = 200  # characters
MAX_ATTRIBUTES = 16 * 1024  # bytes of JSON
MAX_DEPTH = 32

Change = Literal["added", "updated", "known"]

IMAGE_COLUMNS = (
    "id, path, sha256, width, height, bytes, media_type, added_at, key, attributes, changed_at, "
    "(SELECT json_group_array(label) FROM (SELECT label FROM image_labels WHERE image_id = images.id ORDER BY label))"
)


@dataclass(frozen=True)
class NewImage:
    """An image to be added.

    Args:
        path: the path of its file, or its URL; empty for a vector.
        sha256: hash of its content.
        width, height: in pixels; 0 for a vector.
        bytes: size of its file.
        media_type: such as `image/jpeg`.
        labels: if empty, a stored image with this key keeps its labels.
        code: packed (code_size,).
        key: the caller's own name for the image, see `check_key`.
        attributes: a JSON object, see `check_attributes`; if empty, a stored image with this key keeps its attributes.
        mtime_ns: modification time of the file when it was read; None if it is not a file.
        engine: what computed the code, see `hashseek.retrieval.encoder`; empty if unknown.
        feature: (D,) from `hashseek.retrieval.scores.stored_features`; needed by a collection that keeps features.
        is_record: a whole record, as in an export: labels and attributes replace stored ones even if they are empty.
        adopts: a new key goes to the record without a key that has this path and content; not in Milvus, where the key
            decides the id.
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
    feature: NDArray[np.float16] | None = None
    is_record: bool = False
    adopts: bool = False

    @property
    def new_labels(self) -> tuple[str, ...] | None:
        """What replaces the labels of a stored image with this key; None: it keeps them."""
        return self.labels if self.labels or self.is_record else None

    @property
    def new_attributes(self) -> Mapping[str, Any] | None:
        """What replaces the attributes of a stored image with this key; None: it keeps them."""
        return self.attributes if self.attributes or self.is_record else None


class StoredCode(NamedTuple):
    """The packed code (code_size,) of an image, the engine that computed it, and its feature (D,) if that is stored."""

    code: NDArray[np.uint8]
    engine: str
    feature: NDArray[np.float16] | None


def stored_codes(engine: str, features: NDArray[np.float32], outputs: NDArray[np.float32]) -> list[StoredCode]:
    """The codes of features (B, D) and outputs (B, K) that an engine has computed."""
    rows = zip(pack(outputs), stored_features(features), strict=True)
    return [StoredCode(code, engine, feature) for code, feature in rows]


@dataclass(frozen=True)
class StoredImage:
    """An image of the catalog, without its code. Times are UTC, for example 2026-11-21T17:50:32Z."""

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
class Page:
    """Some of the records that match a filter, by ascending id."""

    images: list[StoredImage]
    next: int | None
    """The id after which the next page begins; None at the end."""
    total: int
    """How many records match."""


def page_of(ids: Sequence[int], found: Sequence[StoredImage | None], *, limit: int, total: int) -> Page:
    """A page of the first `limit` ids; `found`: their records, or None for one that was removed meanwhile."""
    images = [image for image in found[:limit] if image is not None]
    return Page(images, ids[limit - 1] if len(ids) > limit else None, total)


@dataclass(frozen=True)
class FileRecord:
    """What a record stores about its file: size in bytes, modification time if known, and whether it has a code."""

    id: int
    key: str | None
    bytes: int
    mtime_ns: int | None
    has_code: bool


@dataclass(frozen=True)
class Changes:
    """The changes since a generation.

    Args:
        generation: the generation after these changes.
        ids: ascending; images that were added or whose code changed.
        codes: their codes, packed (N, code_size).
        removed: ids whose earlier entries are no longer valid: they were removed, or are among `ids`.
        is_complete: `ids` are all images, and all earlier entries are no longer valid.
    """

    generation: int
    ids: NDArray[np.int64]
    codes: Codes
    removed: NDArray[np.int64]
    is_complete: bool


@dataclass(frozen=True)
class Space:
    """A code space: the codes that one checkpoint computes for the images. `checkpoint` is its file in the folder."""

    id: int
    fingerprint: str
    n_bits: int
    checkpoint: str
    state: str


def stored_image(row: tuple[Any, ...]) -> StoredImage:
    """The record in a row of `IMAGE_COLUMNS`.

    Raises:
        BadCollection: its labels or attributes are not JSON.
    """
    image_id, path, sha256, width, height, n_bytes, media_type, added_at, key, attributes, changed_at, labels = row
    try:
        if not (isinstance(path, str) and isinstance(sha256, str)):
            raise TypeError
        described = tuple(json.loads(labels)), added_at, key, json.loads(attributes), changed_at
    except (ValueError, TypeError):
        raise BadCollection(f"the record of image {image_id} is damaged: restore a snapshot") from None
    return StoredImage(image_id, path, sha256, width, height, n_bytes, media_type, *described)


def placeholders(values: Sequence[Any]) -> str:
    """As many question marks as values, separated by commas."""
    return ",".join("?" * len(values))


def listed_ids(ids: Iterable[int]) -> str:
    """The ids as JSON, for a query; without those that no image can have: SQLite refuses numbers beyond 64 bits."""
    return json.dumps([int(i) for i in ids if 0 <= i < 2**63])


def listed_texts(texts: Iterable[str]) -> str:
    """The texts as JSON, for a query; without those with a NUL character, at which SQLite would cut them off."""
    return json.dumps([text for text in texts if "\0" not in text])


def is_utf8(text: str) -> bool:
    """Whether `text` can be stored: a file name may hold bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_described(labels: Sequence[str], key: str | None, attributes: Mapping[str, Any]) -> str:
    """The JSON text of an image's attributes as it is stored.

    Raises:
        BadConfig: the labels, the key or the attributes exceed their limits.
    """
    check_labels(labels)
    if key is not None:
        check_key(key)
    return check_attributes(attributes)


def check_key(key: str) -> None:
    r"""Refuse a key that cannot be stored.

    Raises:
        BadConfig: it is empty, longer than `MAX_KEY` characters, not valid Unicode, or contains a NUL character, at
            which SQLite cuts off a string: "a\0b" would match "a".
    """
    if not 1 <= len(key) <= MAX_KEY:
        raise BadConfig(f"a key must have 1 to {MAX_KEY} characters, got {len(key)}: {key[:40]!r}")
    if "\0" in key:
        raise BadConfig(f"the key {key[:40]!r} contains a NUL character (U+0000): remove it")
    if not is_utf8(key):
        raise BadConfig(f"the key {key[:40]!r} is not valid Unicode: choose another")


def check_labels(labels: Sequence[str]) -> None:
    """Refuse labels that cannot be stored.

    Raises:
        BadConfig: one string instead of a list, more than `MAX_LABELS`, or one that is empty, longer than `MAX_LABEL`
            characters, not valid Unicode, or contains a control character such as NUL or a line break.
    """
    if isinstance(labels, str):
        raise BadConfig(f"labels must be a list of strings, not one string: write [{labels[:40]!r}]")
    if len(labels) > MAX_LABELS:
        raise BadConfig(f"an image may have at most {MAX_LABELS:,} labels, got {len(labels):,}")
    for label in labels:
        if not 1 <= len(label) <= MAX_LABEL:
            raise BadConfig(f"a label must have 1 to {MAX_LABEL} characters, got {len(label):,}: {label[:40]!r}")
        kinds = {category(character) for character in label}
        if "Cs" in kinds:
            raise BadConfig(f"the label {label[:40]!r} is not valid Unicode: save its file as UTF-8")
        if "Cc" in kinds:
            raise BadConfig(f"the label {label[:40]!r} contains a control character: remove it")


def check_attributes(attributes: Mapping[str, Any]) -> str:
    r"""The JSON text of `attributes` as it is stored.

    Raises:
        BadConfig: not a JSON object, larger than `MAX_ATTRIBUTES` bytes, nested deeper than `MAX_DEPTH`, with names
            that are not strings, with integers beyond 64 bits (signed), or with a NUL character, at which SQLite cuts
            off a string: "a\0b" would match "a".
    """
    if not isinstance(attributes, Mapping):
        raise BadConfig(f"attributes must be a JSON object, got {attributes!r:.40}")
    _check_part(attributes, MAX_DEPTH)
    try:
        text = json.dumps(dict(attributes), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        names = ", ".join(name for name, value in attributes.items() if not _is_json(value))
        raise BadConfig(
            f"attributes must be JSON, and {names[:80]} is not ({error}): convert or leave it out"
        ) from None
    n_bytes = len(text.encode())
    if n_bytes > MAX_ATTRIBUTES:
        raise BadConfig(
            f"the attributes of an image may have at most {MAX_ATTRIBUTES:,} bytes of JSON, got {n_bytes:,}"
        )
    return text


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _check_part(value: Any, depth: int) -> None:
    """Check depth, names and text, which `json.dumps` does not refuse.

    SQLite reads at most 1,000 levels, and Python would turn names that are numbers into strings.
    """
    if depth < 0:
        raise BadConfig(f"attributes may be nested at most {MAX_DEPTH} levels deep: flatten them")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise BadConfig("names of attributes must be strings")
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for inner in value:
            _check_part(inner, depth - 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:  # SQLite would round it, Milvus refuses it
        raise BadConfig(f"integers in attributes must be between -2^63 and 2^63 - 1, got {value}: write it as text")
    elif isinstance(value, str):
        if "\0" in value:
            raise BadConfig("attributes contain a NUL character (U+0000), which filters cannot handle: remove it")
        if not is_utf8(value):
            raise BadConfig("attributes contain text that is not valid Unicode: save their file as UTF-8")


def same_attributes(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether both are equal as JSON: 1, 1.0 and true are three different values, also for filters."""
    return json.dumps(dict(first), sort_keys=True) == json.dumps(dict(second), sort_keys=True)
