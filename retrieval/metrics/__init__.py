"""Retrieval metrics from packed codes and multi-hot labels, exact over ties.

Hamming distances are small integers, so the order of ties decides most of a ranking. Here a ranking is the histogram
of its distances: how many items of each gain have each distance from the query. The *expected* metric over a random
order of each group of ties follows in closed form, and so do its smallest and its largest value. Nothing is sorted, and
no Q x N matrix is built.

    found = histograms(query_codes, database_codes, query_labels, database_labels, n_bits=48, graded=True)
    average_precision(found, n=1000).expected.mean()
    bootstrap(ndcg(found, n=100).expected)
"""

from hashseek.retrieval.metrics.calibration import Calibration, calibrate
from hashseek.retrieval.metrics.code_statistics import BitStatistics, bit_statistics, class_distances
from hashseek.retrieval.metrics.counting import Histograms, histograms, without_self
from hashseek.retrieval.metrics.intervals import bootstrap, compare, holm, queries_and_seeds, randomization_test
from hashseek.retrieval.metrics.labels import per_label, remarks
from hashseek.retrieval.metrics.ranking_metrics import (
    Normalizer,
    average_cumulative_gain,
    average_precision,
    effective_n,
    evaluate_codes,
    lookup,
    metrics_of_histograms,
    ndcg,
    precision,
    precision_curve,
    recall,
    recall_curve,
    tied_at_cut,
    weighted_average_precision,
)
from hashseek.retrieval.metrics.rankings import average_precision_of_ranking, gains_of
from hashseek.retrieval.metrics.ties import MetricValues

__all__ = [
    "BitStatistics",
    "Calibration",
    "Histograms",
    "MetricValues",
    "Normalizer",
    "average_cumulative_gain",
    "average_precision",
    "average_precision_of_ranking",
    "bit_statistics",
    "bootstrap",
    "calibrate",
    "class_distances",
    "compare",
    "effective_n",
    "evaluate_codes",
    "gains_of",
    "histograms",
    "holm",
    "lookup",
    "metrics_of_histograms",
    "ndcg",
    "per_label",
    "precision",
    "precision_curve",
    "queries_and_seeds",
    "randomization_test",
    "recall",
    "recall_curve",
    "remarks",
    "tied_at_cut",
    "weighted_average_precision",
    "without_self",
]
