"""Metrics of rankings whose order is given, such as the one that search returns (ties by ascending id).

A ranking is a row of `ids` (Q, n): positions in the database, nearest first. `gains` (Q, n) are the numbers of labels
that its items share with the query.
"""

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Counts, Floats, Histograms, Labels, check_same_labels
from hashseek.retrieval.metrics.ranking_metrics import NORMALIZERS, Normalizer, check_choice, ideal_dcg

Ids = NDArray[np.int64]


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
        raise BadCodes(f"distances of {n_bits}-bit codes range from 0 to {n_bits}, but one is {distances.max()}")
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


def metrics_of_ranking(gains: Counts, *, n_of_gain: Counts, normalizer: Normalizer = "retrieved") -> dict[str, Floats]:
    """AP, precision, recall, nDCG, ACG and WAP (Q,) over all the ranks of `gains` (Q, n).

    Args:
        gains: numbers of labels that the items share with the query.
        n_of_gain: (Q, G + 1), how many items of each gain the database has, from `count_gains`.
        normalizer: see `average_precision`.
    """
    hits = (gains > 0).sum(axis=1)
    n_relevant = n_of_gain[:, 1:].sum(axis=1)
    return {
        "AP": average_precision_of_ranking(gains > 0, n_relevant=n_relevant, normalizer=normalizer),
        "precision": hits / gains.shape[1],
        "recall": hits / np.maximum(n_relevant, 1),
        "nDCG": ndcg_of_ranking(gains, n_of_gain=n_of_gain),
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


def ndcg_of_ranking(gains: NDArray[np.integer], *, n_of_gain: Counts) -> Floats:
    """nDCG of each query from `gains` (Q, n), with `n_of_gain` (Q, G + 1) items of each gain in the whole database."""
    values = np.exp2(np.arange(n_of_gain.shape[1])) - 1
    discounts = 1 / np.log2(np.arange(2, gains.shape[1] + 2))
    ideal = ideal_dcg(n_of_gain[:, 1:], values[1:], discounts)
    result: Floats = values[gains] @ discounts / np.where(ideal > 0, ideal, 1.0)
    return result
