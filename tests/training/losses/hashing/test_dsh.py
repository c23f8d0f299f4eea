from functools import partial
from itertools import combinations, product

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hashing.dsh import DSH
from support.literal_losses import assert_same, batch, gradients_of, rows_of, total

OPTIONS = [{}, {"m": 3.0, "alpha": 0.5}, {"dense": True}, {"dense": True, "m": 4, "alpha": 0}]


def build(n_classes=4, n_bits=5, **hyper):
    return DSH(n_classes=n_classes, n_bits=n_bits, **hyper)


def literal(outputs, labels, memory=None, *, m=10.0, alpha=None, dense=False):
    rows = rows_of(outputs, labels)
    if memory is not None:
        pairs = list(product(rows, rows_of(*memory)))
    else:
        pairs = list(product(rows, rows) if dense else combinations(rows, 2))
    value = 0
    for (a, own), (b, other) in pairs:
        d = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
        value = value + (d if own & other else (m - d if m > d else 0 * d)) / 2 / len(pairs)
    away = sum(abs(abs(x) - 1) for row in outputs for x in row) / len(outputs)
    if dense:
        return value + (0.1 if alpha is None else alpha) * away / outputs.shape[1]
    return value + (0.01 if alpha is None else alpha) * away


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=9)):
        slow = partial(literal, labels=labels, memory=memory, **options)
        assert_same(build(**options), slow, outputs, labels, memory)


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


def test_a_batch_without_pairs_leaves_the_quantisation():
    outputs = torch.tensor([[0.5, -0.5]])
    terms = build(2, 2)(outputs, torch.ones(1, 2))
    assert terms["pairs"] == 0
    assert terms["quantization"].item() == pytest.approx(0.01)


@pytest.mark.parametrize("dense", [False, True])
def test_gradcheck(dense):
    outputs, labels = batch(0)
    loss = build(dense=dense)
    assert torch.autograd.gradcheck(lambda u: total(loss(u, labels)), (outputs.requires_grad_(),))


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"m": 0}, "m is a squared distance and must be greater than 0, not 0"),
        ({"alpha": -0.1}, "alpha .* at least 0, not -0.1"),
        ({"dense": 1}, "dense .* true or false, not 1"),
    ],
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)
