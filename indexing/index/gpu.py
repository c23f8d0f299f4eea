"""Exact search on a GPU with FAISS, fast for large batches of queries."""

import threading
from typing import Any

import faiss
import numpy as np

from hashseek.indexing.index.exact_scan import Distances, Rows
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadConfig

MAX_K = 2048  # of FAISS's selection on a GPU


def is_available() -> bool:
    """Whether this machine has a GPU that FAISS can use."""
    return hasattr(faiss, "GpuIndexBinaryFlat") and faiss.get_num_gpus() > 0


class Gpu:
    """Padded codes (N, size) on the first GPU.

    Raises:
        BadConfig: there is none, or FAISS was built without GPU support.
    """

    def __init__(self, codes: Codes) -> None:
        if not is_available():
            raise BadConfig("an index of kind gpu needs a GPU that FAISS can use, but there is none: choose exact")
        self._lock = threading.Lock()  # FAISS's GPU indexes are not thread-safe
        self._resources = faiss.StandardGpuResources()
        self.index: Any = faiss.GpuIndexBinaryFlat(self._resources, 8 * codes.shape[1])
        self.index.add(codes)

    def search(self, xq: Codes, *, k: int) -> tuple[Distances, Rows, np.ndarray[Any, np.dtype[np.bool_]]]:
        """The k nearest rows: (distances (Q, k), rows (Q, k), which queries (Q,) are certain).

        Among rows at the distance of the last one, FAISS returns arbitrary ones. A query is certain if more than k rows
        were fetched and the last is further away than the k-th: then all rows at that distance are included.
        """
        fetched = min(MAX_K, max(2 * k, k + 64), self.index.ntotal)
        if k > fetched:
            nothing = np.zeros((len(xq), k), np.int32)
            return nothing, nothing.astype(np.int64), np.zeros(len(xq), np.bool_)
        with self._lock:
            distances, rows = self.index.search(np.ascontiguousarray(xq), fetched)
        certain = (distances[:, -1] > distances[:, k - 1]) | (fetched == self.index.ntotal)
        order = np.lexsort((rows, distances))[:, :k]
        return np.take_along_axis(distances, order, 1), np.take_along_axis(rows, order, 1), certain
