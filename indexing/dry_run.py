"""A dry run of `index add`: the real run, against a copy of the catalog, with codes of zeros and no files written."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hashseek.indexing.catalog import Catalog, Change, NewImage, create_catalog
from hashseek.indexing.collection import CATALOG, check_checkpoint, check_place
from hashseek.indexing.kept_files import with_kept_path
from hashseek.retrieval.checkpoint import Header, load_header
from hashseek.retrieval.codes import Codes, code_size
from hashseek.retrieval.errors import BadCollection
from hashseek.retrieval.images import Pixels, Preprocessing


@dataclass
class DryRunCollection:
    """Stands in for the collection in `folder`: images go into a copy of its catalog, and its files stay."""

    folder: Path
    catalog: Catalog

    def add(self, images: list[NewImage], *, replaced: set[str] | None = None) -> list[tuple[int, Change]]:  # noqa: ARG002
        """Store images in the copy, under the paths that `Collection.add` would store."""
        ids = self.catalog.lookup.ids_by_key([image.key for image in images if image.key is not None])
        records = [record for record in self.catalog.get(list(ids.values())) if record is not None]
        stored = {record.key: (record.path, record.sha256) for record in records}
        placed = []
        for image in images:
            placed.append(with_kept_path(self.folder, image, stored.get(image.key)))
            if image.key is not None:
                stored[image.key] = (placed[-1].path, image.sha256)
        return self.catalog.add(placed)

    def drop_files(self, paths: set[str]) -> None:
        """Delete nothing."""


class DryRunEncoder:
    """Stands in for an encoder: every code is zeros."""

    engine = ""
    batch_size = 32

    def __init__(self, preprocessing: Preprocessing, *, n_bits: int) -> None:
        self.preprocessing = preprocessing
        self._code_size = code_size(n_bits)

    def decoding(self) -> AbstractContextManager[None]:
        """Decode without waiting."""
        return nullcontext()

    def encode_pixels(self, pixels: Pixels) -> Codes:
        """Zeros (B, code_size)."""
        return np.zeros((len(pixels), self._code_size), np.uint8)


@contextmanager
def dry_run(folder: Path, *, checkpoint: Path | None) -> Iterator[tuple[DryRunCollection, DryRunEncoder]]:
    """What to give to `ingest` for a dry run over the collection in `folder`, which need not exist yet.

    Raises:
        BadCollection: there is no collection and no checkpoint to create it with, or the folder cannot become one.
        ForeignCodes: the collection was made with another checkpoint.
        OSError: there is no room for the copy in the folder for temporary files (TMPDIR).
    """
    with tempfile.TemporaryDirectory(prefix="hashseek-dry-run-") as scratch:
        copy = Path(scratch) / CATALOG
        header = _copy_catalog(folder, copy, checkpoint)
        with closing(Catalog(copy)) as catalog:
            encoder = DryRunEncoder(header.image_preprocessing(), n_bits=header.n_bits)
            yield DryRunCollection(folder, catalog), encoder


def _copy_catalog(folder: Path, copy: Path, checkpoint: Path | None) -> Header:
    """Copy the catalog of the collection in `folder`, or create an empty one; the header of its checkpoint."""
    if (folder / CATALOG).is_file():
        with closing(Catalog(folder / CATALOG, read_only=True)) as catalog:
            header = check_checkpoint(catalog, checkpoint or folder / catalog.space.checkpoint)
            catalog.copy_to(copy)
        return header
    if checkpoint is None:
        raise BadCollection(f"there is no collection {folder} yet: give the checkpoint for it with --checkpoint")
    header = load_header(checkpoint)
    header.image_preprocessing()  # refuses a model of vectors
    check_place(folder)
    create_catalog(copy, fingerprint=header.fingerprint, n_bits=header.n_bits)
    return header
