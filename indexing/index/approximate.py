"""The approximate kinds, which FAISS searches: the effort is an argument of each search, recall is measured when built.

ivf         inverted lists (Sivic and Zisserman, ICCV 2003): codes by nearest centre; a search visits a few lists
hnsw        a graph of neighbours (Malkov and Yashunin, TPAMI 2020); a search walks along it
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.code_layouts import DistinctCodes, PlainCodes
from hashseek.indexing.index.exact_scan import Distances, FaissThreads, Rows
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadConfig

RECALL_AT = 10
GOOD_RECALL = 0.95
_N_QUERIES, _FLIPPED = 100, 0.05
N_NEIGHBOURS, BUILD_EFFORT, MAX_EFFORT = 16, 100, 65536  # of HNSW


@dataclass(frozen=True)
class _Structure:
    """A FAISS index over the rows 0 to N - 1 that finds most of the nearest without comparing all of them."""

    index: Any  # faiss.IndexBinary

    @classmethod
    def from_array(cls, array: NDArray[np.uint8]) -> Self:
        """Restore what `to_array` returned."""
        return cls(faiss.deserialize_index_binary(array))

    def to_array(self) -> NDArray[np.uint8]:
        """The index in FAISS's format."""
        array: NDArray[np.uint8] = faiss.serialize_index_binary(self.index)
        return array


class Ivf(_Structure):
    """`effort` is the number of lists that a search visits."""

    @classmethod
    def build(cls, codes: Codes) -> Self:
        """Index padded codes (N, size), N at least 1, in about 2 sqrt(N) lists."""
        # FAISS wants at least 39 codes per centre.
        n_lists = max(1, min(int(2 * len(codes) ** 0.5), len(codes) // 39))
        quantizer = faiss.IndexBinaryFlat(8 * codes.shape[1])
        index = faiss.IndexBinaryIVF(quantizer, 8 * codes.shape[1], n_lists)
        index.own_fields = True
        index.cp.min_points_per_centroid = 1  # no warning for fewer than 39 codes, which form one list
        quantizer.this.disown()
        rng = np.random.default_rng(0)
        sample = rng.choice(len(codes), min(len(codes), 64 * n_lists), replace=False)
        index.train(codes[np.sort(sample)])
        index.add(codes)
        return cls(index)

    @property
    def efforts(self) -> tuple[int, ...]:
        """Efforts worth measuring, ascending: powers of two up to all lists."""
        return tuple(2**i for i in range(self.index.nlist.bit_length()))

    @property
    def n_bytes(self) -> int:
        """Bytes in memory: codes and row numbers in the lists, and the centres."""
        return int(self.index.ntotal * (self.index.code_size + 8) + self.index.nlist * self.index.code_size)

    def describe(self) -> dict[str, Any]:
        """The number of lists."""
        return {"lists": self.index.nlist}

    def parameters(self, effort: int, k: int) -> Any:  # noqa: ARG002
        """FAISS's parameters of a search: how many lists to visit; `BadConfig` for an invalid effort."""
        return faiss.SearchParametersIVF(nprobe=check_effort(effort, self.index.nlist, "lists visited"))


class Hnsw(_Structure):
    """`effort` is the number of candidates that a walk keeps (efSearch)."""

    @classmethod
    def build(cls, codes: Codes) -> Self:
        """Index padded codes (N, size), N at least 1: link each with its neighbours."""
        index = faiss.IndexBinaryHNSW(8 * codes.shape[1], N_NEIGHBOURS)
        index.hnsw.efConstruction = BUILD_EFFORT
        index.add(codes)
        return cls(index)

    @property
    def efforts(self) -> tuple[int, ...]:
        """Efforts worth measuring, ascending: 16 to 1024."""
        return (16, 32, 64, 128, 256, 512, 1024)

    @property
    def n_bytes(self) -> int:
        """Bytes in memory: codes and graph."""
        graph = self.index.hnsw
        links = 4 * graph.neighbors.size() + 8 * graph.offsets.size() + 4 * graph.levels.size()
        return int(self.index.ntotal * self.index.code_size + links)

    def describe(self) -> dict[str, Any]:
        """The number of neighbours."""
        return {"neighbours": N_NEIGHBOURS}

    def parameters(self, effort: int, k: int) -> Any:
        """FAISS's parameters of a search: how many candidates to keep; `BadConfig` for an invalid effort."""
        effort = check_effort(effort, MAX_EFFORT, "candidates kept (efSearch)")
        return faiss.SearchParametersHNSW(efSearch=max(effort, k))


Approximate = Ivf | Hnsw
APPROXIMATE: dict[str, type[Approximate]] = {"ivf": Ivf, "hnsw": Hnsw}


def search_structure(structure: Approximate, xq: Codes, *, k: int, effort: int) -> tuple[Distances, Rows]:
    """About the k nearest rows of each query: (distances, rows), each (Q, k); row -1 where there are fewer.

    Raises:
        BadConfig: an invalid effort.
    """
    parameters = structure.parameters(effort, k)
    with FaissThreads(len(xq)):  # FAISS distributes queries, and further threads would only wait
        distances, rows = structure.index.search(xq, k, params=parameters)
    return distances, rows


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
        distances, rows = search_structure(structure, xq, k=k, effort=effort)
        recall[effort] = float(((rows >= 0) & (distances <= np.array(furthest)[:, None])).mean())
        if recall[effort] >= GOOD_RECALL:
            break
    return recall


def default_effort(recall: Mapping[int, float]) -> int:
    """The effort with the best recall: the only one with a good recall, if there is one, see `measure_recall`."""
    return max(recall, key=recall.__getitem__)


def check_effort(effort: int, largest: int, meaning: str) -> int:
    """Return `effort` if it is valid.

    Raises:
        BadConfig: it is not between 1 and `largest`.
    """
    if not 1 <= effort <= largest:
        raise BadConfig(f"effort is the number of {meaning} and must be 1 to {largest}, got {effort}")
    return effort
