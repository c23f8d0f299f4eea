"""Optimizers and learning-rate schedules from the section [optimizer] of a configuration."""

import torch
from torch.optim import lr_scheduler

from hashseek.training.config import Config
from hashseek.training.loop.network import Network, Objective


def build_optimizer(config: Config, network: Network, objective: Objective) -> torch.optim.Optimizer:
    """An optimizer with a parameter group each for the heads, the backbone and the loss's own parameters."""
    settings = config.optimizer
    backbone = [] if network.from_features else list(network.model.backbone.parameters())
    in_backbone = {id(parameter) for parameter in network.model.backbone.parameters()}
    heads = [p for p in network.trained().parameters() if id(p) not in in_backbone and p.requires_grad]
    groups = [
        {"params": parameters, "lr": rate}
        for parameters, rate in (
            (heads, settings.lr),
            (backbone, settings.backbone_lr or settings.lr),
            (list(objective.parameters()), settings.proxy_lr or settings.lr),
        )
        if parameters
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True)
    return torch.optim.AdamW(groups, weight_decay=settings.weight_decay, fused=True)


def build_scheduler(
    config: Config, optimizer: torch.optim.Optimizer, *, steps_per_epoch: int
) -> lr_scheduler.LRScheduler:
    """The learning-rate schedule; call its `step` after every optimizer step.

    "restarts" is the cosine with warm restarts of Loshchilov and Hutter (ICLR 2017): the first period lasts
    restart_epochs, and each later one restart_factor times as long. Every schedule starts after the linear warm-up.
    """
    settings = config.optimizer
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    schedule: lr_scheduler.LRScheduler
    match settings.schedule:
        case "cosine":
            n_steps = config.train.epochs * steps_per_epoch - warmup
            schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, n_steps))
        case "restarts":
            schedule = lr_scheduler.CosineAnnealingWarmRestarts(
                optimizer, T_0=settings.restart_epochs * steps_per_epoch, T_mult=settings.restart_factor
            )
        case "step":
            schedule = lr_scheduler.StepLR(
                optimizer, settings.step_epochs * steps_per_epoch, gamma=settings.step_factor
            )
        case "constant":
            schedule = lr_scheduler.ConstantLR(optimizer, factor=1)
    if not warmup:
        return schedule
    ramp = lr_scheduler.LinearLR(optimizer, start_factor=min(1.0, 1e-3 / settings.warmup_epochs), total_iters=warmup)
    return lr_scheduler.SequentialLR(optimizer, [ramp, schedule], milestones=[warmup])
