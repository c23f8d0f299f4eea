import pytest
import torch

from hashseek.training.losses.hashing.dpsh import DPSH


def build(n_classes=4, n_bits=5, **hyper):
    return DPSH(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]])
    # theta / 2 is 2, 0.5, 1 on the diagonal, 0 for rows 0-1, -1 for 0-2, -0.5 for 1-2; row 2 is similar to nothing,
    # not even to itself.
    soft = {t: torch.tensor(t).double().exp().log1p().item() for t in (2.0, 0.5, 1.0, 0.0, -1.0, -0.5)}
    expected = (soft[2.0] - 2) + (soft[0.5] - 0.5) + soft[1.0] + 2 * (soft[0.0] + soft[-1.0] + soft[-0.5])
    terms = build(2, 2)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx(expected / 9)
    assert terms["quantization"].item() == pytest.approx(0.1 * 1 / 6)  # sgn 0 = 0
