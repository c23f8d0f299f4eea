import pytest
import torch

from hashseek.training.losses.hashing.dsh import DSH
from support.literal_losses import gradients_of


def build(n_classes=4, n_bits=5, **hyper):
    return DSH(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 1.0], [0.0, 1.0], [-1.0, -1.5]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    # Margin 4; distances 0-1: 1 (similar), 0-2: 10.25 (apart, beyond the margin), 1-2: 7.25 (similar).
    terms = build(2, 2)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx((0.5 + 0 + 3.625) / 3)
    assert terms["quantization"].item() == pytest.approx(0.01 * 1.5 / 3)
    terms = build(2, 2, dense=True)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx(2 * (0.5 + 3.625) / 9)
    assert terms["quantization"].item() == pytest.approx(0.1 * 1.5 / 6)


def test_margin_and_weight_follow_the_code_length():
    assert (build(n_bits=48).m, build().alpha, build(dense=True).alpha) == (96, 0.01, 0.1)


def test_long_rows_close_together_keep_their_distance():
    base = 1000 + torch.randn(1, 5)
    outputs = torch.cat([base, base + 1e-3])
    value, _ = gradients_of(build(alpha=0), outputs, torch.ones(2, 4))
    assert value.item() == pytest.approx(2.5e-6, rel=0.2)
