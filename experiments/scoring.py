"""Scores of outputs on the query split and on a gallery of other images."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.inputs import Inputs
from hashseek.retrieval.codes import pack
from hashseek.retrieval.hash_layers import normalized
from hashseek.retrieval.metrics import (
    average_precision,
    average_precision_of_ranking,
    class_distances,
    gains_of,
    histograms,
    precision,
    without_self,
)
from hashseek.retrieval.scores import asymmetric_scores, best
from hashseek.training.data.datasets import Splits

Outputs = NDArray[np.float32]

N = 1000


def scores_of(outputs: Callable[[NDArray[np.float32]], Outputs], inputs: Inputs) -> dict[str, Any]:
    """Scores of a function from features (B, D) to real outputs (B, K): `split_scores`, and `gallery_scores`."""
    scores = split_scores(outputs(inputs.query), outputs(inputs.database), inputs.splits)
    return scores | (gallery_scores(outputs, inputs.gallery) if inputs.gallery else {})


def gallery_scores(outputs: Callable[[NDArray[np.float32]], Outputs], gallery: Inputs) -> dict[str, float]:
    """Precision@10 of every image of a gallery as a query among all the others, expected over ties.

    "gallery": with all labels; "gallery_rare": without the most frequent label, which chance finds, too.
    """
    features, labels = gallery.all
    real = outputs(features)
    codes, scores = pack(real), {}
    for name, chosen in _with_and_without_most_frequent(labels).items():
        found = histograms(codes, codes, chosen, chosen, n_bits=real.shape[1])
        values = precision(without_self(found, chosen), n=10).expected
        scores[name] = float(values[chosen.any(axis=1)].mean())
    return scores


def _with_and_without_most_frequent(labels: NDArray[np.uint8]) -> dict[str, NDArray[np.uint8]]:
    counts = labels.sum(axis=0)
    return {"gallery": labels, "gallery_rare": np.where(counts == counts.max(), 0, labels).astype(np.uint8)}


def cosine_scores(inputs: Inputs) -> dict[str, float]:
    """mAP@1000 and the scores of `gallery_scores`, by the cosine of features. No AP of queries: it is not tested."""
    scores = {"mAP": order_scores(normalized(inputs.query) @ normalized(inputs.database).T, inputs.splits)}
    if inputs.gallery:
        features, labels = inputs.gallery.all
        cosines = normalized(features) @ normalized(features).T
        np.fill_diagonal(cosines, -np.inf)
        nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :10]
        for name, chosen in _with_and_without_most_frequent(labels).items():
            found = gains_of(nearest, chosen, chosen) > 0
            scores[name] = float(found[chosen.any(axis=1)].mean())
    return scores


def order_scores(scores: NDArray[np.float32], splits: Splits, *, n: int = N) -> float:
    """mAP@n of the database in the order of descending scores (Q, N), ties by id."""
    places = np.argsort(-scores, axis=1, kind="stable")[:, :n]
    relevant = gains_of(places, splits.query.labels, splits.database.labels) > 0
    return float(average_precision_of_ranking(relevant, n_relevant=relevant.sum(axis=1)).mean())


def split_scores(query: Outputs, database: Outputs, splits: Splits, *, n: int = N) -> dict[str, Any]:
    """Scores of real outputs of queries (Q, K) and database (N, K).

    AP@n of each query by Hamming distance (expected over ties) and by the query's real outputs (equal codes in the
    order of the database), their means, the bounds over ties, d_intra and d_inter.
    """
    n_bits, codes = query.shape[1], pack(database)
    found = histograms(pack(query), codes, splits.query.labels, splits.database.labels, n_bits=n_bits)
    by_distance, distances = average_precision(found, n=n), class_distances(found)
    ids = np.arange(len(codes))
    ranked = np.stack([best(asymmetric_scores(codes, row), ids, n) for row in query])
    relevant = gains_of(ranked, splits.query.labels, splits.database.labels) > 0
    asymmetric = average_precision_of_ranking(relevant, n_relevant=found.n_relevant)
    return {
        "mAP": float(by_distance.expected.mean()),
        "asymmetric": float(asymmetric.mean()),
        "worst": float(by_distance.worst.mean()),
        "best": float(by_distance.best.mean()),
        "d_intra": distances.intra,
        "d_inter": distances.inter,
        "AP": np.round(by_distance.expected, 5).tolist(),
        "asymmetric_AP": np.round(asymmetric, 5).tolist(),
    }
