"""Retrieval figures of each query, exact over ties: expectation, worst and best order of equal distances.

An item is relevant to a query if they share at least one label; its graded relevance, or gain, is how many they share.
N beyond the database size means the whole database. A query for which nothing is relevant gets 0 in every figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics.counting import Counts, Floats, Histograms
from hashseek.retrieval.metrics.ties import Figure, discounted_sum, weighted_precision

Normalizer = Literal["retrieved", "possible", "relevant"]
NORMALIZERS: tuple[Normalizer, ...] = ("retrieved", "possible", "relevant")

Gain = Literal["exponential", "linear"]
GAINS: tuple[Gain, ...] = ("exponential", "linear")

Empty = Literal["zero", "skip"]


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
    n = effective_n(n, found.n_database)
    check_choice("normalizer", normalizer, NORMALIZERS)
    return weighted_precision(
        found.total,
        found.relevant[:, None],
        np.ones(1),
        n=n,
        divisor=lambda h, every: _divisor(h, every, n, normalizer),
    )


def weighted_average_precision(found: Histograms, *, n: int | None, normalizer: Normalizer = "retrieved") -> Figure:
    """WAP@n per query: the sum of ACG@i over relevant ranks i <= n, divided by R (R as for AP).

    Source: Zhao, Huang, Wang, Tan, "Deep Semantic Ranking Based Hashing for Multi-Label Image Retrieval", CVPR 2015,
    which divides by the relevant items retrieved.
    """
    n = effective_n(n, found.n_database)
    check_choice("normalizer", normalizer, NORMALIZERS)
    levels = _graded(found)
    return weighted_precision(
        found.total, levels, _values(levels), n=n, divisor=lambda h, every: _divisor(h, every, n, normalizer)
    )


def average_cumulative_gain(found: Histograms, *, n: int | None) -> Figure:
    """ACG@n per query: the mean number of labels that the first n share with it (Zhao et al., CVPR 2015)."""
    n = effective_n(n, found.n_database)
    levels = _graded(found)
    return discounted_sum(found.total, levels, _values(levels), np.full(n, 1 / n))


def ndcg(found: Histograms, *, n: int | None, gain: Gain = "exponential") -> Figure:
    """nDCG@n per query: sum of gain(i) / log2(1 + i) over the first n ranks, divided by that of the ideal ranking.

    Args:
        found: counted with `graded=True`. n: ranks that count; None for all.
        gain: of g shared labels, "exponential": 2**g - 1 (Burges et al., ICML 2005; what hashing papers report) or
            "linear": g (Järvelin and Kekäläinen, TOIS 2002; scikit-learn's `ndcg_score`).
    """
    n = effective_n(n, found.n_database)
    check_choice("gain", gain, GAINS)
    levels = _graded(found)
    values = np.exp2(_values(levels)) - 1 if gain == "exponential" else _values(levels)
    discounts = 1 / np.log2(np.arange(2, n + 2))
    figure = discounted_sum(found.total, levels, values, discounts)
    ideal = ideal_dcg(levels.sum(axis=2, dtype=np.int64), values, discounts)
    return Figure(*(part / np.where(ideal > 0, ideal, 1.0) for part in figure))


def ideal_dcg(counts: Counts, values: Floats, discounts: Floats) -> Floats:
    """DCG (Q,) of the best ranking of `counts[q, l]` items of gain `values[l]`, ascending, on ranks with discounts."""
    table = np.concatenate(([0.0], np.cumsum(discounts)))
    ends = np.minimum(np.cumsum(counts[:, ::-1], axis=1), len(discounts))
    starts = np.concatenate((np.zeros((len(counts), 1), np.int64), ends[:, :-1]), axis=1)
    result: Floats = (table[ends] - table[starts]) @ values[::-1]
    return result


def precision(found: Histograms, *, n: int | None) -> Figure:
    """Precision@n per query: the share of relevant items among the first n (or among all, if there are fewer)."""
    n = effective_n(n, found.n_database)
    return Figure(*(part[:, 0] / n for part in relevant_among_first(found, [n])))


def recall(found: Histograms, *, n: int | None) -> Figure:
    """Recall@n per query: the share of the database's relevant items that are among the first n."""
    n = effective_n(n, found.n_database)
    return Figure(*(part[:, 0] / np.maximum(found.n_relevant, 1) for part in relevant_among_first(found, [n])))


def relevant_among_first(found: Histograms, ns: Sequence[int]) -> Figure:
    """How many of the first n items are relevant, (Q, len(ns)), for each n (at most the database size).

    Inside a group of ties the expectation grows evenly with n (hypergeometric mean); the best order has the relevant
    items first, the worst has them last.
    """
    start = np.zeros((len(found), 1), np.int64)
    ranks = np.concatenate((start, np.cumsum(found.total, axis=1)), axis=1)
    hits = np.concatenate((start, np.cumsum(found.relevant, axis=1)), axis=1)
    expected, worst, best = (np.empty((len(found), len(ns))) for _ in range(3))
    # Corners of the broken lines: the ends of the groups and, within each, where its relevant items start or end.
    late = _between(ranks, ranks[:, 1:] - found.relevant), _between(hits, hits[:, :-1])
    early = _between(ranks, ranks[:, :-1] + found.relevant), _between(hits, hits[:, 1:])
    for query in range(len(found)):
        expected[query] = np.interp(ns, ranks[query], hits[query])
        worst[query] = np.interp(ns, late[0][query], late[1][query])
        best[query] = np.interp(ns, early[0][query], early[1][query])
    return Figure(expected, worst, best)


def precision_curve(found: Histograms, ns: Sequence[int]) -> Figure:
    """Precision@n of each query for each n, (Q, len(ns)): the Top-N precision curve is its mean over queries."""
    ns = [effective_n(n, found.n_database) for n in ns]
    return Figure(*(part / np.asarray(ns) for part in relevant_among_first(found, ns)))


def recall_curve(found: Histograms, ns: Sequence[int]) -> Figure:
    """Recall@n of each query for each n, (Q, len(ns)); with `precision_curve` the precision-recall curve over rank."""
    ns = [effective_n(n, found.n_database) for n in ns]
    n_relevant = np.maximum(found.n_relevant, 1)[:, None]
    return Figure(*(part / n_relevant for part in relevant_among_first(found, ns)))


@dataclass(frozen=True)
class Lookup:
    """Hash lookup: everything within a Hamming radius, averaged over queries, for each radius 0..K.

    Ties play no part, since a radius never cuts a group. `precision_zero` counts a query whose ball is empty as 0 (the
    hashing papers' custom), `precision_skip` leaves it out (NaN where every ball is empty), `precision_pooled` is over
    all retrieved pairs. `recall` is over queries, those without a relevant item counting 0. `empty` is the share of
    queries that find nothing, `retrieved` the mean number of items found. All (K + 1,).
    """

    precision_zero: Floats
    precision_skip: Floats
    precision_pooled: Floats
    recall: Floats
    empty: Floats
    retrieved: Floats


def lookup(found: Histograms) -> Lookup:
    """Precision and recall of hash lookup at every radius: the precision-recall curve over Hamming radius."""
    total, relevant = np.cumsum(found.total, axis=1), np.cumsum(found.relevant, axis=1)
    share = relevant / np.maximum(total, 1)
    filled = (total > 0).sum(axis=0)
    pooled = total.sum(axis=0)
    return Lookup(
        precision_zero=share.mean(axis=0),
        precision_skip=np.where(filled > 0, share.sum(axis=0) / np.maximum(filled, 1), np.nan),
        precision_pooled=np.where(pooled > 0, relevant.sum(axis=0) / np.maximum(pooled, 1), np.nan),
        recall=(relevant / np.maximum(found.n_relevant, 1)[:, None]).mean(axis=0),
        empty=1 - filled / len(found),
        retrieved=total.mean(axis=0),
    )


def precision_within(found: Histograms, *, radius: int, empty: Empty = "zero") -> Floats:
    """Precision of each query among the items within `radius` bits, (Q,).

    Args:
        radius: 0..K; 2 is the custom of the field.
        empty: what a query that finds nothing gets: "zero": 0; "skip": NaN, to be left out of a mean by `np.nanmean`.
    """
    check_choice("convention for empty buckets", empty, ("zero", "skip"))
    if not 0 <= radius <= found.n_bits:
        raise BadConfig(f"a radius counts bits, from 0 to the {found.n_bits} of the codes, not {radius}")
    total = found.total[:, : radius + 1].sum(axis=1)
    relevant = found.relevant[:, : radius + 1].sum(axis=1)
    return np.where(total > 0, relevant / np.maximum(total, 1), 0.0 if empty == "zero" else np.nan)


def tied_at_cut(found: Histograms, *, n: int | None) -> Floats:
    """Share (Q,) of the first n ranks that go to the group of equal distances that rank n cuts; 0 if it cuts none."""
    n = effective_n(n, found.n_database)
    ends = np.cumsum(found.total, axis=1)
    whole = np.where(ends <= n, ends, 0).max(axis=1)
    share: Floats = (n - whole) / n
    return share


def effective_n(n: int | None, n_database: int) -> int:
    """`n`, or the size of the database where it is None or beyond it.

    Raises:
        BadConfig: n < 1.
    """
    if n is not None and n < 1:
        raise BadConfig(f"figures at N need N >= 1, not {n}")
    return n_database if n is None else min(n, n_database)


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise `BadConfig` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise BadConfig(f"there is no {name} {value!r}: choose one of {', '.join(allowed)}")


def _divisor(h: Counts, every: NDArray[np.integer], n: int, normalizer: Normalizer) -> Counts:
    """R of AP, broadcast."""
    if normalizer == "retrieved":
        return h
    return np.minimum(n, every) if normalizer == "possible" else every.astype(np.int64)


def _graded(found: Histograms) -> NDArray[np.int32]:
    """Counts of the positive gains 1..G, (Q, G, K + 1)."""
    if found.gains is None:
        raise BadCodes("graded figures need the counts of shared labels: call histograms with graded=True")
    return found.gains[:, 1:]


def _values(levels: NDArray[np.integer]) -> Floats:
    """1, 2, ..., G."""
    return np.arange(1, levels.shape[1] + 1, dtype=np.float64)


def _between(ends: Counts, middles: Counts) -> Counts:
    """Each middle between the two ends around it, (Q, 2 M + 1) of (Q, M + 1) and (Q, M)."""
    result = np.empty((len(ends), 2 * ends.shape[1] - 1), np.int64)
    result[:, ::2], result[:, 1::2] = ends, middles
    return result
