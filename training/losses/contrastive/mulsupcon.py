"""MulSupCon: one supervised contrastive term for every label of an anchor."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import check_choice, check_sizes
from hashseek.training.losses.contrastive.contrast_sets import (
    REDUCTIONS,
    check_tau,
    contrast,
    label_means,
    log_softmax,
    reduce_labels,
    scores_of,
    weighted_sum,
)


class MulSupCon(nn.Module):
    """MulSupCon (Zhang and Wu, AAAI 2024; Huang et al., arXiv 2410.13439, Eqs. 5-7; code
    williamzhangsjtu/MulSupCon 42b2302).

    For anchor i and each of its labels j, with P_ij the rows of A(i) that carry j:

        loss_ij = - mean over k in P_ij of log p_ik        p as in SupCon; 0 where P_ij is empty
        loss    = sum over (i, j) of loss_ij / number of (i, j)

    An anchor with more labels weighs more, by design. A(i) is the batch without i, or exactly the memory. The label
    sums are folded into one weight per pair, so that nothing is larger than B x A. O(B A (D + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        tau: temperature; 0.1 in the code, HBL searches {0.01, 0.1}.
        reduction: what the sum over (i, j) is divided by. "labels": all (i, j), empty P_ij included; "sample":
            every anchor by its number of labels, then B (`with_weight` in the code); "batch": B (HBL, Eqs. 1
            and 7); "valid": anchors that have a positive; "sum": 1.

    Raises:
        BadConfig: tau <= 0 or unknown reduction.
    """

    def __init__(self, *, n_classes: int, n_bits: int, tau: float = 0.1, reduction: str = "labels") -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_tau(tau)
        check_choice("reduction", reduction, ("labels", "sample", *REDUCTIONS))
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.tau = tau
        self.reduction = reduction

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Term {"mulsupcon"} of outputs (B, D) with labels (B, C), against `memory` (ref (Q, D), ref_y (Q, C)).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            c = contrast(outputs, labels, memory, n_classes=self.n_classes, n_bits=self.n_bits)
            weights = label_means(c)
            log_p = log_softmax(scores_of(c, self.tau))
            return {"mulsupcon": reduce_labels(-weighted_sum(weights, log_p), weights, c.y, self.reduction)}
