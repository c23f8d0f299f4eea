"""Multi-index hashing (Norouzi, Punjani and Fleet, CVPR 2012): tables of rows by substrings of their codes.

A row whose distance is small agrees with the query, up to a few bits, in at least one substring: with m substrings,
every row within m * (effort + 1) - 1 bits has one within `effort` bits. Unlike FAISS's IndexBinaryMultiHash, this one
takes the effort with each search.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.approximate import Arrays, check_effort
from hashseek.indexing.index.exact_scan import Distances, Rows, ranked
from hashseek.indexing.sorted_ids import union
from hashseek.retrieval.codes import Codes

MAX_TABLES, MAX_WIDTH, MAX_EFFORT = 8, 22, 5


@dataclass(frozen=True)
class Table:
    """Rows by the bits `first` to `first + width - 1` of their codes: value v has rows[starts[v]:starts[v + 1]]."""

    first: int
    width: int
    starts: NDArray[np.int64]
    rows: NDArray[np.uint32]


@dataclass(frozen=True)
class MultiHash:
    """`effort` is one more than the number of bits that may differ in a substring."""

    codes: Codes
    tables: tuple[Table, ...]

    @classmethod
    def build(cls, codes: Codes, n_bits: int, /) -> Self:
        """Index padded codes (N, size) by substrings of about log2(N) bits."""
        return cls(codes, tuple(build_table(codes, first, width) for first, width in _substrings(len(codes), n_bits)))

    @classmethod
    def from_arrays(cls, arrays: Arrays, codes: Codes, n_bits: int, /) -> Self:
        """Restore what `to_arrays` returned."""
        parts = _substrings(len(codes), n_bits)
        return cls(codes, tuple(Table(*p, arrays[f"starts{i}"], arrays[f"rows{i}"]) for i, p in enumerate(parts)))

    def to_arrays(self) -> Arrays:
        """The tables."""
        starts = {f"starts{i}": table.starts for i, table in enumerate(self.tables)}
        return starts | {f"rows{i}": table.rows for i, table in enumerate(self.tables)}

    @property
    def efforts(self) -> tuple[int, ...]:
        """All valid efforts."""
        return tuple(range(1, 1 + min(MAX_EFFORT, self.tables[0].width)))

    @property
    def n_bytes(self) -> int:
        """The tables."""
        return sum(table.starts.nbytes + table.rows.nbytes for table in self.tables)

    def describe(self) -> dict[str, Any]:
        """Its settings."""
        return {"tables": len(self.tables), "substring_bits": self.tables[0].width}

    def search(self, xq: Codes, *, k: int, effort: int) -> tuple[Distances, Rows]:
        """About the k nearest rows of each query; -1 where too few rows are close in a substring."""
        check_effort(effort, largest=MAX_EFFORT, meaning="bits that may differ in a substring, plus one")
        distances, rows = np.full((len(xq), k), -1, np.int32), np.full((len(xq), k), -1, np.int64)
        for i in range(len(xq)):
            query = np.ascontiguousarray(xq[i : i + 1])
            parts = [_visited(table, substring(query, table.first, table.width), effort) for table in self.tables]
            found = union(parts)
            apart = np.empty(len(found), np.int32)
            gathered = self.codes[found]
            faiss.hammings(
                faiss.swig_ptr(query), faiss.swig_ptr(gathered), 1, len(found), xq.shape[1], faiss.swig_ptr(apart)
            )
            nearest, at = ranked(apart, found, k)
            distances[i, : len(at)], rows[i, : len(at)] = nearest, at
        return distances, rows


def build_table(codes: Codes, first: int, width: int) -> Table:
    """Sort the rows of padded codes (N, size) by the value of one substring."""
    values = substring(codes, first, width)
    starts = np.concatenate([[0], np.cumsum(np.bincount(values, minlength=2**width))])
    order = np.sort(values.astype(np.uint64) << np.uint64(32) | np.arange(len(codes), dtype=np.uint64))
    return Table(first, width, starts, order.astype(np.uint32))


def substring(codes: Codes, first: int, width: int) -> NDArray[np.int64]:
    """The bits `first` to `first + width - 1` of padded codes (N, size), as numbers (N,)."""
    words = codes.view(np.uint64)
    word, shift = divmod(first, 64)
    values = words[:, word] >> np.uint64(shift)
    if shift + width > 64:
        values = values | words[:, word + 1] << np.uint64(64 - shift)
    return (values & np.uint64(2**width - 1)).astype(np.int64)


def flips(width: int, n: int) -> NDArray[np.int64]:
    """All numbers of `width` bits of which at most `n` are set."""
    return _flips(width, min(n, width))


@cache
def _flips(width: int, n: int) -> NDArray[np.int64]:
    numbers = [sum(1 << bit for bit in bits) for count in range(n + 1) for bits in combinations(range(width), count)]
    return np.array(numbers, np.int64)


def _visited(table: Table, value: NDArray[np.int64], effort: int) -> NDArray[np.int64]:
    """The rows whose substring differs from `value` (1,) in fewer than `effort` bits."""
    values = value ^ flips(table.width, effort - 1)
    first, last = table.starts[values], table.starts[values + 1]
    lengths = last - first
    ends = np.cumsum(lengths)
    rows: NDArray[np.uint32] = table.rows[np.arange(ends[-1]) + np.repeat(first - ends + lengths, lengths)]
    return rows.astype(np.int64)


def _substrings(n: int, n_bits: int) -> list[tuple[int, int]]:
    """(first bit, width) of each table's substring."""
    width = min(max((n - 1).bit_length(), 4), MAX_WIDTH, n_bits)
    n_tables = min(-(-n_bits // width), MAX_TABLES)
    if n_tables * width >= n_bits:  # every bit belongs to exactly one substring
        ends = [n_bits * i // n_tables for i in range(n_tables + 1)]
        return [(first, last - first) for first, last in pairwise(ends)]
    return [(i * width, width) for i in range(n_tables)]
