"""Focal loss: binary cross-entropy that looks away from what is already right."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hashseek.training.losses.common import (
    REDUCTIONS,
    check_at_least,
    check_choice,
    check_flag,
    check_logits,
    check_sizes,
    reduce,
)


class Focal(nn.Module):
    """Focal loss (Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, Eq. 4) without class balance.

    With q = sigmoid(x):

        focal = - y (1 - q)^gamma log sigmoid(x) - (1 - y) q^gamma log sigmoid(-x), mean or sum over all B C cells

    It reads `logits` where they are passed, else the outputs, which takes n_bits = n_classes. O(B C).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        gamma: exponent of the focusing weights; 0 gives the binary cross-entropy.
        detach_weight: no gradient through the weights, as in the published multi-label codes. That changes the
            gradient, not the value.
        reduction: "mean" over all cells, or "sum".

    Raises:
        BadConfig: gamma < 0, or unknown reduction.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        gamma: float = 2.0,
        detach_weight: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("gamma", gamma, 0, "is the exponent of the focusing weights")
        check_flag("detach_weight", detach_weight)
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.gamma = gamma
        self.detach_weight = detach_weight
        self.reduction = reduction

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Term {"focal"} of logits (B, C) with labels (B, C); without logits the outputs are the logits.

        Raises:
            BadCodes: no logits where n_bits differs from n_classes, wrong shapes, labels that are not 0/1, or logits
                that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            x, y = check_logits(outputs, labels, logits, n_classes=self.n_classes, n_bits=self.n_bits)
            values = focal(torch.where(y > 0, x, -x), self.gamma, detach_weight=self.detach_weight)
            return {"focal": reduce(values, self.reduction)}


def focal(scores: Tensor, gamma: float, *, detach_weight: bool = False) -> Tensor:
    """-(1 - p)^gamma log p of p = sigmoid(score), the probability of what is true, cell by cell."""
    # The power by way of the logarithm has a finite gradient for every gamma, also where 1 - p is 0.
    weight = torch.exp(gamma * F.logsigmoid(-scores))
    return -(weight.detach() if detach_weight else weight) * F.logsigmoid(scores)
