"""SPLC: a focal loss that takes a missing label for present once the network is sure of it."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.classification.focal import focal
from hashseek.training.losses.common import (
    REDUCTIONS,
    check_at_least,
    check_between,
    check_choice,
    check_count,
    check_flag,
    check_logits,
    check_number,
    check_sizes,
    reduce,
)


class SPLC(nn.Module):
    """SPLC loss (Zhang et al., "Simple and Robust Loss Design for Multi-Label Learning with Missing Labels", 2021;
    code xinyu1205/robust-loss-mlml dcfa4d5).

    With F(x) = -(1 - sigmoid(x))^gamma log sigmoid(x), each cell is

        F(x - margin)    where the label was observed
        F(x)             where it was not, epoch >= start_epoch and sigmoid(x) > tau: taken for present
        F(-x)            elsewhere

    and the loss is the mean or sum over all B C cells. It reads `logits` where they are passed, else the outputs,
    which takes n_bits = n_classes. O(B C).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        tau: probability above which a label is taken for present; 0.6 (the authors), 0.7 (CLML's copy).
        margin: subtracted from the logits of observed labels.
        gamma: exponent of the focusing weights.
        start_epoch: first epoch, counted from 0, with correction.
        margin_on_corrected: subtract the margin from corrected labels too, as the paper may be read; the code
            does not.
        reduction: "mean" over all cells, or "sum" as in the authors' code.

    Raises:
        BadConfig: tau outside [0, 1], gamma < 0, start_epoch < 0, margin that is not a number, or unknown reduction.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        tau: float = 0.6,
        margin: float = 1.0,
        gamma: float = 2.0,
        start_epoch: int = 1,
        margin_on_corrected: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_between("tau", tau, 0, 1, "is compared with probabilities")
        check_number("margin", margin, "is subtracted from the logits of observed labels")
        check_at_least("gamma", gamma, 0, "is the exponent of the focusing weights")
        check_count("start_epoch", start_epoch, 0, "is the first epoch with correction")
        check_flag("margin_on_corrected", margin_on_corrected)
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.tau = tau
        self.margin = margin
        self.gamma = gamma
        self.start_epoch = start_epoch
        self.margin_on_corrected = margin_on_corrected
        self.reduction = reduction

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,
        epoch: int = 0,
    ) -> dict[str, Tensor]:
        """Term {"splc"} of logits (B, C) with labels (B, C); without logits the outputs are the logits.

        Raises:
            BadCodes: no logits where n_bits differs from n_classes, wrong shapes, labels that are not 0/1, or logits
                that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            x, y = check_logits(outputs, labels, logits, n_classes=self.n_classes, n_bits=self.n_bits)
            observed = y > 0
            present = observed
            if epoch >= self.start_epoch:
                present = observed | (torch.sigmoid(x) > self.tau)
            shifted = present if self.margin_on_corrected else observed
            scores = torch.where(present, torch.where(shifted, x - self.margin, x), -x)
            return {"splc": reduce(focal(scores, self.gamma), self.reduction)}
