"""HNSW (Malkov and Yashunin, TPAMI 2020) in FAISS: a search walks along a graph of neighbours."""

from dataclasses import dataclass
from typing import Any, Self

import faiss

from hashseek.indexing.index.approximate import Arrays, check_effort
from hashseek.indexing.index.exact_scan import Distances, Rows, faiss_threads
from hashseek.retrieval.codes import Codes

N_NEIGHBOURS, BUILD_EFFORT = 16, 100
MAX_EFFORT = 65536


@dataclass(frozen=True)
class Hnsw:
    """`effort` is the number of candidates that a walk keeps (efSearch)."""

    index: Any  # faiss.IndexBinaryHNSW

    @classmethod
    def build(cls, codes: Codes, _n_bits: int, /) -> Self:
        """Index padded codes (N, size)."""
        index = faiss.IndexBinaryHNSW(8 * codes.shape[1], N_NEIGHBOURS)
        index.hnsw.efConstruction = BUILD_EFFORT
        index.add(codes)
        return cls(index)

    @classmethod
    def from_arrays(cls, arrays: Arrays, _codes: Codes, _n_bits: int, /) -> Self:
        """Restore what `to_arrays` returned."""
        return cls(faiss.deserialize_index_binary(arrays["faiss"]))

    def to_arrays(self) -> Arrays:
        """The index in FAISS's format."""
        return {"faiss": faiss.serialize_index_binary(self.index)}

    @property
    def efforts(self) -> tuple[int, ...]:
        """16 to 1024."""
        return (16, 32, 64, 128, 256, 512, 1024)

    @property
    def n_bytes(self) -> int:
        """Codes and graph."""
        graph = self.index.hnsw
        links = 4 * graph.neighbors.size() + 8 * graph.offsets.size() + 4 * graph.levels.size()
        return int(self.index.ntotal * self.index.code_size + links)

    def describe(self) -> dict[str, Any]:
        """Its settings."""
        return {"neighbours": N_NEIGHBOURS}

    def search(self, xq: Codes, *, k: int, effort: int) -> tuple[Distances, Rows]:
        """About the k nearest rows of each query; -1 where the walk ended early."""
        check_effort(effort, largest=MAX_EFFORT, meaning="candidates kept (efSearch)")
        parameters = faiss.SearchParametersHNSW(efSearch=max(effort, k))
        with faiss_threads(len(xq)):  # it distributes queries, and further threads would only wait
            distances, rows = self.index.search(xq, k, params=parameters)
        return distances, rows
