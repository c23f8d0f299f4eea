import math
from functools import partial

import _literal as literal
import pytest
import torch

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses.contrastive.base_proto import LProto
from hashseek.training.losses.contrastive.msc import MSC, balanced_weights
from support.literal_losses import batch

OPTIONS = [
    {},
    {"beta": 0.0},
    {"beta": 1.0, "tau": 0.5},
    {"beta": 3, "reduction": "batch"},
    {"reduction": "sum"},
]


def build(n_classes=4, n_bits=5, **hyper):
    return MSC(n_classes=n_classes, n_bits=n_bits, **hyper)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=12)):
        literal.assert_same(
            build(**options),
            lambda z, p, memory=memory: literal.msc(z, labels, p, memory, **options),
            outputs,
            labels,
            memory,
        )


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


def test_beta_of_0_keeps_instances_as_positives():
    outputs, labels = batch(0)
    proto = LProto(n_classes=4, n_bits=5).double()
    loss = build(beta=0.0).double()
    proto.load_state_dict(loss.state_dict())
    assert not torch.allclose(loss(outputs, labels)["msc"], proto(outputs, labels)["proto"])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gradcheck(beta):
    outputs, labels = batch(1)
    loss = build(beta=beta, tau=0.5).double()
    memory = batch(9, n=6)
    assert torch.autograd.gradcheck(
        lambda z, _: loss(z, labels, memory=memory)["msc"], (outputs.requires_grad_(), loss.prototypes)
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_order_and_length_do_not_matter(options):
    literal.assert_invariant(partial(build, **options))


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["valid", "batch"])
def test_survives_every_edge(beta, reduction):
    literal.assert_survives_edges(partial(build, beta=beta, reduction=reduction), zero=literal.UNLABELLED)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_float32_and_half(beta):
    literal.assert_low_precision_agrees(partial(build, beta=beta))


def test_makes_no_tensor_over_labels():
    literal.assert_no_tensor_over_labels(build)


def test_an_empty_queue_changes_nothing():
    outputs, labels = batch(0)
    loss = build().double()
    empty = (outputs[:0], labels[:0])
    torch.testing.assert_close(loss(outputs, labels, memory=empty)["msc"], loss(outputs, labels)["msc"])


@pytest.mark.parametrize(
    ("hyper", "words"),
    [({"tau": 0}, "tau"), ({"beta": -0.1}, "beta .* at least 0, not -0.1"), ({"reduction": "x"}, "'x'")],
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)


def test_bad_memory():
    with pytest.raises(BadCodes, match="memory"):
        build()(*batch(0), memory=(torch.zeros(4, 6), torch.zeros(4, 4)))
