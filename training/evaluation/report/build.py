"""From codes, labels and rankings to the values of a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes
from hashseek.retrieval.metrics import (
    Figure,
    Histograms,
    Normalizer,
    bit_statistics,
    bootstrap,
    calibrate,
    class_distances,
    effective_n,
    figures_of,
    figures_of_ranking,
    lookup,
    per_label,
    precision_curve,
    recall_curve,
    tied_at_cut,
)
from hashseek.training.evaluation.report.schema import Bits, Curves, Distances, Label, Score, Value

Labels = NDArray[np.uint8]
Outputs = NDArray[np.float32]

# The headline is at this N where it was asked for: most of the field reports it.
USUAL_N = 1000
N_POINTS = 60


@dataclass(frozen=True)
class Part:
    """Queries or database: codes (n, code_size), outputs (n, K), labels (n, C), and a path that names each item."""

    codes: Codes
    outputs: Outputs
    labels: Labels
    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Scores:
    """Scores at each N, and per query (Q,) the figures that they are means of, by names such as "AP@1000"."""

    scores: list[Score]
    per_query: dict[str, Figure]


def score_all(
    found: Histograms,
    query_labels: Labels,
    *,
    ns: Sequence[int],
    normalizer: Normalizer,
    served: Sequence[NDArray[np.float64]] | None = None,
    seed: int = 0,
) -> Scores:
    """Scores at each N, of which those beyond the database mean all of it.

    Args:
        found: counted with `graded=True`. query_labels: 0/1 (Q, C). ns, normalizer: as asked for.
        served: AP@N (Q,) in the order that search gives, for each N.
        seed: of the bootstrap.
    """
    limits = list(dict.fromkeys(effective_n(n, found.n_database) for n in ns))
    figures = figures_of(found, ns=limits, normalizer=normalizer)
    tied = [float(tied_at_cut(found, n=n).mean()) for n in limits]
    means = [None if served is None else float(served[place].mean()) for place in range(len(limits))]
    return _scores(figures, query_labels, ns=limits, tied=tied, served=means, seed=seed)


def score_ranking(
    gains: NDArray[np.int64],
    query_labels: Labels,
    *,
    n_of_gain: NDArray[np.int64],
    ns: Sequence[int],
    normalizer: Normalizer,
    seed: int = 0,
) -> Scores:
    """Scores of the one order that is given, at each N: expected, worst and best are the same.

    Args:
        gains: labels that the items of each ranking share with its query, (Q, n), n at least the largest N.
        query_labels: 0/1 (Q, C). n_of_gain: (Q, G + 1) database items of each gain. ns, normalizer, seed: see
            `score_all`.
    """
    figures: dict[str, Figure] = {}
    for n in ns:
        values = figures_of_ranking(
            gains[:, :n], n_relevant=n_of_gain[:, 1:].sum(axis=1), n_of_gain=n_of_gain, normalizer=normalizer
        )
        figures |= {f"{name}@{n}": Figure(value, value, value) for name, value in values.items()}
    means = [float(figures[f"AP@{n}"].expected.mean()) for n in ns]
    return _scores(figures, query_labels, ns=ns, tied=[0.0] * len(ns), served=means, seed=seed)


def _scores(
    figures: dict[str, Figure],
    query_labels: Labels,
    *,
    ns: Sequence[int],
    tied: Sequence[float],
    served: Sequence[float | None],
    seed: int,
) -> Scores:
    value = {name: _value(figure, query_labels, seed=seed) for name, figure in figures.items()}
    scores = [
        Score(
            n,
            mean_average_precision=value[f"AP@{n}"],
            precision=value[f"precision@{n}"],
            recall=value[f"recall@{n}"],
            ndcg=value[f"nDCG@{n}"],
            acg=value[f"ACG@{n}"],
            wap=value[f"WAP@{n}"],
            tied=tied[place],
            as_served=served[place],
        )
        for place, n in enumerate(ns)
    ]
    return Scores(scores, figures)


def main_n(scores: Sequence[Score]) -> int:
    """The N of the headline: 1000 where it was asked for, else the one in the middle."""
    ns = [score.n for score in scores]
    return USUAL_N if USUAL_N in ns else ns[len(ns) // 2]


def curves(found: Histograms, *, largest: int) -> Curves:
    """Precision and recall over rank (densely to `largest`, then on to the whole database) and over Hamming radius."""
    n = effective_n(largest, found.n_database)
    even = np.linspace(1, n, min(n, N_POINTS)).round().astype(int)
    beyond = np.geomspace(n, found.n_database, N_POINTS // 2).round().astype(int)
    ns = np.unique(np.concatenate((even, beyond))).tolist()
    at = precision_curve(found, ns)
    within = lookup(found)
    return Curves(
        ns=ns,
        precision=_mean(at.expected),
        precision_worst=_mean(at.worst),
        precision_best=_mean(at.best),
        recall=_mean(recall_curve(found, ns).expected),
        precision_zero=within.precision_zero.tolist(),
        precision_skip=[or_none(value) for value in within.precision_skip],
        radius_recall=within.recall.tolist(),
        empty=within.empty.tolist(),
    )


def curves_of_ranking(gains: NDArray[np.int64], n_relevant: NDArray[np.int64]) -> Curves:
    """Precision and recall over the ranks of `gains` (Q, n); nothing over the radius."""
    ns = np.unique(np.linspace(1, gains.shape[1], min(gains.shape[1], N_POINTS)).round().astype(int))
    hits = np.cumsum(gains > 0, axis=1)[:, ns - 1]
    precision_at = _mean(hits / ns)
    recall_at = _mean(hits / np.maximum(n_relevant, 1)[:, None])
    return Curves(ns.tolist(), precision_at, precision_at, precision_at, recall_at, [], [], [], [])


def label_rows(
    query_labels: Labels, database_labels: Labels, names: Sequence[str], ap: Figure, at_n: Figure
) -> list[Label]:
    """One row per label, in the order of the label names."""
    held = database_labels.sum(axis=0, dtype=np.int64)
    of_ap, of_precision = (per_label(figure.expected, query_labels) for figure in (ap, at_n))
    return [
        Label(name, int(of_ap.n_queries[i]), int(held[i]), or_none(of_ap.mean[i]), or_none(of_precision.mean[i]))
        for i, name in enumerate(names)
    ]


def distances(found: Histograms) -> Distances:
    """Histograms of the distances of relevant and irrelevant pairs."""
    relevant = found.relevant.sum(axis=0)
    means = class_distances(found)
    return Distances(
        relevant.tolist(), (found.total.sum(axis=0) - relevant).tolist(), or_none(means.intra), or_none(means.inter)
    )


def bits(part: Part, *, n_bits: int) -> Bits:
    """Bit statistics of the database."""
    found = bit_statistics(part.codes, n_bits=n_bits, outputs=part.outputs)
    return Bits(
        balance=found.balance.tolist(),
        constant=found.n_constant,
        mean_correlation=found.mean_correlation,
        max_correlation=found.max_correlation,
        distinct=found.n_distinct,
        most_common=found.most_common,
        quantisation_error=found.quantisation_error,
        quantisation_angle=found.quantisation_angle,
    )


def values_of(
    found: Histograms, query_labels: Labels, database_labels: Labels, names: Sequence[str], scores: Scores
) -> dict[str, Any]:
    """The parts of a report that follow from counts and labels, by the names of its fields."""
    return _of_scores(scores, query_labels, database_labels, names) | {
        "curves": curves(found, largest=max(score.n for score in scores.scores)),
        "distances": distances(found),
        "calibration": calibrate(found),
    }


def values_of_ranking(
    gains: NDArray[np.int64],
    n_relevant: NDArray[np.int64],
    query_labels: Labels,
    database_labels: Labels,
    names: Sequence[str],
    scores: Scores,
) -> dict[str, Any]:
    """The same from rankings that do not reach to the end of the database: what lies at which distance is not known."""
    return _of_scores(scores, query_labels, database_labels, names) | {
        "curves": curves_of_ranking(gains, n_relevant),
        "distances": None,
        "calibration": None,
    }


def _of_scores(scores: Scores, query_labels: Labels, database_labels: Labels, names: Sequence[str]) -> dict[str, Any]:
    n = main_n(scores.scores)
    ap, at_n = scores.per_query[f"AP@{n}"], scores.per_query[f"precision@{n}"]
    rows = label_rows(query_labels, database_labels, names, ap, at_n)
    return {"scores": scores.scores, "main_n": n, "labels": rows}


def chance(found: Histograms) -> float:
    """Precision of a random order: the share of relevant pairs."""
    return float((found.relevant.sum(axis=1) / found.total.sum(axis=1)).mean())


def or_none(value: float | np.floating) -> float | None:
    """The value, or None for NaN, which JSON does not have."""
    return None if np.isnan(value) else float(value)


def _value(figure: Figure, query_labels: Labels, *, seed: int) -> Value:
    interval = bootstrap(figure.expected, seed=seed)
    return Value(
        expected=interval.mean,
        worst=float(figure.worst.mean()),
        best=float(figure.best.mean()),
        low=interval.low,
        high=interval.high,
        macro=per_label(figure.expected, query_labels).macro,
    )


def _mean(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values.mean(axis=0)]
