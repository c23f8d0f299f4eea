import math

import pytest
import torch

from hashseek.training.losses.hashing.dhn import DHN
from hashseek.training.losses.hashing.dpsh import DPSH
from support.literal_losses import batch, gradients_of


def build(n_classes=4, n_bits=5, **hyper):
    return DHN(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    expected = soft(-2) + soft(-0.5) + soft(-1) + 2 * (soft(0) + soft(-1) + soft(0.5))
    terms = build(2, 2)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx(expected / 9)
    assert terms["quantization"].item() == pytest.approx(0.1 * 3 * math.log(math.cosh(1)) / 6)


def test_pairs_are_those_of_dpsh():
    outputs, labels = batch(0)
    dpsh = DPSH(n_classes=4, n_bits=5)
    torch.testing.assert_close(build()(outputs, labels)["pairs"], dpsh(outputs, labels)["pairs"])


def test_balance_without_similar_pairs_is_the_plain_mean():
    outputs = batch(0)[0]
    labels = torch.zeros(7, 4)
    balanced, plain = build(balance=True)(outputs, labels), build()(outputs, labels)
    torch.testing.assert_close(balanced["pairs"], plain["pairs"])


def test_clipped_pairs_have_no_gradient():
    outputs = torch.full((2, 4), 100.0)
    value, (gradient,) = gradients_of(build(4, 4, clip=15, lam=0), outputs, torch.zeros(2, 4))
    assert value.item() == pytest.approx(7.5, rel=1e-3)
    assert not gradient.any()
