"""Tie-aware ranking beside the pair likelihood: our own loss for short codes, where most of a ranking is ties."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_positive,
    check_sizes,
    inner_products,
    logistic,
    share_label,
)


class TieAware(nn.Module):
    """Pair likelihood, and the average precision of each row's ranking of the others with ties taken into account.

    With h = tanh(output), theta the inner product of two h, and S = 1 if two different rows share a label:

        pairs = mean over ordered pairs of different rows of softplus(a theta) - a theta S
        ap    = weight * (1 - mean over rows i with any S_ij = 1 of AP_i)

    The first is the likelihood of Li et al. (DPSH, IJCAI 2016) and Cao et al. (HashNet, ICCV 2017). With a K = 4.8 a
    pair at distance 0 is similar with probability 0.99 at every code length.

    The second follows He et al., "Hashing as Tie-Aware Learning to Rank", CVPR 2018: the distance (K - theta) / 2 of a
    pair is shared out between the two whole distances around it, linearly, which gives histograms c (all others) and r
    (those with S = 1) over the distances 0..K+1. With C and R their sums over smaller distances,

        AP_i = sum over d of r_d (R_d + (r_d + 1) / 2) / (C_d + (c_d + 1) / 2)  /  sum over d of r_d

    where of each tie half of the others stand in front of an item. Codes that are exactly -1 and 1 give whole counts.
    O(B^2 (K + C)) time, O(B^2) memory.

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        a: factor of theta; None takes 4.8 / K.
        weight: of the term `ap`; 0 leaves the likelihood alone.

    Raises:
        BadConfig: a <= 0 or weight < 0.
    """

    def __init__(self, *, n_classes: int, n_bits: int, a: float | None = None, weight: float = 1.0) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        if a is None:
            a = 4.8 / n_bits
        check_positive("a", a, "multiplies the inner products", "4.8 / K")
        check_at_least("weight", weight, 0, "weighs the average precision")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.a = a
        self.weight = weight

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,  # noqa: ARG002
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"pairs", "ap"} of outputs (B, K) with labels (B, C); both 0 for a batch of one.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            h = torch.tanh(outputs)
            theta = inner_products(h, h)
            others = torch.ones_like(theta).fill_diagonal_(0)
            similar = share_label(labels, labels) * others
            pairs = (logistic(self.a * theta, similar) * others).sum() / others.sum().clamp_min(1)
            has_similar = similar.sum(dim=1).clamp_(max=1)
            missing = (1 - tie_aware_ap(theta, similar, others, n_bits=self.n_bits)) * has_similar
            return {"pairs": pairs, "ap": self.weight * missing.sum() / has_similar.sum().clamp_min(1)}


def tie_aware_ap(theta: Tensor, similar: Tensor, others: Tensor, *, n_bits: int) -> Tensor:
    """AP (B,) of rankings by inner products `theta` (B, N), see `TieAware`; 0 for a row without a similar one.

    Args:
        theta: in [-K, K].
        similar: 1 where a pair is relevant, else 0 (B, N).
        others: 1 where a pair is ranked at all, else 0 (B, N).
        n_bits: K.
    """
    distances = ((n_bits - theta) / 2).clamp(0, n_bits)  # rounding may lead out of it
    whole = distances.detach().floor()
    beyond = distances - whole
    at = whole.long()

    def histogram(weights: Tensor) -> Tensor:
        empty = theta.new_zeros(len(theta), n_bits + 2)
        return empty.scatter_add(1, at, weights * (1 - beyond)).scatter_add(1, at + 1, weights * beyond)

    found, relevant = histogram(others), histogram(similar)
    # Half of a tie stands in front of each of its items: what is within the distance, less the other half.
    places = found.cumsum(dim=1) - (found - 1) / 2
    hits = relevant.cumsum(dim=1) - (relevant - 1) / 2
    return (relevant * hits / places).sum(dim=1) / similar.sum(dim=1).clamp_min(1)
