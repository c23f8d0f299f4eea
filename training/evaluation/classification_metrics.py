"""Metrics of multi-label classification, as papers on contrastive losses report them after a linear probe.

    figures(probabilities, labels)                                      # at a threshold of 0.5
    thresholds = best_thresholds(probabilities, labels)                 # chosen on a validation part, one per metric
    figures(test_probabilities, test_labels, thresholds=thresholds)     # used on the test part

The metrics are those of scikit-learn. Where a definition divides 0 by 0: a label that no row has is left out of mAP; a
label that is neither present nor predicted counts as 0 in maF1 and in the mean precision and recall; a row without
labels and predictions is left out of ebF1; a row without labels counts as 0 in p@1.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, f1_score, hamming_loss, precision_recall_fscore_support

# The nine thresholds that MulSupCon's code tries (williamzhangsjtu/MulSupCon 808479c, metrics.py, after C-GMVAE's).
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def mean_average_precision(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """mAP: the mean over labels of AP (HBL, MulSupCon, CLML), 0 if no row has a label; scores and 0/1 labels (n, C).

    AP ranks all rows by their score for a label; see `sklearn.metrics.average_precision_score`.
    """
    present = labels.any(axis=0)
    return float(average_precision_score(labels[:, present], scores[:, present])) if present.any() else 0.0


def precision_at_1(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """p@1: the share of rows with their highest-scored label; of equal scores the first label counts."""
    return float(labels[np.arange(len(labels)), scores.argmax(axis=1)].mean())


def example_f1(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """ebF1: the mean over rows of each row's F1; 0 if no row has a label or a prediction."""
    some = predicted.any(axis=1) | labels.any(axis=1)
    return float(f1_score(labels[some], predicted[some], average="samples", zero_division=0)) if some.any() else 0.0


# From decisions and labels, both 0/1 (n, C).
DECISION_FIGURES: dict[str, Callable[[NDArray[Any], NDArray[Any]], float]] = {
    "HA": lambda predicted, labels: 1 - float(hamming_loss(labels, predicted)),
    "ebF1": example_f1,
    "maF1": lambda predicted, labels: float(f1_score(labels, predicted, average="macro", zero_division=0)),
    "miF1": lambda predicted, labels: float(f1_score(labels, predicted, average="micro", zero_division=0)),
}


def class_and_overall(predicted: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
    """CP, CR, CF1 and OP, OR, OF1: precision, recall and their harmonic mean, averaged per label and overall.

    CF1 is the harmonic mean of CP and CR (Chen et al., ML-GCN, CVPR 2019), not the mean of the labels' F1, which is
    maF1. OF1 equals miF1.

    Args:
        predicted: 0/1 (n, C).
        labels: 0/1 (n, C).
    """
    found: dict[str, float] = {}
    for letter, average in (("C", "macro"), ("O", "micro")):
        means = precision_recall_fscore_support(labels, predicted, average=average, zero_division=0)
        precision, recall = map(float, means[:2])
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        found |= {f"{letter}P": precision, f"{letter}R": recall, f"{letter}F1": f1}
    return found


def figures(
    probabilities: NDArray[Any], labels: NDArray[Any], *, thresholds: float | Mapping[str, float] = 0.5
) -> dict[str, float]:
    """p@1, mAP, HA, ebF1, maF1 and miF1 from probabilities and 0/1 labels (n, C).

    A label is predicted if its probability is at least the threshold: one for all metrics, or one for each.
    """
    found = {"p@1": precision_at_1(probabilities, labels), "mAP": mean_average_precision(probabilities, labels)}
    for name, metric in DECISION_FIGURES.items():
        threshold = thresholds[name] if isinstance(thresholds, Mapping) else thresholds
        found[name] = metric(probabilities >= threshold, labels)
    return found


def best_thresholds(probabilities: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
    """The best of `THRESHOLDS` for each of HA, ebF1, maF1, miF1; of equally good ones, the one nearest to 0.5.

    Use it on a validation part. On the test part it is an oracle, which is what MulSupCon's code reports.
    """
    candidates = sorted(THRESHOLDS, key=lambda t: abs(t - 0.5))
    return {
        name: max(candidates, key=lambda t: metric(probabilities >= t, labels))
        for name, metric in DECISION_FIGURES.items()
    }
