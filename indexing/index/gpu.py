"""Exact search on a GPU with PyTorch, fast for large batches of queries.

The distance of a row is a matrix product with its bits, and one number holds distance and row, `distance * N + row`. So
the k smallest of these numbers are the result: nearest first, ties by row. PyTorch is imported on first use.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.exact_scan import Distances, Rows
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.devices import is_cpu
from hashseek.retrieval.errors import BadConfig

# Queries, bits of rows, and rows at once: they take 3 GB, and more would not be faster. The numbers of so many rows fit
# in int32.
_QUERIES, _BITS, _ROWS = 256, 2**26, 2**20


def is_available() -> bool:
    """Whether this machine has a GPU that PyTorch can use."""
    return not is_cpu("auto")


class Gpu:
    """Padded codes (N, size) in the memory of the first GPU.

    Args:
        codes: the codes.
        device: "cuda"; tests also use "cpu".

    Raises:
        BadConfig: there is no GPU, or its memory is too small.
    """

    def __init__(self, codes: Codes, *, device: str = "cuda") -> None:
        import torch

        if device == "cuda" and not is_available():
            raise BadConfig("an index of kind gpu needs a GPU that PyTorch can use, but there is none: choose exact")
        self._lock = threading.Lock()  # several searches at once would need several times the memory
        try:
            self._codes = torch.tensor(codes, device=device)
        except torch.OutOfMemoryError:
            raise BadConfig(
                f"the memory of the GPU is too small for codes of {codes.nbytes / 2**30:.1f} GiB: choose exact"
            ) from None

    def search(self, xq: Codes, *, k: int) -> tuple[Distances, Rows]:
        """The k nearest rows, 1 <= k <= N: (distances (Q, k), rows (Q, k)), nearest first, ties by row."""
        with self._lock:
            parts = [self._search(xq[start : start + _QUERIES], k) for start in range(0, len(xq), _QUERIES)]
        found = np.concatenate(parts)
        return (found // len(self._codes)).astype(np.int32), found % len(self._codes)

    def _search(self, xq: Codes, k: int) -> NDArray[np.int64]:
        """The k smallest `distance * N + row` of each query, (Q, k), ascending."""
        import torch

        n, device = len(self._codes), self._codes.device
        # Sums of at most 1,024 ones are exact in half precision, which processors compute slowly.
        kind = torch.float32 if device.type == "cpu" else torch.float16
        shifts = torch.arange(8, dtype=torch.uint8, device=device)

        def bits_of(codes: torch.Tensor) -> torch.Tensor:
            return (codes[:, :, None] >> shifts & 1).flatten(1).to(kind)

        queries = bits_of(torch.tensor(xq, device=device))
        signs, ones = 1 - 2 * queries, queries.sum(dim=1, keepdim=True)
        nearest = torch.empty((len(xq), 0), dtype=torch.int64, device=device)
        step = min(_ROWS, _BITS // queries.shape[1])
        with torch.inference_mode():
            for start in range(0, n, step):
                rows = self._codes[start : start + step]
                distances = torch.addmm(ones, signs, bits_of(rows).T).to(torch.int32)
                numbers = torch.add(torch.arange(len(rows), dtype=torch.int32, device=device), distances, alpha=step)
                part = numbers.topk(min(k, len(rows)), largest=False, sorted=False).values.long()
                nearest = torch.cat((nearest, part // step * n + start + part % step), dim=1)
                nearest = nearest.topk(min(k, nearest.shape[1]), largest=False).values
        return nearest.cpu().numpy()
