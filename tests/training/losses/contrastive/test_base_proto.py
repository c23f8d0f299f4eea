import math

import pytest
import torch
import torch.nn.functional as F

from hashseek.training.losses.contrastive.base_proto import LBase, LProto
from hashseek.training.losses.contrastive.supcon import SupCon
from support.literal_losses import batch


def build(kind=LBase, n_classes=4, n_bits=5, **hyper):
    return kind(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    a = math.log(1 + math.exp(-1))
    value = build(LBase, 2, 2, tau=1.0)(outputs, labels)["base"]
    assert value.item() == pytest.approx((a + (a + 0.5) + math.log(2)) / 3, abs=1e-12)
    loss = build(LProto, 2, 2, tau=1.0).double()
    loss.prototypes.data = torch.eye(2, dtype=torch.float64)
    # Rows 1 and 3 lie on their prototype, row 2 on one of its two.
    assert loss(outputs, labels)["proto"].item() == pytest.approx((a + (a + 0.5) + a) / 3, abs=1e-12)


def test_prototypes_are_drawn_as_in_the_code():
    torch.manual_seed(0)
    prototypes = build(LProto, 200, 64).prototypes
    assert prototypes.abs().max().item() == pytest.approx(math.sqrt(6 / (200 + 64)), rel=0.01)
    assert prototypes.std().item() == pytest.approx(math.sqrt(2 / (200 + 64)), rel=0.05)


def test_single_labels_turn_base_into_supcon_and_proto_into_cross_entropy():
    outputs, _ = batch(0, n=8)
    index = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3])
    labels = F.one_hot(index, 4)
    supcon = SupCon(n_classes=4, n_bits=5)(outputs, labels)["supcon"]
    torch.testing.assert_close(build()(outputs, labels)["base"], supcon)
    loss = build(LProto).double()
    scores = F.normalize(outputs) @ F.normalize(loss.prototypes).T / 0.1
    torch.testing.assert_close(loss(outputs, labels)["proto"], F.cross_entropy(scores, index))
