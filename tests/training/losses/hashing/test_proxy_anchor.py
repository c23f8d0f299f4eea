import math

import pytest
import torch

from hashseek.training.losses.hashing.proxy_anchor import ProxyAnchor


def build(n_classes=4, n_bits=5, **hyper):
    return ProxyAnchor(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    loss = build(3, 2, alpha=2.0, delta=0.5).double()
    loss.proxies.data = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]], dtype=torch.float64)
    outputs = torch.tensor([[4.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    e = math.exp
    # Cosines of rows with and without a label. Label 0: 1, 0 and -1. Label 1: 0 and 1, 0. Label 2: none and -1, 0, 1.
    positive = (math.log(1 + e(-1) + e(1)) + math.log(1 + e(1))) / 2
    negative = (math.log(1 + e(-1)) + math.log(1 + e(3) + e(1)) + math.log(1 + e(-1) + e(1) + e(3))) / 3
    terms = loss(outputs, labels)
    assert terms["positive"].item() == pytest.approx(positive)
    assert terms["negative"].item() == pytest.approx(negative)
    only = loss(outputs, labels * torch.tensor([0, 1, 0]))  # a single label is present
    assert only["positive"].item() == pytest.approx(math.log(1 + e(1)))
