"""Exact search that compares few codes: multi-index hashing, Norouzi, Punjani and Fleet (CVPR 2012).

Codes are divided into m substrings, and a table for each lists the rows by its value. A search looks up the query's own
values, then in each table the values that differ from the query's in one bit, then in two, and so on. Lookup number
t = s m + j, from 0, is that of s differing bits in table j. A row that no lookup so far has found differs in more than
s bits in tables 0 to j, and in s or more in the others, so it is more than t bits away. The search ends as soon as it
has k rows within t bits, and so finds what a scan finds. If it would compare too many codes, it scans all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from math import ceil, comb, log2

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.exact_scan import Candidates, candidates, in_threads, words
from hashseek.retrieval.codes import Codes

# Bits of a substring: a table with a list for each of 2^24 values takes 64 MiB beside its rows.
_MAX_WIDTH = 24
# A search scans instead of comparing, or looking up, more than one in this many codes: scattered codes of 100 million
# take about 100 times as long to compare as codes in order. A lookup itself counts as one for each table.
_MOST = 100

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Tables:
    """A table of rows for each substring of their codes.

    Table j lists the rows with value v as table_rows[j, starts[v]:starts[v + 1]], with its own part of `table_starts`.

    Args:
        n_bits: K.
        table_rows: (m, N).
        table_starts: 2^width + 1 numbers for each table, one after the other.
    """

    n_bits: int
    table_rows: NDArray[np.uint32]
    table_starts: NDArray[np.uint32]

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self.table_rows.nbytes + self.table_starts.nbytes

    def candidates(
        self,
        xq: Codes,
        xb: Codes,
        *,
        k: int,
        limit: int,
        usable: NDArray[np.bool_] | None = None,
        weights: NDArray[np.int64] | None = None,
        ties: bool = False,
    ) -> list[Candidates]:
        """As `exact_scan.candidates` of the same codes; more rows at the distance of the k-th may be returned."""

        def search(query: Words) -> Candidates | None:
            return self._search(query, xb, k, min(limit, self.n_bits), usable, weights)

        found = list(in_threads(search, list(words(xq))))
        many = [i for i, of_query in enumerate(found) if of_query is None]
        scanned = iter(candidates(xq[many], xb, k=k, limit=limit, usable=usable, weights=weights, ties=ties))
        return [next(scanned) if of_query is None else of_query for of_query in found]

    def _search(
        self,
        query: Words,
        xb: Codes,
        k: int,
        limit: int,
        usable: NDArray[np.bool_] | None,
        weights: NDArray[np.int64] | None,
    ) -> Candidates | None:
        """Rows within `limit` that are as near as the k-th; None if too many codes would be compared."""
        counts = np.zeros(8 * xb.shape[1] + 1)
        parts: list[Candidates] = []
        for reach, found in enumerate(self._lookups(query, xb)):
            if found is None:
                return None
            distances, rows = found
            if usable is not None:
                kept = usable[rows].nonzero()[0]
                distances, rows = distances[kept], rows[kept]
            parts.append((distances, rows))
            counts += np.bincount(distances, None if weights is None else weights[rows], len(counts))
            within = counts[: min(reach, limit) + 1].cumsum()
            if within[-1] >= k or reach >= limit:
                break
        distances, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
        near = (distances <= within.searchsorted(k)) & (distances <= limit)
        return distances[near], rows[near]

    def _lookups(self, query: Words, xb: Codes) -> Iterator[Candidates | None]:
        """The rows that each lookup is the first to find, with their distances; None instead of too many."""
        parts, left = substrings(self.n_bits, len(xb)), len(xb) // _MOST
        for n_differing in range(self.n_bits + 1):
            offset = 0
            for table, (start, width) in enumerate(parts):
                starts = self.table_starts[offset : offset + 2**width + 1]
                offset += len(starts)
                left -= comb(width, n_differing) + len(parts)
                if left < 0:
                    yield None
                values = values_of(query, start, width) ^ masks(width, n_differing)
                first = starts[values].astype(np.int64)
                lengths = starts[values + 1] - first
                n_rows = int(lengths.sum())
                left -= n_rows
                if left < 0:
                    yield None
                places = np.arange(n_rows) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
                rows = self.table_rows[table, places]
                differing = words(xb[rows]) ^ query
                is_new = np.ones(n_rows, np.bool_)
                for other, part in enumerate(parts):
                    if other != table:  # it found those with as few differing bits before
                        n_other = np.bitwise_count(values_of(differing, *part))
                        is_new &= n_other > n_differing if other < table else n_other >= n_differing
                new = is_new.nonzero()[0]
                yield np.bitwise_count(differing[new]).sum(axis=1, dtype=np.int32), rows[new].astype(np.int64)


def build_tables(codes: Codes, n_bits: int) -> Tables:
    """Tables of padded codes (N, size), N below 2^32."""
    all_rows: list[NDArray[np.uint32]] = []
    all_starts: list[NDArray[np.uint32]] = []
    for start, width in substrings(n_bits, len(codes)):
        values = values_of(words(codes), start, width)
        all_starts.append(np.append(0, np.bincount(values, minlength=2**width).cumsum()).astype(np.uint32))
        values <<= 32  # sorting one number is much faster than argsort
        values |= np.arange(len(codes))
        values.sort()
        all_rows.append(values.astype(np.uint32))
    return Tables(n_bits, np.stack(all_rows), np.concatenate(all_starts))


@cache
def substrings(n_bits: int, n: int) -> list[tuple[int, int]]:
    """(first bit, width) of each substring of `n` codes: about as many values as codes, as the paper recommends."""
    n_tables = ceil(n_bits / min(max(log2(max(n, 2)), 1), _MAX_WIDTH))
    ends = np.linspace(0, n_bits, n_tables + 1).astype(int).tolist()
    return [(first, last - first) for first, last in pairwise(ends)]


def values_of(numbers: Words, start: int, width: int) -> NDArray[np.int64]:
    """The values (...) of the substrings of codes (..., W) of 64-bit words."""
    word, shift = divmod(start, 64)
    values = numbers[..., word] >> np.uint64(shift)
    if shift + width > 64:
        values |= numbers[..., word + 1] << np.uint64(64 - shift)
    return (values & np.uint64(2**width - 1)).astype(np.int64)


@cache
def masks(width: int, n_ones: int) -> NDArray[np.int64]:
    """All numbers of `width` bits with `n_ones` bits that are 1."""
    return np.array([sum(1 << bit for bit in bits) for bits in combinations(range(width), n_ones)], np.int64)
