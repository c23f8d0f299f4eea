"""Two layouts of stored codes: one code per row, or, where many are equal, each distinct code with a list of rows."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.exact_scan import Candidates, candidates, count_distances, ranked, words
from hashseek.indexing.index.multi_index import Tables
from hashseek.retrieval.codes import Codes

# Share of distinct codes below which each is stored once: at 0.3 a search takes 0.4 of the time, at 0.5 0.6, at 0.7 it
# gains little, and the lists take more memory than the repeated codes (10M codes of 48 bits; docs/benchmarks.md).
COLLAPSE_BELOW = 0.5
_SAMPLED, _SCRAMBLE = 2**22, np.uint64(0x9E3779B97F4A7C15)
# Reading scattered codes takes about this many times as long as reading them in order (10M codes; docs/benchmarks.md).
_SCATTERED = 20


class Subset:
    """Some of the rows of an index, with everything that searches among them need, computed once: reuse it.

    Args:
        mask: (N,) the rows that may be found.
    """

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        self.mask = mask
        self.n = int(np.count_nonzero(mask))
        self.counts: NDArray[np.int64] | None = None  # rows of each distinct code

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The rows, ascending."""
        return np.flatnonzero(self.mask)

    @cached_property
    def left_out(self) -> NDArray[np.int64]:
        """The other rows, ascending."""
        return np.flatnonzero(~self.mask)

    @cached_property
    def is_small(self) -> bool:
        """Whether gathering its codes is faster than reading all codes."""
        return self.n * _SCATTERED < len(self.mask)


@dataclass(frozen=True)
class PlainCodes:
    """All codes, row by row. `codes` is packed (N, size), padded."""

    codes: Codes

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def compared(self) -> Codes:
        """The codes that a query is compared with."""
        return self.codes

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self.codes.nbytes

    def gather(self, rows: NDArray[np.int64]) -> Codes:
        """Codes (n, size) of `rows`."""
        return self.codes[rows]

    def search(
        self,
        xq: Codes,
        *,
        k: int,
        limit: int,
        among: Subset | None,
        ties: bool = False,
        tables: Tables | None = None,
    ) -> list[Candidates]:
        """The at most k nearest rows within `limit` bits of each query, nearest first, ties by ascending row.

        With `ties`, also all others at the distance of the k-th. `tables`: those of the `compared` codes, if any.
        """
        if among is not None and among.is_small:
            return _search_gathered(self, xq, k=k, limit=limit, among=among, ties=ties)
        usable = None if among is None else among.mask
        find = candidates if tables is None else tables.candidates
        found = find(xq, self.codes, k=k, limit=limit, usable=usable, ties=ties)
        return [ranked(*of_query, k, ties=ties) for of_query in found]

    def histogram(self, query: Codes, among: Subset) -> NDArray[np.int64]:
        """How many of the rows `among` have each distance (bits) from a query (1, size): (8 * size + 1,)."""
        if among.is_small:
            return count_distances(query, self.gather(among.rows), np.ones(among.n))
        return count_distances(query, self.codes, among.mask)


