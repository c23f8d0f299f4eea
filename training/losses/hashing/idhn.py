"""IDHN: pairs that share all or no labels are told apart, the others match the cosine of their labels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_sizes,
    inner_products,
    logistic,
    mean,
    memory_rows,
)
from hashseek.training.losses.hashing.quantization import l1


class IDHN(nn.Module):
    """IDHN loss (Zhang et al., "Improved Deep Hashing with Soft Pairwise Similarity for Multi-label Image Retrieval",
    IEEE Transactions on Multimedia 2020; code pectinid16 5f3953d).

    With h = u / (1 + |u|), theta the inner product of two h, and s the cosine of two rows of labels (0 where a row has
    none):

        pairs        = mean over ordered pairs, those of a row with itself included, of
                       softplus(5 theta / K) - s 5 theta / K          where s > 0.99 or s < 0.01
                       gamma K ((theta + K) / (2 K) - s)^2            elsewhere
        quantization = alpha * mean over entries of ||h| - 1|

    With a memory, whose rows are outputs before softsign, the pairs are all of batch x memory. O(B^2 (K + C)), with a
    memory O(B Q (K + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        gamma: weight of the pairs that share some labels but not all.
        alpha: weight of the quantisation.

    Raises:
        BadConfig: gamma < 0 or alpha < 0.
    """

    def __init__(self, *, n_classes: int, n_bits: int, gamma: float = 0.1, alpha: float = 0.1) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("gamma", gamma, 0, "weighs pairs that share some labels")
        check_at_least("alpha", alpha, 0, "weighs the quantisation")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.gamma = gamma
        self.alpha = alpha

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"pairs", "quantization"} of outputs (B, K) with labels (B, C), against `memory` if given.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            rows = memory_rows(memory, outputs, n_classes=self.n_classes, n_bits=self.n_bits)
            h = F.softsign(outputs)
            ref, ref_y = (h, labels) if rows is None else (F.softsign(rows[0]), rows[1])
            theta = inner_products(h, ref)
            s = label_cosines(labels, ref_y)
            told_apart = logistic(5 / self.n_bits * theta, s)
            matched = self.gamma * self.n_bits * ((theta + self.n_bits) / (2 * self.n_bits) - s).square()
            pairs = torch.where((s > 0.99) | (s < 0.01), told_apart, matched)
            return {"pairs": mean(pairs), "quantization": self.alpha * l1(h)}


def label_cosines(labels: Tensor, others: Tensor) -> Tensor:
    """Cosines (B, Q) of labels (B, C) with others (Q, C); 0 where a row has no label."""
    sizes = labels.sum(dim=1)[:, None] * others.sum(dim=1)
    return labels @ others.T / sizes.clamp_min(1).sqrt()  # one root of the product: equal rows give exactly 1
