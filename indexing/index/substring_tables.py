"""Tables of rows by substrings of their codes (multi-index hashing; Norouzi, Punjani and Fleet, CVPR 2012).

Of two codes within r bits, cut into m substrings, one pair of substrings differs in at most r // m bits.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.exact_scan import words
from hashseek.retrieval.codes import Codes


@dataclass(frozen=True)
class Table:
    """Rows by the bits `first` to `first + width - 1` of their codes: value v has rows[starts[v]:starts[v + 1]]."""

    first: int
    width: int
    starts: NDArray[np.int64]
    rows: NDArray[np.uint32]


def build_table(codes: Codes, first: int, width: int) -> Table:
    """Sort the rows of padded codes (N, size) by the value of one substring."""
    values = substring(codes, first, width)
    starts = np.concatenate([[0], np.cumsum(np.bincount(values, minlength=2**width))])
    order = np.sort(values.astype(np.uint64) << np.uint64(32) | np.arange(len(codes), dtype=np.uint64))
    return Table(first, width, starts, order.astype(np.uint32))


def substring(codes: Codes, first: int, width: int) -> NDArray[np.int64]:
    """The bits `first` to `first + width - 1` of padded codes (N, size), as numbers (N,)."""
    numbers = words(codes)
    word, shift = divmod(first, 64)
    values = numbers[:, word] >> np.uint64(shift)
    if shift + width > 64:
        values = values | numbers[:, word + 1] << np.uint64(64 - shift)
    return (values & np.uint64(2**width - 1)).astype(np.int64)


def flips(width: int, n: int) -> NDArray[np.int64]:
    """All numbers of `width` bits of which at most `n` are set."""
    return _flips(width, min(n, width))


@cache
def _flips(width: int, n: int) -> NDArray[np.int64]:
    numbers = [sum(1 << bit for bit in bits) for count in range(n + 1) for bits in combinations(range(width), count)]
    return np.array(numbers, np.int64)
