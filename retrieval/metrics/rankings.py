"""Figures of rankings whose order is given: the one that search returns (ties by ascending id), or any other.

Rankings are `ids` (Q, n), positions in the database, nearest first; `gains` (Q, n) are the labels that each item shares
with the query.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes, as_words, check_codes
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics.counting import Counts, Floats, Histograms, Labels
from hashseek.retrieval.metrics.figures import GAINS, NORMALIZERS, Gain, Normalizer, check_choice, ideal_dcg

Ids = NDArray[np.int64]

# Distances and ids of so many queries lie in memory at a time.
_QUERIES = 64


def rank_by_id(query_codes: Codes, database_codes: Codes, *, n_bits: int, n: int) -> Iterator[tuple[slice, Ids]]:
    """The n nearest of each query, equal distances by ascending id: pairs (which queries, ids (q, min(n, N))).

    Only items up to the distance at which rank n lies are sorted.
    """
    check_codes(query_codes, n_bits)
    check_codes(database_codes, n_bits)
    if n < 1:
        raise BadConfig(f"figures at N need N >= 1, not {n}")
    n = min(n, len(database_codes))
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
    if query_labels.shape[1] != database_labels.shape[1]:
        raise BadCodes(
            f"query labels have {query_labels.shape[1]} columns, database labels {database_labels.shape[1]}: "
            "use one list of label names for both"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= len(database_labels)):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise BadCodes(
            f"the ranking names item {wrong}, but the database has the items 0 to {len(database_labels) - 1}"
        )
    gains = np.empty(ids.shape, np.int64)
    wanted = query_labels.astype(np.float32)  # multiplies much faster than integers do, and is exact
    rank, seen_at = np.arange(ids.shape[1]), np.empty(len(database_labels), np.int64)
    for row, ranking in enumerate(ids):
        seen_at[ranking] = rank  # of an item that is named twice the last rank stays
        twice = seen_at[ranking] != rank
        if twice.any():
            item = int(ranking[twice.argmax()])
            raise BadCodes(
                f"the ranking of query {row} names item {item} {int((ranking == item).sum())} times: "
                "each item may be ranked once"
            )
        gains[row] = database_labels[ranking].astype(np.float32) @ wanted[row]
    return gains


def relevance(ids: Ids, query_labels: Labels, database_labels: Labels) -> NDArray[np.bool_]:
    """Whether each item of the rankings shares a label with its query, (Q, n)."""
    return gains_of(ids, query_labels, database_labels) > 0


def count_gains(query_labels: Labels, database_labels: Labels) -> Counts:
    """How many items of the database share g labels with each query, (Q, G + 1) for g = 0..G."""
    most = min(int(labels.sum(axis=1, dtype=np.int64).max()) for labels in (query_labels, database_labels))
    items = database_labels.T.astype(np.float32)
    counts = [
        np.bincount((row @ items).astype(np.int64), minlength=most + 1) for row in query_labels.astype(np.float32)
    ]
    return np.stack(counts).astype(np.int64)


def histograms_of_ranking(
    distances: NDArray[np.integer], ids: Ids, query_labels: Labels, database_labels: Labels, *, n_bits: int
) -> Histograms:
    """The counts of `histograms(graded=True)` from rankings (Q, N) of the whole database.

    Raises:
        BadCodes: a ranking leaves an item out, names one twice, or has a distance above K.
    """
    n = len(database_labels)
    if ids.shape[1] != n:
        raise BadCodes(f"rankings of {ids.shape[1]} items say too little about a database of {n}: rank all of it")
    if distances.size and (distances.min() < 0 or distances.max() > n_bits):
        raise BadCodes(f"distances of {n_bits}-bit codes go from 0 to {n_bits}, not to {distances.max()}")
    gains = gains_of(ids, query_labels, database_labels)
    most = min(int(labels.sum(axis=1, dtype=np.int64).max()) for labels in (query_labels, database_labels))
    counts = np.stack(
        [
            np.bincount(row * (n_bits + 1) + at, minlength=(most + 1) * (n_bits + 1))
            for row, at in zip(gains, distances, strict=True)
        ]
    ).reshape(len(ids), most + 1, n_bits + 1)
    total = counts.sum(axis=1)
    return Histograms(total, total - counts[:, 0], counts.astype(np.int32))


def average_precision_of_ranking(
    relevance: NDArray[np.bool_], *, n_relevant: Counts, normalizer: Normalizer = "retrieved"
) -> Floats:
    """AP per query of `relevance` (Q, n), with `n_relevant` (Q,) in the whole database."""
    return weighted_average_precision_of_ranking(
        relevance.astype(np.int64), n_relevant=n_relevant, normalizer=normalizer
    )


def weighted_average_precision_of_ranking(
    gains: NDArray[np.integer], *, n_relevant: Counts, normalizer: Normalizer = "retrieved"
) -> Floats:
    """WAP per query of `gains` (Q, n)."""
    check_choice("normalizer", normalizer, NORMALIZERS)
    n = gains.shape[1]
    retrieved = (gains > 0).sum(axis=1)
    divisor = {"retrieved": retrieved, "possible": np.minimum(n, n_relevant), "relevant": n_relevant}[normalizer]
    means = np.cumsum(gains, axis=1) / np.arange(1, n + 1)
    result: Floats = np.where(gains > 0, means, 0.0).sum(axis=1) / np.maximum(divisor, 1)
    return result


def ndcg_of_ranking(gains: NDArray[np.integer], *, n_of_gain: Counts, gain: Gain = "exponential") -> Floats:
    """nDCG per query of `gains` (Q, n), with `n_of_gain` (Q, G + 1) items of each gain in the whole database."""
    check_choice("gain", gain, GAINS)
    values = np.arange(n_of_gain.shape[1], dtype=np.float64)
    values = np.exp2(values) - 1 if gain == "exponential" else values
    discounts = 1 / np.log2(np.arange(2, gains.shape[1] + 2))
    ideal = ideal_dcg(n_of_gain[:, 1:], values[1:], discounts)
    result: Floats = values[gains] @ discounts / np.where(ideal > 0, ideal, 1.0)
    return result
