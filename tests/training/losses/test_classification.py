"""BCE, focal, ASL, ZLPR, Hill and SPLC; test_every_loss compares them with their formulas."""

import math

import pytest
import torch

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses import LOSSES, build_loss, loss_class
from support.literal_losses import batch, gradients_of, total

CLASSIFICATION = [name for name in LOSSES if loss_class(name).kind == "classification"]


def build(name, n_classes=4, n_bits=4, **hyper):
    return build_loss(name, n_classes=n_classes, n_bits=n_bits, **hyper)


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
def test_logits_of_any_size(name):
    x = torch.tensor([[800.0, -800.0, 0.0], [-800.0, 800.0, 800.0], [1e4, 88.0, -104.0]])
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


def test_splc_corrects_only_upwards_and_only_from_its_epoch():
    x = torch.tensor([[3.0, -3.0]], dtype=torch.float64)
    loss, nothing, first = build("splc", 2, 2), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    focal_loss = build("focal", 2, 2)
    torch.testing.assert_close(loss(x, nothing)["splc"], focal_loss(x, nothing)["focal"])
    torch.testing.assert_close(loss(x, nothing, epoch=1)["splc"], focal_loss(x, first)["focal"])
    assert torch.equal(loss(x, first)["splc"], loss(x, first, epoch=1)["splc"])


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_logits_take_the_place_of_outputs(name):
    x, labels = batch(0, width=4)
    wide = build(name, n_bits=48)
    value, _ = gradients_of(build(name), x, labels)
    leaf = x.clone().requires_grad_()
    found = wide(torch.full((7, 48), math.nan), labels, logits=leaf)[name]
    torch.testing.assert_close(found.detach(), value)
    assert torch.autograd.grad(found, leaf)[0].any()
    torch.testing.assert_close(build(name)(torch.zeros(7, 4), labels, logits=x)[name], value)
    for logits in (None, torch.zeros(7, 5), torch.full((7, 4), math.inf)):
        with pytest.raises(BadCodes, match="logits"):
            wide(torch.zeros(7, 48), labels, logits=logits)
