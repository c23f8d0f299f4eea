"""Metrics of multi-label classification against values worked out by hand, and against their definitions in loops."""

import numpy as np
import pytest

from hashseek.training.evaluation.classification_metrics import (
    best_thresholds,
    class_and_overall,
    figures,
    precision_at_1,
)

#                   row 0      row 1      row 2      row 3
SCORES = np.array([[0.9, 0.2, 0.1], [0.6, 0.7, 0.3], [0.4, 0.8, 0.2], [0.1, 0.3, 0.45]])
LABELS = np.array([[1, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 0]])


def test_metrics_worked_by_hand():
    # AP: label 0 ranks rows 0, 1, 2, 3: hits at 1, 2, 4; label 1 ranks 2, 1, 3, 0: hits at 1, 3; label 2: hit at 2.
    # At 0.5: row 0 {0}, row 1 {0, 1}, row 2 {1}, row 3 {}. Hits: label 0: 2 of 2 predicted and 3 present, label 1: 1 of
    # 2 and 2, label 2: 0 of 0 and 1.
    assert figures(SCORES, LABELS) == pytest.approx(
        {
            "p@1": 0.5,  # rows 0 and 2
            "mAP": ((1 + 1 + 3 / 4) / 3 + (1 + 2 / 3) / 2 + 1 / 2) / 3,
            "HA": 8 / 12,
            "ebF1": (1 + 1 / 2 + 1 + 0) / 4,
            "maF1": (4 / 5 + 2 / 4 + 0) / 3,
            "miF1": 2 * 3 / (4 + 6),
        }
    )
    cp, cr = (1 + 1 / 2 + 0) / 3, (2 / 3 + 1 / 2 + 0) / 3
    op, o_r = 3 / 4, 3 / 6
    assert class_and_overall(SCORES >= 0.5, LABELS) == pytest.approx(
        {
            "CP": cp,
            "CR": cr,
            "CF1": 2 * cp * cr / (cp + cr),
            "OP": op,
            "OR": o_r,
            "OF1": 2 * op * o_r / (op + o_r),
        }
    )
    assert precision_at_1(SCORES[:3], LABELS[:3]) == pytest.approx(2 / 3)
    assert precision_at_1(np.array([[0.5, 0.5]]), np.array([[0, 1]])) == 0  # of equal scores the first


def test_a_label_that_no_row_has_is_left_out_of_map_and_counts_0_in_macro_f1():
    without = figures(SCORES, LABELS)
    found = figures(np.c_[SCORES, [0.1, 0.2, 0.3, 0.4]], np.c_[LABELS, [0, 0, 0, 0]])
    assert found["mAP"] == pytest.approx(without["mAP"])
    assert found["maF1"] == pytest.approx(without["maF1"] * 3 / 4)


def test_a_row_without_labels_counts_0_in_p_at_1_and_is_left_out_of_example_f1_if_nothing_is_predicted():
    scores, labels = np.vstack([SCORES, [0.1, 0.2, 0.3]]), np.vstack([LABELS, [0, 0, 0]])
    assert precision_at_1(scores, labels) == pytest.approx(2 / 5)
    assert figures(scores, labels)["ebF1"] == pytest.approx(figures(SCORES, LABELS)["ebF1"])
    assert figures(scores, labels, thresholds=0.25)["ebF1"] < figures(SCORES, LABELS, thresholds=0.25)["ebF1"]


def test_no_label_anywhere_gives_numbers():
    scores, labels = np.full((3, 2), 0.2), np.zeros((3, 2))
    assert figures(scores, labels) == {"p@1": 0, "mAP": 0, "HA": 1, "ebF1": 0, "maF1": 0, "miF1": 0}
    assert set(class_and_overall(scores >= 0.5, labels).values()) == {0}


def test_metrics_agree_with_their_definitions_in_loops():
    rng = np.random.default_rng(1)
    probabilities, labels = rng.random((60, 7)).round(1), rng.integers(0, 2, (60, 7))  # rounded: many ties
    found = figures(probabilities, labels, thresholds=0.6)
    decided = probabilities >= 0.6
    per_row = [
        2 * (d & y).sum() / (d.sum() + y.sum())
        for d, y in zip(decided, labels.astype(bool), strict=True)
        if (d | y).any()
    ]
    assert found["ebF1"] == pytest.approx(np.mean(per_row))
    assert found["HA"] == pytest.approx(np.mean(decided == labels))
    aps = []
    for c in range(7):
        total, previous = 0.0, 0.0
        for threshold in sorted(set(probabilities[:, c]), reverse=True):
            chosen = probabilities[:, c] >= threshold
            recall = labels[chosen, c].sum() / labels[:, c].sum()
            total += (recall - previous) * labels[chosen, c].mean()
            previous = recall
        aps.append(total)
    assert found["mAP"] == pytest.approx(np.mean(aps))
    assert class_and_overall(decided, labels)["OF1"] == pytest.approx(found["miF1"])


def test_thresholds_are_chosen_on_one_part_and_used_on_another():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, (200, 4))
    probabilities = np.clip(0.25 * labels + 0.3 * rng.random((200, 4)), 0, 1)  # right decisions lie well below 0.5
    chosen = best_thresholds(probabilities[:100], labels[:100])
    assert set(chosen) == {"HA", "ebF1", "maF1", "miF1"}
    assert all(0.2 <= threshold <= 0.4 for threshold in chosen.values())
    at_half = figures(probabilities[100:], labels[100:])
    at_chosen = figures(probabilities[100:], labels[100:], thresholds=chosen)
    assert all(at_chosen[name] > at_half[name] for name in chosen)
    assert at_chosen["mAP"] == at_half["mAP"]
    certain = np.array([[0.05, 0.95], [0.95, 0.05]])  # every threshold is equally good: the one nearest to 0.5
    assert set(best_thresholds(certain, certain.round().astype(int)).values()) == {0.5}
