"""Hill: negatives that the network is sure are positive count less, for they may be missing labels."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.classification.focal import focal
from hashseek.training.losses.common import (
    REDUCTIONS,
    check_at_least,
    check_choice,
    check_logits,
    check_number,
    check_sizes,
    reduce,
)


class Hill(nn.Module):
    """Hill loss (Zhang et al., "Simple and Robust Loss Design for Multi-Label Learning with Missing Labels", 2021;
    code xinyu1205/robust-loss-mlml dcfa4d5).

    With q = sigmoid(x) and q1 = sigmoid(x - margin):

        hill = - y (1 - q1)^gamma log q1 + (1 - y) (lam - q) q^2, mean or sum over all B C cells

    It reads `logits` where they are passed, else the outputs, which takes n_bits = n_classes. O(B C).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        lam: where the weight of a negative turns to 0; 1.5 makes the loss steepest at q = 0.5.
        margin: subtracted from the logits of positives.
        gamma: exponent of the weights of positives.
        reduction: "mean" over all cells, or "sum" as in the authors' code.

    Raises:
        BadConfig: gamma < 0, or lam or margin that is not a number, or unknown reduction.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        lam: float = 1.5,
        margin: float = 1.0,
        gamma: float = 2.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_number("lam", lam, "is where the weight of a negative turns to 0")
        check_number("margin", margin, "is subtracted from the logits of positives")
        check_at_least("gamma", gamma, 0, "is the exponent of the weights of positives")
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.lam = lam
        self.margin = margin
        self.gamma = gamma
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
        """Term {"hill"} of logits (B, C) with labels (B, C); without logits the outputs are the logits.

        Raises:
            BadCodes: no logits where n_bits differs from n_classes, wrong shapes, labels that are not 0/1, or logits
                that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            x, y = check_logits(outputs, labels, logits, n_classes=self.n_classes, n_bits=self.n_bits)
            q = torch.sigmoid(x)
            values = torch.where(y > 0, focal(x - self.margin, self.gamma), (self.lam - q) * q.square())
            return {"hill": reduce(values, self.reduction)}
