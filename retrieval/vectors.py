"""Checks vectors computed by another program, such as CLIP or DINO embeddings."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadDataset

_BLOCK = 4096  # rows that are checked at a time

Vectors = NDArray[Any]  # (N, D) numbers of any kind, possibly memory-mapped


def as_float32(vectors: Vectors) -> NDArray[np.float32]:
    """The rows as they are encoded and hashed."""
    return np.ascontiguousarray(vectors, "<f4")


def check_vectors(
    vectors: Vectors, *, width: int | None = None, name: str = "the vectors", nonzero: bool = False
) -> None:
    """Refuse anything but rows of finite numbers. Needs little memory, regardless of the number of rows.

    Args:
        vectors: (N, D).
        width: the required D; None: any.
        name: the array's name in messages.
        nonzero: only directions count, so a row of zeros is refused.

    Raises:
        BadDataset: a wrong shape, type or width; no rows; or a row of zeros if `nonzero`, or with NaN, infinity or
            numbers so large that their squares exceed float32. The message names the first such row, counted from 0.
    """
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or vectors.size == 0:
        raise BadDataset(
            f"{name} must be numbers of the shape (rows, width), got {vectors.dtype} {vectors.shape}: save one row per "
            "vector"
        )
    if width is not None and vectors.shape[1] != width:
        raise BadDataset(
            f"the rows of {name} have {vectors.shape[1]:,} numbers, but the model needs {width:,}: use vectors "
            "from the same source as those it was trained on"
        )
    for start in range(0, len(vectors), _BLOCK):
        with np.errstate(over="ignore", invalid="ignore"):
            rows = as_float32(vectors[start : start + _BLOCK])
            bad = np.flatnonzero(~np.isfinite(np.square(rows).sum(axis=1)))
        if len(bad):
            raise BadDataset(
                f"row {start + bad[0]} (counted from 0) of {name} has NaN, infinity or numbers too large for float32: "
                "correct it or leave it out"
            )
        if nonzero and len(zeros := np.flatnonzero(~rows.any(axis=1))):
            raise BadDataset(
                f"row {start + zeros[0]} (counted from 0) of {name} is all zeros and has no direction to compare: "
                "correct it or leave it out"
            )
