"""Retrieval figures on packed codes and multi-hot labels, exact over ties.

Hamming distances are small integers, so most of a ranking is decided by how ties are broken. Here a ranking is the
histogram of its distances: how many items, and how many relevant ones, lie at each distance from the query. From that
the *expected* figure over a random order inside each group of equal distance follows in closed form (McSherry and
Najork, "Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied Scores", ECIR 2008),
and so do the smallest and largest value that any order could give. Nothing is sorted, no Q x N matrix is built.

An item is relevant to a query if they share at least one label. N beyond the database size means the whole database.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.codes import Codes, as_words, check_codes
from retrieval.devices import n_cores
from retrieval.errors import BadCodes, BadConfig

Normalizer = Literal["retrieved", "possible", "relevant"]
NORMALIZERS: tuple[Normalizer, ...] = ("retrieved", "possible", "relevant")

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Labels = NDArray[np.uint8]


@dataclass(frozen=True)
class Histograms:
    """Rankings of Q queries as counts per Hamming distance.

    `total[q, d]` items, of which `relevant[q, d]` are relevant, lie at distance d from query q; both (Q, K + 1).
    """

    total: Counts
    relevant: Counts

    @property
    def n_database(self) -> int:
        """N, the number of items that were ranked."""
        return int(self.total[0].sum())

    @property
    def without_relevant(self) -> int:
        """Queries for which the database holds no relevant item; they count as 0 in every figure."""
        return int((self.relevant.sum(axis=1) == 0).sum())


class Figure(NamedTuple):
    """A figure per query (Q,): its expectation over ties, and the least and greatest that an order of ties gives."""

    expected: Floats
    worst: Floats
    best: Floats


def histograms(
    query_codes: Codes, database_codes: Codes, query_labels: Labels, database_labels: Labels, *, n_bits: int
) -> Histograms:
    """Count items and relevant items at each distance from each query.

    Args:
        query_codes: packed (Q, code_size). database_codes: packed (N, code_size).
        query_labels: 0/1 (Q, C). database_labels: 0/1 (N, C).
        n_bits: K.

    Raises:
        BadCodes: nothing to rank, widths that differ, or labels that are not 0/1.
    """
    check_codes(query_codes, n_bits)
    check_codes(database_codes, n_bits)
    check_labels(query_codes, query_labels, "query")
    check_labels(database_codes, database_labels, "database")
    if query_labels.shape[1] != database_labels.shape[1]:
        raise BadCodes(
            f"query labels have {query_labels.shape[1]} columns, database labels {database_labels.shape[1]}: "
            "use one list of label names for both"
        )
    xq, xb = as_words(query_codes), as_words(database_codes)
    lq, lb = _label_words(query_labels), _label_words(database_labels)
    total = np.zeros((len(xq), n_bits + 1), np.int64)
    relevant = np.zeros_like(total)

    def count(queries: NDArray[np.int64]) -> None:
        workspace = _Workspace(len(xb), n_bits, lb.dtype)
        for query in queries:
            total[query], relevant[query] = workspace.count(xq[query], xb, lq[query], lb)

    with ThreadPoolExecutor(n_cores()) as pool:
        list(pool.map(count, np.array_split(np.arange(len(xq)), n_cores())))
    return Histograms(total, relevant)


def check_labels(codes: Codes, labels: Labels, split: str) -> None:
    """Raise `BadCodes` unless there are codes, and a row of 0/1 labels for each."""
    if not len(codes):
        raise BadCodes(f"the {split} split is empty: there is nothing to evaluate")
    if labels.ndim != 2 or len(labels) != len(codes):
        raise BadCodes(f"{len(codes)} {split} codes need labels of shape ({len(codes)}, C), not {labels.shape}")
    if labels.size and (labels.min() < 0 or labels.max() > 1):
        raise BadCodes(f"{split} labels must be 0 or 1, but range from {labels.min()} to {labels.max()}")


def average_precision(found: Histograms, *, n: int | None, normalizer: Normalizer = "retrieved") -> Figure:
    """AP@n per query: the sum of precision@i over relevant ranks i <= n, divided by R.

    Args:
        found: from `histograms`.
        n: ranks that count; None for all.
        normalizer: R is "retrieved": the relevant among the first n (HashNet, DeepHash and HyP2 report this);
            "possible": min(n, all relevant); "relevant": all relevant.

    Queries with R = 0 get 0. Where rank n cuts a group of ties, the number of relevant items above the cut is
    hypergeometric, and the expectation is taken over it.
    """
    if normalizer not in NORMALIZERS:
        raise BadConfig(f"there is no normalizer {normalizer!r}: choose one of {', '.join(NORMALIZERS)}")
    n = _check_n(n, found)
    groups = _Groups(found, n)
    harmonic = np.concatenate(([0.0], np.cumsum(1.0 / np.arange(1, found.n_database + 1))))
    whole = groups.size <= groups.room  # groups that lie above the cut entirely
    args = (groups.ahead, groups.relevant_ahead, groups.size, groups.relevant, harmonic)
    before = [np.where(whole, part(*args), 0.0).sum(axis=1) for part in (_mean_sum, _least_sum, _greatest_sum)]
    all_relevant = found.relevant.sum(axis=1)
    cut = _Cut(groups, n, found)
    expected, worst, best = (
        np.zeros_like(before[0]),
        np.full_like(before[1], np.inf),
        np.zeros_like(before[2]),
    )
    for h, probability in cut.outcomes():
        in_cut = (cut.ahead, cut.relevant_ahead, cut.room, h, harmonic)
        retrieved = cut.relevant_ahead + h
        if normalizer == "retrieved":
            divisor = retrieved
        elif normalizer == "possible":
            divisor = np.minimum(n, all_relevant)
        else:
            divisor = all_relevant
        divisor = np.maximum(divisor, 1)
        possible = probability > 0
        expected += np.where(possible, probability * (before[0] + _mean_sum(*in_cut)) / divisor, 0.0)
        worst = np.where(possible, np.minimum(worst, (before[1] + _least_sum(*in_cut)) / divisor), worst)
        best = np.where(possible, np.maximum(best, (before[2] + _greatest_sum(*in_cut)) / divisor), best)
    return Figure(expected, worst, best)


def precision(found: Histograms, *, n: int) -> Figure:
    """Precision@n per query: the share of relevant items among the first n (or among all, if there are fewer)."""
    n = _check_n(n, found)
    groups = _Groups(found, n)
    cut = _Cut(groups, n, found)
    share = cut.room * cut.relevant / np.maximum(cut.size, 1)
    return Figure(
        (cut.relevant_ahead + share) / n,
        (cut.relevant_ahead + cut.least) / n,
        (cut.relevant_ahead + cut.greatest) / n,
    )


def average_precision_of_ranking(
    relevance: NDArray[np.bool_], *, n_relevant: NDArray[np.int64], normalizer: Normalizer = "retrieved"
) -> Floats:
    """AP per query of rankings whose order is given: `relevance` (Q, n), `n_relevant` (Q,) in the whole database."""
    ranks = np.arange(1, relevance.shape[1] + 1)
    hits = np.cumsum(relevance, axis=1)
    retrieved = hits[:, -1] if relevance.shape[1] else np.zeros(len(relevance), np.int64)
    divisor = {
        "retrieved": retrieved,
        "possible": np.minimum(relevance.shape[1], n_relevant),
        "relevant": n_relevant,
    }[normalizer]
    result: Floats = np.where(relevance, hits / ranks, 0.0).sum(axis=1) / np.maximum(divisor, 1)
    return result


def relevance(ids: NDArray[np.int64], query_labels: Labels, database_labels: Labels) -> NDArray[np.bool_]:
    """Whether each item of given rankings, ids (Q, n) into the database, shares a label with its query: (Q, n)."""
    lq, lb = _label_words(query_labels), _label_words(database_labels)
    shared = np.zeros(ids.shape, np.bool_)
    for word in range(lq.shape[1]):
        shared |= (lb[:, word][ids] & lq[:, word, None]) != 0
    return shared


def _check_n(n: int | None, found: Histograms) -> int:
    if n is not None and n < 1:
        raise BadConfig(f"figures at N need N >= 1, not {n}")
    return found.n_database if n is None else min(n, found.n_database)


class _Groups:
    """Groups of equal distance, (Q, K + 1) each: what lies ahead of a group, and how many ranks the cut leaves it."""

    def __init__(self, found: Histograms, n: int) -> None:
        self.size = found.total
        self.relevant = found.relevant
        self.ahead = np.cumsum(found.total, axis=1) - found.total
        self.relevant_ahead = np.cumsum(found.relevant, axis=1) - found.relevant
        self.room = np.maximum(n - self.ahead, 0)


class _Cut:
    """The one group per query that rank n cuts, (Q,) each; where n falls between groups it has room 0."""

    def __init__(self, groups: _Groups, n: int, found: Histograms) -> None:
        ends = groups.ahead + groups.size
        at = np.minimum((ends <= n).sum(axis=1), groups.size.shape[1] - 1)[:, None]
        exists = ends[:, -1] > n
        self.size, self.relevant, self.ahead, self.relevant_ahead = (
            np.take_along_axis(values, at, axis=1)[:, 0]
            for values in (groups.size, groups.relevant, groups.ahead, groups.relevant_ahead)
        )
        self.room = np.where(exists, np.minimum(groups.room, groups.size)[np.arange(len(at)), at[:, 0]], 0)
        # Beyond the last group nothing is cut: everything relevant is ahead.
        self.relevant_ahead = np.where(exists, self.relevant_ahead, found.relevant.sum(axis=1))
        self.least = np.maximum(0, self.room - (self.size - self.relevant))
        self.greatest = np.minimum(self.room, self.relevant)

    def outcomes(self) -> "list[tuple[Counts, Floats]]":
        """Pairs (h, probability), (Q,) each: h relevant items above the cut, hypergeometric."""
        steps = int((self.greatest - self.least).max()) + 1
        h = self.least[:, None] + np.arange(steps)[None, :]
        room, size, relevant = self.room[:, None], self.size[:, None], self.relevant[:, None]
        # P(h) / P(h - 1), multiplied up in logarithms: neither overflows nor loses digits to huge factorials.
        numerator = (relevant - h + 1) * (room - h + 1.0)
        denominator = h * (size - relevant - room + h + 0.0)
        valid = h <= self.greatest[:, None]
        ratio = np.divide(numerator, denominator, out=np.ones_like(numerator), where=valid & (denominator > 0))
        ratio[:, 0] = 1.0
        logarithm = np.cumsum(np.log(np.where(valid, ratio, 1.0)), axis=1)
        weight = np.where(valid, np.exp(logarithm - logarithm.max(axis=1, keepdims=True, initial=-np.inf)), 0.0)
        probability = weight / weight.sum(axis=1, keepdims=True)
        return [(np.where(valid[:, i], h[:, i], 0), probability[:, i]) for i in range(steps)]


# In the three sums below, `size` items of which `relevant` are relevant take the ranks after `ahead` items with
# `relevant_ahead` relevant ones. Each gives the sum of precision@i over the relevant ranks i among them.


def _mean_sum(ahead: Counts, relevant_ahead: Counts, size: Counts, relevant: Counts, harmonic: Floats) -> Floats:
    """Over a random order: rank ahead + j is relevant with r / n, and then sees (j - 1)(r - 1)/(n - 1) before it."""
    inverse = harmonic[ahead + size] - harmonic[ahead]
    slope = (relevant - 1) / np.maximum(size - 1, 1)
    result: Floats = (relevant / np.maximum(size, 1)) * (
        (relevant_ahead + 1) * inverse + slope * (size - (ahead + 1) * inverse)
    )
    return result


def _greatest_sum(ahead: Counts, relevant_ahead: Counts, _size: Counts, relevant: Counts, harmonic: Floats) -> Floats:
    """Relevant items first."""
    inverse = harmonic[ahead + relevant] - harmonic[ahead]
    result: Floats = relevant + (relevant_ahead - ahead) * inverse
    return result


def _least_sum(ahead: Counts, relevant_ahead: Counts, size: Counts, relevant: Counts, harmonic: Floats) -> Floats:
    """Relevant items last."""
    return _greatest_sum(ahead + size - relevant, relevant_ahead, relevant, relevant, harmonic)


def _label_words(labels: Labels) -> NDArray[np.unsignedinteger]:
    """Labels (B, C) as bit sets (B, words), in the smallest type that holds C: less memory to read per pair."""
    packed = np.packbits(labels.astype(np.uint8), axis=1, bitorder="little")
    width = packed.shape[1]
    itemsize = next((size for size in (1, 2, 4) if width <= size), 8)
    padded = np.zeros((len(packed), -(-width // itemsize) * itemsize), np.uint8)
    padded[:, :width] = packed
    return padded.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[itemsize])


class _Workspace:
    """Buffers for counting one query against N items, allocated once per thread."""

    def __init__(self, n: int, n_bits: int, label_type: np.dtype[Any]) -> None:
        self.n_bits = n_bits
        # distance and relevance share one small integer, so that one pass counts both
        self.keys = np.empty(n, np.uint8 if 2 * (n_bits + 1) <= 256 else np.int16)
        self.offset = np.empty_like(self.keys)
        self.xor, self.bits = np.empty(n, np.uint64), np.empty(n, np.uint8)
        self.shared, self.relevant = np.empty(n, label_type), np.empty(n, np.bool_)

    def count(
        self,
        query: NDArray[np.uint64],
        database: NDArray[np.uint64],
        label: NDArray[np.unsignedinteger],
        labels: NDArray[np.unsignedinteger],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(total, relevant), each (K + 1,)."""
        for word in range(len(query)):
            np.bitwise_xor(database[:, word], query[word], out=self.xor)
            np.bitwise_count(self.xor, out=self.bits)
            if word == 0:
                self.keys[:] = self.bits
            else:
                np.add(self.keys, self.bits, out=self.keys)
        for word in range(len(label)):
            np.bitwise_and(labels[:, word], label[word], out=self.shared)
            if word == 0:
                np.not_equal(self.shared, 0, out=self.relevant)
            else:
                np.logical_or(self.relevant, self.shared != 0, out=self.relevant)
        np.multiply(self.relevant, self.n_bits + 1, out=self.offset, dtype=self.offset.dtype)
        np.add(self.keys, self.offset, out=self.keys)
        counts = torch.bincount(torch.from_numpy(self.keys), minlength=2 * (self.n_bits + 1)).numpy()
        irrelevant, relevant = counts[: self.n_bits + 1], counts[self.n_bits + 1 :]
        return irrelevant + relevant, relevant
