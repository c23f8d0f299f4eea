"""Exact search by comparing every code, at about the speed of reading memory; all kinds of index fall back on it.

Two functions do it. `nearest` leaves it to FAISS's k-NN, which is faster for few codes or many queries. `candidates`
spreads even a single query over all cores: FAISS computes the distances of one block of rows, and NumPy keeps those
that can still be among the k nearest. It reads more memory per second, and supports masks, limits and ties.
"""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import faiss
import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import MAX_BITS, Codes, code_size
from hashseek.retrieval.devices import n_cores

Distances = NDArray[np.int32]
Rows = NDArray[np.int64]
Candidates = tuple[Distances, Rows]
T = TypeVar("T")
R = TypeVar("R")

# On ARM, FAISS 1.15 mistakes 32 bytes that differ in every bit for equal ones. Its portable code is right, except for
# `hammings`, which `_compare` replaces.
_IS_ARM = platform.machine() in ("aarch64", "arm64")
if _IS_ARM:
    faiss.SIMDConfig.set_level(faiss.SIMDLevel_NONE)

# Sizes (bytes) at which FAISS computes distances as fast as memory is read; 6 or 24 bytes take 2 to 6 times as long.
_SIZES = (4, 8, 16, 32, 64, 128)
_BLOCK_BYTES, _MIN_BLOCK, _MAX_BLOCK = 2**21, 8192, 2**17
# Up to this many bytes of codes per query, `nearest` is faster; more do not fit in the caches.
_CACHED = 16 * 2**20
_MAX_K = 4096
# FAISS counts distances if there are at most this many rows for each of the k, and keeps a heap otherwise. Its Python
# interface takes 3 microseconds to make a heap, which is noticeable for a single query.
_COUNTED = 400
_COUNTED_FOR_ONE = 1000
_COUNTERS = 64 * 2**20  # bytes of counters at a time
# Less work than this (bytes of codes) is done before another thread would have started.
_BYTES_PER_THREAD = 4 * 2**20
# If several threads share the rows of one query, one in this many rows is compared first, so that all threads start
# with an estimate of the distance of the k-th nearest.
_SEED = 100


@cache
def padded_size(n_bits: int) -> int:
    """Bytes per stored code of `n_bits` bits, padded with zero bytes, which add no distance."""
    return next(size for size in _SIZES if code_size(n_bits) <= size)


def words(codes: Codes) -> NDArray[np.uint64]:
    """Padded codes (N, size) as numbers: (N, 1 or size / 8)."""
    return codes.view(f"u{min(codes.shape[1], 8)}").astype(np.uint64, copy=False)


def suits_nearest(xq: Codes, xb: Codes, k: int) -> bool:
    """Whether `nearest` finds the k nearest of all rows faster than `candidates`, with AVX2 as with AVX-512."""
    return k <= _MAX_K and xb.nbytes <= _CACHED * len(xq)


