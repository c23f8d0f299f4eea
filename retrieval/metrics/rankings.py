"""Metrics of rankings whose order is given, such as the order that search returns (ties by ascending id).

A ranking is a row of `ids` (Q, n): positions in the database, nearest first. `gains` (Q, n) are the numbers of labels
that its items share with the query.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes, as_words, check_codes
from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Counts, Floats, Histograms, Labels, check_same_labels, histograms
from hashseek.retrieval.metrics.ranking_metrics import (
    GAINS,
    NORMALIZERS,
    Gain,
    Normalizer,
    check_choice,
    effective_n,
    ideal_dcg,
    metrics_of_histograms,
    name_of_n,
)
from hashseek.retrieval.metrics.ties import MetricValues

Ids = NDArray[np.int64]

TiePolicy = Literal["expected", "by_id"]
TIE_POLICIES: tuple[TiePolicy, ...] = ("expected", "by_id")

# Queries per block: their distances and ids are in memory at the same time.
_QUERIES = 64


def evaluate_codes(
    query_codes: Codes,
    database_codes: Codes,
    query_labels: Labels,
    database_labels: Labels,
    *,
    n_bits: int,
    ns: Sequence[int | None] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    gain: Gain = "exponential",
    tie_policy: TiePolicy = "expected",
    device: str = "cpu",
) -> dict[str, MetricValues]:
    """AP, precision, recall, nDCG, ACG and WAP of each query, by names such as "AP@1000" and "nDCG@all".

    Args:
        query_codes, database_codes, query_labels, database_labels, n_bits, device: see `histograms`.
        ns: how many ranks count; None means all.
        normalizer: see `average_precision`.
        gain: see `ndcg`.
        tie_policy: "expected": the expectation over all orders of ties, with the worst and the best order; "by_id": the
            one order that search returns, ties by ascending position in the database (worst = best = expected).

    Raises:
        BadCodes, BadConfig: see `histograms`; or an N < 1.
    """
    check_choice("tie policy", tie_policy, TIE_POLICIES)
    found = histograms(
        query_codes, database_codes, query_labels, database_labels, n_bits=n_bits, graded=True, device=device
    )
    if tie_policy == "expected":
        return metrics_of_histograms(found, ns=ns, normalizer=normalizer, gain=gain)
    limits = {name_of_n(n): effective_n(n, found.n_database) for n in ns}
    n_of_gain = count_gains(query_labels, database_labels)
    parts: dict[str, list[Floats]] = {}
    for chosen, ids in rank_by_id(query_codes, database_codes, n_bits=n_bits, n=max(limits.values())):
        gains = gains_of(ids, query_labels[chosen], database_labels)
        for name, n in limits.items():
            values = metrics_of_ranking(gains[:, :n], n_of_gain=n_of_gain[chosen], normalizer=normalizer, gain=gain)
            for metric, value in values.items():
                parts.setdefault(f"{metric}@{name}", []).append(value)
    joined = {name: np.concatenate(values) for name, values in parts.items()}
    return {name: MetricValues(values, values, values) for name, values in joined.items()}


def rank_by_id(query_codes: Codes, database_codes: Codes, *, n_bits: int, n: int) -> Iterator[tuple[slice, Ids]]:
    """The n nearest items of each query, ties by ascending id: pairs (slice of queries, ids (q, min(n, N))).

    Only the items up to the distance at rank n are sorted.
    """
    check_codes(query_codes, n_bits)
    check_codes(database_codes, n_bits)
    n = effective_n(n, len(database_codes))
    xq, xb = as_words(query_codes), as_words(database_codes)
    kind = np.uint8 if n_bits < 256 else np.uint16
    for start in range(0, len(xq), _QUERIES):
        part = xq[start : start + _QUERIES]
        ids = np.empty((len(part), n), np.int64)
        for row, query in enumerate(part):
            distances = np.bitwise_count(xb ^ query).sum(axis=1, dtype=kind)
            cut = int(np.searchsorted(np.cumsum(np.bincount(distances, minlength=n_bits + 1)), n))
            near = np.flatnonzero(distances <= cut)
            ids[row] = near[np.argsort(distances[near], kind="stable")[:n]]
        yield slice(start, start + len(part)), ids


def gains_of(ids: Ids, query_labels: Labels, database_labels: Labels) -> NDArray[np.int64]:
    """How many labels each item of the rankings shares with its query, (Q, n).

    Raises:
        BadCodes: an id occurs twice in a ranking, or is not in the database.
    """
    check_same_labels(query_labels, database_labels)
    if ids.size and (ids.min() < 0 or ids.max() >= len(database_labels)):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise BadCodes(f"a ranking has item {wrong}, but the database has items 0 to {len(database_labels) - 1}")
    gains = np.empty(ids.shape, np.int64)
    wanted = query_labels.astype(np.float32)  # exact, and multiplies much faster than integers
    rank, seen_at = np.arange(ids.shape[1]), np.empty(len(database_labels), np.int64)
    for row, ranking in enumerate(ids):
        seen_at[ranking] = rank  # an item that occurs twice keeps its last rank
        twice = seen_at[ranking] != rank
        if twice.any():
            raise BadCodes(f"the ranking of query {row} has item {int(ranking[twice.argmax()])} more than once")
        gains[row] = database_labels[ranking].astype(np.float32) @ wanted[row]
    return gains


def relevance(ids: Ids, query_labels: Labels, database_labels: Labels) -> NDArray[np.bool_]:
    """Whether each item of the rankings shares a label with its query, (Q, n)."""
    return gains_of(ids, query_labels, database_labels) > 0


def count_gains(query_labels: Labels, database_labels: Labels) -> Counts:
    """How many items of the database share g labels with each query, (Q, G + 1) for g = 0..G."""
    most = _largest_gain(query_labels, database_labels)
    items = database_labels.T.astype(np.float32)
    counts = [
        np.bincount((row @ items).astype(np.int64), minlength=most + 1) for row in query_labels.astype(np.float32)
    ]
    return np.stack(counts).astype(np.int64)


def histograms_of_ranking(
    distances: NDArray[np.integer], ids: Ids, query_labels: Labels, database_labels: Labels, *, n_bits: int
) -> Histograms:
    """The result of `histograms(graded=True)` from rankings (Q, N) of the whole database.

    Raises:
        BadCodes: a ranking is shorter than the database, has an item twice, or has a distance above K.
    """
    n = len(database_labels)
    if ids.shape[1] != n:
        raise BadCodes(f"the rankings have {ids.shape[1]} of {n} items: histograms need all of them")
    if distances.size and (distances.min() < 0 or distances.max() > n_bits):
        raise BadCodes(f"distances of {n_bits}-bit codes lie between 0 and {n_bits}, but one is {distances.max()}")
    gains = gains_of(ids, query_labels, database_labels)
    n_gains = _largest_gain(query_labels, database_labels) + 1
    counts = np.stack(
        [
            np.bincount(row * (n_bits + 1) + at, minlength=n_gains * (n_bits + 1))
            for row, at in zip(gains, distances, strict=True)
        ]
    ).reshape(len(ids), n_gains, n_bits + 1)
    total = counts.sum(axis=1)
    return Histograms(total, total - counts[:, 0], counts.astype(np.int32))


def _largest_gain(query_labels: Labels, database_labels: Labels) -> int:
    """An upper bound of the labels that a query and an item can share."""
    return min(int(labels.sum(axis=1, dtype=np.int64).max()) for labels in (query_labels, database_labels))


def metrics_of_ranking(
    gains: Counts, *, n_of_gain: Counts, normalizer: Normalizer = "retrieved", gain: Gain = "exponential"
) -> dict[str, Floats]:
    """AP, precision, recall, nDCG, ACG and WAP (Q,) over all the ranks of `gains` (Q, n).

    Args:
        gains: numbers of labels that the items share with the query.
        n_of_gain: (Q, G + 1), how many items of each gain the database has, from `count_gains`.
        normalizer: see `average_precision`.
        gain: see `ndcg`.
    """
    hits = (gains > 0).sum(axis=1)
    n_relevant = n_of_gain[:, 1:].sum(axis=1)
    return {
        "AP": average_precision_of_ranking(gains > 0, n_relevant=n_relevant, normalizer=normalizer),
        "precision": hits / gains.shape[1],
        "recall": hits / np.maximum(n_relevant, 1),
        "nDCG": ndcg_of_ranking(gains, n_of_gain=n_of_gain, gain=gain),
        "ACG": gains.mean(axis=1),
        "WAP": weighted_average_precision_of_ranking(gains, n_relevant=n_relevant, normalizer=normalizer),
    }


def average_precision_of_ranking(
    relevance: NDArray[np.bool_], *, n_relevant: Counts, normalizer: Normalizer = "retrieved"
) -> Floats:
    """AP of each query from `relevance` (Q, n), with `n_relevant` (Q,) relevant items in the whole database."""
    return weighted_average_precision_of_ranking(
        relevance.astype(np.int64), n_relevant=n_relevant, normalizer=normalizer
    )


def weighted_average_precision_of_ranking(
    gains: NDArray[np.integer], *, n_relevant: Counts, normalizer: Normalizer = "retrieved"
) -> Floats:
    """WAP of each query from `gains` (Q, n), with `n_relevant` (Q,) relevant items in the whole database."""
    check_choice("normalizer", normalizer, NORMALIZERS)
    n = gains.shape[1]
    retrieved = (gains > 0).sum(axis=1)
    divisor = {"retrieved": retrieved, "possible": np.minimum(n, n_relevant), "relevant": n_relevant}[normalizer]
    means = np.cumsum(gains, axis=1) / np.arange(1, n + 1)
    result: Floats = np.where(gains > 0, means, 0.0).sum(axis=1) / np.maximum(divisor, 1)
    return result


def ndcg_of_ranking(gains: NDArray[np.integer], *, n_of_gain: Counts, gain: Gain = "exponential") -> Floats:
    """nDCG of each query from `gains` (Q, n), with `n_of_gain` (Q, G + 1) items of each gain in the whole database."""
    check_choice("gain", gain, GAINS)
    values = np.arange(n_of_gain.shape[1], dtype=np.float64)
    values = np.exp2(values) - 1 if gain == "exponential" else values
    discounts = 1 / np.log2(np.arange(2, gains.shape[1] + 2))
    ideal = ideal_dcg(n_of_gain[:, 1:], values[1:], discounts)
    result: Floats = values[gains] @ discounts / np.where(ideal > 0, ideal, 1.0)
    return result
