"""A dry run of `index add`: the real run, against a copy of the catalog, with codes of zeros and no files written."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import Catalog, create_catalog
from hashseek.indexing.collection import CATALOG, check_checkpoint, check_place
from hashseek.indexing.opening import Store
from hashseek.retrieval.checkpoint import Header, load_header
from hashseek.retrieval.images import Pixels, Preprocessing

# For a new collection without a checkpoint; which images can be used does not depend on it.
_TO_BE_FITTED = Header("", 8, Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)), (), fingerprint="")


Target = Store | Catalog  # of `ingest`


@dataclass
class DryRunEncoder:
    """Stands in for an encoder: every code is zeros."""

    preprocessing: Preprocessing
    n_bits: int
    engine: str = ""
    batch_size: int = 32

    def features_and_outputs(self, pixels: Pixels) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Zeros (B, 1) and (B, K)."""
        return np.zeros((len(pixels), 1), np.float32), np.zeros((len(pixels), self.n_bits), np.float32)


@contextmanager
def dry_run(folder: Path, *, checkpoint: Path | None) -> Iterator[tuple[Catalog, DryRunEncoder]]:
    """The arguments of `ingest` for a dry run over the collection in `folder`, which need not exist yet.

    Raises:
        BadCollection: there is no collection, and the folder cannot become one.
        ForeignCodes: the collection was made with another checkpoint.
        OSError: there is no room for the copy in the folder for temporary files (TMPDIR).
    """
    with tempfile.TemporaryDirectory(prefix="hashseek-dry-run-") as scratch:
        copy = Path(scratch) / CATALOG
        if (folder / CATALOG).is_file():
            with closing(Catalog(folder / CATALOG, read_only=True)) as catalog:
                header = check_checkpoint(catalog, checkpoint or catalog.checkpoint)
                catalog.copy_to(copy)
        else:
            header = _TO_BE_FITTED if checkpoint is None else load_header(checkpoint)
            header.image_preprocessing()  # refuses a model of vectors
            check_place(folder)
            create_catalog(copy, fingerprint=header.fingerprint, n_bits=header.n_bits)
        with closing(Catalog(copy)) as target:
            target.folder = folder
            yield target, DryRunEncoder(header.image_preprocessing(), header.n_bits)
