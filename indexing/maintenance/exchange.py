"""Export and import: the records and codes of a collection as Parquet files, for other programs and collections.

One row per image, by ascending id; the file's metadata names the checkpoint that computed the codes. The file contains
paths, not images: a snapshot (`indexing.maintenance.backup`) contains the images that the collection keeps.
"""

import io
import json
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.catalog import Catalog, NewImage, StoredImage
from hashseek.indexing.catalog.records import VECTOR_TYPE, StoredCode
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.ingest.batch import IngestReport, Writer
from hashseek.indexing.ingest.manifests import load_pyarrow
from hashseek.indexing.maintenance.scratch import new_file
from hashseek.indexing.opening import Store, open_for_adding
from hashseek.indexing.remote import is_remote
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.codes import check_codes, code_size
from hashseek.retrieval.errors import BadDataset, ForeignCodes, HashseekError
from hashseek.retrieval.label_files import Problem

FORMAT = 1
PROBLEMS = "hashseek.problems"
GROUP = 8192  # rows that are in memory at a time
_HEX = re.compile(r"[0-9a-f]{64}")
_MEDIA_TYPE = re.compile(r"image/[\w.+-]{1,80}")


def export(collection: Collection, file: Path) -> tuple[int, int]:
    """Write the record and code of every image, in a consistent state, to a new Parquet `file`.

    Returns:
        (how many images were written, how many of them have no code; an import refuses those).

    Raises:
        BadConfig: pyarrow is not installed, the file already exists, its folder does not, or it is not writable.
        OSError: the disk is full; `file` does not exist then.
    """
    pa = load_pyarrow()
    with new_file(file) as (out, scratch):
        collection.catalog.copy_to(scratch / CATALOG)
        with closing(Catalog(scratch / CATALOG, read_only=True)) as frozen:
            moment = pa.timestamp("s", tz="UTC")
            columns = {"id": pa.int64(), **_imported(frozen.n_bits), "added_at": moment, "changed_at": moment}
            n_images, after = len(frozen), 0
            about = _about(frozen.fingerprint, frozen.n_bits, n_images=n_images)
            schema = pa.schema(list(columns.items()), metadata=about)
            with pa.parquet.ParquetWriter(out, schema, compression="zstd", write_page_checksum=True) as writer:
                while page := frozen.page(after=after, limit=GROUP):
                    codes = frozen.spaces.codes_of([image.id for image in page])
                    rows = [_row(collection, image, codes.get(image.id)) for image in page]
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                    after = page[-1].id
            n_without_code = frozen.spaces.n_missing(frozen.space.id)
    return n_images, n_without_code


def shard(images: Sequence[NewImage], problems: Sequence[Problem], *, fingerprint: str, n_bits: int) -> bytes:
    """The Parquet file of encoded images, for `import_`, and of the problems with other images.

    It also has the modification times of files, so that a later `index add` can tell that they are unchanged.
    """
    pa = load_pyarrow()
    columns = {**_imported(n_bits), "mtime_ns": pa.int64()}
    about = _about(fingerprint, n_bits, n_images=len(images))
    about[PROBLEMS] = json.dumps([asdict(problem) for problem in problems])
    schema = pa.schema(list(columns.items()), metadata=about)
    rows = [{**_described(image, image.path, image), "mtime_ns": image.mtime_ns} for image in images]
    out = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=schema)
    pa.parquet.write_table(table, out, compression="zstd", write_page_checksum=True)
    return out.getvalue()


def _about(fingerprint: str, n_bits: int, *, n_images: int) -> dict[str, str]:
    values = {"format": FORMAT, "fingerprint": fingerprint, "n_bits": n_bits, "n_images": n_images}
    return {f"hashseek.{name}": str(value) for name, value in values.items()}


def _imported(n_bits: int) -> dict[str, Any]:
    """The columns that an import needs, and their types."""
    pa = load_pyarrow()
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


def _row(collection: Collection, image: StoredImage, code: StoredCode | None) -> dict[str, Any]:
    uri = os.path.realpath(collection.uri_of(image)) if collection.owns(image) else image.path
    return {
        "id": image.id,
        **_described(image, uri, code),
        "added_at": datetime.fromisoformat(image.added_at),
        "changed_at": datetime.fromisoformat(image.changed_at),
    }


def _described(image: StoredImage | NewImage, uri: str, code: StoredCode | NewImage | None) -> dict[str, Any]:
    return {
        "key": image.key,
        "uri": uri,
        "sha256": image.sha256,
        "size": image.bytes,
        "width": image.width,
        "height": image.height,
        "media_type": image.media_type,
        "labels": list(image.labels),
        "attributes": json.dumps(image.attributes, ensure_ascii=False),
        "code": None if code is None else code.code.tobytes(),
        "engine": None if code is None else code.engine,
    }


def import_(place: Path, folder: Path, *, checkpoint: Path | None) -> Generator[IngestReport, None, None]:
    """Add the images of an export to the collection in `folder`, or to a new one for `checkpoint`.

    Keys, labels, attributes, codes and engines are kept; ids and times are new. Importing again adds nothing twice. An
    image of an export with a stored key replaces that record's labels and attributes; without a key, a stored image
    with the same content keeps its own, with a note.

    Args:
        place: an export, or a folder of them (`*.parquet`, by name), such as the one from `index add --ray`.
        folder: the folder of the collection.
        checkpoint: the checkpoint that computed the codes; needed for a new collection.

    Yields:
        The running report after each committed group of images.

    Raises:
        BadConfig: pyarrow is not installed.
        BadDataset: a file is missing, damaged, or not an export. Rows before the damage are added.
        ForeignCodes: the codes are of another checkpoint; nothing of the file was added.
        BadCollection: no collection, and no checkpoint to create one for.
    """
    files = sorted(place.glob("*.parquet")) or [place]
    fingerprint = None if checkpoint is None else load_header(checkpoint).fingerprint
    with open_export(files[0], fingerprint):  # it is refused before a collection is created
        pass
    with open_for_adding(folder, checkpoint=checkpoint) as collection:
        yield from add_exports(files, collection)
        collection.save_index()


