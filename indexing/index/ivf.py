"""Inverted lists (Sivic and Zisserman, ICCV 2003) in FAISS: codes by nearest centre; a search visits a few lists."""

from dataclasses import dataclass
from typing import Any, Self

import faiss
import numpy as np

from hashseek.indexing.index.approximate import Arrays, check_effort
from hashseek.indexing.index.exact_scan import Distances, Rows, faiss_threads
from hashseek.retrieval.codes import Codes


@dataclass(frozen=True)
class Ivf:
    """`effort` is the number of lists that a search visits."""

    index: Any  # faiss.IndexBinaryIVF

    @classmethod
    def build(cls, codes: Codes, _n_bits: int, /) -> Self:
        """Index padded codes (N, size) in about 2 sqrt(N) lists."""
        # FAISS wants at least 39 codes per centre.
        n_lists = max(1, min(int(2 * len(codes) ** 0.5), len(codes) // 39))
        quantizer = faiss.IndexBinaryFlat(8 * codes.shape[1])
        index = faiss.IndexBinaryIVF(quantizer, 8 * codes.shape[1], n_lists)
        index.own_fields = True
        index.cp.min_points_per_centroid = 1  # no warning for fewer than 39 codes, which get one list
        quantizer.this.disown()
        rng = np.random.default_rng(0)
        sample = rng.choice(len(codes), min(len(codes), 64 * n_lists), replace=False)
        index.train(codes[np.sort(sample)])
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
        """Powers of two up to all lists."""
        return tuple(2**i for i in range(self.index.nlist.bit_length()))

    @property
    def n_bytes(self) -> int:
        """Codes and row numbers in the lists, and the centres."""
        return int(self.index.ntotal * (self.index.code_size + 8) + self.index.nlist * self.index.code_size)

    def describe(self) -> dict[str, Any]:
        """Its settings."""
        return {"lists": self.index.nlist}

    def search(self, xq: Codes, *, k: int, effort: int) -> tuple[Distances, Rows]:
        """About the k nearest rows of each query; -1 where the lists visited hold fewer."""
        check_effort(effort, largest=self.index.nlist, meaning="lists visited")
        parameters = faiss.SearchParametersIVF(nprobe=effort)
        with faiss_threads(len(xq)):  # it distributes queries, and further threads would only wait
            distances, rows = self.index.search(xq, k, params=parameters)
        return distances, rows
