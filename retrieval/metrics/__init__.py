"""Retrieval figures on packed codes and multi-hot labels, exact over ties.

Hamming distances are small integers, so most of a ranking is decided by how ties are broken. Here a ranking is the
histogram of its distances: how many items of each gain lie at each distance from the query. From that the *expected*
figure over a random order inside each group of equal distance follows in closed form, and so do the smallest and the
largest value that any order could give. Nothing is sorted, no Q x N matrix is built.

    found = histograms(query_codes, database_codes, query_labels, database_labels, n_bits=48, graded=True)
    average_precision(found, n=1000).expected.mean()
    bootstrap(ndcg(found, n=100).expected)
"""

from hashseek.retrieval.metrics.calibration import Calibration, calibrate
from hashseek.retrieval.metrics.counting import Histograms, check_labels, histograms, without_self
from hashseek.retrieval.metrics.evaluation import (
    TIE_POLICIES,
    TiePolicy,
    evaluate_codes,
    figures_of,
    figures_of_ranking,
    name_ns,
)
from hashseek.retrieval.metrics.figures import (
    GAINS,
    NORMALIZERS,
    Gain,
    Lookup,
    Normalizer,
    average_cumulative_gain,
    average_precision,
    effective_n,
    lookup,
    ndcg,
    precision,
    precision_curve,
    precision_within,
    recall,
    recall_curve,
    tied_at_cut,
    weighted_average_precision,
)
from hashseek.retrieval.metrics.intervals import Comparison, Interval, bootstrap, compare
from hashseek.retrieval.metrics.labels import PerLabel, per_label, remarks
from hashseek.retrieval.metrics.rankings import (
    average_precision_of_ranking,
    count_gains,
    gains_of,
    histograms_of_ranking,
    ndcg_of_ranking,
    rank_by_id,
    relevance,
    weighted_average_precision_of_ranking,
)
from hashseek.retrieval.metrics.statistics import BitStatistics, ClassDistances, bit_statistics, class_distances
from hashseek.retrieval.metrics.ties import Figure

__all__ = [
    "GAINS",
    "NORMALIZERS",
    "TIE_POLICIES",
    "BitStatistics",
    "Calibration",
    "ClassDistances",
    "Comparison",
    "Figure",
    "Gain",
    "Histograms",
    "Interval",
    "Lookup",
    "Normalizer",
    "PerLabel",
    "TiePolicy",
    "average_cumulative_gain",
    "average_precision",
    "average_precision_of_ranking",
    "bit_statistics",
    "bootstrap",
    "calibrate",
    "check_labels",
    "class_distances",
    "compare",
    "count_gains",
    "effective_n",
    "evaluate_codes",
    "figures_of",
    "figures_of_ranking",
    "gains_of",
    "histograms",
    "histograms_of_ranking",
    "lookup",
    "name_ns",
    "ndcg",
    "ndcg_of_ranking",
    "per_label",
    "precision",
    "precision_curve",
    "precision_within",
    "rank_by_id",
    "recall",
    "recall_curve",
    "relevance",
    "remarks",
    "tied_at_cut",
    "weighted_average_precision",
    "weighted_average_precision_of_ranking",
    "without_self",
]
