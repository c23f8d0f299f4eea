"""SupCon for several labels: positives share every label (ALL) or at least one (ANY)."""

import torch
from torch import Tensor, nn

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.common import check_choice, check_flag, check_positive, check_sizes
from hashseek.training.losses.contrastive.contrast_sets import (
    REDUCTIONS,
    all_positives,
    any_positives,
    check_tau,
    contrast,
    log_softmax,
    overlaps,
    reduce_anchors,
    row_means,
    scores_of,
    some,
)


class SupCon(nn.Module):
    """Supervised contrastive loss with ALL or ANY positives (Khosla et al., NeurIPS 2020, Eq. 2; Huang et al.,
    arXiv 2410.13439, Eqs. 1-3; code HobbitLong/SupContrast, williamzhangsjtu/MulSupCon).

    For anchor i with contrast set A(i) and positives P(i):

        p_ik   = softmax over k in A(i) of cos(output i, row k) / tau
        loss_i = - mean over k in P(i) of log p_ik

    ALL: P(i) has the same labels as i. ANY: P(i) shares at least one with i. A(i) is the batch without i, or exactly
    the memory. An anchor without positives counts 0. O(B A (D + C)), A rows in the contrast set.

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        positives: "any" or "all".
        tau: temperature; 0.1 (MulSupCon), 0.07 (Similarity-Dissimilarity).
        reduction: "valid" divides by the anchors that have a positive, "batch" by B, "sum" by 1.
        base_temperature: multiply the loss by tau / base_temperature as HobbitLong does (0.07); None does not.
        empty_match: with "all", let rows without labels be positives of each other, as in MulSupCon's code.

    Raises:
        BadConfig: tau or base_temperature <= 0, unknown positives or reduction, or empty_match with "any".
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        positives: str = "any",
        tau: float = 0.1,
        reduction: str = "valid",
        base_temperature: float | None = None,
        empty_match: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_choice("positives", positives, ("any", "all"))
        check_tau(tau)
        check_choice("reduction", reduction, REDUCTIONS)
        check_flag("empty_match", empty_match)
        if base_temperature is not None:
            check_positive("base_temperature", base_temperature, "divides tau", "0.07")
        if empty_match and positives == "any":
            raise BadConfig(
                "empty_match lets rows without labels match each other, which share none: set positives='all' "
                "or empty_match=False"
            )
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.positives = positives
        self.tau = tau
        self.reduction = reduction
        self.base_temperature = base_temperature
        self.empty_match = empty_match

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Term {"supcon"} of outputs (B, D) with labels (B, C), against `memory` (ref (Q, D), ref_y (Q, C)).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            c = contrast(outputs, labels, memory, n_classes=self.n_classes, n_bits=self.n_bits)
            shared = overlaps(c)
            if self.positives == "any":
                positive = any_positives(shared)
            else:
                positive = all_positives(shared, c, empty_match=self.empty_match)
            log_p = log_softmax(scores_of(c, self.tau))
            factor = 1.0 if self.base_temperature is None else self.tau / self.base_temperature
            loss = reduce_anchors(-row_means(positive, log_p), some(positive), self.reduction)
            return {"supcon": factor * loss}
