"""Figures of multi-label classification, as the papers on contrastive losses report them after a linear probe.

    figures(probabilities, labels)                  # at a threshold of 0.5
    thresholds = best_thresholds(probabilities, labels)   # chosen on a validation part, one a figure ...
    figures(test_probabilities, test_labels, thresholds=thresholds)     # ... used on the test part

Ranking figures (p@1, mAP) read scores of any scale; the others read decisions 0/1. Where a definition divides 0 by 0:
a label that no row carries is left out of mAP; a label neither carried nor predicted anywhere counts 0 in maF1 and in
the per-label precision and recall; a row without labels for which none is predicted is left out of ebF1, and counts 0
in p@1.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, f1_score, hamming_loss

from hashseek.retrieval.errors import BadCodes

Floats = NDArray[np.float64]

# The nine thresholds that MulSupCon's code tries (williamzhangsjtu/MulSupCon 808479c, metrics.py, after C-GMVAE's).
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def average_precisions(scores: NDArray[Any], labels: NDArray[Any]) -> Floats:
    """AP (C,) of each label: its rows ranked by scores (n, C), labels (n, C); NaN for a label that no row carries.

    AP is the sum over thresholds of the gain in recall times the precision there, rows of equal score together, as
    `sklearn.metrics.average_precision_score` has it.

    Raises:
        BadCodes: wrong shapes, labels that are not 0/1, or scores that are NaN or infinite.
    """
    scores, truth = _check(scores, labels)
    return np.array(
        [
            average_precision_score(truth[:, c], scores[:, c]) if truth[:, c].any() else np.nan
            for c in range(truth.shape[1])
        ]
    )


def mean_average_precision(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """mAP: the mean over labels of AP; 0 if no row carries any label (HBL, MulSupCon, CLML: macro over labels).

    Raises:
        BadCodes: as `average_precisions`.
    """
    values = average_precisions(scores, labels)
    return float(np.nanmean(values)) if np.isfinite(values).any() else 0.0


def sample_average_precision(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """Mean over rows of the AP of the row's own ranking of labels; rows without labels are left out, 0 if all are.

    "Average precision" in the older multi-label literature (ML-kNN); not what HBL calls mAP.

    Raises:
        BadCodes: as `average_precisions`.
    """
    scores, truth = _check(scores, labels)
    labelled = truth.any(axis=1)
    if not labelled.any():
        return 0.0
    return float(average_precision_score(truth[labelled], scores[labelled], average="samples"))


def precision_at_1(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """p@1: share of rows whose highest-scored label is theirs; of equal scores the first label counts.

    Raises:
        BadCodes: as `average_precisions`.
    """
    scores, truth = _check(scores, labels)
    return float(truth[np.arange(len(truth)), scores.argmax(axis=1)].mean())


def hamming_accuracy(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """HA: share of the n C decisions that are right; 1 - Hamming loss.

    Raises:
        BadCodes: wrong shapes, or decisions or labels that are not 0/1.
    """
    decided, truth = _check_decisions(predicted, labels)
    return 1 - float(hamming_loss(truth, decided))


def micro_f1(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """miF1: F1 of all n C decisions together; 0 if there is neither a label nor a prediction.

    Raises:
        BadCodes: as `hamming_accuracy`.
    """
    decided, truth = _check_decisions(predicted, labels)
    return float(f1_score(truth, decided, average="micro", zero_division=0))


def macro_f1(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """maF1: mean over labels of each label's F1.

    Raises:
        BadCodes: as `hamming_accuracy`.
    """
    decided, truth = _check_decisions(predicted, labels)
    return float(f1_score(truth, decided, average="macro", zero_division=0))


def example_f1(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """ebF1: mean over rows of each row's F1; 0 if every row is empty on both sides.

    Raises:
        BadCodes: as `hamming_accuracy`.
    """
    decided, truth = _check_decisions(predicted, labels)
    some = decided.any(axis=1) | truth.any(axis=1)
    if not some.any():
        return 0.0
    return float(f1_score(truth[some], decided[some], average="samples", zero_division=0))


def class_and_overall(predicted: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
    """CP, CR, CF1 and OP, OR, OF1: precision, recall and their harmonic mean, per label averaged, and overall.

    CF1 is the harmonic mean of CP and CR (Chen et al., ML-GCN, CVPR 2019), not the mean of the labels' F1, which is
    maF1; OF1 equals miF1. A precision or recall of 0/0 is 0.

    Raises:
        BadCodes: as `hamming_accuracy`.
    """
    decided, truth = _check_decisions(predicted, labels)
    hits, chosen, carried = (matrix.sum(axis=0, dtype=float) for matrix in (decided & truth, decided, truth))
    cp, cr = float(_ratio(hits, chosen).mean()), float(_ratio(hits, carried).mean())
    op, o_r = float(_ratio(hits.sum(), chosen.sum())), float(_ratio(hits.sum(), carried.sum()))
    return {"CP": cp, "CR": cr, "CF1": _harmonic(cp, cr), "OP": op, "OR": o_r, "OF1": _harmonic(op, o_r)}


DECISION_FIGURES: dict[str, Callable[[NDArray[Any], NDArray[Any]], float]] = {
    "HA": hamming_accuracy,
    "ebF1": example_f1,
    "maF1": macro_f1,
    "miF1": micro_f1,
}


def figures(
    probabilities: NDArray[Any], labels: NDArray[Any], *, thresholds: float | Mapping[str, float] = 0.5
) -> dict[str, float]:
    """p@1, mAP, HA, ebF1, maF1, miF1 of probabilities (n, C), labels (n, C).

    A label is predicted where its probability is at least the threshold: one for all figures, or one a figure.

    Raises:
        BadCodes: wrong shapes, labels that are not 0/1, probabilities outside [0, 1], or a missing threshold.
    """
    probabilities = _check_probabilities(probabilities, labels)
    found = {"p@1": precision_at_1(probabilities, labels), "mAP": mean_average_precision(probabilities, labels)}
    for name, figure in DECISION_FIGURES.items():
        if isinstance(thresholds, Mapping) and name not in thresholds:
            raise BadCodes(f"there is no threshold for {name}: give one for each of {', '.join(DECISION_FIGURES)}")
        threshold = thresholds[name] if isinstance(thresholds, Mapping) else thresholds
        found[name] = figure(probabilities >= threshold, labels)
    return found


def best_thresholds(probabilities: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
    """The threshold of `THRESHOLDS` at which each of HA, ebF1, maF1, miF1 is best; of equals the one nearest 0.5.

    For a validation part. On the test part itself it is an oracle: MulSupCon's code reports that.

    Raises:
        BadCodes: as `figures`.
    """
    probabilities = _check_probabilities(probabilities, labels)
    candidates = sorted(THRESHOLDS, key=lambda t: abs(t - 0.5))
    return {
        name: max(candidates, key=lambda t: figure(probabilities >= t, labels))
        for name, figure in DECISION_FIGURES.items()
    }


def _ratio(numerator: NDArray[Any], denominator: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(numerator / np.maximum(denominator, 1))  # counts: a denominator of 0 comes with a numerator of 0


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b > 0 else 0.0


def _check(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Scores as they are and labels as uint8, both (n, C)."""
    scores, labels = np.asarray(scores), np.asarray(labels)
    if scores.ndim != 2 or scores.shape != labels.shape or scores.size == 0:
        raise BadCodes(
            f"figures need scores and labels of one shape (n, C) with at least one row and label, not "
            f"{scores.shape} and {labels.shape}"
        )
    if not np.isin(labels, (0, 1)).all():
        wrong = labels[~np.isin(labels, (0, 1))].flat[0]
        raise BadCodes(f"labels must be 0 or 1, but one is {wrong}: give one column per label")
    if not np.isfinite(scores).all():
        row = int(np.nonzero(~np.isfinite(scores).all(axis=1))[0][0])
        raise BadCodes(f"the scores of row {row} are NaN or infinite: there is nothing to rank by")
    return scores, labels.astype(np.uint8)


def _check_probabilities(probabilities: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    probabilities, _ = _check(probabilities, labels)
    if probabilities.min() < 0 or probabilities.max() > 1:
        raise BadCodes(
            f"probabilities lie between 0 and 1, but these reach from {probabilities.min():g} to "
            f"{probabilities.max():g}: put scores through a sigmoid first"
        )
    return probabilities


def _check_decisions(predicted: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    predicted = np.asarray(predicted)
    if not np.isin(predicted, (0, 1)).all():
        raise BadCodes("decisions must be 0 or 1: compare probabilities with a threshold first")
    decided, truth = _check(predicted.astype(np.uint8), labels)
    return decided.astype(np.uint8), truth
