"""SupCon for several labels: positives share every label (ALL) or at least one (ANY)."""

from typing import Annotated, Any

from torch import Tensor

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.contrast_sets import (
    POSITIVES,
    ContrastiveLoss,
    all_positives,
    any_positives,
    contrast,
    overlaps,
    reduce_anchors,
    row_means,
    scores_of,
    some,
)
from hashseek.training.losses.hyperparameters import Flag, Number


class SupCon(ContrastiveLoss):
    """Supervised contrastive loss with ANY or ALL positives. For anchor i with contrast set A(i) and positives P(i):

        p_ik   = softmax over k in A(i) of cos(output i, row k) / tau
        loss_i = - mean over k in P(i) of log p_ik

    ANY: P(i) shares at least one label with i. ALL: P(i) has the same labels as i. A(i) is the batch without i, or
    exactly the memory. An anchor without positives contributes 0. HobbitLong's code divides by all
    anchors (`reduction = "batch"`); Huang et al. sum over them, at tau 0.07. O(B A (D + C)), with A rows
    in the contrast set.
    """

    source = (
        "Khosla et al., Supervised Contrastive Learning, NeurIPS 2020; Huang et al., Similarity-Dissimilarity Loss, "
        "arXiv 2410.13439"
    )
    formula = "Khosla Eq. 2; Huang Eqs. 1-3, ANY; code HobbitLong/SupContrast"
    use = "the plain contrast: one shared label is as good as five"

    positives: Annotated[str, POSITIVES] = "any"
    base_temperature: Annotated[
        float | None,
        Number("multiply the loss by tau / base_temperature, as HobbitLong does with 0.07; none does not", above=0),
    ] = None
    empty_match: Annotated[
        bool, Flag('with "all", rows without labels are positives of each other, as in MulSupCon\'s code')
    ] = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.empty_match and self.positives == "any":
            raise BadConfig(
                "empty_match lets rows without labels match each other, which share none: set positives='all' "
                "or empty_match=False"
            )

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "supcon"."""
        c = contrast(batch)
        shared = overlaps(c)
        if self.positives == "any":
            positive = any_positives(shared)
        else:
            positive = all_positives(shared, c, empty_match=self.empty_match)
        log_p = scores_of(c, self.tau).log_softmax(dim=1)
        factor = 1.0 if self.base_temperature is None else self.tau / self.base_temperature
        loss = reduce_anchors(-row_means(positive, log_p), some(positive), self.reduction)
        return {"supcon": factor * loss}


class SupConAll(SupCon):
    """SupCon with ALL positives."""

    formula = "Khosla Eq. 2; Huang Eqs. 1-3, ALL; code HobbitLong/SupContrast"
    use = "positives have exactly the same labels: if label sets vary, use a queue, or there are no positives"
    positives = "all"
