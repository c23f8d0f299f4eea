"""Tie-aware ranking with the pair likelihood: our own loss for short codes, where most of a ranking is ties."""

from typing import Annotated

import torch
from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hyperparameters import Number
from hashseek.training.losses.numerics import inner_products, logistic, mean_where, share_label


class TieAware(Loss):
    """Pair likelihood, and the average precision of each row's ranking of the others, with ties taken into account.

    With h = tanh(output), theta the inner product of two h, and S = 1 if two different rows share a label:

        pairs = mean over ordered pairs of different rows of softplus(a theta) - a theta S
        ap    = weight * (1 - mean over rows i with any S_ij = 1 of AP_i)

    The first is the likelihood of DPSH (Li et al., IJCAI 2016) and HashNet (Cao et al., ICCV 2017). With a K = 4.8 a
    pair at distance 0 is similar with probability 0.99 at every code length.

    The second follows He et al.: the distance (K - theta) / 2 of a pair is divided linearly between the two whole
    distances around it, which gives histograms c (all others) and r (those with S = 1) over the distances 0..K+1. With
    C and R their sums over smaller distances,

        AP_i = sum over d of r_d (R_d + (r_d + 1) / 2) / (C_d + (c_d + 1) / 2)  /  sum over d of r_d

    in which half of the other items of a tie are ranked before an item. Codes of exactly -1 and 1 give whole counts.
    Both terms are 0 for a batch of one. O(B^2 (K + C)) time, O(B^2) memory.
    """

    source = "Hashseek's own; He et al., Hashing as Tie-Aware Learning to Rank, CVPR 2018"
    formula = "training/losses/hashing/tie_aware.py; no published code"
    use = "the default: it trains the ranking itself, ties included, which is what mAP measures"

    a: Annotated[float, Number("factor of theta; none: 4.8 / K", above=0, derived=lambda loss: 4.8 / loss.n_bits)]
    weight: Annotated[float, Number("weight of the term ap; 0 leaves only the likelihood", least=0)] = 1.0

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "pairs" and "ap"."""
        h = torch.tanh(batch.outputs)
        theta = inner_products(h, h)
        others = torch.ones_like(theta).fill_diagonal_(0)
        similar = share_label(batch.labels, batch.labels) * others
        has_similar = similar.sum(dim=1).clamp_(max=1)
        ap = tie_aware_ap(theta, similar, others, n_bits=self.n_bits)
        return {
            "pairs": mean_where(logistic(self.a * theta, similar), others),
            "ap": self.weight * mean_where(1 - ap, has_similar),
        }


def tie_aware_ap(theta: Tensor, similar: Tensor, others: Tensor, *, n_bits: int) -> Tensor:
    """AP (B,) of rankings by inner products `theta` (B, N), see `TieAware`; 0 for a row without a similar one.

    Args:
        theta: inner products in [-K, K].
        similar: 1 where a pair is relevant, else 0 (B, N).
        others: 1 where a pair is ranked at all, else 0 (B, N).
        n_bits: K.
    """
    distances = ((n_bits - theta) / 2).clamp(0, n_bits)  # rounding may lead out of the range
    whole = distances.detach().floor()
    beyond = distances - whole
    at = whole.long()

    def histogram(weights: Tensor) -> Tensor:
        empty = theta.new_zeros(len(theta), n_bits + 2)
        return empty.scatter_add(1, at, weights * (1 - beyond)).scatter_add(1, at + 1, weights * beyond)

    found, relevant = histogram(others), histogram(similar)
    # Half of a tie stands in front of each of its items: those within the distance, less the other half.
    places = found.cumsum(dim=1) - (found - 1) / 2
    hits = relevant.cumsum(dim=1) - (relevant - 1) / 2
    return (relevant * hits / places).sum(dim=1) / similar.sum(dim=1).clamp_min(1)
