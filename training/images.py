"""Training images: decoded once where they fit in memory, augmented the same way in every run of a seed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from retrieval.encoder import load_ahead
from retrieval.errors import BadDataset, BadImage
from retrieval.images import Pixels, Preprocessing, decode_for, read_bytes
from retrieval.listing import OnError, Problem, refuse
from training.datasets.splits import Split


class Images:
    """The images of a split as uint8 pixels (3, size, size) by row.

    They are decoded once into memory if they fit into `cache_gib` GiB, else from the file each time.
    """

    def __init__(self, split: Split, preprocessing: Preprocessing, *, cache_gib: float) -> None:
        self.split = split
        self.preprocessing = preprocessing
        needed = len(split) * 3 * preprocessing.size**2
        self._cached: Pixels | None = None
        if needed <= cache_gib * 2**30:
            self._cached = np.empty((len(split), 3, preprocessing.size, preprocessing.size), np.uint8)
            for row, pixels in enumerate(load_ahead(range(len(split)), self._decode, depth=64)):
                self._cached[row] = pixels

    def __len__(self) -> int:
        return len(self.split)

    def pixels(self, row: int) -> Pixels:
        """Preprocessed uint8 pixels (3, size, size) of one image."""
        return self._decode(row) if self._cached is None else self._cached[row]

    def batches(
        self, rows: NDArray[np.int64], *, batch_size: int, flip: bool, min_crop: float, seed: tuple[int, ...]
    ) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Augmented uint8 batches (b, 3, size, size) with their rows; the same for the same `seed`."""

        def load(row: np.int64) -> Tensor:
            rng = np.random.default_rng((*seed, int(row)))
            return augment(torch.from_numpy(self.pixels(int(row))), rng, flip=flip, min_crop=min_crop)

        loaded = load_ahead(rows, load, depth=2 * batch_size)
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            yield torch.stack([next(loaded) for _ in chosen]), chosen

    def _decode(self, row: int) -> Pixels:
        path = self.split.paths[row]
        try:
            return decode_for(read_bytes(path), self.preprocessing, name=str(path))[1]
        except BadImage as error:
            raise BadDataset(f"{self.split.where[row]}: {error}") from None


def augment(pixels: Tensor, rng: np.random.Generator, *, flip: bool, min_crop: float) -> Tensor:
    """A random part of at least `min_crop` of the area, resized to the whole, mirrored half of the time.

    Source: random resized crop of Szegedy et al. (2015), aspect ratio between 3/4 and 4/3.
    """
    size = pixels.shape[-1]
    if flip and rng.random() < 0.5:
        pixels = pixels.flip(-1)
    if min_crop == 1:
        return pixels
    area, ratio = rng.uniform(min_crop, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    width = min(size, max(1, round(size * np.sqrt(area * ratio))))
    height = min(size, max(1, round(size * np.sqrt(area / ratio))))
    top, left = int(rng.integers(size - height + 1)), int(rng.integers(size - width + 1))
    resized: Tensor = transforms.resized_crop(pixels, top, left, height, width, [size, size], antialias=True)
    return resized


def without_broken(split: Split, *, on_error: OnError, source: str) -> tuple[Split, list[Problem]]:
    """The images of `split` that decode, and the problems of those that do not.

    Raises:
        BadDataset: an image is broken and `on_error` is "stop", or no image is left.
    """

    def check(row: int) -> str | None:
        try:
            decode_for(read_bytes(split.paths[row]), _TINY, name=str(split.paths[row]))
        except BadImage as error:
            return str(error)
        return None

    reasons = list(load_ahead(range(len(split)), check, depth=64))
    problems = [Problem(split.where[row], reason) for row, reason in enumerate(reasons) if reason]
    if problems and on_error == "stop":
        refuse(Path(source), problems)
    kept = [row for row, reason in enumerate(reasons) if not reason]
    if not kept:
        raise BadDataset(f"none of the {len(split)} images of {source} can be decoded; the first: {problems[0]}")
    return split.take(kept), problems


# Draft decoding to a small size still reads the file to its end, which is what finds a truncated one.
_TINY = Preprocessing(size=16, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_fraction=1.0)
