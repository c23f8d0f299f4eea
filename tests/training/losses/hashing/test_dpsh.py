from functools import partial
from itertools import product

import pytest
import torch

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses.hashing.dpsh import DPSH
from support.literal_losses import assert_same, batch, gradients_of, rows_of, total

OPTIONS = [{}, {"eta": 2.0}, {"eta": 0}]


def build(n_classes=4, n_bits=5, **hyper):
    return DPSH(n_classes=n_classes, n_bits=n_bits, **hyper)


def literal(outputs, labels, memory=None, *, eta=0.1):
    rows = rows_of(outputs, labels)
    pairs = list(product(rows, rows if memory is None else rows_of(*memory)))
    value = 0
    for (a, own), (b, other) in pairs:
        half = a @ b / 2
        value = value + (torch.log1p(torch.exp(half)) - (half if own & other else 0)) / len(pairs)
    away = sum((u - (1 if u > 0 else -1)) ** 2 for row in outputs for u in row)
    return value + eta * away / outputs.numel()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=9)):
        slow = partial(literal, labels=labels, memory=memory, **options)
        assert_same(build(**options), slow, outputs, labels, memory)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]])
    # theta / 2 is 2, 0.5, 1 on the diagonal, 0 for rows 0-1, -1 for 0-2, -0.5 for 1-2; row 2 is similar to nothing,
    # not even to itself.
    soft = {t: torch.tensor(t).double().exp().log1p().item() for t in (2.0, 0.5, 1.0, 0.0, -1.0, -0.5)}
    expected = (soft[2.0] - 2) + (soft[0.5] - 0.5) + soft[1.0] + 2 * (soft[0.0] + soft[-1.0] + soft[-0.5])
    terms = build(2, 2)(outputs, labels)
    assert terms["pairs"].item() == pytest.approx(expected / 9)
    assert terms["quantization"].item() == pytest.approx(0.1 * 1 / 6)  # sgn 0 = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_products_of_any_size(dtype):
    outputs = torch.tensor([[800.0] * 4, [-800.0] * 4], dtype=dtype)
    for labels, pairs in ((torch.ones(2, 1), 2 * 1280000 / 4), (torch.eye(2), 0.0)):
        value, (gradient,) = gradients_of(build(labels.shape[1], 4, eta=0), outputs, labels)
        assert value.item() == pytest.approx(pairs)
        assert gradient.isfinite().all()


def test_a_memory_gets_no_gradient_and_replaces_the_batch():
    outputs, labels = batch(0)
    ref = batch(1)[0].requires_grad_()
    total(build()(outputs.requires_grad_(), labels, memory=(ref, labels))).backward()
    assert ref.grad is None
    assert outputs.grad.any()


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (torch.zeros(3, 5), "the memory is a Tensor"),
        ((torch.zeros(3, 4), torch.zeros(3, 4)), r"memory does not fit.*\(B, 5\), not \(3, 4\)"),
        ((torch.zeros(3, 5), torch.full((3, 4), 0.5)), "memory does not fit.* 0 or 1, but one is 0.5"),
        ((torch.full((3, 5), torch.nan), torch.zeros(3, 4)), "memory does not fit.*NaN"),
        (object(), "the memory is a object, but must hold tensors ref"),
    ],
)
def test_bad_memory(memory, words):
    with pytest.raises(BadCodes, match=words):
        build()(torch.zeros(2, 5), torch.zeros(2, 4), memory=memory)


def test_gradcheck():
    outputs, labels = batch(0)
    loss = build()
    assert torch.autograd.gradcheck(lambda u: total(loss(u, labels)), (outputs.requires_grad_(),))


def test_bad_hyperparameters():
    with pytest.raises(BadConfig, match=r"eta .* at least 0, not -1"):
        build(eta=-1)
