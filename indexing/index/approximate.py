"""What approximate kinds have in common: effort is an argument of a search, recall is measured at build time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.code_rows import Collapsed, Plain
from hashseek.indexing.index.exact_scan import Distances, Rows
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadConfig

Arrays = Mapping[str, NDArray[Any]]

RECALL_AT = 10
GOOD_RECALL = 0.95
_N_QUERIES, _FLIPPED = 100, 0.05


class Approximate(Protocol):
    """A structure over the rows 0 to N - 1 that finds most of the nearest without looking at all of them."""

    @classmethod
    def build(cls, codes: Codes, n_bits: int, /) -> Self:
        """Index padded codes (N, size), N at least 1."""

    @classmethod
    def from_arrays(cls, arrays: Arrays, codes: Codes, n_bits: int, /) -> Self:
        """What `to_arrays` gave, over the same codes."""

    def to_arrays(self) -> Arrays:
        """What is to be saved."""

    @property
    def efforts(self) -> tuple[int, ...]:
        """Efforts worth measuring, ascending."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, beside the codes."""

    def describe(self) -> dict[str, Any]:
        """Its settings."""

    def search(self, xq: Codes, *, k: int, effort: int) -> tuple[Distances, Rows]:
        """About the k nearest rows of each query: (distances, rows), each (Q, k); row -1 where there are fewer."""


def measure_recall(structure: Approximate, exact: Plain | Collapsed, *, n_bits: int) -> dict[int, float]:
    """Recall@10 per effort, up to the first that reaches `GOOD_RECALL`.

    The queries are 100 of the codes themselves, each bit flipped with probability 0.05. A row counts as found if it is
    as near as the tenth: which of several equally near ones are returned does not matter.
    """
    rng = np.random.default_rng(0)
    xq = exact.gather(np.sort(rng.choice(len(exact), min(_N_QUERIES, len(exact)), replace=False)))
    flips = np.zeros((len(xq), 8 * xq.shape[1]), np.bool_)
    flips[:, :n_bits] = rng.random((len(xq), n_bits)) < _FLIPPED
    xq = xq ^ np.packbits(flips, axis=1, bitorder="little")
    k = min(RECALL_AT, len(exact))
    furthest = [distances[-1] for distances, _ in exact.search(xq, k=k, limit=n_bits, among=None)]
    recall: dict[int, float] = {}
    for effort in structure.efforts:
        distances, rows = structure.search(xq, k=k, effort=effort)
        recall[effort] = float(((rows >= 0) & (distances <= np.array(furthest)[:, None])).mean())
        if recall[effort] >= GOOD_RECALL:
            break
    return recall


@contextmanager
def threads_for(n_queries: int) -> Iterator[None]:
    """Have FAISS use no more threads than there are queries: it shares out queries, and more threads only wait.

    The number holds for the calling thread alone.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(max(1, min(before, n_queries)))
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def default_effort(recall: Mapping[int, float]) -> int:
    """The least effort with a good recall, or else the one with the best."""
    return next(
        (effort for effort, value in recall.items() if value >= GOOD_RECALL), max(recall, key=recall.__getitem__)
    )


def check_effort(effort: int, *, largest: int, meaning: str) -> int:
    """Return `effort` if it is one.

    Raises:
        BadConfig: it is not within 1 to `largest`.
    """
    if not 1 <= effort <= largest:
        raise BadConfig(f"effort is the number of {meaning}, 1 to {largest}, not {effort}")
    return effort