@dataclass(frozen=True)
class DistinctCodes:
    """Each distinct code once. Rows rows[starts[i]:starts[i + 1]], ascending, have code i.

    `distinct` is packed (D, size), padded; `starts` is (D + 1,), `rows` (N,).
    """

    distinct: Codes
    starts: NDArray[np.int64]
    rows: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def compared(self) -> Codes:
        """The codes that a query is compared with."""
        return self.distinct

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        lists = self.distinct.nbytes + self.starts.nbytes + self.rows.nbytes + self._counts.nbytes
        return lists + (self._code_of.nbytes if "_code_of" in self.__dict__ else 0)

    @property
    def codes(self) -> Codes:
        """All codes (N, size), row by row."""
        codes = np.empty((len(self), self.distinct.shape[1]), np.uint8)
        codes[self.rows] = np.repeat(self.distinct, self._counts, axis=0)
        return codes

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @cached_property
    def _code_of(self) -> NDArray[np.uint32]:
        """(N,) the number of each row's code."""
        code_of = np.empty_like(self.rows)
        code_of[self.rows] = np.repeat(np.arange(len(self.distinct), dtype=np.uint32), self._counts)
        return code_of

    def gather(self, rows: NDArray[np.int64]) -> Codes:
        """Codes (n, size) of `rows`."""
        return self.distinct[self._code_of[rows]]

    def search(
        self,
        xq: Codes,
        *,
        k: int,
        limit: int,
        among: Subset | None,
        ties: bool = False,
        tables: Tables | None = None,
    ) -> list[Candidates]:
        """See `PlainCodes.search`."""
        if among is not None and among.n * _SCATTERED < len(self.distinct):
            return _search_gathered(self, xq, k=k, limit=limit, among=among, ties=ties)
        counts = self._counts if among is None else self._counts_among(among)
        usable = None if among is None else counts > 0
        find = candidates if tables is None else tables.candidates
        found = find(xq, self.distinct, k=k, limit=limit, usable=usable, weights=counts)
        return [self._expanded(distances, at, k, among, ties) for distances, at in found]

    def histogram(self, query: Codes, among: Subset) -> NDArray[np.int64]:
        """See `PlainCodes.histogram`."""
        return count_distances(query, self.distinct, self._counts_among(among))

    def _counts_among(self, among: Subset) -> NDArray[np.int64]:
        """Rows of each code that are in `among`."""
        if among.counts is None:
            few = among.n < len(self) // 2
            counts = np.bincount(self._code_of[among.rows if few else among.left_out], minlength=len(self.distinct))
            among.counts = counts if few else self._counts - counts
        return among.counts

    def _expanded(
        self, distances: NDArray[np.int32], at: NDArray[np.int64], k: int, among: Subset | None, ties: bool
    ) -> Candidates:
        """The rows of the codes `at`, ranked."""
        first, lengths = self.starts[at], self._counts[at]
        if among is None and not ties:
            lengths = np.minimum(lengths, k)  # further rows rank behind these
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + lengths, lengths)
        rows, distances = self.rows[places].astype(np.int64), np.repeat(distances, lengths)
        if among is not None:
            kept = among.mask[rows]
            rows, distances = rows[kept], distances[kept]
        return ranked(distances, rows, k, ties=ties)


def _search_gathered(
    where: PlainCodes | DistinctCodes, xq: Codes, *, k: int, limit: int, among: Subset, ties: bool
) -> list[Candidates]:
    """Search among few rows by copying their codes together."""
    found = candidates(xq, where.gather(among.rows), k=k, limit=limit, ties=ties)
    return [ranked(distances, among.rows[at], k, ties=ties) for distances, at in found]


def arrange(codes: Codes) -> PlainCodes | DistinctCodes:
    """Store padded codes (N, size) in the layout that is searched faster."""
    keys = _keys(codes)
    # Of many, a sample with all rows of a code or none: those whose scrambled key begins with six zeros.
    few = keys[(keys ^ _SCRAMBLE) * _SCRAMBLE >> np.uint64(58) == 0] if len(keys) > _SAMPLED else keys
    sample = np.sort(few)
    n_distinct = np.count_nonzero(sample[1:] != sample[:-1]) + 1
    if n_distinct >= COLLAPSE_BELOW * len(sample) or len(codes) >= 2**32:
        return PlainCodes(codes)
    return collapse(codes, keys)


def collapse(codes: Codes, keys: NDArray[np.uint64] | None = None) -> DistinctCodes:
    """Store each distinct one of padded codes (N, size) once, in no particular order."""
    keys = _keys(codes) if keys is None else keys
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]]))
    distinct = codes[order[starts[:-1]]]
    if codes.shape[1] > 8 and not np.array_equal(np.repeat(distinct, np.diff(starts), axis=0), codes[order]):
        # Different codes with the same key, about as likely as a bit flip in memory: number them the slow way.
        _, numbers = np.unique(codes, axis=0, return_inverse=True)
        return collapse(codes, numbers.astype(np.uint64))
    return DistinctCodes(distinct, starts, order.astype(np.uint32))


def _keys(codes: Codes) -> NDArray[np.uint64]:
    """One 64-bit number per code, the same for equal codes, and different for others with overwhelming probability."""
    numbers = words(codes)
    keys = numbers[:, 0] if numbers.shape[1] == 1 else numbers[:, 0].copy()
    for word in range(1, numbers.shape[1]):
        keys ^= keys >> np.uint64(29)
        keys *= _SCRAMBLE
        keys += numbers[:, word]
    return keys
