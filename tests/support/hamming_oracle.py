"""Exact Hamming distances and rankings in plain NumPy: the oracle that every index is tested against."""

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes


def distances(query_codes: Codes, database_codes: Codes) -> NDArray[np.int32]:
    """Hamming distances (Q, N) in bits between packed codes (Q, code_size) and (N, code_size)."""
    result = np.zeros((len(query_codes), len(database_codes)), dtype=np.int32)
    for byte in range(query_codes.shape[1]):
        result += np.bitwise_count(query_codes[:, byte, None] ^ database_codes[None, :, byte])
    return result


def search(query_codes: Codes, database_codes: Codes, k: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The `k` nearest of the database: (distances, ids), each (Q, min(k, N)).

    Nearest first, equal distances by ascending id, where an id is the position in `database_codes`.
    """
    everything = distances(query_codes, database_codes)
    ids = np.argsort(everything, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(everything, ids, axis=1), ids
