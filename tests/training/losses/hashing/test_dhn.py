import math
from functools import partial
from itertools import product

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hashing.dhn import DHN
from hashseek.training.losses.hashing.dpsh import DPSH
from support.literal_losses import assert_same, batch, cos, gradients_of, rows_of, total

OPTIONS = [
    {},
    {"inner": 1.0, "lam": 0.7},
    {"quantizer": "square"},
    {"normed": True, "balance": True},
    {"clip": 0.8, "balance": True, "quantizer": "l1", "lam": 0},
]


def build(n_classes=4, n_bits=5, **hyper):
    return DHN(n_classes=n_classes, n_bits=n_bits, **hyper)


def literal(
    outputs,
    labels,
    memory=None,
    *,
    lam=0.1,
    inner=0.5,
    quantizer="logcosh",
    normed=False,
    clip=math.inf,
    balance=False,
):
    rows = rows_of(outputs, labels)
    pairs = list(product(rows, rows if memory is None else rows_of(*memory)))
    n_similar = sum(bool(own & other) for (_, own), (_, other) in pairs)
    value = 0
    for (a, own), (b, other) in pairs:
        theta = cos(a, b) if normed else a @ b
        theta = inner * (theta if -clip < theta < clip else torch.sign(theta.detach()) * clip)
        nll = torch.log1p(torch.exp(theta)) - (theta if own & other else 0)
        value = value + nll * (len(pairs) / n_similar if balance and own & other else 1) / len(pairs)
    away = {
        "logcosh": lambda u: torch.log(torch.cosh(abs(u) - 1)),
        "square": lambda u: (abs(u) - 1) ** 2,
        "l1": lambda u: abs(abs(u) - 1),
    }[quantizer]
    return value + lam * sum(away(u) for row in outputs for u in row) / outputs.numel()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=9)):
        slow = partial(literal, labels=labels, memory=memory, **options)
        assert_same(build(**options), slow, outputs, labels, memory)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    expected = soft(-2) + soft(-0.5) + soft(-1) + 2 * (soft(0) + soft(-1) + soft(0.5))
    terms = build(2, 2)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx(expected / 9)
    assert terms["quantization"].item() == pytest.approx(0.1 * 3 * math.log(math.cosh(1)) / 6)


def test_pairs_are_those_of_dpsh():
    outputs, labels = batch(0)
    dpsh = DPSH(n_classes=4, n_bits=5)
    torch.testing.assert_close(build()(outputs, labels)["pairs"], dpsh(outputs, labels)["pairs"])


def test_balance_without_similar_pairs_is_the_plain_mean():
    outputs = batch(0)[0]
    labels = torch.zeros(7, 4)
    balanced, plain = build(balance=True)(outputs, labels), build()(outputs, labels)
    torch.testing.assert_close(balanced["pairs"], plain["pairs"])


def test_clipped_pairs_have_no_gradient():
    outputs = torch.full((2, 4), 100.0)
    value, (gradient,) = gradients_of(build(4, 4, clip=15, lam=0), outputs, torch.zeros(2, 4))
    assert value.item() == pytest.approx(7.5, rel=1e-3)
    assert not gradient.any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options):
    outputs, labels = batch(0)
    loss = build(**options)
    assert torch.autograd.gradcheck(lambda u: total(loss(u, labels)), (outputs.requires_grad_(),))


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"lam": -1}, "lam .* at least 0, not -1"),
        ({"inner": 0}, "inner .* greater than 0, not 0: 0.5 is usual"),
        ({"clip": -15}, "clip .* greater than 0, not -15"),
        ({"quantizer": "log"}, "quantizer is 'log': choose one of l1"),
        ({"normed": "yes"}, "normed .* true or false, not 'yes'"),
        ({"balance": 0}, "balance .* true or false, not 0"),
    ],
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)
