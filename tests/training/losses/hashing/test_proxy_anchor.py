import math
from functools import partial

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hashing.proxy_anchor import ProxyAnchor
from support.literal_losses import assert_same, batch, cos, gradients_of, label_sets, total

OPTIONS = [{}, {"alpha": 4.0, "delta": 0.3}, {"alpha": 8, "delta": -0.1}]


def build(n_classes=4, n_bits=5, **hyper):
    return ProxyAnchor(n_classes=n_classes, n_bits=n_bits, **hyper)


def literal(outputs, proxies, labels, *, alpha=32.0, delta=0.1):
    sets = label_sets(labels)
    positive, negative = [], []
    for j, proxy in enumerate(proxies):
        cosines = [cos(u, proxy) for u in outputs]
        near = [torch.exp(-alpha * (c - delta)) for c, own in zip(cosines, sets, strict=True) if j in own]
        far = [torch.exp(alpha * (c + delta)) for c, own in zip(cosines, sets, strict=True) if j not in own]
        if near:
            positive.append(torch.log(1 + sum(near)))
        negative.append(torch.log(1 + sum(far)) if far else 0)
    return (sum(positive) / len(positive) if positive else 0) + sum(negative) / len(proxies)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    assert_same(build(**options), partial(literal, labels=labels, **options), outputs, labels)


def test_three_rows_worked_by_hand():
    loss = build(3, 2, alpha=2.0, delta=0.5).double()
    loss.proxies.data = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]], dtype=torch.float64)
    outputs = torch.tensor([[4.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    e = math.exp
    # Label 0: cosines 1, 0 with, -1 without. Label 1: 0 with, 1, 0 without. Label 2: nobody with, -1, 0, 1 without.
    positive = (math.log(1 + e(-1) + e(1)) + math.log(1 + e(1))) / 2
    negative = (math.log(1 + e(-1)) + math.log(1 + e(3) + e(1)) + math.log(1 + e(-1) + e(1) + e(3))) / 3
    terms = loss(outputs, labels)
    assert terms["positive"].item() == pytest.approx(positive)
    assert terms["negative"].item() == pytest.approx(negative)


def test_a_batch_without_labels_has_no_positive_term():
    outputs, _ = batch(0)
    loss = build().double()
    terms = loss(outputs.requires_grad_(), torch.zeros(7, 4))
    assert terms["positive"] == 0
    assert not torch.autograd.grad(terms["positive"], outputs)[0].any()
    full = loss(outputs, torch.ones(7, 4))
    assert full["negative"] == 0


def test_steep_exponents_do_not_overflow():
    outputs, labels = batch(0)
    value, gradients = gradients_of(build(alpha=1e4), outputs.float(), labels)
    assert value.isfinite()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options):
    outputs, labels = batch(1)
    loss = build(**options).double()
    assert torch.autograd.gradcheck(lambda z, _: total(loss(z, labels)), (outputs.requires_grad_(), loss.proxies))


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"alpha": 0}, "alpha .* greater than 0, not 0: 32 is usual"),
        ({"delta": math.nan}, "delta .* finite number, not nan"),
    ],
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)
