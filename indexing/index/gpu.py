"""Exact search on a GPU with PyTorch, fast for large batches of queries.

Distances are computed as a matrix product of bits. Distance and row are packed into one number, `distance * N + row`,
so the k smallest numbers are the result: nearest first, ties by row. PyTorch is imported on first use.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.exact_scan import Distances, Rows
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.devices import is_cpu
from hashseek.retrieval.errors import BadConfig

if TYPE_CHECKING:
    import torch

# Queries, bits of rows, rows and results per step. A step takes about 3 GB; larger ones are no faster. With at most
# 2**26 bits, `distance * step + row` fits in int32.
_QUERIES, _BITS, _ROWS, _RESULTS = 256, 2**26, 2**20, 2**26

_log = logging.getLogger("hashseek")


def is_available() -> bool:
    """Whether this machine has a GPU that PyTorch can use."""
    return not is_cpu("auto")


def to_gpu(codes: Codes) -> Gpu | None:
    """Copy padded codes (N, size) to the first GPU; None, with a warning in the log, if its memory is too small.

    Raises:
        BadConfig: there is no GPU.
    """
    if not is_available():
        raise BadConfig("an index of kind gpu needs a GPU that PyTorch can use, but there is none: choose exact")
    import torch

    try:
        return Gpu(torch.tensor(codes, device="cuda"))
    except torch.OutOfMemoryError:
        _log.warning("the GPU has no room for codes of %.1f GB: searches run on the CPU", codes.nbytes / 1e9)
        return None


class Gpu:
    """Padded codes (N, size) uint8 in the memory of a GPU. Safe to use from several threads."""

    def __init__(self, codes: torch.Tensor) -> None:
        self._codes = codes
        self._lock = threading.Lock()  # several searches at once would need several times the memory

    def search(self, xq: Codes, *, k: int, usable: NDArray[np.bool_] | None = None) -> tuple[Distances, Rows] | None:
        """The k nearest rows: (distances (Q, k), rows (Q, k)), nearest first, ties by row.

        None, with a warning in the log, if the memory of the GPU is too small.

        Args:
            xq: packed (Q, size), padded.
            k: at least 1, at most the number of rows that may be found.
            usable: (N,) the rows that may be found; None: all.
        """
        import torch

        step = min(_QUERIES, max(1, _RESULTS // k))
        with self._lock, torch.inference_mode():
            try:
                unusable = None if usable is None else torch.tensor(~usable, device=self._codes.device)
                found = [self._search(xq[start : start + step], k, unusable) for start in range(0, len(xq), step)]
            except torch.OutOfMemoryError:
                _log.warning("the GPU has no room to search for %d results: this search runs on the CPU", k)
                return None
        numbers = np.concatenate(found)
        return (numbers // len(self._codes)).astype(np.int32), numbers % len(self._codes)

    def _search(self, xq: Codes, k: int, unusable: torch.Tensor | None) -> NDArray[np.int64]:
        """The k smallest `distance * N + row` of each query, (Q, k), ascending."""
        import torch

        n, device = len(self._codes), self._codes.device
        shifts = torch.arange(8, dtype=torch.uint8, device=device)

        def bits_of(codes: torch.Tensor) -> torch.Tensor:
            # Half precision is exact, because all sums are at most 1,024.
            return (codes[:, :, None] >> shifts & 1).flatten(1).to(torch.float16)

        queries = bits_of(torch.tensor(xq, device=device))
        signs, ones = 1 - 2 * queries, queries.sum(dim=1, keepdim=True)
        nearest = torch.empty((len(xq), 0), dtype=torch.int64, device=device)
        step = min(_ROWS, _BITS // queries.shape[1])
        for start in range(0, n, step):
            rows = self._codes[start : start + step]
            numbers = torch.addmm(ones, signs, bits_of(rows).T).to(torch.int32).mul_(step)
            numbers += torch.arange(len(rows), dtype=torch.int32, device=device)
            if unusable is not None:
                numbers.masked_fill_(unusable[start : start + step], 2**31 - 1)  # more than any distance
            part = numbers.topk(min(k, len(rows)), largest=False, sorted=False).values.long()
            nearest = torch.cat((nearest, part // step * n + start + part % step), dim=1)
            nearest = nearest.topk(min(k, nearest.shape[1]), largest=False).values
        return nearest.cpu().numpy()