def nearest(xq: Codes, xb: Codes, *, k: int) -> Candidates:
    """The k nearest rows of each query: (distances, rows), each (Q, k), nearest first, ties by ascending row.

    Args:
        xq: packed (Q, size), Q at least 1, padded to `padded_size`.
        xb: packed (N, size).
        k: 1 to N.
    """
    # FAISS keeps the first of equally near rows.
    variant = "mc" if len(xb) <= k * (_COUNTED_FOR_ONE if len(xq) == 1 else _COUNTED) else "hc"
    at_once = max(1, _COUNTERS // (64 * k * xb.shape[1]))
    with FaissThreads(1 if len(xq) == 1 else min(len(xq), n_cores())):  # a thread handles whole queries
        parts: list[Candidates] = [
            faiss.knn_hamming(xq[i : i + at_once], xb, k, variant) for i in range(0, len(xq), at_once)
        ]
    if len(parts) == 1:
        return parts[0]
    distances, rows = zip(*parts, strict=True)
    return np.vstack(distances), np.vstack(rows)


def candidates(
    xq: Codes,
    xb: Codes,
    *,
    k: int,
    limit: int,
    usable: NDArray[np.bool_] | None = None,
    weights: NDArray[np.int64] | None = None,
    ties: bool = False,
) -> list[Candidates]:
    """For each query, rows of `xb` among which are its k nearest: (distances, rows), in no order.

    Args:
        xq: packed (Q, size), padded to `padded_size`.
        xb: packed (N, size).
        k: at least 1; from N on, all rows within `limit` are returned.
        limit: in bits; rows further away are left out.
        usable: (N,) rows that may be found; None: all.
        weights: (N,) number of results that each row stands for. All ties are returned then, because the order of
            rows is not the order of results.
        ties: return all rows at the distance of the k-th.
    """
    searches = [_Nearest(k, limit, usable, weights, ties) for _ in xq]
    n_threads = min(n_cores(), 1 + len(xq) * xb.nbytes // _BYTES_PER_THREAD)
    if n_threads == 1:
        _scan(searches, xq, xb, 0, len(xb))
        return [search.candidates() for search in searches]
    n_query_parts = min(n_threads, len(xq))
    n_row_parts = -(-n_threads // n_query_parts)
    seed = len(xb) // _SEED if n_row_parts > 1 else 0
    _scan(searches, xq, xb, 0, seed)
    queries = np.linspace(0, len(xq), n_query_parts + 1).astype(int).tolist()
    rows = np.linspace(seed, len(xb), n_row_parts + 1).astype(int).tolist()

    def run(part: tuple[tuple[int, int], tuple[int, int]]) -> list[Candidates]:
        (first, last), (start, stop) = part
        of_part = [search.further() for search in searches[first:last]]
        _scan(of_part, xq[first:last], xb, start, stop)
        return [search.candidates() for search in of_part]

    found = list(in_threads(run, [(q, r) for q in pairwise(queries) for r in pairwise(rows)]))
    merged = []
    for i in range(0, len(found), n_row_parts):
        first = queries[i // n_row_parts]
        for at, of_query in enumerate(zip(*found[i : i + n_row_parts], strict=True), start=first):
            distances, hits = zip(searches[at].candidates(), *of_query, strict=True)
            merged.append((np.concatenate(distances), np.concatenate(hits)))
    return merged


def ranked(distances: Distances, rows: Rows, k: int, *, ties: bool = False) -> Candidates:
    """The k nearest, and with `ties` all others at the distance of the k-th; equal distances by ascending row."""
    if not len(rows):
        return distances, rows
    span = int(rows.max()) + 1
    keys = distances * np.int64(span) + rows  # one number to sort by, which is faster than two
    if len(keys) > 4 * k and not ties:
        keys = np.partition(keys, k - 1)[:k]
    keys.sort()
    if ties and len(keys) > k:
        k = int(keys.searchsorted((keys[k - 1] // span + 1) * span))
    keys = keys[:k]
    return (keys // span).astype(np.int32), keys % span


def count_distances(query: Codes, xb: Codes, weights: NDArray[Any]) -> NDArray[np.int64]:
    """How many results have each distance (bits) from a query (1, size), where row i of `xb` stands for weights[i]."""
    counts, distances = np.zeros(8 * xb.shape[1] + 1), np.empty(_MAX_BLOCK, np.int32)
    for start in range(0, len(xb), _MAX_BLOCK):
        codes = xb[start : start + _MAX_BLOCK]
        _compare(query, codes, distances[: len(codes)])
        counts += np.bincount(distances[: len(codes)], weights[start : start + len(codes)], len(counts))
    return counts.astype(np.int64)


def _compare(query: Codes, codes: Codes, distances: Distances) -> None:
    """Write the distances (N,) in bits of codes (N, size) from a query of as many bytes."""
    n, size = codes.shape
    if _IS_ARM and size >= 32:
        np.bitwise_count(words(query.reshape(1, size)) ^ words(codes)).sum(1, dtype=np.int32, out=distances)
    else:
        faiss.hammings(faiss.swig_ptr(query), faiss.swig_ptr(codes), 1, n, size, faiss.swig_ptr(distances))


def _scan(searches: "list[_Nearest]", xq: Codes, xb: Codes, start: int, stop: int) -> None:
    """Compare each query with the rows from `start` to `stop`."""
    size = xb.shape[1]
    largest = min(max(_BLOCK_BYTES // size, _MIN_BLOCK), _MAX_BLOCK)
    # At first every row is a candidate, so the first blocks are small.
    block = largest if start else min(max([1024, *(4 * search.k for search in searches)]), largest)
    distances = np.empty(largest, np.int32)
    while start < stop:
        n = min(block, stop - start)
        for query, search in zip(xq, searches, strict=True):
            if search.bound >= 0:
                _compare(query, xb[start : start + n], distances[:n])
                search.take(start, distances[:n])
        start += n
        block = min(4 * block, largest)


@dataclass
class _Nearest:
    """The k nearest of one query among the rows so far, and how near another row must be to be a candidate."""

    k: int
    limit: int
    usable: NDArray[np.bool_] | None
    weights: NDArray[np.int64] | None
    ties: bool

    def __post_init__(self) -> None:
        self.limit = self.bound = min(self.limit, MAX_BITS)
        self.bins = np.arange(self.limit + 1, dtype=np.int16)
        self.within = np.zeros(self.limit + 1, np.int64)  # results within each distance
        self.parts: list[Candidates] = []

    def further(self) -> "_Nearest":
        """A search over later rows that starts with the bound of this one."""
        other = replace(self)
        other.bound, other.within = self.bound, self.within.copy()
        return other

    def take(self, start: int, distances: Distances) -> None:
        """Take in the distances of the rows from `start` on."""
        if np.minimum.reduce(distances) > self.bound:
            return
        near = distances <= self.bound
        if self.usable is not None:
            near &= self.usable[start : start + len(near)]
        at = near.nonzero()[0]
        if not len(at):
            return
        hits = distances.take(at)
        if self.weights is None:  # sorting small numbers is faster than counting them
            self.within += np.sort(hits.astype(np.int16)).searchsorted(self.bins, "right")
        else:
            weights = self.weights.take(at + start)
            self.within += np.bincount(hits, weights, len(self.bins)).cumsum().astype(np.int64)
        reach = self._reach()
        if reach < self.bound:
            kept = (hits <= reach).nonzero()[0]  # with take, faster than a mask
            hits, at = hits.take(kept), at.take(kept)
        self.parts.append((hits, at + start))
        if reach <= self.limit:  # k are found: later rows at the same distance rank behind them
            self.bound = reach - 1 if self.weights is None and not self.ties else reach

    def _reach(self) -> int:
        """The distance of the k-th nearest so far; above the limit if there are fewer."""
        return int(self.within.searchsorted(self.k))

    def candidates(self) -> Candidates:
        """All candidates that are still near enough."""
        parts = [(np.zeros(0, np.int32), np.zeros(0, np.int64)), *self.parts]
        distances, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
        kept = (distances <= self._reach()).nonzero()[0]
        return distances.take(kept), rows.take(kept)


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """The function's results in order, computed by one thread per core, the calling thread among them.

    At most one result per core is in memory.
    """
    for start in range(0, len(items), n_cores()):
        first, *others = items[start : start + n_cores()]
        submitted = [_pool().submit(function, item) for item in others]
        yield function(first)
        for other in submitted:
            yield other.result()


class FaissThreads:
    """Context in which FAISS uses at most `n` threads, in the calling thread alone.

    As a class, it takes 1 microsecond; `contextlib.contextmanager` takes 3, which is noticeable for a single query.
    """

    def __init__(self, n: int) -> None:
        self._n = n

    def __enter__(self) -> None:
        self._before = faiss.omp_get_max_threads()
        # After a fork, OpenMP would wait for threads that no longer exist.
        faiss.omp_set_num_threads(1 if _forked else min(self._before, self._n))

    def __exit__(self, *_: object) -> None:
        faiss.omp_set_num_threads(self._before)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(n_cores() - 1, 1), thread_name_prefix="hamming")


_forked = False


def _forget_threads() -> None:
    """Threads do not survive a fork."""
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
