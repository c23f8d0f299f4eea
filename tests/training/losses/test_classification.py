"""BCE, focal, ASL, ZLPR, Hill and SPLC."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses import CLASSIFICATION, build_loss
from support.literal_losses import assert_same, batch, gradients_of, total


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def weight(value, detach):
    return value.detach() if detach else value


def bce(x, y):
    return -torch.log(sigmoid(x)) if y else -torch.log(1 - sigmoid(x))


def focal(x, y, gamma=2.0, detach_weight=False):
    q = sigmoid(x)
    if y:
        return -weight((1 - q) ** gamma, detach_weight) * torch.log(q)
    return -weight(q**gamma, detach_weight) * torch.log(1 - q)


def asl(x, y, gamma_pos=1.0, gamma_neg=4.0, m=0.05, detach_weight=False):
    q = sigmoid(x)
    if y:
        return -weight((1 - q) ** gamma_pos, detach_weight) * torch.log(q)
    if q <= m:
        return 0 * q
    return -weight((q - m) ** gamma_neg, detach_weight) * torch.log(1 - (q - m))


def hill(x, y, lam=1.5, margin=1.0, gamma=2.0):
    if y:
        q = sigmoid(x - margin)
        return -((1 - q) ** gamma) * torch.log(q)
    q = sigmoid(x)
    return (lam - q) * q**2


def splc(x, y, epoch=0, tau=0.6, margin=1.0, gamma=2.0, start_epoch=1, margin_on_corrected=False):
    if y:
        return focal(x - margin, True, gamma)
    if epoch >= start_epoch and sigmoid(x) > tau:
        return focal(x - margin if margin_on_corrected else x, True, gamma)
    return focal(x, False, gamma)


def zlpr(row, own):
    near = sum(torch.exp(-x) for x, y in zip(row, own, strict=True) if y)
    far = sum(torch.exp(x) for x, y in zip(row, own, strict=True) if not y)
    return math.log(1) + torch.log(1 + near + 0 * row.sum()) + torch.log(1 + far + 0 * row.sum())


CELLS = {"bce": bce, "focal": focal, "asl": asl, "hill": hill, "splc": splc}
CASES = [
    ("bce", {}),
    ("focal", {}),
    ("focal", {"gamma": 0.5}),
    ("focal", {"gamma": 0, "detach_weight": True}),
    ("focal", {"detach_weight": True}),
    ("asl", {}),
    ("asl", {"gamma_pos": 0, "gamma_neg": 1, "m": 0}),
    ("asl", {"gamma_pos": 0.5, "gamma_neg": 0.5, "m": 0.4}),
    ("asl", {"gamma_neg": 0, "m": 0.3, "detach_weight": True}),
    ("asl", {"m": 1}),
    ("hill", {}),
    ("hill", {"lam": 1.2, "margin": 0.5, "gamma": 1}),
    ("splc", {}),
    ("splc", {"tau": 0.7, "margin": 0.3, "gamma": 0.5, "start_epoch": 0}),
    ("splc", {"margin_on_corrected": True, "start_epoch": 0}),
    ("zlpr", {}),
]


def build(name, n_classes=4, n_bits=4, **hyper):
    return build_loss(name, n_classes=n_classes, n_bits=n_bits, **hyper)


def literal(name, x, labels, reduction="mean", **options):
    if name == "zlpr":
        values = [zlpr(row, own) for row, own in zip(x, labels.tolist(), strict=True)]
    else:
        cell = partial(CELLS[name], **options)
        values = [cell(x[i, c], bool(labels[i, c])) for i in range(len(x)) for c in range(x.shape[1])]
    return sum(values) / (len(values) if reduction == "mean" else 1)


class AtEpoch(nn.Module):
    def __init__(self, loss, epoch):
        super().__init__()
        self.loss, self.epoch = loss, epoch

    def forward(self, outputs, labels, **context):
        return self.loss(outputs, labels, **context | {"epoch": self.epoch})


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_loops_in_value_and_gradient(name, options, reduction, seed):
    x, labels = batch(seed, n=6, width=4)
    loss = build(name, reduction=reduction, **options)
    for epoch in (0, 1, 7) if name == "splc" else (0,):
        at = {"epoch": epoch} if name == "splc" else {}
        slow = partial(literal, name, labels=labels, reduction=reduction, **options, **at)
        assert_same(AtEpoch(loss, epoch), slow, 2 * x, labels)


X = torch.tensor([[0.0, 1.0, -2.0]], dtype=torch.float64)
Y = torch.tensor([[1, 0, 0]])
S1, S2 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))  # sigmoid(1), sigmoid(-2)


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("bce", [math.log(2), -math.log(1 - S1), -math.log(1 - S2)]),
        ("focal", [math.log(2) / 4, -(S1**2) * math.log(1 - S1), -(S2**2) * math.log(1 - S2)]),
        (
            "asl",
            [math.log(2) / 2, -((S1 - 0.05) ** 4) * math.log(1.05 - S1), -((S2 - 0.05) ** 4) * math.log(1.05 - S2)],
        ),
        ("hill", [-(S1**2) * math.log(1 - S1), (1.5 - S1) * S1**2, (1.5 - S2) * S2**2]),
        ("splc", [-(S1**2) * math.log(1 - S1), -((1 - S1) ** 2) * math.log(S1), -(S2**2) * math.log(1 - S2)]),
        ("zlpr", [3 * (math.log(2) + math.log(1 + math.e + math.exp(-2)))]),
    ],
)
def test_one_row_worked_by_hand(name, cells):
    # sigmoid(0 - 1) = 1 - S1; at epoch 1 SPLC takes the second label, S1 = 0.73 > 0.6, for present.
    assert build(name, 3, 3)(X, Y, epoch=1)[name].item() == pytest.approx(sum(cells) / 3)


@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_of_any_size(name, dtype):
    x = torch.tensor([[800.0, -800.0, 0.0], [-800.0, 800.0, 800.0], [1e4, 88.0, -104.0]], dtype=dtype)
    options = {"focal": [{}, {"gamma": 0.5}], "asl": [{}, {"m": 0, "gamma_neg": 0.5}, {"m": 1e-30}]}
    for labels in (torch.ones(3, 3), torch.zeros(3, 3), torch.eye(3)):
        for hyper in options.get(name, [{}]):
            value, (gradient,) = gradients_of(build(name, 3, 3, **hyper), x, labels, epoch=3)
            assert value.isfinite()
            assert gradient.isfinite().all()


def test_a_wrong_logit_of_800_costs_800():
    x = torch.tensor([[800.0, -800.0]], dtype=torch.float64)
    for name in ("bce", "focal", "zlpr"):
        value = total(build(name, 2, 2, reduction="sum")(x, torch.tensor([[0, 1]])))
        assert value.item() == pytest.approx(1600)
        assert total(build(name, 2, 2)(x, torch.tensor([[1, 0]]))) == 0


def test_special_cases_are_cross_entropy():
    x, labels = batch(0, width=4)
    expected = F.binary_cross_entropy_with_logits(x, labels)
    for name, options in (("bce", {}), ("focal", {"gamma": 0}), ("asl", {"gamma_pos": 0, "gamma_neg": 0, "m": 0})):
        torch.testing.assert_close(total(build(name, **options)(x, labels)), expected)


@pytest.mark.parametrize("name", ["focal", "asl"])
def test_detached_weights_change_the_gradient_and_not_the_value(name):
    x, labels = batch(0, width=4)
    attached = gradients_of(build(name), x, labels)
    detached = gradients_of(build(name, detach_weight=True), x, labels)
    assert torch.equal(attached[0], detached[0])
    assert not torch.allclose(attached[1][0], detached[1][0])


def test_zlpr_is_exact_where_the_study_code_is_not():
    x = torch.zeros(2, 3, dtype=torch.float64)
    value, _ = gradients_of(build("zlpr", 3, 3), x, torch.tensor([[1, 1, 1], [0, 0, 0]]))
    assert value.item() == pytest.approx(math.log(4))


def test_splc_corrects_only_upwards_and_only_from_its_epoch():
    x = torch.tensor([[3.0, -3.0]], dtype=torch.float64)
    loss, nothing, first = build("splc", 2, 2), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    focal_loss = build("focal", 2, 2)
    torch.testing.assert_close(loss(x, nothing)["splc"], focal_loss(x, nothing)["focal"])
    torch.testing.assert_close(loss(x, nothing, epoch=1)["splc"], focal_loss(x, first)["focal"])
    assert torch.equal(loss(x, first)["splc"], loss(x, first, epoch=1)["splc"])


def test_hill_is_flat_where_a_negative_is_certain():
    x = torch.tensor([[30.0]], dtype=torch.float64)
    _, (gradient,) = gradients_of(build("hill", 1, 1), x, torch.zeros(1, 1))
    assert abs(gradient.item()) < 1e-10


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_rows_without_labels_are_ordinary(name):
    x, labels = batch(0, width=4)
    labels[2] = 0
    loss = build(name, reduction="sum")
    parts = [total(loss(x[i : i + 1], labels[i : i + 1])) for i in range(len(x))]
    torch.testing.assert_close(total(loss(x, labels)), sum(parts))
    assert parts[2] > 0


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_logits_take_the_place_of_outputs(name):
    x, labels = batch(0, width=4)
    wide = build(name, n_bits=48)
    value, _ = gradients_of(build(name), x, labels)
    leaf = x.clone().requires_grad_()
    found = wide(torch.full((7, 48), math.nan), labels, logits=leaf)[name]
    torch.testing.assert_close(found.detach(), value)
    assert torch.autograd.grad(found, leaf)[0].any()
    both = build(name)(torch.zeros(7, 4), labels, logits=x)[name]
    torch.testing.assert_close(both, value)
    with pytest.raises(BadCodes, match=r"48 outputs do not match the 4 labels: pass logits of shape \(B, 4\)"):
        wide(torch.zeros(7, 48), labels)
    with pytest.raises(BadCodes, match=r"logits of shape \(B, 4\), not \(7, 5\)"):
        wide(torch.zeros(7, 48), labels, logits=torch.zeros(7, 5))
    with pytest.raises(BadCodes, match="logits hold NaN or infinity in row 0"):
        wide(torch.zeros(7, 48), labels, logits=torch.full((7, 4), math.inf))


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_half_logits_are_raised(name):
    x, labels = batch(0, width=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = build(name, n_bits=9)(torch.zeros(7, 9), labels, logits=x.bfloat16())[name]
    assert inside.dtype == torch.float32
    assert torch.equal(inside, build(name)(x.bfloat16().float(), labels)[name])


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_gradcheck(name, options):
    x, labels = batch(1, n=4, width=4)
    loss = build(name, **options)
    if options.get("detach_weight"):
        return  # the gradient is another one on purpose; the loops above have it
    assert torch.autograd.gradcheck(lambda z: total(loss(z, labels, epoch=2)), (x.requires_grad_(),))


@pytest.mark.parametrize(
    ("name", "hyper", "words"),
    [
        *((name, {"reduction": "batch"}, "reduction is 'batch': choose one of mean, sum") for name in CLASSIFICATION),
        ("focal", {"gamma": -1}, "gamma .* at least 0, not -1"),
        ("focal", {"detach_weight": 1}, "detach_weight .* true or false"),
        ("asl", {"gamma_pos": -1}, "gamma_pos"),
        ("asl", {"gamma_neg": -1}, "gamma_neg"),
        ("asl", {"m": 1.1}, "m is subtracted from probabilities and must lie between 0 and 1, not 1.1"),
        ("hill", {"lam": math.inf}, "lam"),
        ("hill", {"margin": "1"}, "margin"),
        ("hill", {"gamma": -2}, "gamma"),
        ("splc", {"tau": 1.5}, "tau .* between 0 and 1, not 1.5"),
        ("splc", {"start_epoch": -1}, "start_epoch .* whole number of at least 0, not -1"),
        ("splc", {"margin": math.nan}, "margin"),
        ("splc", {"gamma": -1}, "gamma"),
        ("splc", {"margin_on_corrected": None}, "margin_on_corrected"),
    ],
)
def test_bad_hyperparameters(name, hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(name, **hyper)
