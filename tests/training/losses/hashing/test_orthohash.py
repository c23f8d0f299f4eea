import math
from functools import partial

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hashing.orthohash import OrthoHash
from support.literal_losses import assert_same, batch, cos, gradients_of, label_sets, total

OPTIONS = [
    {},
    {"s": 3.0, "m": 0.5},
    {"margin": "arc"},
    {"bce": True},
    {"bce": True, "margin": "arc", "m": 0.4},
    {"m": 0, "centres": "balanced", "seed": 2},
]


def build(n_classes=4, n_bits=6, **hyper):
    return OrthoHash(n_classes=n_classes, n_bits=n_bits, **hyper)


def literal(outputs, labels, centres, *, s=8.0, m=0.2, margin="cosine", bce=False):
    values = []
    for u, own in zip(outputs, label_sets(labels), strict=True):
        if not own:
            continue
        scores = []
        for c, centre in enumerate(centres):
            cosine = cos(u, centre)
            if c in own:
                cosine = cosine - m if margin == "cosine" else torch.cos(torch.acos(cosine) + m)
            scores.append(s * cosine)
        if bce:
            for c, x in enumerate(scores):
                values.append(torch.log1p(torch.exp(-x if c in own else x)))
        else:
            everything = torch.log(sum(torch.exp(x) for x in scores))
            values.append(sum(everything - scores[c] for c in own) / len(own))
    return sum(values) / len(values) if values else 0 * outputs.sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed, width=6)
    loss = build(**options)
    given = {key: value for key, value in options.items() if key not in ("centres", "seed")}
    slow = partial(literal, labels=labels, centres=loss.centres.double(), **given)
    assert_same(loss, slow, outputs, labels)


def test_two_rows_worked_by_hand():
    loss = build(2, 2)
    loss.centres.copy_(torch.tensor([[1, 1], [1, -1]]))
    outputs = torch.tensor([[3.0, 0.0], [2.0, 2.0], [1.0, 7.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 1], [0, 1], [0, 0]])
    # Row 0 has equal scores; row 1 has cosines 1 and 0, the second with the margin; row 2 has no label.
    second = math.log(math.exp(8) + math.exp(-1.6)) + 1.6
    assert loss(outputs, labels)["centre"].item() == pytest.approx((math.log(2) + second) / 2)


def test_arc_margin_at_the_poles_and_at_a_zero_row():
    loss = build(2, 2, margin="arc", s=1.0).double()
    loss.centres.copy_(torch.tensor([[1, 1], [1, -1]]))
    labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    for row, angle in (([2.0, 2.0], 0.0), ([-3.0, -3.0], math.pi), ([0.0, 0.0], math.pi / 2)):
        value, (gradient,) = gradients_of(loss, torch.tensor([row], dtype=torch.float64), labels)
        score = math.cos(angle + 0.2)
        assert value.item() == pytest.approx(math.log1p(math.exp(-score)), abs=1e-12)
        assert gradient.isfinite().all()


def test_arc_margin_near_a_pole_keeps_float32_exact():
    loss = build(2, 4, margin="arc")
    labels = torch.tensor([[1.0, 0.0]])
    for distance in (1e-1, 1e-2, 1e-3):
        rough = loss.centres[:1] + distance * torch.tensor([[1.0, 2.0, -1.0, 0.5]])
        exact = gradients_of(loss, rough.double(), labels)
        found = gradients_of(loss, rough, labels)
        torch.testing.assert_close(found[0].double(), exact[0], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(found[1][0].double(), exact[1][0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("bce", [False, True])
def test_unlabelled_rows_are_left_out(bce):
    outputs, labels = batch(0, n=6, width=6)
    labels[[1, 4]] = 0
    labels[[0, 2, 3, 5], 0] = 1
    loss = build(bce=bce)
    kept = [0, 2, 3, 5]
    torch.testing.assert_close(total(loss(outputs, labels)), total(loss(outputs[kept], labels[kept])))
    value, (gradient,) = gradients_of(loss, outputs, torch.zeros(6, 4))
    assert value == 0
    assert not gradient.any()


def test_one_label_is_always_right():
    value, (gradient,) = gradients_of(build(1), torch.randn(3, 6), torch.ones(3, 1))
    assert value == 0
    assert not gradient.any()


def test_centres_travel_with_the_checkpoint():
    loss, other = build(seed=1), build(seed=2)
    assert set(loss.centres.unique().tolist()) == {-1, 1}
    assert not torch.equal(loss.centres, other.centres)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(loss.centres, other.centres)
    assert not list(loss.parameters())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options):
    outputs, labels = batch(1, width=6)
    loss = build(**options)
    assert torch.autograd.gradcheck(lambda u: total(loss(u, labels)), (outputs.requires_grad_(),))


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"s": 0}, "s scales the cosines and must be greater than 0, not 0: 8 is usual"),
        ({"m": -0.1}, "m .* between 0 and 2, not -0.1"),
        ({"margin": "angle"}, "margin is 'angle': choose one of cosine, arc"),
        ({"bce": "no"}, "bce .* true or false, not 'no'"),
        ({"centres": "hadamard"}, "power of 2, not 6"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)
