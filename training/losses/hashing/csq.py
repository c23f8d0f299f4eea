"""CSQ: every row is drawn to one fixed binary centre, the majority of the centres of its labels."""

from typing import Annotated, Any

import torch
from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.centres import CENTRES, SEED, make_centres, random_signs
from hashseek.training.losses.hyperparameters import Number
from hashseek.training.losses.numerics import logistic, mean_where


class CSQ(Loss):
    """Central similarity. Every label has a fixed centre of -1 and 1. The target t of a row is, bit by bit, the sign of
    the sum of the centres of its labels; a tied bit takes the value of one fixed random vector.

        centre       = mean over entries of labelled rows of the binary cross-entropy of sigmoid(2 u), that is
                       (1 + tanh u) / 2, with (t + 1) / 2
        quantization = lam * mean over the same entries of (|tanh u| - 1)^2

    Centres and tie vector are buffers, `centres` (C, K) and `tie` (K,), so a checkpoint keeps them. O(B C K).
    """

    source = "Yuan et al., Central Similarity Quantization, CVPR 2020"
    formula = "DeepHash-pytorch ab14068; centres also authors' code (yuanli2333 55cab00)"
    use = "fixed centres far apart, nothing to learn except the network; few labels per image"
    needs = ("centres (fixed)",)

    lam: Annotated[
        float,
        Number(
            "weight of the quantisation; 1e-4 in DeepHash-pytorch, 0.05 in the authors' code, which also adds a "
            "pairwise term that is left out here",
            least=0,
        ),
    ] = 1e-4
    centre_kind: Annotated[str, CENTRES, "centres"] = "auto"
    seed: Annotated[int, SEED] = 0

    centres: Tensor
    tie: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("centres", make_centres(self.centre_kind, self.n_classes, self.n_bits, seed=self.seed))
        self.register_buffer("tie", random_signs(self.n_bits, seed=self.seed))

    def targets(self, labels: Tensor) -> Tensor:
        """Majority centres (B, K) of -1 and 1 for labels (B, C); the tie vector for a row without labels."""
        votes = labels @ self.centres.to(labels.dtype)  # whole numbers: a tie is exactly 0
        return torch.where(votes == 0, self.tie.to(labels.dtype), votes.sign())

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "centre" and "quantization"."""
        outputs, labels = batch.outputs, batch.labels
        labelled = labels.sum(dim=1, keepdim=True).clamp_(max=1).expand_as(outputs)
        centre = logistic(2 * outputs, (self.targets(labels) + 1) / 2)
        away = (torch.tanh(outputs).abs() - 1).square()
        return {"centre": mean_where(centre, labelled), "quantization": self.lam * mean_where(away, labelled)}
