"""Exact Hamming distances and rankings in plain NumPy: the oracle that every index is tested against."""

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes, as_words
from hashseek.retrieval.errors import BadCodes


def distances(query_codes: Codes, database_codes: Codes) -> NDArray[np.int32]:
    """Hamming distances (Q, N) in bits between packed codes (Q, code_size) and (N, code_size)."""
    if query_codes.shape[1] != database_codes.shape[1]:
        raise BadCodes(
            f"query codes have {query_codes.shape[1]} bytes and database codes {database_codes.shape[1]}: "
            "encode both with the same checkpoint"
        )
    xq, xb = as_words(query_codes), as_words(database_codes)
    result = np.zeros((len(xq), len(xb)), dtype=np.int32)
    for word in range(xq.shape[1]):
        result += np.bitwise_count(xq[:, word, None] ^ xb[None, :, word])
    return result


def search(query_codes: Codes, database_codes: Codes, k: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The `k` nearest of the database: (distances, ids), each (Q, min(k, N)).

    Nearest first, equal distances by ascending id, where an id is the position in `database_codes`.
    """
    if k < 1:
        raise BadCodes(f"k is the number of results and must be at least 1, not {k}")
    everything = distances(query_codes, database_codes)
    ids = np.argsort(everything, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(everything, ids, axis=1), ids
