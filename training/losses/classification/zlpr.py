"""ZLPR: every positive logit above 0, every negative one below, by one softmax-like term each."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    REDUCTIONS,
    check_choice,
    check_logits,
    check_sizes,
    log_one_plus_sum_exp,
    reduce,
)


class ZLPR(nn.Module):
    """ZLPR loss (Su et al., "ZLPR: A Novel Loss for Multi-label Classification", 2022; comprehensive study, Eq. 21).

        zlpr = mean or sum over rows of log(1 + sum over its labels of exp(-x))
                                      + log(1 + sum over the others of exp(x))

    It reads `logits` where they are passed, else the outputs, which takes n_bits = n_classes. O(B C).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        reduction: "mean" over rows, or "sum".

    Raises:
        BadConfig: unknown reduction.
    """

    def __init__(self, *, n_classes: int, n_bits: int, reduction: str = "mean") -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
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
        """Term {"zlpr"} of logits (B, C) with labels (B, C); without logits the outputs are the logits.

        Raises:
            BadCodes: no logits where n_bits differs from n_classes, wrong shapes, labels that are not 0/1, or logits
                that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            x, y = check_logits(outputs, labels, logits, n_classes=self.n_classes, n_bits=self.n_bits)
            pull = log_one_plus_sum_exp(-x, y > 0, dim=1)
            push = log_one_plus_sum_exp(x, y == 0, dim=1)
            return {"zlpr": reduce(pull + push, self.reduction)}
