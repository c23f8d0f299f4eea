"""Optimizers and learning rates."""

import math

import torch
from torch import nn

from hashseek.training.config import Config, OptimizerSection
from hashseek.training.loop.network import Network, Objective


def build_optimizer(
    config: Config, network: Network, objective: Objective
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer and the base rate of each of its groups: heads, backbone, the loss's own parameters."""
    settings = config.optimizer
    backbone = [] if network.from_features else list(network.model.backbone.parameters())
    inside = {id(parameter) for parameter in network.model.backbone.parameters()}
    heads = [p for p in network.trained().parameters() if id(p) not in inside and p.requires_grad]
    groups = [
        (heads, settings.lr),
        (backbone, settings.backbone_lr or settings.lr),
        (list(objective.parameters()), settings.proxy_lr or settings.lr),
    ]
    groups = [(parameters, rate) for parameters, rate in groups if parameters]
    parameters = [{"params": members, "lr": rate} for members, rate in groups]
    rates = [rate for _, rate in groups]
    if settings.name == "sgd":
        sgd = torch.optim.SGD(parameters, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True)
        return sgd, rates
    return torch.optim.AdamW(parameters, weight_decay=settings.weight_decay, fused=True), rates


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Everything that the optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rate_factor(settings: OptimizerSection, epoch: float, epochs: int) -> float:
    """What the learning rates are multiplied with at a (fractional) epoch.

    "restarts" is the cosine with warm restarts of Loshchilov and Hutter (ICLR 2017): the first lasts restart_epochs,
    each later one restart_factor times as long.
    """
    if epoch < settings.warmup_epochs:
        return (epoch + 1e-3) / settings.warmup_epochs
    epoch, epochs_left = epoch - settings.warmup_epochs, epochs - settings.warmup_epochs
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / epochs_left))
    if settings.schedule == "restarts":
        length = settings.restart_epochs
        while epoch >= length:
            epoch -= length
            length *= settings.restart_factor
        return 0.5 * (1 + math.cos(math.pi * epoch / length))
    if settings.schedule == "step":
        return float(settings.step_factor ** (int(epoch + settings.warmup_epochs) // settings.step_epochs))
    return 1.0


def set_rates(
    optimizer: torch.optim.Optimizer, rates: list[float], settings: OptimizerSection, epoch: float, epochs: int
) -> None:
    """Set the rate of each group to its base rate times `rate_factor`."""
    factor = rate_factor(settings, epoch, epochs)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
