"""Everything that changes during training, which is what a resumed run needs."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import Config
from hashseek.training.loop.network import Keys, Network, Objective
from hashseek.training.losses.memory import update_key_encoder


@dataclass
class State:
    """What changes from step to step and from epoch to epoch."""

    network: Network
    objective: Objective
    keys: Keys | None
    optimizer: Optimizer
    scheduler: LRScheduler
    ema: HashModel | None
    records: list[dict[str, Any]]
    best_score: float = -math.inf
    best_epoch: int = 0

    @property
    def evaluated(self) -> HashModel:
        """The model that is validated and saved."""
        return self.network.model if self.ema is None else self.ema

    def update(self, config: Config) -> None:
        """One step of optimizer, learning rate and averaged weights, from the gradients in the parameters."""
        if config.optimizer.clip_norm is not None:
            updated = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(updated, config.optimizer.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        if self.ema is not None and config.train.ema is not None:
            model = self.network.model
            if config.model.freeze_backbone:
                update_key_encoder(self.ema.head, model.head, config.train.ema)
            else:
                update_key_encoder(self.ema, model, config.train.ema)

    def saved(self, config: Config) -> dict[str, Any]:
        """What a resumed run needs. A frozen backbone is left out: the configuration names its weights."""
        frozen = config.model.freeze_backbone
        parts = {
            name: {key: value for key, value in part.state_dict().items() if not (frozen and "backbone." in key)}
            for name, part in self._parts().items()
        }
        return {**parts, "records": self.records, "best_score": self.best_score, "best_epoch": self.best_epoch}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore what `saved` returned."""
        for name, part in self._parts().items():
            part.load_state_dict(part.state_dict() | saved[name])
        self.records = saved["records"]
        self.best_score, self.best_epoch = saved["best_score"], saved["best_epoch"]

    def _parts(self) -> dict[str, Any]:
        """What has a state dict, by name; without keys or an average, if there are none."""
        names = ("network", "objective", "optimizer", "scheduler", "keys", "ema")
        return {name: part for name in names if (part := getattr(self, name)) is not None}
