"""AP of rankings whose order is given, such as the one that search returns (ties by ascending id).

A ranking is a row of `ids` (Q, n): positions in the database, nearest first.
"""

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Counts, Floats, Labels, check_same_labels
from hashseek.retrieval.metrics.ranking_metrics import Normalizer, check_choice


def gains_of(ids: NDArray[np.int64], query_labels: Labels, database_labels: Labels) -> NDArray[np.int64]:
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


def average_precision_of_ranking(
    relevance: NDArray[np.bool_], *, n_relevant: Counts, normalizer: Normalizer = "retrieved"
) -> Floats:
    """AP of each query from `relevance` (Q, n), with `n_relevant` (Q,) relevant items in the whole database."""
    check_choice("normalizer", normalizer, Normalizer)
    n = relevance.shape[1]
    retrieved = relevance.sum(axis=1)
    divisor = {"retrieved": retrieved, "possible": np.minimum(n, n_relevant), "relevant": n_relevant}[normalizer]
    places = (np.flatnonzero(hits) + 1 for hits in relevance)
    summed = np.array([(np.arange(1, len(ranks) + 1) / ranks).sum() for ranks in places])
    result: Floats = summed / np.maximum(divisor, 1)
    return result
