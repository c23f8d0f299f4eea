"""Similarity-Dissimilarity: ANY positives, with a factor for how alike their labels are."""

from typing import Annotated

import torch
from torch import Tensor

from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.contrast_sets import (
    TAU,
    Contrast,
    ContrastiveLoss,
    any_positives,
    contrast,
    overlaps,
    reduce_anchors,
    row_means,
    scores_of,
    some,
    weighted_sum,
)
from hashseek.training.losses.hyperparameters import Choice


class SimDis(ContrastiveLoss):
    """Weighted positives. With P(i) the rows of A(i) that share a label with i, p as in SupCon, and for a positive k

        K_ik = share of the labels of i that k has / (1 + number of labels of k that i lacks)      in (0, 1]

        inside        loss_i = - mean over k in P(i) of (log K_ik + log p_ik)         Eq. 13, literally
        outside       loss_i = - mean over k in P(i) of K_ik log p_ik
        outside_norm  loss_i = - sum over k in P(i) of K_ik log p_ik / sum of K_ik

    K is constant, so the gradient of "inside" IS that of SupCon with ANY positives: only the value moves. Use
    "outside" where the factor is to have an effect, and report which one was used. No published code is available.
    A(i) is the batch without i, or exactly the memory. O(B A (D + C)).
    """

    source = "Huang et al., Similarity-Dissimilarity Loss, arXiv 2410.13439"
    formula = "Eqs. 13-16"
    use = 'positives with similar labels count more, but only with mode "outside"; "inside" trains like supcon'

    mode: Annotated[str, Choice("position of the factor K", ("inside", "outside", "outside_norm"))] = "inside"
    tau: Annotated[float, TAU] = 0.07

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "simdis"."""
        c = contrast(batch)
        shared = overlaps(c)
        positive = any_positives(shared)
        factor = label_factor(shared, c)
        log_p = scores_of(c, self.tau).log_softmax(dim=1)
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
