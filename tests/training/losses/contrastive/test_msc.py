import math

import pytest
import torch

from hashseek.training.losses.contrastive.msc import MSC


def build(n_classes=4, n_bits=5, **hyper):
    return MSC(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    loss = build(2, 2, tau=1.0, beta=1.0).double()
    loss.prototypes.data = torch.eye(2, dtype=torch.float64)
    upper, lower = math.log(2 * math.e + 2), math.log(math.e + 3)
    expected = ((upper - 1) + (upper - 1 / 2) + (lower - 2 / 3)) / 3
    assert loss(outputs, labels)["msc"].item() == pytest.approx(expected, abs=1e-12)
