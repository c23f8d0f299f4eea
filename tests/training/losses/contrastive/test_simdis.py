import math
from functools import partial

import _literal as literal
import pytest
import torch
import torch.nn.functional as F

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.contrastive.contrast_sets import contrast, overlaps
from hashseek.training.losses.contrastive.simdis import SimDis, label_factor
from hashseek.training.losses.contrastive.supcon import SupCon
from support.literal_losses import batch, gradients_of

MODES = ["inside", "outside", "outside_norm"]
OPTIONS = [{"mode": m} for m in MODES] + [
    {"mode": m, "reduction": r, "tau": 0.3} for m, r in zip(MODES, ("sum", "batch", "sum"), strict=True)
]


def build(n_classes=4, n_bits=5, **hyper):
    return SimDis(n_classes=n_classes, n_bits=n_bits, **hyper)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=12)):
        literal.assert_same(
            build(**options),
            partial(literal.simdis, labels=labels, memory=memory, **options),
            outputs,
            labels,
            memory,
        )


def test_factor_of_the_five_relations_of_figure_1():
    anchor = torch.tensor([[1, 1, 1, 0, 0]])
    others = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    rows = torch.ones(5, 3, dtype=torch.float64)
    c = contrast(rows[:1], anchor, (rows, others), n_classes=5, n_bits=3)
    expected = torch.tensor([[0, 1, 1 / 9, 2 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(label_factor(overlaps(c), c), expected, rtol=0, atol=1e-15)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    a = math.log(1 + math.exp(-1))
    any_value = (a + (a + 0.5) + math.log(2)) / 3
    expected = {"inside": any_value + math.log(2), "outside": any_value / 2, "outside_norm": any_value}
    for mode, value in expected.items():  # every factor is 1/2 here
        got = build(2, 2, tau=1.0, mode=mode)(outputs, labels)["simdis"].item()
        assert got == pytest.approx(value, abs=1e-12), mode


@pytest.mark.parametrize("seed", range(4))
def test_inside_has_exactly_the_gradient_of_any(seed):
    outputs, labels = batch(seed)
    for memory in (None, batch(seed + 10, n=12)):
        value, gradient = gradients_of(build(tau=0.1), outputs, labels, memory=memory)
        plain, slope = gradients_of(SupCon(n_classes=4, n_bits=5, tau=0.1), outputs, labels, memory=memory)
        assert torch.equal(gradient[0], slope[0])
        assert value >= plain


def test_outside_has_another_gradient_than_any():
    outputs, labels = batch(0)
    _, (gradient,) = gradients_of(build(mode="outside_norm"), outputs, labels)
    _, (plain,) = gradients_of(SupCon(n_classes=4, n_bits=5, tau=0.07), outputs, labels)
    assert not torch.allclose(gradient, plain)


@pytest.mark.parametrize("mode", MODES)
def test_single_labels_give_supcon(mode):
    outputs, _ = batch(0, n=8)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0, 3]), 4)
    supcon = SupCon(n_classes=4, n_bits=5, tau=0.07)(outputs, labels)["supcon"]
    torch.testing.assert_close(build(mode=mode)(outputs, labels)["simdis"], supcon)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode):
    outputs, labels = batch(1)
    loss = build(mode=mode, tau=0.5)
    assert torch.autograd.gradcheck(lambda z: loss(z, labels)["simdis"], outputs.requires_grad_())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_order_and_length_do_not_matter(options):
    literal.assert_invariant(partial(build, **options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["valid", "sum"])
def test_survives_every_edge(mode, reduction):
    literal.assert_survives_edges(partial(build, mode=mode, reduction=reduction), zero=literal.NO_PAIR)


@pytest.mark.parametrize("mode", MODES)
def test_float32_and_half(mode):
    literal.assert_low_precision_agrees(partial(build, mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_makes_no_tensor_over_labels(mode):
    literal.assert_no_tensor_over_labels(partial(build, mode=mode))


@pytest.mark.parametrize(
    ("hyper", "words"), [({"tau": 0}, "tau"), ({"mode": "between"}, "mode is 'between'"), ({"reduction": "x"}, "'x'")]
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)
