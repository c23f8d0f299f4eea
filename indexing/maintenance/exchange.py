"""Export and import: the records and codes of a collection as a Parquet file, for other programs and collections.

One row per image, by ascending id; the file's metadata names the checkpoint that computed the codes. The file contains
paths, not images: a snapshot (`indexing.maintenance.backup`) contains the images that the collection keeps.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import Catalog, NewImage, StoredImage
from hashseek.indexing.catalog.records import VECTOR_TYPE
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.ingest.uris import is_remote
from hashseek.indexing.maintenance.scratch import new_file
from hashseek.indexing.opening import open_store_for_adding
from hashseek.retrieval.codes import check_codes, code_size
from hashseek.retrieval.errors import BadConfig, BadDataset, ForeignCodes, HashseekError

FORMAT = 1
GROUP = 8192  # rows that are in memory at a time
_HEX = re.compile(r"[0-9a-f]{64}")
_MEDIA_TYPE = re.compile(r"image/[\w.+-]{1,80}")


@dataclass(frozen=True)
class Exported:
    """How many images were written, and how many of them without a code; an import refuses those."""

    n_images: int
    n_without_code: int


def export(collection: Collection, file: Path) -> Exported:
    """Write the record and code of every image, as of one moment, to a new Parquet `file`.

    Raises:
        BadConfig: pyarrow is not installed, the file exists already, its folder does not, or no permission to write.
        OSError: the disk is full; `file` does not exist then.
    """
    pa, parquet = _pyarrow()
    with new_file(file) as (out, scratch):
        collection.catalog.copy_to(scratch / CATALOG)
        with closing(Catalog(scratch / CATALOG, read_only=True)) as frozen:
            schema = _schema(pa, frozen)
            n_images = n_without_code = 0
            with parquet.ParquetWriter(out, schema, compression="zstd", write_page_checksum=True) as writer:
                for rows in _groups(collection, frozen):
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                    n_images += len(rows)
                    n_without_code += sum(row["code"] is None for row in rows)
    return Exported(n_images, n_without_code)


def _schema(pa: ModuleType, catalog: Catalog) -> Any:
    moment = pa.timestamp("s", tz="UTC")
    columns = {"id": pa.int64(), **_imported(pa, catalog.n_bits), "added_at": moment, "changed_at": moment}
    about = {
        "hashseek.format": str(FORMAT),
        "hashseek.fingerprint": catalog.fingerprint,
        "hashseek.n_bits": str(catalog.n_bits),
        "hashseek.n_images": str(len(catalog)),
        "hashseek.kept_groups": json.dumps(catalog.kept_groups()),
    }
    return pa.schema(list(columns.items()), metadata=about)


def _imported(pa: ModuleType, n_bits: int) -> dict[str, Any]:
    """The columns that an import needs, and their types."""
    return {
        "key": pa.string(),
        "uri": pa.string(),
        "sha256": pa.string(),
        "size": pa.int64(),
        "width": pa.int32(),
        "height": pa.int32(),
        "media_type": pa.string(),
        "labels": pa.list_(pa.string()),
        "attributes": pa.string(),
        "code": pa.binary(code_size(n_bits)),
        "engine": pa.string(),
    }


def _groups(collection: Collection, catalog: Catalog) -> Iterator[list[dict[str, Any]]]:
    after = 0
    while page := catalog.page(after=after, limit=GROUP):
        codes = catalog.spaces.codes_of([image.id for image in page])
        yield [_row(collection, image, *codes.get(image.id, (None, None))) for image in page]
        after = page[-1].id


def _row(
    collection: Collection, image: StoredImage, code: NDArray[np.uint8] | None, engine: str | None
) -> dict[str, Any]:
    return {
        "id": image.id,
        "key": image.key,
        "uri": os.path.realpath(collection.uri_of(image)) if collection.owns(image) else image.path,
        "sha256": image.sha256,
        "size": image.bytes,
        "width": image.width,
        "height": image.height,
        "media_type": image.media_type,
        "labels": list(image.labels),
        "attributes": json.dumps(image.attributes, ensure_ascii=False),
        "added_at": datetime.fromisoformat(image.added_at),
        "changed_at": datetime.fromisoformat(image.changed_at),
        "code": None if code is None else code.tobytes(),
        "engine": engine,
    }


def import_(file: Path, folder: Path, *, checkpoint: Path | None) -> dict[str, int]:
    """Add the images of an export to the collection in `folder`, or to a new one for `checkpoint`.

    Keys, labels, attributes, codes, engines and decisions about near-duplicates are kept; ids and times are new.
    Imported again, nothing is added twice.

    Returns:
        How many were "added", "updated" and "known".

    Raises:
        BadConfig: pyarrow is not installed.
        BadDataset: `file` is missing, damaged, or not what `export` writes. Rows before the damage were added.
        ForeignCodes: the codes are of another checkpoint; nothing was added.
        BadCollection: no collection, and no checkpoint to create one for.
    """
    pa, parquet = _pyarrow()
    if not file.is_file():
        raise BadDataset(f"there is no export {file}: correct the path")
    with _unreadable(file, pa):
        opened = parquet.ParquetFile(file, page_checksum_verification=True)
    outcome = {"added": 0, "updated": 0, "known": 0}
    with closing(opened):
        with _unreadable(file, pa):
            fingerprint, n_images = _check_columns(pa, opened.schema_arrow)
            groups = json.loads(opened.schema_arrow.metadata.get(b"hashseek.kept_groups", b"[]"))
            kept = [[int(image_id) for image_id in group] for group in groups]
        with open_store_for_adding(folder, checkpoint=checkpoint) as collection:
            if fingerprint != collection.fingerprint:
                raise ForeignCodes(
                    f"{file} holds codes of checkpoint {fingerprint[:12]}, not of {collection.fingerprint[:12]}: "
                    "distances between them mean nothing; import it into a collection of its own checkpoint"
                )
            replaced = set[str]()  # kept files that a later row may name
            new_ids: dict[int, int | None] = dict.fromkeys(image_id for group in kept for image_id in group)
            try:
                batches = opened.iter_batches(batch_size=GROUP)
                while True:
                    with _unreadable(file, pa):
                        batch = next(batches, None)
                        rows = [] if batch is None else batch.to_pylist()
                        images = [_image(row, collection.n_bits) for row in rows]
                    if batch is None:
                        break
                    for row, (image_id, what) in zip(rows, collection.add(images, replaced=replaced), strict=True):
                        outcome[what] += 1
                        if row.get("id") in new_ids:
                            new_ids[row["id"]] = image_id
            finally:
                collection.drop_files(replaced)
            if kept and isinstance(collection, Collection):  # a store in Milvus finds no near-duplicates
                # Images that were removed have no new id.
                collection.catalog.keep_groups([[new for i in group if (new := new_ids[i])] for group in kept])
            collection.save_index()
    if sum(outcome.values()) != n_images:
        raise BadDataset(f"{file} has {sum(outcome.values())} of {n_images} rows: export the collection again")
    return outcome


@contextmanager
def _unreadable(file: Path, pa: ModuleType) -> Iterator[None]:
    """Raise errors of reading an export as `BadDataset`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, HashseekError) as error:
        raise BadDataset(f"{file} is not an intact export: {error}; export the collection again") from None


