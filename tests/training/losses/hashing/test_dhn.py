import math

import pytest
import torch

from hashseek.training.losses.hashing.dhn import DHN


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
