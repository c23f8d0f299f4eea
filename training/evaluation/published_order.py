"""The order of ties in published evaluation code, to compute the value that it would print."""

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes


def hyp2_order(query: Codes, database: Codes) -> NDArray[np.int64]:
    """Rows of the database (N,) by Hamming distance to one code, ties as in HyP2's code: `np.argsort(distances)`.

    NumPy's default is a quicksort, whose order of ties follows from the order of the database but is meaningless. The
    authors sort 32-bit floats, for which newer versions of NumPy use other algorithms on some processors. 16-bit
    integers are still sorted by the algorithm of the paper's time, so the order is the same everywhere.

    Args:
        query: one packed code, (code_size,).
        database: packed codes (N, code_size).

    Source: JerryXu0129/HyP2-Loss; the same lines are in HashNet and DeepHash-pytorch.
    """
    distances = np.bitwise_count(database ^ query).sum(axis=1, dtype=np.int16)
    return np.argsort(distances, kind="quicksort")