def _check_columns(pa: ModuleType, schema: Any) -> tuple[str, int]:
    """(fingerprint, number of images) of an export with all metadata and columns."""
    about = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
    if about.get("hashseek.format") != str(FORMAT):
        raise BadDataset("it has no or another format version, so use the Hashseek that wrote it")
    found = dict(zip(schema.names, schema.types, strict=True))
    expected = _imported(pa, int(about["hashseek.n_bits"]))
    if wrong := [f"{name} ({kind})" for name, kind in expected.items() if found.get(name) != kind]:
        raise BadDataset(f"columns are missing or have other types: {', '.join(wrong)}")
    return about["hashseek.fingerprint"], int(about["hashseek.n_images"])


def _image(row: dict[str, Any], n_bits: int) -> NewImage:
    """The image of a row, whose values are checked: the file may come from elsewhere."""
    is_vector = row["media_type"] == VECTOR_TYPE
    sizes = ("size",) if is_vector else ("size", "width", "height")
    is_valid = {
        "code": row["code"] is not None,
        "sha256": _HEX.fullmatch(row["sha256"] or ""),
        "uri": row["uri"] == "" if is_vector else is_remote(row["uri"] or "") or (row["uri"] or "").startswith("/"),
        "media_type": is_vector or _MEDIA_TYPE.fullmatch(row["media_type"] or ""),
        **{name: (row[name] or 0) > 0 for name in sizes},
    }
    for name, valid in is_valid.items():
        if not valid:
            raise BadDataset(f"the {name} of image {row.get('id')} is {row[name]!r:.80}")
    return NewImage(
        path=row["uri"],
        sha256=row["sha256"],
        width=row["width"],
        height=row["height"],
        bytes=row["size"],
        media_type=row["media_type"],
        labels=tuple(row["labels"] or ()),
        code=check_codes(np.frombuffer(row["code"], np.uint8)[None], n_bits)[0],
        key=row["key"],
        attributes=json.loads(row["attributes"] or "{}"),
        engine=row["engine"] or "",
    )


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadConfig("Parquet needs pyarrow: pip install 'hashseek[parquet]'") from None
    return pyarrow, pyarrow.parquet
