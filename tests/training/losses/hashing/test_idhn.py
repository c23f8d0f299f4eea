import math
from functools import partial
from itertools import product

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hashing.idhn import IDHN, label_cosines
from support.literal_losses import assert_same, batch, rows_of, total

OPTIONS = [{}, {"gamma": 2.0, "alpha": 0}, {"gamma": 0, "alpha": 1.5}]


def build(n_classes=4, n_bits=5, **hyper):
    return IDHN(n_classes=n_classes, n_bits=n_bits, **hyper)


def literal(outputs, labels, memory=None, *, gamma=0.1, alpha=0.1):
    soft = lambda u: u / (1 + abs(u))  # noqa: E731
    rows = rows_of(soft(outputs), labels)
    pairs = list(product(rows, rows if memory is None else rows_of(soft(memory[0]), memory[1])))
    n_bits = outputs.shape[1]
    value = 0
    for (a, own), (b, other) in pairs:
        theta = a @ b
        s = len(own & other) / math.sqrt(len(own) * len(other)) if own and other else 0.0
        if s > 0.99 or s < 0.01:
            t = 5 * theta / n_bits
            value = value + torch.log1p(torch.exp(t)) - s * t
        else:
            value = value + gamma * n_bits * ((theta + n_bits) / (2 * n_bits) - s) ** 2
    away = sum(abs(abs(h) - 1) for row, _ in rows for h in row) / outputs.numel()
    return value / len(pairs) + alpha * away


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=9)):
        slow = partial(literal, labels=labels, memory=memory, **options)
        assert_same(build(**options), slow, outputs, labels, memory)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [1.0, -1.0], [-3.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]])
    # h: (1/2, 0), (1/2, -1/2), (-3/4, 0); theta: 1/4, 1/2, 9/16 on the diagonal, 1/4, -3/8, -3/8 beside it.
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    told_apart = soft(-2.5 / 4) + soft(-2.5 / 2) + soft(2.5 * 9 / 16) + 4 * soft(-2.5 * 3 / 8)
    matched = 2 * 0.1 * 2 * ((0.25 + 2) / 4 - math.sqrt(0.5)) ** 2
    terms = build(2, 2)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx((told_apart + matched) / 9)
    assert terms["quantization"].item() == pytest.approx(0.1 * (0.5 + 1 + 0.5 + 0.5 + 0.25 + 1) / 6)


def test_label_cosines_of_equal_rows_are_1_and_of_empty_rows_0():
    labels = (torch.rand(40, 30) < 0.3).float()
    labels[0] = 0
    cosines = label_cosines(labels, labels)
    assert (cosines.diagonal()[1:] == 1).all()
    assert not cosines[0].any()


def test_nearly_equal_label_rows_keep_their_own_target():
    labels = torch.ones(2, 100, dtype=torch.float64)
    labels[1, 0] = 0  # cosine sqrt(0.99) = 0.995: told apart, with 0.995 and not 1 as the target
    outputs = batch(0, n=2)[0]
    loss = IDHN(n_classes=100, n_bits=5)
    torch.testing.assert_close(total(loss(outputs, labels)), literal(outputs, labels))


def test_a_memory_is_squashed_too():
    outputs, labels = batch(0)
    found = build()(outputs, labels, memory=(outputs, labels))
    torch.testing.assert_close(found["pairs"], build()(outputs, labels)["pairs"])


def test_gradcheck():
    outputs, labels = batch(0)
    loss = build()
    assert torch.autograd.gradcheck(lambda u: total(loss(u, labels)), (outputs.requires_grad_(),))


@pytest.mark.parametrize("name", ["gamma", "alpha"])
def test_bad_hyperparameters(name):
    with pytest.raises(BadConfig, match=f"{name} .* at least 0, not -1"):
        build(**{name: -1})
