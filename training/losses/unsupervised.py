"""Losses that use no labels."""

from typing import Annotated

import torch
from torch import Tensor

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch, raised
from hashseek.training.losses.hyperparameters import Flag, Number
from hashseek.training.losses.numerics import inner_products, mean, mean_where, normalize


class UnsupervisedLoss(Loss):
    """A loss that ignores the labels. The data set need not have any (C = 0)."""

    kind = "unsupervised"


class BiHalf(UnsupervisedLoss):
    """Codes whose cosines are those of the features, every bit 1 for half of the batch.

    b is 1 in the rows of the larger half of the outputs u of its bit, -1 in the others, with the gradient of u:

        similarity = mean over ordered pairs of different rows of (cos(b_i, b_j) - cos(x_i, x_j))^2
        balance    = gamma / 2 * mean of (u - b)^2, b without gradient

    The paper's layer has no second term but adds its gradient to that of the first, which is the same. Its code
    compares B / 2 pairs, here all are. The features get no gradient. O(B^2 (K + D)).
    """

    source = "Li and van Gemert, Deep Unsupervised Image Hashing by Maximizing Bit Entropy, AAAI 2021"
    formula = "Eqs. 8-12; code liyunqianggyn/Deep-Unsupervised-Image-Hashing, read"
    use = "without labels: keeps the similarity of features, with balanced bits"
    needs = ("features",)
    reads_features = True

    gamma: Annotated[float, Number("weight of the balance", least=0)] = 6.0
    centre: Annotated[bool, Flag("subtract the batch's mean from features of length 1 before they are compared")] = True

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "similarity" and "balance"."""
        outputs, features = batch.outputs, batch.features
        if features is None or features.ndim != 2 or len(features) != len(outputs):
            found = "none" if features is None else tuple(features.shape)
            raise BadCodes(f"BiHalf compares with features of shape ({len(outputs)}, D), got {found}")
        x = normalize(raised(features.detach()).to(outputs))
        if self.centre and len(x):
            x = normalize(x - x.mean(dim=0))
        halves = bi_half(outputs.detach())
        codes = normalize(halves + (outputs - outputs.detach()))  # straight through
        away = inner_products(codes, codes) - inner_products(x, x)
        others = torch.ones_like(away).fill_diagonal_(0)
        return {
            "similarity": mean_where(away.square(), others),
            "balance": self.gamma / 2 * mean((outputs - halves).square()),
        }


def bi_half(outputs: Tensor) -> Tensor:
    """Codes (B, K) of -1 and 1 in which every bit is 1 in the B // 2 rows of its largest outputs."""
    ranks = outputs.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return torch.where(ranks < len(outputs) // 2, 1.0, -1.0).to(outputs)
