"""Memory, projection, partner and chunks: what training adds to model and loss."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.loop.dropout import row_seeds
from hashseek.training.loop.network import Keys, Network, Objective, build_network
from hashseek.training.loop.step import backward
from hashseek.training.losses import build_loss
from support.models import EVERYTHING, run_config

QUANTIZATION = {"kind": "l2", "weight": 1}


def build(**sections: Any) -> tuple[Network, Objective, Keys | None]:
    """Network, losses and keys for vectors of 6 numbers and 3 labels; features are 8 wide."""
    torch.manual_seed(0)
    settings = run_config(Path(), **{"model": {"backbone": "mlp:6-8", **sections.pop("model", {})}}, **sections)
    return build_network(settings, HashModel(backbone=settings.model.backbone, n_bits=12), n_classes=3)


def step(parts: tuple[Network, Objective, Keys | None], inputs: torch.Tensor, labels: torch.Tensor, **options: Any):
    seeds = row_seeds(np.arange(len(inputs)), seed=0, epoch=0).to(inputs.device)
    return backward(*parts, inputs, labels, seeds=seeds, epoch=0, autocast=nullcontext, **options)


def some_labels(n: int) -> torch.Tensor:
    return (torch.rand(n, 3) < 0.4).float()


@pytest.mark.parametrize(
    ("sections", "width"),
    [
        ({}, 6),
        (EVERYTHING, 6),
        # Frozen features beside a loss that reads them: they lead to nothing that learns.
        (
            {
                "model": {"freeze_backbone": True},
                "loss": {"name": "supcon", "on": "features"},
                "partner": {"name": "asl"},
            },
            8,
        ),
    ],
    ids=["hyp2", "everything", "frozen"],
)
@pytest.mark.parametrize("chunk_size", [1, 5])
def test_chunks_leave_the_gradients_of_the_whole_batch(sections, width, chunk_size):
    gradients = []
    for size in (None, chunk_size):
        parts = build(**sections)
        inputs, labels = torch.randn(16, width), some_labels(16)
        for _ in range(2):  # the second time there is a queue
            for part in parts[:2]:
                part.zero_grad()
            step(parts, inputs, labels, chunk_size=size)
        gradients.append([p.grad.clone() for part in parts[:2] for p in part.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) >= 2
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ],
)
def test_chunks_draw_the_same_dropout_in_both_passes(device):
    parts = build(model={"dropout": 0.5}, loss={"name": "mulsupcon"})
    for part in parts[:2]:
        part.to(device)
    assert parts[0].dropout.p == 0.5
    seen = []
    parts[0].dropout.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    step(parts, torch.randn(8, 6).to(device), torch.ones(8, 3).to(device), chunk_size=4)
    assert all(torch.equal(first, second) for first, second in zip(seen[:2], seen[2:], strict=True))
    assert not torch.equal(seen[0] == 0, seen[1] == 0)


def test_keys_follow_slowly_and_the_queue_holds_the_batches_that_came_before():
    parts = network, _, keys = build(loss={"name": "supcon"}, memory={"size": 20, "momentum": 0.5})
    moved = [network.model.head.weight, network.model.backbone.layers[0].weight]
    starts = [weight.detach().clone() for weight in moved]
    with torch.no_grad():
        for weight in moved:
            weight.add_(1)
    for n_filled in (8, 16, 20):
        step(parts, torch.randn(8, 6), torch.ones(8, 3))
        assert len(keys.queue) == n_filled
    followed = [keys.encoder.model.head.weight, keys.encoder.model.backbone.layers[0].weight]
    torch.testing.assert_close(followed, [start + 0.875 for start in starts])  # half the way, three times
    assert not any(p.requires_grad for p in keys.parameters())


def test_the_second_view_makes_the_keys():
    parts = build(loss={"name": "supcon"}, memory={"size": 8}, model={"dropout": 0.5}, train={"batch_size": 8})
    views, seeds = torch.randn(16, 6), row_seeds(np.arange(16), seed=0, epoch=0)
    step(parts, views, torch.ones(8, 3), views=2)
    expected = nn.functional.normalize(parts[2].encoder(views[8:], seeds[8:])["outputs"], dim=1)
    torch.testing.assert_close(parts[2].queue.keys, expected)


def test_without_a_key_encoder_every_view_is_an_anchor_and_a_key():
    sections = {"loss": {"name": "supcon"}, "train": {"batch_size": 8, "views": 2}}
    parts = build(memory={"size": 16, "momentum": 0}, **sections)
    views, labels = torch.randn(16, 6), some_labels(8)
    expected = nn.functional.normalize(parts[0](views)["outputs"], dim=1)
    step(parts, views, labels, views=2)
    torch.testing.assert_close(parts[2].queue.keys, expected.detach())
    torch.testing.assert_close(parts[2].queue.key_labels.float(), labels.repeat(2, 1))
    with pytest.raises(BadConfig, match="memory.size is 15"):
        build(memory={"size": 15, "momentum": 0}, **sections)


@pytest.mark.parametrize("until_full", [False, True])
def test_a_step_has_the_gradient_of_the_loss_beside_its_memory_and_of_the_weighted_partner(until_full):
    sections = {"loss": {"name": "dpsh"}, "partner": {"name": "bce", "weight": 0.3}}
    parts = network, _, _ = build(memory={"size": 20, "momentum": 0, "until_full": until_full}, **sections)
    (first, first_labels), (second, labels) = ((torch.randn(8, 6), some_labels(8)) for _ in range(2))
    earlier = network(first)["outputs"].detach()
    step(parts, first, first_labels)
    network.zero_grad()
    terms = step(parts, second, labels)
    heads = network(second)
    ref, ref_y = heads["outputs"].detach(), labels
    if not until_full:
        ref, ref_y = torch.cat([ref, earlier]), torch.cat([ref_y, first_labels])  # as they are, for inner products
    expected = build_loss("dpsh", n_classes=3, n_bits=12)(heads["outputs"], labels, memory=(ref, ref_y))
    expected["bce"] = 0.3 * nn.functional.binary_cross_entropy_with_logits(heads["logits"], labels)
    torch.testing.assert_close(terms, {name: value.detach() for name, value in expected.items()})
    learned = list(network.parameters())
    gradients = torch.autograd.grad(torch.stack(list(expected.values())).sum(), learned)
    torch.testing.assert_close([parameter.grad for parameter in learned], list(gradients))


def test_frozen_features_share_the_backbone_with_the_key_encoder():
    network, _, keys = build(model={"freeze_backbone": True}, **EVERYTHING)
    assert keys.encoder.model.backbone is network.model.backbone
    assert keys.encoder.model.head is not network.model.head
    assert [type(layer) for layer in network.projection] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [network.projection[i].out_features for i in (0, 2)] == [24, 16]
    before = [p.clone() for p in network.model.backbone.parameters()]
    for _ in range(50):
        keys.follow(network)
    assert all(torch.equal(a, b) for a, b in zip(before, network.model.backbone.parameters(), strict=True))


def test_clml_reads_raw_features_and_corrects_labels_by_its_partner_logits():
    loss = {"name": "clml", "on": "features", "start_epoch": 0, "delta": 0.5}
    network, objective, _ = build(loss=loss, partner={"name": "bce", "on": "features"})
    inputs, labels = torch.randn(8, 6), torch.zeros(8, 3)
    labels[:, 0] = 1
    with torch.no_grad():
        network.classifier.bias.copy_(torch.tensor([0.0, 50.0, -50.0]))
    heads = network(inputs)
    assert {name: rows.shape for name, rows in heads.items()} == {"features": (8, 8), "logits": (8, 3)}
    terms = objective(heads, labels, memory=None, epoch=0)
    assert set(terms) == {"clml", "bce"}
    corrected = labels.clone()
    corrected[:, 1] = 1
    torch.testing.assert_close(terms["clml"], objective.loss(heads["features"], corrected, epoch=0)["clml"])


def test_heads_are_computed_in_float32_beside_a_backbone_in_bf16():
    network, _, _ = build(loss={"name": "bce"})
    with torch.autocast("cpu", torch.bfloat16):
        heads = network(torch.randn(4, 6))
    assert {name: rows.dtype for name, rows in heads.items()} == dict.fromkeys(("outputs", "logits"), torch.float32)


def test_only_what_a_loss_reads_learns():
    parts = build(loss={"name": "bce"})  # classifies the outputs
    assert (parts[0].classifier.in_features, parts[0].classifier.out_features) == (12, 3)
    step(parts, torch.randn(8, 6), torch.ones(8, 3))
    assert parts[0].model.head.weight.grad.abs().sum() > 0
    network, _, _ = build(loss={"name": "supcon", "on": "features"})
    assert not any(p.requires_grad for p in network.model.head.parameters())
    assert set(network(torch.randn(4, 6))) == {"features"}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"memory": {}}, "hyp2"),
        ({"loss": {"name": "supcon"}, "memory": {"size": 8}}, "memory.size is 8"),
        ({"loss": {"name": "supcon", "on": "projection"}}, r"\[projection\]"),
        ({"projection": {}}, r"\[projection\]"),
        ({"partner": {"name": "supcon"}}, "supcon"),
        ({"loss": {"name": "bce"}, "partner": {"name": "asl"}}, "partner"),
        ({"loss": {"name": "clml"}, "partner": {"name": "asl", "gama": 1}}, "gama"),
        # DPSH has a term of that name itself.
        ({"loss": {"name": "dpsh"}, "partner": {"name": "asl", "quantization": QUANTIZATION}}, "loss.quantization"),
        (
            {
                "model": {"freeze_backbone": True},
                "loss": {"name": "supcon", "on": "projection"},
                "projection": {},
            },
            "freeze_backbone",
        ),
        ({"model": {"backbone": "resnet18"}, "train": {"chunk_size": 4}}, "freeze_batch_norm"),
        ({"train": {"devices": 3}}, "train.devices"),
        ({"train": {"keep_labels": 0.5, "single_label": True}}, "keep_labels"),
        ({"train": {"views": 2}, "model": {"freeze_backbone": True}}, "train.views"),
        ({"memory": {"size": 10**12}}, "memory.size"),
        ({"optimizer": {"momentum": 0.5}}, "momentum"),  # of AdamW
    ],
)
def test_settings_that_do_not_fit_are_refused(sections, named):
    with pytest.raises(BadConfig, match=named):
        build(**sections)


def test_batch_norm_in_the_head_is_refused_beside_chunks():
    settings = run_config(Path(), train={"chunk_size": 4}, model={"head": "linear_bn", "freeze_batch_norm": True})
    model = HashModel(backbone="mlp:6-8", n_bits=12, head="linear_bn")
    with pytest.raises(BadConfig, match="model.head = 'linear'"):
        build_network(settings, model, n_classes=3)
