"""Measurements on the rankings of the queries: scores, curves, distances and calibration.

`measure_histograms` computes them from counts over the whole database, exactly over ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.metrics import (
    Calibration,
    Histograms,
    MetricValues,
    Normalizer,
    bootstrap,
    calibrate,
    class_distances,
    lookup,
    metrics_of_histograms,
    per_label,
    precision_curve,
    recall_curve,
    tied_at_cut,
)
from hashseek.training.data.splits import Labels
from hashseek.training.evaluation.report.schema import Curves, Distances, LabelScore, MeanValue, Score

N_POINTS = 60  # of a curve


@dataclass(frozen=True)
class Ranking:
    """The order in which search returns images.

    `distances` and `rows` (Q, n): the nearest database images of each query. `average_precision`: AP@N (Q,) for each N.
    """

    distances: NDArray[np.int64]
    rows: NDArray[np.int64]
    average_precision: list[NDArray[np.float64]]


@dataclass(frozen=True)
class Measurements:
    """The measurements of the rankings of Q queries.

    `scores`: means over queries at each N. `per_query`: the metrics (Q,) that they are means of, by names such as
    "AP@1000". `n_relevant`: relevant items of each query in the database, (Q,).
    """

    scores: list[Score]
    per_query: dict[str, MetricValues]
    n_relevant: NDArray[np.int64]
    n_database: int
    curves: Curves
    distances: Distances
    calibration: Calibration
    ranking: Ranking

    @property
    def main_n(self) -> int:
        """The N of the headline: 1000, or 100 if the database has fewer than 2000 images.

        If that was not asked for, or is more than half of the database, the middle one of the N that are smaller than
        the database: recall over the whole of it is always 1.
        """
        ns = [score.n for score in self.scores]
        smaller = [n for n in ns if n < self.n_database] or ns
        usual = 1000 if self.n_database >= 2000 else 100
        return usual if usual in smaller and 2 * usual <= self.n_database else smaller[len(smaller) // 2]


def measure_histograms(
    found: Histograms,
    ranking: Ranking,
    query_labels: Labels,
    *,
    ns: Sequence[int],
    normalizer: Normalizer,
    seed: int = 0,
) -> Measurements:
    """Measure rankings of the whole database, exactly over ties.

    Args:
        found: counted with `graded=True`.
        ranking: the same, in the order of search.
        query_labels: 0/1 (Q, C).
        ns: how many ranks count, none of them larger than the database.
        normalizer: see `average_precision`.
        seed: seed of the bootstrap.
    """
    metrics = metrics_of_histograms(found, ns=ns, normalizer=normalizer)
    relevant = found.relevant.sum(axis=0)
    irrelevant = found.total.sum(axis=0) - relevant
    means = class_distances(found)
    return Measurements(
        [
            _score(found, metrics, ap, query_labels, n=n, seed=seed)
            for n, ap in zip(ns, ranking.average_precision, strict=True)
        ],
        metrics,
        found.n_relevant,
        found.n_database,
        _curves(found, largest=max(ns)),
        Distances(relevant.tolist(), irrelevant.tolist(), _or_none(means.intra), _or_none(means.inter)),
        calibrate(found),
        ranking,
    )


def label_scores(
    found: Measurements, query_labels: Labels, database_labels: Labels, names: Sequence[str]
) -> list[LabelScore]:
    """Scores by label at the headline N, in the order of the label names."""
    n = found.main_n
    ap, precision = (per_label(found.per_query[f"{name}@{n}"].expected, query_labels) for name in ("AP", "precision"))
    in_database = database_labels.sum(axis=0)
    return [
        LabelScore(name, int(ap.n_queries[i]), int(in_database[i]), _or_none(ap.mean[i]), _or_none(precision.mean[i]))
        for i, name in enumerate(names)
    ]


def _score(
    found: Histograms,
    metrics: dict[str, MetricValues],
    served: NDArray[np.float64],
    query_labels: Labels,
    *,
    n: int,
    seed: int,
) -> Score:
    """The scores at N; `served`: AP (Q,) in the order of search."""

    def mean(name: str) -> MeanValue:
        values = metrics[f"{name}@{n}"]
        interval = bootstrap(values.expected, seed=seed)
        return MeanValue(
            expected=interval.mean,
            worst=float(values.worst.mean()),
            best=float(values.best.mean()),
            low=interval.low,
            high=interval.high,
            macro=per_label(values.expected, query_labels).macro,
        )

    return Score(
        n,
        mean_average_precision=mean("AP"),
        precision=mean("precision"),
        recall=mean("recall"),
        ndcg=mean("nDCG"),
        acg=mean("ACG"),
        wap=mean("WAP"),
        tied=float(tied_at_cut(found, n=n).mean()),
        as_served=float(served.mean()),
    )


def _curves(found: Histograms, *, largest: int) -> Curves:
    """Precision and recall over rank (densely up to `largest`, then on to the whole database) and over radius."""
    dense = np.linspace(1, largest, min(largest, N_POINTS)).round().astype(int)
    beyond = np.geomspace(largest, found.n_database, N_POINTS // 2).round().astype(int)
    ns = np.unique(np.concatenate((dense, beyond))).tolist()
    precision = precision_curve(found, ns)
    within = lookup(found)
    return Curves(
        ns=ns,
        precision=precision.expected.mean(axis=0).tolist(),
        precision_worst=precision.worst.mean(axis=0).tolist(),
        precision_best=precision.best.mean(axis=0).tolist(),
        recall=recall_curve(found, ns).expected.mean(axis=0).tolist(),
        precision_zero=within.precision_zero.tolist(),
        precision_skip=[_or_none(value) for value in within.precision_skip],
        radius_recall=within.recall.tolist(),
        empty=within.empty.tolist(),
    )


def _or_none(value: Any) -> float | None:
    """The value, or None for NaN, which JSON does not have."""
    return None if np.isnan(value) else float(value)
