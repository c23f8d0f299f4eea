"""Vectors that another program computed, such as CLIP or DINO embeddings: how they are checked, and their encoder."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadDataset

if TYPE_CHECKING:
    from hashseek.retrieval.checkpoint import Checkpoint

_BLOCK = 4096  # rows that are checked at a time

Vectors = NDArray[Any]  # (N, D) numbers of any kind, possibly memory-mapped


def as_float32(vectors: Vectors) -> NDArray[np.float32]:
    """The rows as they are encoded and hashed."""
    return np.ascontiguousarray(vectors, "<f4")


def check_vectors(vectors: Vectors, *, width: int | None = None, name: str = "the vectors") -> None:
    """Refuse anything but rows of finite numbers. Needs little memory, however many rows there are.

    Args:
        vectors: (N, D).
        width: D as it must be; None: any.
        name: of the array in messages.

    Raises:
        BadDataset: another shape, type or width; no row; or a row with NaN, infinity or numbers so large that their
            squares exceed float32. The message names the first such row, counted from 0.
    """
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or vectors.size == 0:
        raise BadDataset(
            f"{name} must be numbers of the shape (rows, width), not {vectors.dtype} {vectors.shape}: save one row per "
            "vector"
        )
    if width is not None and vectors.shape[1] != width:
        raise BadDataset(
            f"{name} have {vectors.shape[1]:,} numbers per row, and the collection was made of vectors of {width:,}: "
            "use those of the same model"
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


class VectorEncoder:
    """Encodes vectors with the model of one checkpoint, in float32 on the CPU. Safe to call from several threads.

    Args:
        checkpoint: from `load_checkpoint`.

    Attributes:
        engine: what computes the codes, as `Encoder.engine`.
        width: D, the length of a vector.

    Raises:
        BadCheckpoint: the checkpoint encodes images.
    """

    engine = "torch cpu float32"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.header = checkpoint.header
        self.width = checkpoint.header.vector_width()
        self._model = checkpoint.model.cpu().eval()
        self._lock = threading.Lock()  # the number of threads is that of the process

    @property
    def n_bits(self) -> int:
        """Length K of the codes."""
        return self.header.n_bits

    @property
    def fingerprint(self) -> str:
        """Only codes with the same fingerprint can be compared."""
        return self.header.fingerprint

    def features_and_outputs(self, vectors: Vectors) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Features (B, F) and real outputs (B, K) of vectors (B, D).

        One row at a time, for the reason that `Encoder.apply_head` gives, and in one thread: on a busy machine, several
        threads that wait for each other after each row take a hundred times as long.

        Raises:
            BadDataset: as `check_vectors`.
        """
        import torch

        check_vectors(vectors, width=self.width)
        features, outputs = [], []
        with self._lock, torch.inference_mode():
            n_threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                for row in as_float32(vectors):
                    features.append(self._model.features(torch.tensor(row[None])))
                    outputs.append(self._model.outputs(features[-1]))
            finally:
                torch.set_num_threads(n_threads)
            return torch.cat(features).numpy(), torch.cat(outputs).numpy()
