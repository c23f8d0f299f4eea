"""Training images: decoded once if they fit in memory or on disk, and augmented reproducibly; `batches` reads them."""

import logging
import math
import os
import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hashseek.retrieval.errors import BadConfig, BadDataset, BadImage
from hashseek.retrieval.files import cached_file, mark_used
from hashseek.retrieval.images import Pixels, Preprocessing, load_file, read_bytes
from hashseek.retrieval.load_ahead import load_ahead
from hashseek.training.config import Cache, TrainSection
from hashseek.training.data.augmentation import augment, generators
from hashseek.training.data.file_digests import digest_files
from hashseek.training.data.image_cache import check_disk, write_images
from hashseek.training.data.splits import Split

_log = logging.getLogger(__name__)


class Images:
    """The images of a split as uint8 pixels (3, size, size) by row, decoded on first use.

    Args:
        split: the images.
        preprocessing: decides their size.
        cache_gib: GiB of memory that decoded images may use, per process.
        cache: where decoded images are kept: "memory"; "memmap", an array on disk that later runs also use; "none";
            or "auto": memory if they fit in `cache_gib`, else memmap if they fit on the disk, else none.

    Raises:
        BadConfig: there is not enough room for `cache`.
    """

    def __init__(
        self, split: Split, preprocessing: Preprocessing, *, cache_gib: float = 4, cache: Cache = "auto"
    ) -> None:
        self.split = split
        self.preprocessing = preprocessing
        self._shape = (len(split), preprocessing.size, preprocessing.size, 3)
        # Height, width, colour: the layout of decoding, the fastest to crop, and channels-last in a batch.
        self._stored: Pixels | None = None
        self._known = np.zeros(len(split), np.bool_)
        self._opening = threading.Lock()
        self.cache: Cache = self._choose(cache, cache_gib)

    def __len__(self) -> int:
        return len(self.split)

    def pixels(self, row: int) -> Pixels:
        """Preprocessed uint8 pixels (3, size, size) of one image.

        Raises:
            BadDataset: the image cannot be decoded, because its file was changed after the start of the run.
        """
        stored = self._open()
        if stored is None:
            return self._decode(row)
        if not self._known[row]:
            stored[row] = self._decode(row).transpose(1, 2, 0)
            self._known[row] = True
        pixels: Pixels = stored[row].transpose(2, 0, 1)
        return pixels

    def batches(
        self,
        rows: NDArray[np.int64],
        *,
        batch_size: int,
        seed: tuple[int, ...] = (),
        augmentation: TrainSection | None = None,
    ) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Augmented uint8 batches (views * b, 3, size, size) with their rows (b,); the same for the same `seed`.

        Args:
            rows: which images, in this order.
            batch_size: b; the last batch may be smaller.
            seed: seed of the changes, together with the row and the view.
            augmentation: the settings of the random changes and of the views, the augmented copies of each image: all
                rows of the batch once, then all of them again; None: one view without changes.

        Raises:
            BadDataset: see `pixels`.
        """

        def load(row: np.int64) -> list[Tensor]:
            pixels = torch.from_numpy(self.pixels(int(row)))
            if augmentation is None:
                return [pixels.permute(1, 2, 0)]
            rngs = generators(seed, int(row), views=augmentation.views)
            return [augment(pixels, rng, augmentation).permute(1, 2, 0) for rng in rngs]

        self._open()
        loaded = load_ahead(rows, load, depth=2 * batch_size)
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            copies = zip(*[next(loaded) for _ in chosen], strict=True)
            yield torch.stack([pixels for copy in copies for pixels in copy]).permute(0, 3, 1, 2), chosen

    def _choose(self, cache: Cache, cache_gib: float) -> Cache:
        """`cache`, or for "auto" the first cache with enough room."""
        n_bytes = math.prod(self._shape)
        if cache == "auto" and n_bytes <= cache_gib * 2**30:
            return "memory"
        if cache == "memory" and n_bytes > _memory():
            raise BadConfig(
                f"the decoded images need {n_bytes / 2**30:.1f} GiB, but this machine has {_memory() / 2**30:.1f} GiB "
                "of memory: set train.cache = memmap or none"
            )
        if cache in ("auto", "memmap"):
            how = (self.preprocessing.size, self.preprocessing.crop_fraction, self.preprocessing.interpolation)
            self._file = cached_file("images", digest_files(self.split.paths), *how, suffix=".npy")
            try:
                if not self._file.is_file():
                    check_disk(self._file, n_bytes)
            except BadConfig as error:
                if cache == "memmap":
                    raise
                _log.warning("every epoch decodes the images again: %s", error)
                return "none"
            return "memmap"
        return cache

    def _open(self) -> Pixels | None:
        """The array of decoded images in memory or on disk, created on first use; None without a cache."""
        if self._stored is not None or self.cache == "none":
            return self._stored
        with self._opening:
            if self._stored is None and self.cache == "memory":
                self._stored = np.empty(self._shape, np.uint8)
            if self._stored is None and self.cache == "memmap":
                if not self._file.is_file():
                    decoded = load_ahead(range(len(self)), self._decode, depth=64)
                    write_images(self._file, (row.transpose(1, 2, 0) for row in decoded), shape=self._shape)
                mark_used(self._file)
                # Pages are read when they are needed. Copy on write, never written: PyTorch rejects read-only arrays.
                self._stored = np.load(self._file, mmap_mode="c")
                self._known[:] = True
        return self._stored

    def _decode(self, row: int) -> Pixels:
        path = self.split.paths[row]
        try:
            return load_file(read_bytes(path), self.preprocessing, name=str(path)).pixels
        except BadImage as error:
            raise BadDataset(
                f"{self.split.where[row]}: {error}; the file was readable at the start: restore it and resume the run"
            ) from None


def _memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
