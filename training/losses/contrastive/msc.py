"""MSC: rows, a queue and prototypes in one softmax, positives balanced within every label."""

import math

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_choice,
    check_sizes,
    inner_products,
    memory_rows,
    normalize,
)
from hashseek.training.losses.contrastive.contrast_sets import (
    REDUCTIONS,
    check_tau,
    lowest_on_diagonal,
    new_prototypes,
    reduce_anchors,
    weighted_sum,
)


class MSC(nn.Module):
    """MSC loss (Audibert et al., ECML-PKDD 2024; arXiv 2412.00101, Eqs. 4-5; code audibert-alexandre-fra/
    Multi-label-contrastive-comprehensive 0e509a5, which has no queue).

    For a row i with labels S_i, the instances I(i) = the batch without i, then the memory; s_ik = cos(output i,
    instance k) / tau, t_ij = cos(output i, prototype j) / tau, f_ik = 1 / |S_i or S_k|:

        log den_i = log(sum over all prototypes of exp t_ij + beta * sum over I(i) of exp s_ik)
        N_ij      = 1 + sum over instances k that carry j of f_ik
        loss_i    = - mean over the labels j of i of
                      [(t_ij - log den_i) + sum over instances k that carry j of f_ik (s_ik - log den_i)] / N_ij

    Prototypes are no anchors. A row without labels counts 0. Unlike the other contrastive losses it keeps the batch
    beside a memory. O(B (B + Q + C) D + B (B + Q) C).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        tau: temperature.
        beta: weight of the instances in the denominator; 0 leaves only the prototypes there.
        reduction: "valid" divides by the rows with labels, "batch" by B, "sum" by 1.

    Raises:
        BadConfig: tau <= 0, beta < 0 or unknown reduction.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        tau: float = 0.1,
        beta: float = 0.1,
        reduction: str = "valid",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_tau(tau)
        check_at_least("beta", beta, 0, "weighs the instances in the denominator")
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.tau = tau
        self.beta = beta
        self.reduction = reduction
        self.prototypes = new_prototypes(n_classes, n_bits)

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Term {"msc"} of outputs (B, D) with labels (B, C), beside `memory` (ref (Q, D), ref_y (Q, C)).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, y = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            z = normalize(outputs)
            instances, instance_y = z, y
            queue = memory_rows(memory, outputs, n_classes=self.n_classes, n_bits=self.n_bits)
            if queue is not None:
                instances = torch.cat([z, normalize(queue[0])])
                instance_y = torch.cat([y, queue[1]])

            tempered = z / self.tau
            to_instances = lowest_on_diagonal(
                inner_products(tempered, instances)
            )  # the first B instances are the rows themselves
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
