"""IDHN: pairs that share all or no labels are separated, the others match the cosine of their labels."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.quantization import l1
from hashseek.training.losses.hyperparameters import Number
from hashseek.training.losses.numerics import inner_products, logistic, mean


class IDHN(Loss):
    """Soft pairwise similarity. With h = u / (1 + |u|), theta the inner product of two h, and s the cosine of two rows
    of labels (0 where a row has none):

        pairs        = mean over ordered pairs, those of a row with itself included, of
                       softplus(5 theta / K) - s 5 theta / K          where s > 0.99 or s < 0.01
                       gamma K ((theta + K) / (2 K) - s)^2            elsewhere
        quantization = alpha * mean over entries of ||h| - 1|

    DeepHash-pytorch halves the inner product, which then misses its target; the authors' code is NaN for a row without
    labels. With a memory, whose rows are outputs before softsign, the pairs are all of batch x memory. O(B^2
    (K + C)), with a memory O(B Q (K + C)).
    """

    source = "Zhang et al., Improved Deep Hashing with Soft Pairwise Similarity, IEEE TMM 2020"
    formula = "authors' code (pectinid16 5f3953d)"
    use = "where the number of shared labels counts, not only whether there is one"
    memory_kind = "raw"

    gamma: Annotated[float, Number("weight of the pairs that share some labels but not all", least=0)] = 0.1
    alpha: Annotated[float, Number("weight of the quantisation", least=0)] = 0.1

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "pairs" and "quantization"."""
        h = F.softsign(batch.outputs)
        ref, ref_y = (h, batch.labels) if batch.memory is None else (F.softsign(batch.memory.ref), batch.memory.ref_y)
        theta = inner_products(h, ref)
        s = label_cosines(batch.labels, ref_y)
        separated = logistic(5 / self.n_bits * theta, s)
        matched = self.gamma * self.n_bits * ((theta + self.n_bits) / (2 * self.n_bits) - s).square()
        pairs = torch.where((s > 0.99) | (s < 0.01), separated, matched)
        return {"pairs": mean(pairs), "quantization": self.alpha * l1(h)}


def label_cosines(labels: Tensor, others: Tensor) -> Tensor:
    """Cosines (B, Q) of labels (B, C) with others (Q, C); 0 where a row has no label."""
    sizes = labels.sum(dim=1)[:, None] * others.sum(dim=1)
    return labels @ others.T / sizes.clamp_min(1).sqrt()  # one root of the product: equal rows give exactly 1
