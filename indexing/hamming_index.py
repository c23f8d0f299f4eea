"""FAISS behind one small interface: exact search over packed codes, ties by ascending id."""

from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.codes import Codes, check_codes, code_size, pad
from retrieval.errors import BadCodes, BadCollection
from retrieval.files import write_atomically

Distances = NDArray[np.int32]
Ids = NDArray[np.int64]

# Code sizes (bytes) for which FAISS has unrolled loops: others are 2 to 3.5 times slower (docs/benchmarks.md).
_FAST_SIZES = (4, 8, 16, 20, 32, 64)
# From here on counting distances beats keeping a heap of the k best.
_COUNTING_FROM = 1000


@dataclass(frozen=True)
class HammingIndex:
    """Codes with their ids, read-only once built.

    `ids` ascend, so that FAISS's own order of ties, by position, is the order by id.
    """

    n_bits: int
    ids: Ids
    flat: faiss.IndexBinaryFlat

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def codes(self) -> Codes:
        """Packed codes (N, code_size), in the order of `ids`."""
        padded = faiss.vector_to_array(self.flat.xb).reshape(-1, self.flat.code_size)
        return np.ascontiguousarray(padded[:, : code_size(self.n_bits)])

    def search(self, query_codes: Codes, *, k: int, alive: NDArray[np.bool_] | None = None) -> tuple[Distances, Ids]:
        """The k nearest: (distances, ids), each (Q, min(k, number alive)), nearest first, ties by ascending id.

        Args:
            query_codes: packed (Q, code_size).
            k: results per query, at least 1.
            alive: (N,) which positions may be found; None: all.
        """
        check_codes(query_codes, self.n_bits)
        if k < 1:
            raise BadCodes(f"k is the number of results and must be at least 1, not {k}")
        n_alive = len(self) if alive is None else int(alive.sum())
        k = min(k, n_alive)
        if k == 0 or not len(query_codes):
            return np.zeros((len(query_codes), k), np.int32), np.zeros((len(query_codes), k), np.int64)
        parameters = None
        if alive is not None and n_alive < len(self):
            bitmap = np.packbits(alive, bitorder="little")
            parameters = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(bitmap))
        # FAISS reads this once per block of queries and both ways give the same answer: if another thread changes it
        # in between, that costs time and nothing else.
        self.flat.use_heap = k < _COUNTING_FROM
        distances, positions = self.flat.search(pad(query_codes, self.flat.code_size), k, params=parameters)
        return distances, self.ids[positions]


def build_index(codes: Codes, ids: Ids, *, n_bits: int) -> HammingIndex:
    """Index packed codes (N, code_size) under strictly ascending ids (N,)."""
    check_codes(codes, n_bits)
    if len(ids) != len(codes) or (len(ids) > 1 and (np.diff(ids) <= 0).any()):
        raise BadCodes(f"{len(codes)} codes need {len(codes)} strictly ascending ids, one each")
    flat = faiss.IndexBinaryFlat(8 * _padded_size(n_bits))
    flat.add(pad(codes, flat.code_size))
    return HammingIndex(n_bits, np.ascontiguousarray(ids, dtype=np.int64), flat)


def save_index(index: HammingIndex, path: Path) -> None:
    """Write the codes to `path`, atomically; the ids are the caller's to keep."""
    write_atomically(path, faiss.serialize_index_binary(index.flat).tobytes())


def load_index(path: Path, ids: Ids, *, n_bits: int) -> HammingIndex:
    """Read what `save_index` wrote.

    Raises:
        BadCollection: the file is no such index, or not of this size and width.
    """
    try:
        flat = faiss.deserialize_index_binary(np.fromfile(path, np.uint8))
    except (RuntimeError, OSError) as error:
        raise BadCollection(f"{path} is not a readable index: {error}") from None
    if not isinstance(flat, faiss.IndexBinaryFlat):
        raise BadCollection(f"{path} holds a {type(flat).__name__}, not a flat binary index")
    if flat.ntotal != len(ids) or flat.code_size != _padded_size(n_bits):
        raise BadCollection(
            f"{path} holds {flat.ntotal} codes of {flat.code_size} bytes, not {len(ids)} of {n_bits} bits"
        )
    return HammingIndex(n_bits, ids, flat)


def _padded_size(n_bits: int) -> int:
    size = code_size(n_bits)
    return next((fast for fast in _FAST_SIZES if size <= fast), -(-size // 8) * 8)
