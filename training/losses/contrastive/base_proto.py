"""The two halves of the comprehensive study's baseline: pairs weighted by Jaccard overlap, and label prototypes."""

from typing import Any

import torch
from torch import Tensor

from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.contrast_sets import (
    ContrastiveLoss,
    contrast,
    new_prototypes,
    overlaps,
    reduce_anchors,
    scores_of,
    weighted_sum,
)
from hashseek.training.losses.numerics import inner_products, jaccard, normalize

STUDY = "Audibert et al., Multi-Label Contrastive Learning: A Comprehensive Study, arXiv 2412.00101"


class LBase(ContrastiveLoss):
    """Contrast weighted by label overlap. With J_ik the Jaccard overlap of the labels of i and k (0 where neither has
    any):

        loss_i = - sum over k in A(i) of J_ik log p_ik / sum over k in A(i) of J_ik        p as in SupCon

    Eq. 1 divides a product by tau that contains it already; here tau is applied once. The code reduces by "valid", the
    paper by "batch". An anchor without overlap contributes 0. A(i) is the batch without i, or exactly the memory.
    O(B A (D + C)).
    """

    source = STUDY
    formula = "Eq. 1"
    use = "pull in proportion to the overlap of labels, with nothing to learn or balance"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "base"."""
        c = contrast(batch)
        weights = jaccard(overlaps(c), c.y.sum(dim=1, keepdim=True), c.ref_y.sum(dim=1))
        total = weights.sum(dim=1)
        valid = total > 0
        log_p = scores_of(c, self.tau).log_softmax(dim=1)
        per_anchor = -weighted_sum(weights, log_p) / torch.where(valid, total, 1.0)
        return {"base": reduce_anchors(per_anchor, valid, self.reduction)}


class LProto(ContrastiveLoss):
    """Every output is drawn to the prototypes of its labels. With q_ij the softmax over all labels j of
    cos(output i, prototype j) / tau, other positives included:

        loss_i = - mean over the labels j of i of log q_ij

    A row without labels contributes 0 (NaN in the code). Prototypes (C, D) are the parameter `prototypes`. O(B C D).
    """

    source = STUDY
    formula = "Eq. 2"
    use = "prototypes only: for small batches"
    needs = ("prototypes (learned)",)
    memory_kind = "none"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.prototypes = new_prototypes(self.n_classes, self.n_bits)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "proto"."""
        outputs, y = batch.outputs, batch.labels
        scores = inner_products(normalize(outputs) / self.tau, normalize(self.prototypes.to(outputs.dtype)))
        n_labels = y.sum(dim=1)
        per_anchor = -weighted_sum(y, scores.log_softmax(dim=1)) / n_labels.clamp_min(1)
        return {"proto": reduce_anchors(per_anchor, n_labels > 0, self.reduction)}
