"""Similarity-Dissimilarity: ANY positives, with a factor for how alike their labels are."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import check_choice, check_sizes
from hashseek.training.losses.contrastive.contrast_sets import (
    REDUCTIONS,
    Contrast,
    any_positives,
    check_tau,
    contrast,
    log_softmax,
    overlaps,
    reduce_anchors,
    row_means,
    scores_of,
    some,
    weighted_sum,
)


class SimDis(nn.Module):
    """Similarity-Dissimilarity loss (Huang et al., arXiv 2410.13439, Eqs. 13-16; no code could be had).

    With P(i) the rows of A(i) that share a label with i, p as in SupCon, and for a positive k

        K_ik = share of the labels of i that k has / (1 + number of labels of k that i lacks)      in (0, 1]

        inside        loss_i = - mean over k in P(i) of (log K_ik + log p_ik)         Eq. 13 to the letter
        outside       loss_i = - mean over k in P(i) of K_ik log p_ik
        outside_norm  loss_i = - sum over k in P(i) of K_ik log p_ik / sum of K_ik

    K is constant, so the gradient of "inside" IS that of SupCon with ANY positives: only the value moves. Use
    "outside" where the factor shall have an effect, and report which one was used. A(i) is the batch without i, or
    exactly the memory. O(B A (D + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        mode: "inside", "outside" or "outside_norm".
        tau: temperature.
        reduction: "valid" divides by the anchors that have a positive, "batch" by B, "sum" by 1 (Eq. 4).

    Raises:
        BadConfig: tau <= 0, unknown mode or reduction.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        mode: str = "inside",
        tau: float = 0.07,
        reduction: str = "valid",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_choice("mode", mode, ("inside", "outside", "outside_norm"))
        check_tau(tau)
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.mode = mode
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
        """Term {"simdis"} of outputs (B, D) with labels (B, C), against `memory` (ref (Q, D), ref_y (Q, C)).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            c = contrast(outputs, labels, memory, n_classes=self.n_classes, n_bits=self.n_bits)
            shared = overlaps(c)
            positive = any_positives(shared)
            factor = label_factor(shared, c)
            log_p = log_softmax(scores_of(c, self.tau))
            if self.mode == "inside":
                # K is 0 outside the positives only; 1 in its place makes the logarithm 0 there.
                n_positives = positive.sum(dim=1).clamp_min(1)
                log_factor = (1 - positive).add_(factor).log_().sum(dim=1) / n_positives
                per_anchor = -row_means(positive, log_p) - log_factor
            else:
                total = (factor if self.mode == "outside_norm" else positive).sum(dim=1)
                per_anchor = -weighted_sum(factor, log_p) / torch.where(total > 0, total, 1.0)
            return {"simdis": reduce_anchors(per_anchor, some(positive), self.reduction)}


def label_factor(shared: Tensor, c: Contrast) -> Tensor:
    """K (B, A): share of the anchor's labels that the other has, over 1 + labels that only the other has.

    0 where they share none. Asymmetric: the anchor is the row.
    """
    share = shared / c.y.sum(dim=1)[:, None].clamp_min(1)
    return share.div_(1 + c.ref_y.sum(dim=1) - shared)