def add_exports(files: Iterable[Path], collection: Store) -> Generator[IngestReport, None, None]:
    """Add the images of exports; yields the running report after each committed group of images.

    Shards of `index add --ray` also have problems, of the images that are missing.

    Raises:
        BadDataset, ForeignCodes: see `import_`.
    """
    report, writer = IngestReport(), Writer(collection)
    for file in files:
        with open_export(file, collection.fingerprint) as (groups, problems):
            skipped = sum(problem.skipped for problem in problems)
            report = report.plus(IngestReport(skipped=skipped, problems=problems))
            yield report
            for images in groups:
                report = report.plus(writer.add(images))
                yield report
    if (notes := writer.notes_of_run()).problems:
        yield report.plus(notes)


@contextmanager
def open_export(file: Path, fingerprint: str | None) -> Iterator[tuple[Iterator[list[NewImage]], list[Problem]]]:
    """Open an export, whose codes must be of the checkpoint with this fingerprint, if one is given.

    Yields:
        (its images, in groups; of a shard, problems with others).

    Raises:
        BadConfig: pyarrow is not installed.
        BadDataset: `file` is missing, damaged, or not an export; for a damaged row, when that row is read.
        ForeignCodes: the codes are of another checkpoint.
    """
    pa = load_pyarrow()
    if not file.is_file():
        raise BadDataset(f"there is no export {file}: check the path")
    with _unreadable(file):
        opened = pa.parquet.ParquetFile(file, page_checksum_verification=True)
    with closing(opened):
        with _unreadable(file):
            about = _checked(opened.schema_arrow)
            groups = _read_groups(opened, file, int(about["hashseek.n_bits"]), n_images=int(about["hashseek.n_images"]))
            problems = [Problem(**fields) for fields in json.loads(about.get(PROBLEMS, "[]"))]
            found = about["hashseek.fingerprint"]
        if fingerprint not in (None, found):
            raise ForeignCodes(
                f"{file} holds codes of checkpoint {found[:12]}, not of {fingerprint[:12]}: distances "
                "between them are meaningless; import it into a collection of its own checkpoint"
            )
        yield groups, problems


def _read_groups(opened: Any, file: Path, n_bits: int, *, n_images: int) -> Iterator[list[NewImage]]:
    """The images in groups; of an export, those without a key first.

    After an image with the same content and a key, `add` would treat them as known.
    """
    n_read = 0
    for keyed in (False, True) if "id" in opened.schema_arrow.names else (None,):
        batches = opened.iter_batches(batch_size=GROUP)
        while True:
            with _unreadable(file):
                if (batch := next(batches, None)) is None:
                    break
                if keyed is not None:
                    batch = batch.filter(batch["key"].is_valid() if keyed else batch["key"].is_null())
                images = [_image(row, n_bits) for row in batch.to_pylist()]
            n_read += len(images)
            if images:
                yield images
    if n_read != n_images:
        raise BadDataset(f"{file} has {n_read} of {n_images} rows: write it again")


@contextmanager
def _unreadable(file: Path) -> Iterator[None]:
    """Raise errors of reading an export as `BadDataset`."""
    try:
        yield
    except (
        load_pyarrow().ArrowException,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
        HashseekError,
    ) as error:
        raise BadDataset(
            f"{file} is not an intact export: {error}; write it again with this version of Hashseek"
        ) from None


def _checked(schema: Any) -> dict[str, str]:
    """The metadata of an export with all columns."""
    about = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
    if about.get("hashseek.format") != str(FORMAT):
        raise BadDataset("its format version is missing or not supported")
    found = dict(zip(schema.names, schema.types, strict=True))
    expected = _imported(int(about["hashseek.n_bits"]))
    if wrong := [f"{name} ({kind})" for name, kind in expected.items() if found.get(name) != kind]:
        raise BadDataset(f"columns are missing or have other types: {', '.join(wrong)}")
    return about


def _image(row: dict[str, Any], n_bits: int) -> NewImage:
    """The image of a row, whose values are checked: the file may come from elsewhere."""
    is_vector = row["media_type"] == VECTOR_TYPE
    sizes = ("size",) if is_vector else ("size", "width", "height")
    is_valid = {
        "code": row["code"] is not None,
        "sha256": _HEX.fullmatch(row["sha256"] or ""),
        "uri": row["uri"] == "" if is_vector else is_remote(row["uri"] or "") or (row["uri"] or "").startswith("/"),
        "labels": None not in (row["labels"] or ()),
        "media_type": is_vector or _MEDIA_TYPE.fullmatch(row["media_type"] or ""),
        **{name: (row[name] or 0) > 0 for name in sizes},
    }
    if "mtime_ns" in row:
        is_valid["mtime_ns"] = isinstance(row["mtime_ns"], int | None)
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
        # The images of an export are different ones, and whole records; those of a shard are of `index add`.
        is_record="id" in row,
        adopts="id" not in row,
        attributes=json.loads(row["attributes"] or "{}"),
        engine=row["engine"] or "",
        mtime_ns=row.get("mtime_ns"),
    )
