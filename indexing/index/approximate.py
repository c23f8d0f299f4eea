"""What the approximate kinds share: the effort is an argument of each search, recall is measured at build time."""

from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.code_layouts import DistinctCodes, PlainCodes
from hashseek.indexing.index.exact_scan import Distances, Rows
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadConfig

Arrays = Mapping[str, NDArray[Any]]

RECALL_AT = 10
GOOD_RECALL = 0.95
_N_QUERIES, _FLIPPED = 100, 0.05


class Approximate(Protocol):
    """A structure over the rows 0 to N - 1 that finds most of the nearest without comparing all of them."""

    @classmethod
    def build(cls, codes: Codes, n_bits: int, /) -> Self:
        """Index padded codes (N, size), N at least 1."""

    @classmethod
    def from_arrays(cls, arrays: Arrays, codes: Codes, n_bits: int, /) -> Self:
        """Restore what `to_arrays` returned, over the same codes."""

    def to_arrays(self) -> Arrays:
        """The arrays to be saved."""

    @property
    def efforts(self) -> tuple[int, ...]:
        """Efforts worth measuring, ascending."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, without the codes."""

    def describe(self) -> dict[str, Any]:
        """Its settings."""

    def search(self, xq: Codes, *, k: int, effort: int) -> tuple[Distances, Rows]:
        """About the k nearest rows of each query: (distances, rows), each (Q, k); row -1 where there are fewer."""


def measure_recall(structure: Approximate, exact: PlainCodes | DistinctCodes, *, n_bits: int) -> dict[int, float]:
    """Recall@10 per effort, up to the first that reaches `GOOD_RECALL`.

    The queries are 100 of the codes themselves, each bit flipped with probability 0.05. A row counts as found if it is
    as near as the tenth, so it does not matter which of several equally near rows are returned.
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


def default_effort(recall: Mapping[int, float]) -> int:
    """The lowest effort with a good recall, or else the effort with the best recall."""
    return next(
        (effort for effort, value in recall.items() if value >= GOOD_RECALL), max(recall, key=recall.__getitem__)
    )


def check_effort(effort: int, *, largest: int, meaning: str) -> int:
    """Return `effort` if it is valid.

    Raises:
        BadConfig: it is not between 1 and `largest`.
    """
    if not 1 <= effort <= largest:
        raise BadConfig(f"effort is the number of {meaning}, 1 to {largest}, not {effort}")
    return effort
