"""Figures of multi-label classification against values worked out by hand, and against their definitions in loops."""

import numpy as np
import pytest

from hashseek.retrieval.errors import BadCodes
from hashseek.training.evaluation.classification_metrics import (
    average_precisions,
    best_thresholds,
    class_and_overall,
    example_f1,
    figures,
    hamming_accuracy,
    macro_f1,
    mean_average_precision,
    micro_f1,
    precision_at_1,
    sample_average_precision,
)

#                   row 0      row 1      row 2      row 3
SCORES = np.array([[0.9, 0.2, 0.1], [0.6, 0.7, 0.3], [0.4, 0.8, 0.2], [0.1, 0.3, 0.45]])
LABELS = np.array([[1, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 0]])


def test_average_precision_of_each_label_is_the_mean_precision_at_its_rows():
    # Label 0 ranks rows 0, 1, 2, 3: hits at 1, 2, 4.  Label 1 ranks 2, 1, 3, 0: hits at 1, 3.  Label 2: hit at 2.
    expected = [(1 + 1 + 3 / 4) / 3, (1 + 2 / 3) / 2, 1 / 2]
    assert average_precisions(SCORES, LABELS) == pytest.approx(expected)
    assert mean_average_precision(SCORES, LABELS) == pytest.approx(np.mean(expected))


def test_sample_average_precision_ranks_the_labels_of_each_row():
    # Row 1 ranks labels 1, 0, 2: hits at 2, 3.  Row 3 ranks 2, 1, 0: hits at 2, 3.
    row = (1 / 2 + 2 / 3) / 2
    assert sample_average_precision(SCORES, LABELS) == pytest.approx((1 + row + 1 + row) / 4)


def test_precision_at_1_looks_at_the_best_label_of_each_row():
    assert precision_at_1(SCORES, LABELS) == 0.5  # rows 0 and 2
    assert precision_at_1(np.array([[0.5, 0.5]]), np.array([[0, 1]])) == 0  # of equal scores the first


def test_figures_of_decisions_worked_by_hand():
    # At 0.5: row 0 {0}, row 1 {0, 1}, row 2 {1}, row 3 {}.  Hits: label 0: 2 of 2 chosen and 3 carried, label 1: 1 of 2
    # and 2, label 2: 0 of 0 and 1.
    decided = SCORES >= 0.5
    assert hamming_accuracy(decided, LABELS) == pytest.approx(8 / 12)
    assert micro_f1(decided, LABELS) == pytest.approx(2 * 3 / (4 + 6))
    assert macro_f1(decided, LABELS) == pytest.approx((4 / 5 + 2 / 4 + 0) / 3)
    assert example_f1(decided, LABELS) == pytest.approx((1 + 1 / 2 + 1 + 0) / 4)
    cp, cr = (1 + 1 / 2 + 0) / 3, (2 / 3 + 1 / 2 + 0) / 3
    op, o_r = 3 / 4, 3 / 6
    assert class_and_overall(decided, LABELS) == pytest.approx(
        {
            "CP": cp,
            "CR": cr,
            "CF1": 2 * cp * cr / (cp + cr),
            "OP": op,
            "OR": o_r,
            "OF1": 2 * op * o_r / (op + o_r),
        }
    )


def test_overall_f1_is_micro_f1():
    rng = np.random.default_rng(0)
    decided, labels = rng.integers(0, 2, (2, 40, 5))
    assert class_and_overall(decided, labels)["OF1"] == pytest.approx(micro_f1(decided, labels))


def test_a_label_that_no_row_carries_is_left_out_of_map_and_counts_0_in_macro_f1():
    scores, labels = np.c_[SCORES, [0.1, 0.2, 0.3, 0.4]], np.c_[LABELS, [0, 0, 0, 0]]
    assert np.isnan(average_precisions(scores, labels)[3])
    assert mean_average_precision(scores, labels) == pytest.approx(mean_average_precision(SCORES, LABELS))
    without = macro_f1(SCORES >= 0.5, LABELS)
    assert macro_f1(scores >= 0.5, labels) == pytest.approx(without * 3 / 4)


def test_a_row_without_labels_counts_0_in_p_at_1_and_is_left_out_of_example_f1_if_nothing_is_predicted():
    scores, labels = np.vstack([SCORES, [0.1, 0.2, 0.3]]), np.vstack([LABELS, [0, 0, 0]])
    assert precision_at_1(scores, labels) == pytest.approx(2 / 5)
    assert example_f1(scores >= 0.5, labels) == pytest.approx(example_f1(SCORES >= 0.5, LABELS))
    assert example_f1(scores >= 0.25, labels) < example_f1(SCORES >= 0.25, LABELS)  # predicted there: an error
    assert sample_average_precision(scores, labels) == pytest.approx(sample_average_precision(SCORES, LABELS))


def test_no_label_anywhere_gives_numbers():
    scores, labels = np.full((3, 2), 0.2), np.zeros((3, 2))
    assert figures(scores, labels) == {"p@1": 0, "mAP": 0, "HA": 1, "ebF1": 0, "maF1": 0, "miF1": 0}
    assert sample_average_precision(scores, labels) == 0
    assert set(class_and_overall(scores >= 0.5, labels).values()) == {0}


def test_figures_agree_with_their_definitions_in_loops():
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


def test_thresholds_can_be_chosen_a_figure_on_one_part_and_used_on_another():
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


def test_of_equally_good_thresholds_the_one_nearest_a_half_is_taken():
    probabilities, labels = np.array([[0.05, 0.95], [0.95, 0.05]]), np.array([[0, 1], [1, 0]])
    assert set(best_thresholds(probabilities, labels).values()) == {0.5}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: precision_at_1(SCORES, LABELS[:3]), r"one shape .* not \(4, 3\) and \(3, 3\)"),
        (lambda: precision_at_1(SCORES[:0], LABELS[:0]), "at least one row"),
        (lambda: mean_average_precision(SCORES, LABELS * 2), "labels must be 0 or 1, but one is 2"),
        (lambda: mean_average_precision(np.where(SCORES == 0.8, np.nan, SCORES), LABELS), "row 2 are NaN"),
        (lambda: micro_f1(SCORES, LABELS), "decisions must be 0 or 1"),
        (lambda: figures(SCORES * 10, LABELS), "reach from 1 to 9"),
        (lambda: figures(SCORES, LABELS, thresholds={"HA": 0.5}), "no threshold for ebF1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(BadCodes, match=message):
        call()
