import math

import pytest
import torch

from hashseek.training.losses.contrastive.base_proto import LProto
from hashseek.training.losses.contrastive.msc import MSC, balanced_weights
from support.literal_losses import batch


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


def test_weights_of_one_label_sum_to_1():
    _, labels = batch(0)
    instances, prototypes = balanced_weights(labels, labels)
    torch.testing.assert_close(instances.sum(dim=1) + prototypes.sum(dim=1), labels.sum(dim=1))
    assert not instances.diagonal().any()


def test_without_instances_it_is_l_proto():
    outputs, _ = batch(0, n=4)
    labels = torch.eye(4, dtype=torch.float64)
    loss = build(beta=0.0).double()
    proto = LProto(n_classes=4, n_bits=5).double()
    proto.load_state_dict(loss.state_dict())
    torch.testing.assert_close(loss(outputs, labels)["msc"], proto(outputs, labels)["proto"])


def test_an_empty_queue_changes_nothing():
    outputs, labels = batch(0)
    loss = build().double()
    empty = (outputs[:0], labels[:0])
    torch.testing.assert_close(loss(outputs, labels, memory=empty)["msc"], loss(outputs, labels)["msc"])
