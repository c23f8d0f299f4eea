import math
from functools import partial

import _literal as literal
import pytest
import torch
import torch.nn.functional as F

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.contrastive.base_proto import LBase, LProto
from hashseek.training.losses.contrastive.supcon import SupCon
from support.literal_losses import batch

OPTIONS = [{}, {"tau": 0.5, "reduction": "batch"}, {"reduction": "sum"}]


def build(kind=LBase, n_classes=4, n_bits=5, **hyper):
    return kind(n_classes=n_classes, n_bits=n_bits, **hyper)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_base_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=12)):
        literal.assert_same(
            build(**options),
            partial(literal.l_base, labels=labels, memory=memory, **options),
            outputs,
            labels,
            memory,
        )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_proto_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    literal.assert_same(
        build(LProto, **options),
        lambda z, p: literal.l_proto(z, labels, p, **options),
        outputs,
        labels,
    )


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


@pytest.mark.parametrize("kind", [LBase, LProto])
def test_gradcheck(kind):
    outputs, labels = batch(1)
    loss = build(kind, tau=0.5).double()
    assert torch.autograd.gradcheck(
        lambda z, *_: literal.total(loss(z, labels)), (outputs.requires_grad_(), *loss.parameters())
    )


@pytest.mark.parametrize("kind", [LBase, LProto])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_order_and_length_do_not_matter(kind, options):
    literal.assert_invariant(partial(build, kind, **options))


@pytest.mark.parametrize("reduction", ["valid", "batch", "sum"])
def test_base_survives_every_edge(reduction):
    literal.assert_survives_edges(partial(build, reduction=reduction), zero=literal.NO_PAIR)


@pytest.mark.parametrize("reduction", ["valid", "batch", "sum"])
def test_proto_survives_every_edge(reduction):
    literal.assert_survives_edges(partial(build, LProto, reduction=reduction), zero=literal.UNLABELLED)


@pytest.mark.parametrize("kind", [LBase, LProto])
def test_float32_and_half(kind):
    literal.assert_low_precision_agrees(partial(build, kind))


@pytest.mark.parametrize("kind", [LBase, LProto])
def test_makes_no_tensor_over_labels(kind):
    literal.assert_no_tensor_over_labels(partial(build, kind))


def test_single_labels_turn_base_into_supcon_and_proto_into_cross_entropy():
    outputs, _ = batch(0, n=8)
    index = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3])
    labels = F.one_hot(index, 4)
    supcon = SupCon(n_classes=4, n_bits=5)(outputs, labels)["supcon"]
    torch.testing.assert_close(build()(outputs, labels)["base"], supcon)
    loss = build(LProto).double()
    scores = F.normalize(outputs) @ F.normalize(loss.prototypes).T / 0.1
    torch.testing.assert_close(loss(outputs, labels)["proto"], F.cross_entropy(scores, index))


def test_base_pulls_harder_where_more_labels_are_shared():
    outputs = F.normalize(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64))
    labels = torch.tensor([[1, 1], [1, 1], [0, 1]])
    _, (gradient,) = literal.gradients_of(build(LBase, 2, 3), outputs[:], labels)
    assert gradient[0, 1] < gradient[0, 2] < 0 or gradient[0, 1] < 0 <= gradient[0, 2]


@pytest.mark.parametrize("kind", [LBase, LProto])
@pytest.mark.parametrize(("hyper", "words"), [({"tau": -1}, "tau"), ({"reduction": "mean"}, "reduction is 'mean'")])
def test_bad_hyperparameters(kind, hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(kind, **hyper)
