import math

import pytest
import torch
import torch.nn.functional as F

from hashseek.training.losses.contrastive.mulsupcon import MulSupCon
from hashseek.training.losses.contrastive.supcon import SupCon
from support.literal_losses import batch, gradients_of


def build(n_classes=4, n_bits=5, **hyper):
    return MulSupCon(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    a = math.log(1 + math.exp(-1))
    parts = {"labels": 4, "batch": 3, "valid": 3, "sum": 1}
    for reduction, by in parts.items():
        value = build(2, 2, tau=1.0, reduction=reduction)(outputs, labels)["mulsupcon"]
        assert value.item() == pytest.approx((a + a + (1 + a) + math.log(2)) / by, abs=1e-12)
    value = build(2, 2, tau=1.0, reduction="sample")(outputs, labels)["mulsupcon"]
    assert value.item() == pytest.approx((a + (a + 1 + a) / 2 + math.log(2)) / 3, abs=1e-12)


def test_float32_stays_finite_at_tau_of_a_hundredth():
    # log(softmax) underflows here: a cosine far below the row's largest gives log(0) * 0.
    generator = torch.Generator().manual_seed(0)
    keys = F.normalize(torch.randn(4096, 128, generator=generator), dim=1)
    noise = F.normalize(torch.randn(64, 128, generator=generator), dim=1)
    outputs = 0.7 * keys[:64] + math.sqrt(1 - 0.49) * noise
    keys[100] = -outputs[0]  # a cosine of -1 beside an own key of 0.7
    labels = (torch.rand(4096, 20, generator=generator) < 0.15).float()
    value, (gradient,) = gradients_of(build(20, 128, tau=0.01), outputs, labels[:64], memory=(keys, labels))
    exact, (slope,) = gradients_of(build(20, 128, tau=0.01), outputs.double(), labels[:64], memory=(keys, labels))
    assert bool(gradient.isfinite().all())
    torch.testing.assert_close(value.double(), exact, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(gradient.double(), slope, rtol=2e-4, atol=2e-4)


def test_single_labels_give_supcon():
    outputs, _ = batch(0, n=8)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), 4)
    supcon = SupCon(n_classes=4, n_bits=5)(outputs, labels)["supcon"]
    torch.testing.assert_close(build()(outputs, labels)["mulsupcon"], supcon)
