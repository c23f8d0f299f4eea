"""Rows of a collection in Milvus: fields, ids, and the conversion to records."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hashseek.indexing.catalog import NewImage, StoredImage
from hashseek.indexing.catalog.records import FileRecord, StoredCode
from hashseek.indexing.milvus.expressions import spelt_numbers

Row = dict[str, Any]

N_IDS = 2**53  # ids are below this: JavaScript rounds larger numbers
CODE = "code"
N_LISTS = 1024  # of BIN_IVF_FLAT
INDEXED = (CODE, "sha256")  # fields; their indexes have the same names
_TEXT = {"key": 2048, "path": 65_535, "sha256": 64, "media_type": 255, "engine": 255, "added_at": 32, "changed_at": 32}
_INTEGERS = ("width", "height", "bytes", "mtime_ns")
RECORD = ["id", *_TEXT, *_INTEGERS, "labels", "attributes"]


def make_schema(description: str, *, n_bytes: int) -> Any:
    """The fields of a new collection. Milvus has no empty values: "" is no key, -1 no modification time."""
    from pymilvus import DataType as types
    from pymilvus import MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False, description=description)
    schema.add_field("id", types.INT64, is_primary=True)
    for name, size in _TEXT.items():
        schema.add_field(name, types.VARCHAR, max_length=size)
    for name in _INTEGERS:
        schema.add_field(name, types.INT64)
    # In bytes of UTF-8, of which a character has up to four.
    schema.add_field("labels", types.ARRAY, element_type=types.VARCHAR, max_capacity=1000, max_length=800)
    schema.add_field("attributes", types.JSON)
    schema.add_field("numbers", types.JSON)
    schema.add_field(CODE, types.BINARY_VECTOR, dim=8 * n_bytes)
    return schema


def make_indexes(kind: str) -> Any:
    """The indexes of a new collection; `kind` as in `MilvusUri.index`."""
    from pymilvus import MilvusClient

    indexes = MilvusClient.prepare_index_params()
    if kind == "ivf":
        indexes.add_index(CODE, index_type="BIN_IVF_FLAT", metric_type="HAMMING", params={"nlist": N_LISTS})
    else:
        indexes.add_index(CODE, index_type="BIN_FLAT", metric_type="HAMMING")
    indexes.add_index("sha256", index_type="Trie")
    return indexes


def ids_of(image: NewImage) -> tuple[int, int]:
    """The two ids that an image may have. It gets the first unless another image already has it by chance.

    They are hashes of the key, or of the content without one. So several writers that add the same image write the same
    row, and none has to ask another for an id. Among a billion images, about 60 have their second id.
    """
    return ids_of_key(image.key) if image.key is not None else _ids(f"content:{image.sha256}")


def ids_of_key(key: str) -> tuple[int, int]:
    """Like `ids_of`, for the image with this key."""
    return _ids(f"key:{key}")


def _ids(identity: str) -> tuple[int, int]:
    digest = hashlib.sha256(identity.encode()).digest()
    first, second = (1 + int.from_bytes(digest[at : at + 8]) % (N_IDS - 1) for at in (0, 8))
    return first, second


def find_row(image: NewImage, rows: Mapping[int, Row]) -> Row | None:
    """The row of an image that is already stored: by its key, or without one by its content.

    Of several with its content, that of its path, or else the one with the lowest id.
    """
    if image.key is not None:
        return next((rows[i] for i in ids_of(image) if i in rows and rows[i]["key"] == image.key), None)
    same = (row for row in rows.values() if row["sha256"] == image.sha256)
    return min(same, key=lambda row: (row["path"] != image.path, row["id"]), default=None)


def content_of(image: NewImage) -> Row:
    """The fields that follow from an image's content and file."""
    return {
        "path": image.path,
        "sha256": image.sha256,
        "width": image.width,
        "height": image.height,
        "bytes": image.bytes,
        "media_type": image.media_type,
        "mtime_ns": -1 if image.mtime_ns is None else image.mtime_ns,
        "engine": image.engine,
        CODE: image.code.tobytes(),
    }


def described(labels: Iterable[str], attributes: Mapping[str, Any]) -> Row:
    """The fields of labels and attributes."""
    return {
        "labels": sorted(set(labels)),
        "attributes": dict(attributes),
        "numbers": spelt_numbers(attributes),
    }


def stored_image(row: Row) -> StoredImage:
    """The record in a row."""
    names = ("id", "path", "sha256", "width", "height", "bytes", "media_type", "added_at", "attributes", "changed_at")
    return StoredImage(**{name: row[name] for name in names}, labels=tuple(row["labels"]), key=row["key"] or None)


def file_record(row: Row) -> FileRecord:
    """The part of a row that is about its file."""
    mtime_ns = None if row["mtime_ns"] == -1 else row["mtime_ns"]
    return FileRecord(row["id"], row["key"] or None, row["bytes"], mtime_ns, True)


def stored_code(row: Row) -> StoredCode:
    """The code in a row, and the engine that computed it."""
    return StoredCode(np.frombuffer(code_bytes(row), np.uint8), row["engine"], None)


def code_bytes(row: Row) -> bytes:
    """The packed code of a row. A query returns binary vectors as a list of one."""
    code = row[CODE]
    return code if isinstance(code, bytes) else bytes(code[0])
