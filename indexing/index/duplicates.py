"""Near-duplicates: groups of images whose codes are linked by steps of at most a given number of bits.

Pairs are found through tables of rows by substrings of their codes (multi-index hashing; Norouzi, Punjani and Fleet,
CVPR 2012): of two codes within r bits, cut into m substrings, one pair of substrings differs in at most r // m bits.
Every pair within the radius is found; only the amount of work depends on how the codes are distributed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.code_layouts import DistinctCodes, collapse
from hashseek.indexing.index.exact_scan import candidates, in_threads, words
from hashseek.indexing.index.hamming_index import HammingIndex, Ids
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadConfig

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
Group = TypeVar("Group", bound=Iterable[int])

_MAX_WIDTH = 20
# Comparing one pair from a table costs as much as comparing this many pairs of codes in order.
_SCATTERED = 10
_BATCH = 256
# From this many pairs on, besides one for each code, only those that are needed to link the codes are kept: 30,000
# similar codes have half a billion pairs.
_KEPT = 2**20
_CHUNK = 16384  # pairs compared at a time, so that they stay in a core's cache
_STEP_PAIRS = 20_000  # pairs compared in the time of one call to NumPy


def groups(index: HammingIndex, *, radius: int, parallel: bool = True) -> Iterator[Ids]:
    """Groups of two or more ids, ascending within each group and by their first id.

    Two images are in one group if a chain of images leads from one to the other in which neighbours differ in at most
    `radius` bits. `parallel` uses the threads of searches, which then wait.

    Raises:
        BadConfig: radius is below 0, or not below the length of the codes.
    """
    if not 0 <= radius < index.n_bits:
        raise BadConfig(f"radius is in bits and must be 0 to {index.n_bits - 1}, got {radius}")
    if not len(index):
        return
    rows = index.rows if isinstance(index.rows, DistinctCodes) else collapse(index.rows.codes)
    pairs = _pairs(rows.distinct, index.n_bits, radius, parallel)
    group_of_code = _components(len(rows.distinct), _links(len(rows.distinct), pairs))
    group_of_row = np.empty(len(rows), np.int64)
    group_of_row[rows.rows] = np.repeat(group_of_code, np.diff(rows.starts))
    counts = np.bincount(group_of_row, minlength=len(rows.distinct))
    in_groups = np.flatnonzero(counts[group_of_row] > 1)
    if not len(in_groups):
        return
    in_groups = in_groups[np.argsort(group_of_row[in_groups], kind="stable")]
    found = np.split(in_groups, np.flatnonzero(np.diff(group_of_row[in_groups])) + 1)
    for rows_of_group in sorted(found, key=lambda group: group[0]):
        yield index.ids[rows_of_group]


def not_kept(found: Iterable[Group], kept: Sequence[Sequence[int]]) -> Iterator[Group]:
    """The groups that have an image outside every kept group, see `Catalog.kept_groups`."""
    with_image: dict[int, list[set[int]]] = {}
    for whole in map(set, kept):
        for image_id in whole:
            with_image.setdefault(image_id, []).append(whole)
    for group in found:
        if not any(whole.issuperset(group) for whole in with_image.get(next(iter(group)), ())):
            yield group


def _links(n: int, pairs: Iterable[Pairs]) -> list[Pairs]:
    """Pairs that link the same of n codes as these pairs, in memory for the number of codes."""
    found: list[Pairs] = []
    n_found = 0
    for part in pairs:
        found.append(part)
        n_found += len(part[0])
        if n_found > _KEPT + n:
            found = [_spanning(n, found)]
            n_found = len(found[0][0])
    return found


def _components(n: int, pairs: Sequence[Pairs]) -> NDArray[np.integer]:
    """(n,) numbers of the groups of n codes that the pairs link."""
    from scipy.sparse import coo_array  # slow to import
    from scipy.sparse.csgraph import connected_components

    if not pairs:
        return np.arange(n)
    first, second = (np.concatenate(codes) for codes in zip(*pairs, strict=True))
    links = coo_array((np.ones(len(first), np.bool_), (first, second)), shape=(n, n))
    group_of: NDArray[np.integer] = connected_components(links, directed=False)[1]
    return group_of


def _spanning(n: int, pairs: Sequence[Pairs]) -> Pairs:
    """Fewer than n pairs that link the same of n codes as these pairs."""
    group_of = _components(n, pairs)
    head: NDArray[np.int64] = np.unique(group_of, return_index=True)[1][group_of]
    linked = np.flatnonzero(head != np.arange(n))
    return linked, head[linked]


def _pairs(codes: Codes, n_bits: int, radius: int, parallel: bool) -> Iterator[Pairs]:
    """Pairs of distinct codes (N, size) within `radius` bits, some of them more than once."""
    if radius == 0:
        return
    n_tables, n_flips, cost = min((_plan(len(codes), n_bits, radius, n) for n in range(radius + 1)), key=lambda p: p[2])
    if cost < len(codes) ** 2:
        ends = [n_bits * i // n_tables for i in range(n_tables + 1)]
        tables = [build_table(codes, first, min(last - first, _MAX_WIDTH)) for first, last in pairwise(ends)]
        if cost * max(map(_skew, tables)) < len(codes) ** 2:
            parts = [(table, flip) for table in tables for flip in flips(table.width, n_flips)]
            run = in_threads if parallel else map
            for found in run(lambda part: _links(len(part[0].rows), _pairs_of_table(part, radius)), parts):
                yield from found
            return
    for start in range(0, len(codes), _BATCH):
        rest = codes[start:]
        near = candidates(rest[:_BATCH], rest, k=len(rest), limit=radius)
        first = np.repeat(np.arange(start, start + len(near)), [len(other) for _, other in near])
        yield first, np.concatenate([other for _, other in near]) + start


def _plan(n: int, n_bits: int, radius: int, n_flips: int) -> tuple[int, int, float]:
    """(tables, bits that may differ in a substring, cost in sequential comparisons) for random codes."""
    n_tables = radius // (n_flips + 1) + 1
    width = min(n_bits // n_tables, _MAX_WIDTH)
    if width <= n_flips:
        return n_tables, n_flips, float("inf")
    n_lookups = n_tables * sum(comb(width, i) for i in range(n_flips + 1))
    per_list = n / 2**width
    return n_tables, n_flips, _SCATTERED * n_lookups * (n * per_list + 3 * n + (2 + 2 * per_list) * _STEP_PAIRS)


@dataclass(frozen=True)
class Table:
    """Codes in the order of their substrings of `width` bits: value v has rows[starts[v]:starts[v + 1]].

    `values` (N,) are the substrings, and `words` (N, size / 8) the codes, in that order.
    """

    width: int
    starts: NDArray[np.int64]
    rows: NDArray[np.uint32]
    values: NDArray[np.int64]
    words: NDArray[np.uint64]


def build_table(codes: Codes, first: int, width: int) -> Table:
    """Sort the rows of padded codes (N, size) by their bits `first` to `first + width - 1`."""
    numbers, values = words(codes), substring(codes, first, width)
    starts = np.concatenate([[0], np.cumsum(np.bincount(values, minlength=2**width))])
    order = np.sort(values.astype(np.uint64) << np.uint64(32) | np.arange(len(codes), dtype=np.uint64))
    rows = order.astype(np.uint32)
    return Table(width, starts, rows, (order >> np.uint64(32)).astype(np.int64), numbers[rows])


def substring(codes: Codes, first: int, width: int) -> NDArray[np.int64]:
    """The bits `first` to `first + width - 1` of padded codes (N, size), as numbers (N,)."""
    numbers = words(codes)
    word, shift = divmod(first, 64)
    values = numbers[:, word] >> np.uint64(shift)
    if shift + width > 64:
        values = values | numbers[:, word + 1] << np.uint64(64 - shift)
    return (values & np.uint64(2**width - 1)).astype(np.int64)


def flips(width: int, n: int) -> list[int]:
    """All numbers of `width` bits of which at most `n` are set."""
    return [sum(1 << bit for bit in bits) for count in range(n + 1) for bits in combinations(range(width), count)]


def _skew(table: Table) -> float:
    """How many times as many pairs share a list as in lists of equal length."""
    lengths = np.diff(table.starts).astype(np.float64)
    return float((lengths**2).mean() / lengths.mean() ** 2)


def _pairs_of_table(part: tuple[Table, int], radius: int) -> Iterator[Pairs]:
    """Pairs within `radius` whose substrings differ in exactly the bits of the flip of a table."""
    by, flip = part
    starts = by.starts
    if flip:
        places = np.flatnonzero(by.values < by.values ^ flip)  # each pair of lists once
        others = by.values[places] ^ flip
        partner, last = starts[others], starts[others + 1]
    else:
        places = np.arange(len(by.values))
        partner, last = places + 1, starts[by.values + 1]
    left = partner < last
    places, partner, last = places[left], partner[left], last[left]
    for i in range(0, len(places), _CHUNK):
        chunk = slice(i, i + _CHUNK)
        yield from _pairs_of_lists(by, places[chunk], partner[chunk], last[chunk], radius)


def _pairs_of_lists(
    by: Table, places: NDArray[np.int64], partner: NDArray[np.int64], last: NDArray[np.int64], radius: int
) -> Iterator[Pairs]:
    """Pairs within `radius` of each place and the places from its partner to the last, exclusively."""
    while len(places):  # the first partner of all, the second of all, and so on
        apart = np.bitwise_count(by.words[places, 0] ^ by.words[partner, 0]).astype(np.int16)
        for word in range(1, by.words.shape[1]):
            apart += np.bitwise_count(by.words[places, word] ^ by.words[partner, word])
        near = (apart <= radius).nonzero()[0]
        if len(near):
            yield by.rows[places[near]].astype(np.int64), by.rows[partner[near]].astype(np.int64)
        partner = partner + 1
        left = partner < last
        if not left.all():
            places, partner, last = places[left], partner[left], last[left]
