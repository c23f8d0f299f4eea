import math

import pytest
import torch

from hashseek.training.losses.hashing.hashnet import HashNet
from support.literal_losses import batch


def build(n_classes=4, n_bits=5, **hyper):
    return HashNet(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    one = math.atanh(0.5)
    outputs = torch.tensor([[one, 0.0], [one, one], [-one, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]])
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    # a = 5. Similar: 0-0 (1/4), 1-1 (1/2), 0-1 twice (1/4). Apart: 2-2 (1/4), 0-2 and 1-2 twice each (-1/4).
    similar = (soft(-1.25) + soft(-2.5) + 2 * soft(-1.25)) / 4
    apart = (soft(1.25) + 4 * soft(-1.25)) / 5
    assert build(2, 2)(outputs, labels)["pairs"].item() == pytest.approx(similar + apart)


def test_continuation_by_iteration_is_that_of_the_authors():
    outputs, labels = batch(0)
    loss = build(continuation="iteration").double()
    scale = 1.0
    for iteration in range(1, 802):
        found = loss(outputs, labels)["pairs"]
        if iteration % 200 == 0:
            scale = (1 + 0.005 * iteration) ** 0.5
        if iteration in (1, 199, 200, 201, 399, 400, 600, 801):
            plain = build(continuation="none")(scale * outputs, labels)["pairs"]
            torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    loss.eval()
    loss(outputs, labels)
    assert loss.iterations == 801
