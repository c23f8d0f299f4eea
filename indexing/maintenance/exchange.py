"""Export and import: the records and codes of a collection as a Parquet file, for other programs and collections.

One row per image, by ascending id; the file's metadata names the checkpoint that computed the codes. The file contains
paths, not images: a snapshot (`indexing.maintenance.backup`) contains the images that the collection keeps.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import Catalog, NewImage, StoredImage
from hashseek.indexing.catalog.records import check_attributes, check_key
from hashseek.indexing.collection import CATALOG, Collection, open_for_adding
from hashseek.indexing.ingest.uris import is_remote
from hashseek.indexing.maintenance.scratch import new_file
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.codes import check_codes, code_size
from hashseek.retrieval.errors import BadConfig, BadDataset, ForeignCodes, HashseekError

FORMAT = 1
GROUP = 8192  # rows that are in memory at a time
_ABOUT = ("format", "fingerprint", "n_bits", "n_images")  # in the metadata, as `hashseek.format` and so on
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


class Export:
    """An open export all of whose rows have been checked.

    Args:
        file: that `export` wrote.

    Raises:
        BadConfig: pyarrow is not installed.
        BadDataset: missing, truncated, damaged, not an export, or of a newer Hashseek.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        pa, parquet = _pyarrow()
        self._arrow_error = pa.ArrowException
        if not file.is_file():
            raise BadDataset(f"there is no export {file}: correct the path")
        try:
            self._opened = parquet.ParquetFile(file, page_checksum_verification=True)
            schema = self._opened.schema_arrow
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(error) from None
        try:
            about = {name: schema.metadata[f"hashseek.{name}".encode()].decode() for name in _ABOUT}
            version, self.n_bits, self.n_images = (int(about[name]) for name in ("format", "n_bits", "n_images"))
            self.fingerprint = about["fingerprint"]
        except (KeyError, TypeError, ValueError):
            raise BadDataset(
                f"{file} does not name the checkpoint of its codes: import a file that `hashseek index export` wrote"
            ) from None
        if version > FORMAT:
            raise BadDataset(f"{file} has export format {version}, this Hashseek reads up to {FORMAT}: update Hashseek")
        found = dict(zip(schema.names, schema.types, strict=True))
        wrong = [f"{name} ({kind})" for name, kind in _imported(pa, self.n_bits).items() if found.get(name) != kind]
        if wrong:
            raise BadDataset(
                f"{file} has no such columns, or of other types: {', '.join(wrong)}; export the collection again"
            )
        n_rows = sum(len(images) for images in self.batches())
        if n_rows != self.n_images:
            raise self._damaged(f"it has {n_rows} rows instead of {self.n_images}")

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def batches(self) -> Iterator[list[NewImage]]:
        """The images, `GROUP` at most at a time.

        Raises:
            BadDataset: a row is damaged or invalid; the message names it.
        """
        n_rows = 0
        try:
            for batch in self._opened.iter_batches(batch_size=GROUP):
                rows = batch.to_pylist()
                yield [self._image(row, number) for number, row in enumerate(rows, start=n_rows + 1)]
                n_rows += len(rows)
        except (self._arrow_error, OSError, ValueError) as error:
            raise self._damaged(error) from None

    def _image(self, row: dict[str, Any], number: int) -> NewImage:
        try:
            uri = row["uri"] or ""
            is_valid = {
                "sha256": _HEX.fullmatch(row["sha256"] or ""),
                "uri": (is_remote(uri) or uri.startswith("/")) and "\0" not in uri,
                "media_type": _MEDIA_TYPE.fullmatch(row["media_type"] or ""),
                **{name: (row[name] or 0) > 0 for name in ("size", "width", "height")},
            }
            for name, valid in is_valid.items():
                if not valid:
                    raise BadDataset(f"{name} is {row[name]!r:.80}")
            if row["code"] is None:
                raise BadDataset(
                    "its code is missing: repair its collection (`index verify --repair`), export it again"
                )
            code = check_codes(np.frombuffer(row["code"], np.uint8)[None], self.n_bits)[0]
            attributes = json.loads(row["attributes"] or "{}")
            check_attributes(attributes)
            key = row["key"]
            return NewImage(
                path=uri,
                sha256=row["sha256"],
                width=int(row["width"]),
                height=int(row["height"]),
                bytes=int(row["size"]),
                media_type=str(row["media_type"]),
                labels=tuple(map(str, row["labels"] or ())),
                code=code,
                key=None if key is None else check_key(key),
                attributes=attributes,
                engine=row["engine"] or "",
            )
        except (HashseekError, ValueError, TypeError) as error:
            raise BadDataset(f"{self.file} row {number}: {error}; nothing was imported") from None

    def _damaged(self, error: Exception | str) -> BadDataset:
        return BadDataset(
            f"{self.file} is damaged, cut short, or no Parquet file: {error}; export the collection again"
        )


def check_export(opened: Export, *, fingerprint: str, n_bits: int) -> None:
    """Raise `ForeignCodes` unless the export's codes are of this checkpoint."""
    if opened.fingerprint != fingerprint:
        raise ForeignCodes(
            f"{opened.file} holds codes of checkpoint {opened.fingerprint[:12]} ({opened.n_bits} bits), not of "
            f"{fingerprint[:12]} ({n_bits} bits): distances between them mean nothing; import with the export's own "
            "checkpoint"
        )


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadConfig("Parquet needs pyarrow: pip install 'hashseek[parquet]'") from None
    return pyarrow, pyarrow.parquet


def import_(file: Path, folder: Path, *, checkpoint: Path | None) -> dict[str, int]:
    """Add the images of an export to the collection in `folder`, or to a new one for `checkpoint`.

    Every row is checked before the first is added. Keys, labels, attributes, codes and engines are kept; ids and times
    are new.

    Returns:
        How many were "added", "updated" and "known".

    Raises:
        BadConfig: pyarrow is not installed.
        BadDataset: `file` is damaged, or not what `export` writes.
        ForeignCodes: the codes are of another checkpoint.
        BadCollection: no collection, and no checkpoint to create one for.
    """
    opened = Export(file)
    try:
        if checkpoint is not None:  # before a collection is created for it
            header = load_header(checkpoint)
            check_export(opened, fingerprint=header.fingerprint, n_bits=header.n_bits)
        outcome = {"added": 0, "updated": 0, "known": 0}
        with open_for_adding(folder, checkpoint=checkpoint) as collection:
            check_export(opened, fingerprint=collection.fingerprint, n_bits=collection.n_bits)
            replaced = set[str]()  # kept files that a later row may name
            try:
                for images in opened.batches():
                    for _, what in collection.add(images, replaced=replaced):
                        outcome[what] += 1
            finally:
                collection.drop_files(replaced)
            collection.save_index()
        return outcome
    finally:
        opened.close()
