"""Binary cross-entropy: one yes-or-no question a label."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import REDUCTIONS, check_choice, check_logits, check_sizes, logistic, reduce


class BCE(nn.Module):
    """Binary cross-entropy of the logits x, one label at a time.

        bce = - y log sigmoid(x) - (1 - y) log sigmoid(-x), mean or sum over all B C cells

    It is exact for logits of any size; the code of CLML and ASL clamps the value at 18.4, and the gradient to 0 there.
    It reads `logits` where they are passed, else the outputs, which takes n_bits = n_classes. O(B C).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        reduction: "mean" over all cells, or "sum" as in the codes of CLML, SPLC and ASL.

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
        """Term {"bce"} of logits (B, C) with labels (B, C); without logits the outputs are the logits.

        Raises:
            BadCodes: no logits where n_bits differs from n_classes, wrong shapes, labels that are not 0/1, or logits
                that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            x, y = check_logits(outputs, labels, logits, n_classes=self.n_classes, n_bits=self.n_bits)
            return {"bce": reduce(logistic(x, y), self.reduction)}
