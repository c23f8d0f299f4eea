import math

import pytest
import torch

from hashseek.training.losses.hashing.idhn import IDHN, label_cosines
from support.literal_losses import batch


def build(n_classes=4, n_bits=5, **hyper):
    return IDHN(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [1.0, -1.0], [-3.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]])
    # h: (1/2, 0), (1/2, -1/2), (-3/4, 0); theta: 1/4, 1/2, 9/16 on the diagonal, 1/4, -3/8, -3/8 beside it.
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    told_apart = soft(-2.5 / 4) + soft(-2.5 / 2) + soft(2.5 * 9 / 16) + 4 * soft(-2.5 * 3 / 8)
    matched = 2 * 0.1 * 2 * ((0.25 + 2) / 4 - math.sqrt(0.5)) ** 2
    terms = build(2, 2)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx((told_apart + matched) / 9)
    assert terms["quantization"].item() == pytest.approx(0.1 * (0.5 + 1 + 0.5 + 0.5 + 0.25 + 1) / 6)


def test_a_label_more_or_one_in_forty_is_matched_and_not_separated():
    labels = torch.ones(3, 40)
    labels[1, 0], labels[2, :39] = 0, 0  # the rows have 40, 39 and 1 labels
    cosines = [39 / math.sqrt(40 * 39), 1 / math.sqrt(40), 1 / math.sqrt(39)]
    expected = 3 * math.log(2) + 2 * sum(0.1 * 5 * (0.5 - s) ** 2 for s in cosines)
    assert build(40, 5)(torch.zeros(3, 5), labels)["pairs"].item() == pytest.approx(expected / 9)


def test_label_cosines_of_equal_rows_are_1_and_of_empty_rows_0():
    labels = (torch.rand(40, 30) < 0.3).float()
    labels[:, 0], labels[0] = 1, 0
    cosines = label_cosines(labels, labels)
    assert (cosines.diagonal()[1:] == 1).all()
    assert not cosines[0].any()


def test_a_memory_is_squashed_too():
    outputs, labels = batch(0)
    found = build()(outputs, labels, memory=(outputs, labels))
    torch.testing.assert_close(found["pairs"], build()(outputs, labels)["pairs"])
