import math

import pytest
import torch
import torch.nn.functional as F

from hashseek.training.losses.batches import Batch, Memory
from hashseek.training.losses.contrastive.contrast_sets import contrast, overlaps
from hashseek.training.losses.contrastive.simdis import SimDis, label_factor
from hashseek.training.losses.contrastive.supcon import SupCon
from support.literal_losses import batch, gradients_of

MODES = ["inside", "outside", "outside_norm"]


def build(n_classes=4, n_bits=5, **hyper):
    return SimDis(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_factor_of_the_five_relations_of_figure_1():
    anchor = torch.tensor([[1, 1, 1, 0, 0]])
    others = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    rows = torch.ones(5, 3, dtype=torch.float64)
    c = contrast(Batch(rows[:1], anchor.double(), Memory(rows, others.double()), logits=None, epoch=0))
    expected = torch.tensor([[0, 1, 1 / 9, 2 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(label_factor(overlaps(c), c), expected, rtol=0, atol=1e-15)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    a = math.log(1 + math.exp(-1))
    any_value = (a + (a + 0.5) + math.log(2)) / 3
    expected = {"inside": any_value + math.log(2), "outside": any_value / 2, "outside_norm": any_value}
    for mode, value in expected.items():  # every factor is 1/2 here
        got = build(2, 2, tau=1.0, mode=mode)(outputs, labels)["simdis"].item()
        assert got == pytest.approx(value, abs=1e-12), mode


@pytest.mark.parametrize("seed", range(4))
def test_inside_has_exactly_the_gradient_of_any(seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=12)):
        value, gradient = gradients_of(build(tau=0.1), outputs, labels, memory=memory)
        plain, slope = gradients_of(SupCon(n_classes=4, n_bits=5, tau=0.1), outputs, labels, memory=memory)
        assert torch.equal(gradient[0], slope[0])
        assert value >= plain


@pytest.mark.parametrize("mode", MODES)
def test_single_labels_give_supcon(mode):
    outputs, _ = batch(0, n=8)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0, 3]), 4)
    supcon = SupCon(n_classes=4, n_bits=5, tau=0.07)(outputs, labels)["supcon"]
    torch.testing.assert_close(build(mode=mode)(outputs, labels)["simdis"], supcon)
