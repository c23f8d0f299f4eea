"""ASL: a focal loss that is stricter with negatives and drops the easy ones."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hashseek.training.losses.classification.focal import focal
from hashseek.training.losses.common import (
    REDUCTIONS,
    check_at_least,
    check_between,
    check_choice,
    check_flag,
    check_logits,
    check_sizes,
    reduce,
)


class ASL(nn.Module):
    """Asymmetric loss (Ridnik et al., "Asymmetric Loss For Multi-Label Classification", ICCV 2021; code
    Alibaba-MIIL/ASL 8c9e0bd).

    With q = sigmoid(x) and q_m = max(q - m, 0), for negatives only:

        asl = - y (1 - q)^gamma_pos log q - (1 - y) q_m^gamma_neg log(1 - q_m), mean or sum over all B C cells

    It reads `logits` where they are passed, else the outputs, which takes n_bits = n_classes. O(B C).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        gamma_pos: exponent of the weights of positives.
        gamma_neg: exponent of the weights of negatives.
        m: probability that negatives may have for free.
        detach_weight: no gradient through the weights, as the authors' `AsymmetricLoss`; their
            `AsymmetricLossOptimized` has it. That changes the gradient, not the value.
        reduction: "mean" over all cells, or "sum" as in the authors' code.

    Raises:
        BadConfig: an exponent < 0, m outside [0, 1], or unknown reduction.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        gamma_pos: float = 1.0,
        gamma_neg: float = 4.0,
        m: float = 0.05,
        detach_weight: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("gamma_pos", gamma_pos, 0, "is the exponent of the weights of positives")
        check_at_least("gamma_neg", gamma_neg, 0, "is the exponent of the weights of negatives")
        check_between("m", m, 0, 1, "is subtracted from probabilities")
        check_flag("detach_weight", detach_weight)
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.gamma_pos = gamma_pos
        self.gamma_neg = gamma_neg
        self.m = m
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
        """Term {"asl"} of logits (B, C) with labels (B, C); without logits the outputs are the logits.

        Raises:
            BadCodes: no logits where n_bits differs from n_classes, wrong shapes, labels that are not 0/1, or logits
                that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            x, y = check_logits(outputs, labels, logits, n_classes=self.n_classes, n_bits=self.n_bits)
            pull = focal(x, self.gamma_pos, detach_weight=self.detach_weight)
            push = shifted_negatives(x, self.gamma_neg, self.m, detach_weight=self.detach_weight)
            return {"asl": reduce(torch.where(y > 0, pull, push), self.reduction)}


def shifted_negatives(x: Tensor, gamma: float, m: float, *, detach_weight: bool) -> Tensor:
    """-q_m^gamma log(1 - q_m) with q_m = max(sigmoid(x) - m, 0), cell by cell."""
    q = torch.sigmoid(x)
    active = q > m
    # Inactive cells get some number before the power, not only after: its gradient at 0 may be infinite.
    weight = torch.where(active, q - m, 1.0) ** gamma
    log_rest = F.logsigmoid(-x)  # of 1 - q_m = sigmoid(-x) + m: without m that may be 0, so never the log of it
    if m > 0:
        log_rest = torch.logaddexp(log_rest, torch.full_like(log_rest, math.log(m)))
    return torch.where(active, -(weight.detach() if detach_weight else weight) * log_rest, 0.0)
