"""Retrieval metrics of each query from histograms, exact over ties: expectation, worst and best order.

An item is relevant to a query if they share at least one label; its graded relevance, or gain, is how many they share.
An N beyond the database size means the whole database. A query without relevant items scores 0 in every metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics.counting import Counts, Floats, Histograms, Labels, histograms
from hashseek.retrieval.metrics.ties import MetricValues, discounted_sum, weighted_precision

Normalizer = Literal["retrieved", "possible", "relevant"]
Gain = Literal["exponential", "linear"]


def average_precision(found: Histograms, *, n: int | None, normalizer: Normalizer = "retrieved") -> MetricValues:
    """AP@n of each query: the sum of precision@i over the relevant ranks i <= n, divided by R.

    Args:
        found: the result of `histograms`.
        n: how many ranks count; None means all.
        normalizer: what R is. "retrieved": the relevant items among the first n (reported by HashNet, DeepHash and
            HyP2); "possible": min(n, all relevant items); "relevant": all relevant items.

    A query with R = 0 scores 0. Where rank n cuts a group of ties, the number of relevant items above the cut is
    hypergeometric, and the expectation is taken over it.
    """
    return _weighted_average_precision(found, found.relevant[:, None], n=n, normalizer=normalizer)


def weighted_average_precision(
    found: Histograms, *, n: int | None, normalizer: Normalizer = "retrieved"
) -> MetricValues:
    """WAP@n of each query: the sum of ACG@i over the relevant ranks i <= n, divided by R (R as for AP).

    Source: Zhao, Huang, Wang, Tan, "Deep Semantic Ranking Based Hashing for Multi-Label Image Retrieval", CVPR 2015,
    which divides by the relevant items retrieved.
    """
    return _weighted_average_precision(found, _graded(found), n=n, normalizer=normalizer)


def _weighted_average_precision(
    found: Histograms, levels: NDArray[np.integer], *, n: int | None, normalizer: Normalizer
) -> MetricValues:
    n = effective_n(n, found.n_database)
    check_choice("normalizer", normalizer, Normalizer)

    def divisor(hits: Counts, n_relevant: NDArray[np.integer]) -> Counts:
        if normalizer == "retrieved":
            return hits
        return np.minimum(n, n_relevant) if normalizer == "possible" else n_relevant.astype(np.int64)

    return weighted_precision(found.total, levels, _values(levels), n=n, divisor=divisor)


def average_cumulative_gain(found: Histograms, *, n: int | None) -> MetricValues:
    """ACG@n of each query: the mean number of labels that the first n items share with it (Zhao et al., CVPR 2015)."""
    n = effective_n(n, found.n_database)
    levels = _graded(found)
    return discounted_sum(found.total, levels, _values(levels), np.full(n, 1 / n))


def ndcg(found: Histograms, *, n: int | None, gain: Gain = "exponential") -> MetricValues:
    """nDCG@n of each query: the sum of gain(i) / log2(1 + i) over the first n ranks, divided by the ideal ranking's.

    Args:
        found: counted with `graded=True`.
        n: how many ranks count; None means all.
        gain: the gain of g shared labels. "exponential": 2**g - 1 (Burges et al., ICML 2005; used by hashing papers);
            "linear": g (Järvelin and Kekäläinen, TOIS 2002; used by scikit-learn's `ndcg_score`).
    """
    n = effective_n(n, found.n_database)
    check_choice("gain", gain, Gain)
    levels = _graded(found)
    values = np.exp2(_values(levels)) - 1 if gain == "exponential" else _values(levels)
    discounts = 1 / np.log2(np.arange(2, n + 2))
    dcg = discounted_sum(found.total, levels, values, discounts)
    ideal = ideal_dcg(levels.sum(axis=2, dtype=np.int64), values, discounts)
    return MetricValues(*(part / np.where(ideal > 0, ideal, 1.0) for part in dcg))


def ideal_dcg(counts: Counts, values: Floats, discounts: Floats) -> Floats:
    """DCG (Q,) of the best order of `counts[q, l]` items with gain `values[l]` (ascending) under rank discounts."""
    table = np.concatenate(([0.0], np.cumsum(discounts)))
    ends = np.minimum(np.cumsum(counts[:, ::-1], axis=1), len(discounts))
    starts = np.concatenate((np.zeros((len(counts), 1), np.int64), ends[:, :-1]), axis=1)
    result: Floats = (table[ends] - table[starts]) @ values[::-1]
    return result


def precision(found: Histograms, *, n: int | None) -> MetricValues:
    """Precision@n of each query: the share of relevant items among the first n."""
    return MetricValues(*(part[:, 0] for part in precision_curve(found, [n])))


def recall(found: Histograms, *, n: int | None) -> MetricValues:
    """Recall@n of each query: the share of the database's relevant items that are among the first n."""
    return MetricValues(*(part[:, 0] for part in recall_curve(found, [n])))


def precision_curve(found: Histograms, ns: Sequence[int | None]) -> MetricValues:
    """Precision@n of each query for each n, (Q, len(ns)); its mean over queries is the Top-N precision curve."""
    limits = [effective_n(n, found.n_database) for n in ns]
    return MetricValues(*(part / np.asarray(limits) for part in _relevant_among_first(found, limits)))


def recall_curve(found: Histograms, ns: Sequence[int | None]) -> MetricValues:
    """Recall@n of each query for each n, (Q, len(ns)); with `precision_curve`, the precision-recall curve over rank."""
    limits = [effective_n(n, found.n_database) for n in ns]
    n_relevant = np.maximum(found.n_relevant, 1)[:, None]
    return MetricValues(*(part / n_relevant for part in _relevant_among_first(found, limits)))


def _relevant_among_first(found: Histograms, ns: Sequence[int]) -> MetricValues:
    """How many of the first n items are relevant, (Q, len(ns)), for each n (at most the database size).

    Inside a group of ties the expectation grows linearly with n (hypergeometric mean). The best order puts the relevant
    items of a group first, the worst order puts them last.
    """
    start = np.zeros((len(found), 1), np.int64)
    ranks = np.concatenate((start, np.cumsum(found.total, axis=1)), axis=1)
    hits = np.concatenate((start, np.cumsum(found.relevant, axis=1)), axis=1)
    expected, worst, best = (np.empty((len(found), len(ns))) for _ in range(3))
    # The curves are piecewise linear. Their corners are the ends of the groups and, within each group, the rank where
    # its relevant items start (worst order) or end (best order).
    late = _interleave(ranks, ranks[:, 1:] - found.relevant), _interleave(hits, hits[:, :-1])
    early = _interleave(ranks, ranks[:, :-1] + found.relevant), _interleave(hits, hits[:, 1:])
    for query in range(len(found)):
        expected[query] = np.interp(ns, ranks[query], hits[query])
        worst[query] = np.interp(ns, late[0][query], late[1][query])
        best[query] = np.interp(ns, early[0][query], early[1][query])
    return MetricValues(expected, worst, best)


def evaluate_codes(
    query_codes: Codes,
    database_codes: Codes,
    query_labels: Labels,
    database_labels: Labels,
    *,
    n_bits: int,
    ns: Sequence[int | None] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    device: str = "cpu",
) -> dict[str, MetricValues]:
    """Every metric of each query at every N, by names such as "AP@1000" and "nDCG@all".

    Args:
        query_codes, database_codes, query_labels, database_labels, n_bits, device: see `histograms`.
        ns: how many ranks count; None means all.
        normalizer: see `average_precision`.

    Raises:
        BadCodes, BadConfig: see `histograms`; or an N < 1.
    """
    found = histograms(
        query_codes, database_codes, query_labels, database_labels, n_bits=n_bits, graded=True, device=device
    )
    return metrics_of_histograms(found, ns=ns, normalizer=normalizer)


def metrics_of_histograms(
    found: Histograms, *, ns: Sequence[int | None], normalizer: Normalizer = "retrieved"
) -> dict[str, MetricValues]:
    """Every metric at every N, by names such as "AP@1000" and "nDCG@all", from histograms with `graded=True`."""
    result = {}
    for n in ns:
        name = "all" if n is None else str(n)
        result[f"AP@{name}"] = average_precision(found, n=n, normalizer=normalizer)
        result[f"precision@{name}"] = precision(found, n=n)
        result[f"recall@{name}"] = recall(found, n=n)
        result[f"nDCG@{name}"] = ndcg(found, n=n)
        result[f"ACG@{name}"] = average_cumulative_gain(found, n=n)
        result[f"WAP@{name}"] = weighted_average_precision(found, n=n, normalizer=normalizer)
    return result


@dataclass(frozen=True)
class Lookup:
    """Hash lookup: everything within a Hamming radius, averaged over queries, for each radius 0..K; all (K + 1,).

    Ties do not matter here, because a radius never cuts a group. A query may find nothing within a radius:
    `precision_zero` counts it as 0 (usual in hashing papers), `precision_skip` leaves it out (NaN where no query finds
    anything), and `empty` is the share of such queries. `recall` counts queries without relevant items as 0.
    """

    precision_zero: Floats
    precision_skip: Floats
    recall: Floats
    empty: Floats


def lookup(found: Histograms) -> Lookup:
    """Precision and recall of hash lookup at every radius: the precision-recall curve over Hamming radius."""
    total, relevant = np.cumsum(found.total, axis=1), np.cumsum(found.relevant, axis=1)
    share = relevant / np.maximum(total, 1)
    filled = (total > 0).sum(axis=0)
    return Lookup(
        precision_zero=share.mean(axis=0),
        precision_skip=np.where(filled > 0, share.sum(axis=0) / np.maximum(filled, 1), np.nan),
        recall=(relevant / np.maximum(found.n_relevant, 1)[:, None]).mean(axis=0),
        empty=1 - filled / len(found),
    )


def tied_at_cut(found: Histograms, *, n: int | None) -> Floats:
    """Share (Q,) of the first n ranks that belong to the group of ties cut by rank n; 0 if rank n cuts none."""
    n = effective_n(n, found.n_database)
    ends = np.cumsum(found.total, axis=1)
    whole = np.where(ends <= n, ends, 0).max(axis=1)
    share: Floats = (n - whole) / n
    return share


def effective_n(n: int | None, n_database: int) -> int:
    """`n`, or the database size if `n` is None or larger.

    Raises:
        BadConfig: n < 1.
    """
    if n is not None and n < 1:
        raise BadConfig(f"N must be at least 1, got {n}")
    return n_database if n is None else min(n, n_database)


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise `BadConfig` unless `value` is one of the `choices`, a `Literal`."""
    allowed = get_args(choices)
    if value not in allowed:
        raise BadConfig(f"unknown {name} {value!r}: choose one of {', '.join(allowed)}")


def _graded(found: Histograms) -> NDArray[np.int32]:
    """Counts of the positive gains 1..G, (Q, G, K + 1)."""
    if found.gains is None:
        raise BadCodes("graded metrics need the counts of shared labels: call histograms with graded=True")
    return found.gains[:, 1:]


def _values(levels: NDArray[np.integer]) -> Floats:
    """1, 2, ..., G."""
    return np.arange(1, levels.shape[1] + 1, dtype=np.float64)


def _interleave(ends: Counts, middles: Counts) -> Counts:
    """Each middle placed between the two ends around it, (Q, 2 M + 1) from (Q, M + 1) and (Q, M)."""
    result = np.empty((len(ends), 2 * ends.shape[1] - 1), np.int64)
    result[:, ::2], result[:, 1::2] = ends, middles
    return result
