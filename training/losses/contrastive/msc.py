"""MSC: rows, a queue and prototypes in one softmax, positives balanced within every label."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.base_proto import STUDY
from hashseek.training.losses.contrastive.contrast_sets import (
    ContrastiveLoss,
    lowest_on_diagonal,
    new_prototypes,
    reduce_anchors,
    weighted_sum,
)
from hashseek.training.losses.hyperparameters import Number
from hashseek.training.losses.numerics import inner_products, normalize


class MSC(ContrastiveLoss):
    """Balanced labels. For a row i with labels S_i, the instances I(i) = the batch without i, then the memory;
    s_ik = cos(output i, instance k) / tau, t_ij = cos(output i, prototype j) / tau, f_ik = 1 / |S_i or S_k|:

        log den_i = log(sum over all prototypes of exp t_ij + beta * sum over I(i) of exp s_ik)
        N_ij      = 1 + sum over instances k that carry j of f_ik
        loss_i    = - mean over the labels j of i of
                      [(t_ij - log den_i) + sum over instances k that carry j of f_ik (s_ik - log den_i)] / N_ij

    Prototypes (C, D), the parameter `prototypes`, are not anchors. A row without labels contributes 0. Unlike the other
    contrastive losses it keeps the batch beside a memory. The published code (audibert-alexandre-fra/Multi-label-
    contrastive-comprehensive 0e509a5) has no queue. O(B (B + Q + C) D + B (B + Q) C).
    """

    source = f"Audibert et al., ECML-PKDD 2024; {STUDY}"
    formula = "Eqs. 4-5"
    use = "rare labels: each label of an image has the same weight, however many rows have it"
    needs = ("prototypes (learned)",)

    beta: Annotated[
        float,
        Number(
            "weight of the instances in the denominator; 0.1 as in the code, 0 leaves only the prototypes there",
            least=0,
        ),
    ] = 0.1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.prototypes = new_prototypes(self.n_classes, self.n_bits)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "msc"."""
        z, y = normalize(batch.outputs), batch.labels
        instances, instance_y = z, y
        if batch.memory is not None:
            instances = torch.cat([z, normalize(batch.memory.ref)])
            instance_y = torch.cat([y, batch.memory.ref_y])

        tempered = z / self.tau
        # The first B instances are the rows themselves.
        to_instances = lowest_on_diagonal(inner_products(tempered, instances))
        to_prototypes = inner_products(tempered, normalize(self.prototypes.to(z.dtype)))
        instance_weights, prototype_weights = balanced_weights(y, instance_y)
        log_beta = math.log(self.beta) if self.beta > 0 else -math.inf
        log_den = torch.logsumexp(torch.cat([to_instances + log_beta, to_prototypes], dim=1), dim=1)

        n_labels = y.sum(dim=1)
        attraction = weighted_sum(instance_weights, to_instances) + weighted_sum(prototype_weights, to_prototypes)
        # The weights of one label sum to 1, hence those of a row to its number of labels.
        per_anchor = n_labels.sign() * log_den - attraction / n_labels.clamp_min(1)
        return {"msc": reduce_anchors(per_anchor, n_labels > 0, self.reduction)}


def balanced_weights(y: Tensor, instance_y: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the positives of rows with labels y (B, C): of instances (B, I), whose first B are the rows, and of
    prototypes (B, C).

    Within each label of a row they are in proportion f to 1 and sum to 1.
    """
    shared = y @ instance_y.T
    f = (y.sum(dim=1)[:, None] + instance_y.sum(dim=1) - shared).clamp_min_(1).reciprocal_()
    f.fill_diagonal_(0)
    prototype_weights = y / (1 + f @ instance_y)
    return f.mul_(prototype_weights @ instance_y.T), prototype_weights
