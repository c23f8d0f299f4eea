"""Each part learns at its own rate; rates follow their schedules, and a restored schedule continues them exactly."""

import copy
from pathlib import Path

import pytest
import torch

from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.loop.network import build_network
from hashseek.training.loop.optimizers import build_optimizer, build_scheduler
from hashseek.training.loop.state import State
from support.models import run_config

STEPS = 10


def schedule(epochs: int, **settings):
    config = run_config(Path(), train__epochs=epochs, optimizer=settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, build_scheduler(config, optimizer, steps_per_epoch=STEPS)


def rates(optimizer, scheduler, n_steps: int) -> list[float]:
    found = []
    for _ in range(n_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),  # the rate by epoch
    [
        ({"schedule": "cosine", "warmup_epochs": 2}, {0: 0.0005, 1: 0.5, 2: 1.0, 4: 0.853553, 6: 0.5, 8: 0.146447}),
        ({"schedule": "step", "step_epochs": 3, "step_factor": 0.2}, {0: 1, 2: 1, 3: 0.2, 5: 0.2, 6: 0.04, 9: 0.008}),
        ({"schedule": "restarts", "restart_epochs": 2}, {0: 1, 1: 0.5, 2: 1, 4: 0.5, 6: 1, 8: 0.853553}),
        ({"schedule": "restarts", "restart_epochs": 2, "restart_factor": 1}, {0: 1, 1: 0.5, 2: 1, 3: 0.5, 8: 1}),
        ({"schedule": "constant"}, {0: 1, 9: 1}),
    ],
)
def test_rates_follow_their_schedule_and_a_restored_one_continues_exactly(settings, expected):
    found = rates(*schedule(10, **settings), 10 * STEPS)
    assert {epoch: found[epoch * STEPS] for epoch in expected} == pytest.approx(expected, abs=1e-3)
    optimizer, scheduler = schedule(10, **settings)
    begun = rates(optimizer, scheduler, 37)
    saved = optimizer.state_dict(), scheduler.state_dict()
    optimizer, scheduler = schedule(10, **settings)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    assert begun + rates(optimizer, scheduler, 63) == found


@pytest.mark.parametrize(("epochs", "warmup"), [(2, 1.95), (2, 0.0005), (2, 0.06)])
def test_rates_stay_within_their_limits_with_the_longest_and_the_shortest_warm_up(epochs, warmup):
    config = run_config(Path(), train__epochs=epochs, optimizer={"schedule": "cosine", "warmup_epochs": warmup})
    for steps in (1, 10, 2000):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        found = rates(optimizer, build_scheduler(config, optimizer, steps_per_epoch=steps), epochs * steps)
        assert all(0 <= rate <= 1 for rate in found)


@pytest.mark.parametrize("clip_norm", [None, 1.5])
def test_the_norm_of_the_whole_gradient_is_clipped(clip_norm):
    settings = {"name": "sgd", "lr": 0.1, "proxy_lr": 1.0, "momentum": 0, "weight_decay": 0, "clip_norm": clip_norm}
    config = run_config(Path(), model={"backbone": "mlp:6-8"}, optimizer=settings)
    network, objective, _ = build_network(config, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)
    optimizer = build_optimizer(config, network, objective)
    learned = {"head": network.model.head.weight, "proxies": objective.loss.proxies}
    before = {name: parameter.detach().clone() for name, parameter in learned.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    learned["head"].grad[0, 0], learned["proxies"].grad[1, 2] = 3.0, 4.0
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
    State(network, objective, None, optimizer, scheduler, None, records=[]).update(config)
    share = 1.0 if clip_norm is None else 1.5 / 5
    assert (before["head"] - learned["head"])[0, 0].item() == pytest.approx(0.1 * 3 * share, rel=1e-5)
    assert (before["proxies"] - learned["proxies"])[1, 2].item() == pytest.approx(4 * share, rel=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_averaged_weights_follow_head_and_backbone_by_their_share(frozen):
    model = {"backbone": "mlp:6-8", "freeze_backbone": frozen}
    config = run_config(Path(), model=model, train__ema=0.75)
    network, objective, _ = build_network(config, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)
    average, start = copy.deepcopy(network.model), copy.deepcopy(network.model)
    with torch.no_grad():
        for parameter in network.model.parameters():
            parameter.add_(1)
    optimizer = build_optimizer(config, network, objective)
    scheduler = build_scheduler(config, optimizer, steps_per_epoch=1)
    State(network, objective, None, optimizer, scheduler, average, records=[]).update(config)  # without a gradient
    for part, moved in (("head", 0.25), ("backbone", 0 if frozen else 0.25)):
        expected = [parameter + moved for parameter in getattr(start, part).parameters()]
        torch.testing.assert_close(list(getattr(average, part).parameters()), expected, check_dtype=False)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("own_rates", [True, False])
def test_heads_backbone_and_proxies_have_their_rates_and_all_have_the_other_settings(name, own_rates):
    own = {"backbone_lr": 0.01, "proxy_lr": 1.0} if own_rates else {"backbone_lr": None, "proxy_lr": None}
    momentum = {"momentum": 0.7} if name == "sgd" else {}
    settings = {"name": name, "lr": 0.1, "weight_decay": 0.2, **momentum, **own}
    config = run_config(Path(), model={"backbone": "mlp:6-8"}, optimizer=settings)
    network, objective, _ = build_network(config, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)
    groups = build_optimizer(config, network, objective).param_groups
    found = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    parts = [
        (network.model.head.parameters(), 0.1),
        (network.model.backbone.parameters(), own["backbone_lr"] or 0.1),
        (objective.parameters(), own["proxy_lr"] or 0.1),
    ]
    assert found == {parameter: rate for parameters, rate in parts for parameter in parameters}
    assert {group["weight_decay"] for group in groups} == {0.2}
    assert {group.get("momentum") for group in groups} == {momentum.get("momentum")}
