import math

import pytest
import torch

from hashseek.training.losses.hashing.orthohash import OrthoHash, cosines_of_larger_angles
from support.literal_losses import gradients_of


def build(n_classes=4, n_bits=6, **hyper):
    return OrthoHash(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_two_rows_worked_by_hand():
    loss = build(2, 2)
    loss.centres.copy_(torch.tensor([[1, 1], [1, -1]]))
    outputs = torch.tensor([[3.0, 0.0], [2.0, 2.0], [1.0, 7.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 1], [0, 1], [0, 0]])
    # Row 0 has equal scores; row 1 has cosines 1 and 0, the second with the margin; row 2 has no label.
    second = math.log(math.exp(8) + math.exp(-1.6)) + 1.6
    assert loss(outputs, labels)["centre"].item() == pytest.approx((math.log(2) + second) / 2)


def test_arc_margin_at_the_poles_and_at_a_zero_row():
    loss = build(2, 2, margin="arc", s=1.0).double()
    loss.centres.copy_(torch.tensor([[1, 1], [1, -1]]))
    labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    for row, angle in (([2.0, 2.0], 0.0), ([-3.0, -3.0], math.pi), ([0.0, 0.0], math.pi / 2)):
        value, (gradient,) = gradients_of(loss, torch.tensor([row], dtype=torch.float64), labels)
        score = math.cos(angle + 0.2)
        assert value.item() == pytest.approx(math.log1p(math.exp(-score)), abs=1e-12)
        assert gradient.isfinite().all()


def test_arc_margin_near_a_pole_keeps_float32_exact():
    loss = build(2, 4, margin="arc")
    labels = torch.tensor([[1.0, 0.0]])
    for distance in (1e-1, 1e-2, 1e-3):
        rough = loss.centres[:1] + distance * torch.tensor([[1.0, 2.0, -1.0, 0.5]])
        exact = gradients_of(loss, rough.double(), labels)
        found = gradients_of(loss, rough, labels)
        torch.testing.assert_close(found[0].double(), exact[0], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(found[1][0].double(), exact[1][0], rtol=2e-4, atol=2e-4)


def test_a_row_with_a_zero_has_a_direction():
    row, centre = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5**0.5, 0.5**0.5]])  # 45 degrees apart
    found = cosines_of_larger_angles(row, centre, row @ centre.T, math.radians(30))
    assert found.item() == pytest.approx(math.cos(math.radians(75)))
