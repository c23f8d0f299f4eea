"""The two halves of the comprehensive study's baseline: pairs weighted by Jaccard overlap, and label prototypes."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import check_batch, check_choice, check_sizes, inner_products, normalize
from hashseek.training.losses.contrastive.contrast_sets import (
    REDUCTIONS,
    check_tau,
    contrast,
    jaccard,
    log_softmax,
    new_prototypes,
    overlaps,
    reduce_anchors,
    scores_of,
    weighted_sum,
)


class LBase(nn.Module):
    """L_Base: contrast weighted by label overlap (Audibert et al., arXiv 2412.00101, Eq. 1).

    With J_ik the Jaccard overlap of the labels of i and k (0 where neither has any):

        loss_i = - sum over k in A(i) of J_ik log p_ik / sum over k in A(i) of J_ik        p as in SupCon

    Eq. 1 divides by tau a product that is already tempered; tau is applied once. An anchor without overlap counts
    0. A(i) is the batch without i, or exactly the memory. O(B A (D + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        tau: temperature.
        reduction: "valid" divides by the anchors with some overlap (the code), "batch" by B (the paper), "sum" by 1.

    Raises:
        BadConfig: tau <= 0 or unknown reduction.
    """

    def __init__(self, *, n_classes: int, n_bits: int, tau: float = 0.1, reduction: str = "valid") -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_tau(tau)
        check_choice("reduction", reduction, REDUCTIONS)
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
        """Term {"base"} of outputs (B, D) with labels (B, C), against `memory` (ref (Q, D), ref_y (Q, C)).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            c = contrast(outputs, labels, memory, n_classes=self.n_classes, n_bits=self.n_bits)
            weights = jaccard(overlaps(c), c)
            total = weights.sum(dim=1)
            valid = total > 0
            log_p = log_softmax(scores_of(c, self.tau))
            per_anchor = -weighted_sum(weights, log_p) / torch.where(valid, total, 1.0)
            return {"base": reduce_anchors(per_anchor, valid, self.reduction)}


class LProto(nn.Module):
    """L_Proto: every output is drawn to the prototypes of its labels (Audibert et al., arXiv 2412.00101, Eq. 2).

    With q_ij the softmax over all labels j of cos(output i, prototype j) / tau, other positives included:

        loss_i = - mean over the labels j of i of log q_ij

    A row without labels counts 0. A memory has no part in it. O(B C D).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        tau: temperature.
        reduction: "valid" divides by the rows with labels, "batch" by B, "sum" by 1.

    Raises:
        BadConfig: tau <= 0 or unknown reduction.
    """

    def __init__(self, *, n_classes: int, n_bits: int, tau: float = 0.1, reduction: str = "valid") -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_tau(tau)
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.tau = tau
        self.reduction = reduction
        self.prototypes = new_prototypes(n_classes, n_bits)

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,  # noqa: ARG002
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Term {"proto"} of outputs (B, D) with labels (B, C).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, y = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            scores = inner_products(normalize(outputs) / self.tau, normalize(self.prototypes.to(outputs.dtype)))
            n_labels = y.sum(dim=1)
            per_anchor = -weighted_sum(y, log_softmax(scores)) / n_labels.clamp_min(1)
            return {"proto": reduce_anchors(per_anchor, n_labels > 0, self.reduction)}
