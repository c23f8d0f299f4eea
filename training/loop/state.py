"""What changes while a run trains: modules, optimizer, records. Its state is what a resumed run starts from."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import Config
from hashseek.training.loop.network import Keys, Network, Objective


@dataclass
class State:
    """What changes from epoch to epoch."""

    network: Network
    objective: Objective
    keys: Keys | None
    optimizer: torch.optim.Optimizer
    ema: HashModel | None
    records: list[dict[str, Any]]
    best_score: float = -math.inf
    best_epoch: int = -1

    @property
    def evaluated(self) -> HashModel:
        """The model that is validated and saved."""
        return self.network.model if self.ema is None else self.ema

    def modules(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        """Everything with a state, by name."""
        found: dict[str, nn.Module | torch.optim.Optimizer | None] = {
            "network": self.network,
            "objective": self.objective,
            "optimizer": self.optimizer,
            "keys": self.keys,
            "ema": self.ema,
        }
        return {name: module for name, module in found.items() if module is not None}

    def is_patience_over(self, config: Config) -> bool:
        """Whether so many epochs brought nothing better that the run ends."""
        return config.train.patience is not None and len(self.records) > self.best_epoch + config.train.patience

    def saved(self, config: Config, *, epoch: int) -> dict[str, Any]:
        """What a resumed run needs; without a frozen backbone, which is in the weights the configuration names."""
        scalars = {"epoch": epoch, "best_score": self.best_score, "best_epoch": self.best_epoch}
        return {name: _what_changes(module, config) for name, module in self.modules().items()} | scalars

    def load(self, saved: dict[str, Any]) -> None:
        """Take up what `saved` gave."""
        for name, module in self.modules().items():
            module.load_state_dict(module.state_dict() | saved[name])
        self.best_score, self.best_epoch = saved["best_score"], saved["best_epoch"]


def _what_changes(module: nn.Module | torch.optim.Optimizer, config: Config) -> dict[str, Any]:
    state = module.state_dict()
    frozen = config.model.freeze_backbone and isinstance(module, nn.Module)
    return {name: value for name, value in state.items() if not (frozen and "backbone." in name)}
