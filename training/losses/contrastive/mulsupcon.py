"""MulSupCon: one supervised contrastive term for every label of an anchor."""

from typing import Annotated

from torch import Tensor

from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.contrast_sets import (
    ContrastiveLoss,
    contrast,
    label_means,
    reduce_labels,
    reductions,
    scores_of,
    weighted_sum,
)


class MulSupCon(ContrastiveLoss):
    """One term per label. For anchor i and each of its labels j, with P_ij the rows of A(i) that carry j:

        loss_ij = - mean over k in P_ij of log p_ik        p as in SupCon; 0 where P_ij is empty
        loss    = sum over (i, j) of loss_ij / number of (i, j)

    An anchor with more labels weighs more, by design. A(i) is the batch without i, or exactly the memory. "labels"
    counts empty P_ij too, as both codes do; "sample" is `with_weight` in the code, "batch" is used by HBL. The
    sums over labels become one weight per pair, so that nothing is larger than B x A. O(B A (D + C)).
    """

    source = "Zhang and Wu, Multi-Label Supervised Contrastive Learning, AAAI 2024"
    formula = (
        "Eqs. 5-7 of Huang et al., Similarity-Dissimilarity Loss, arXiv 2410.13439; code "
        "williamzhangsjtu/MulSupCon 42b2302"
    )
    use = "every label of an image pulls separately; images with many labels carry more weight"

    reduction: Annotated[str, reductions("labels", "sample", "valid", "batch", "sum")] = "labels"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "mulsupcon"."""
        c = contrast(batch)
        weights = label_means(c)
        log_p = scores_of(c, self.tau).log_softmax(dim=1)
        return {"mulsupcon": reduce_labels(-weighted_sum(weights, log_p), weights, c.y, self.reduction)}
