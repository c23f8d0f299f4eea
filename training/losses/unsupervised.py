"""Losses that read no labels: two views of an image, or the features of pairs, say what belongs together."""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch, raised
from hashseek.training.losses.hyperparameters import Flag, Number
from hashseek.training.losses.numerics import inner_products, mean, mean_where, normalize


class UnsupervisedLoss(Loss):
    """A loss that does not look at the labels. The data set need not have any (C = 0)."""

    kind = "unsupervised"


class CIBHash(UnsupervisedLoss):
    """Contrast of the codes of two views, and agreement of their probabilities.

    With p = sigmoid(output) the probability of a bit, p' that of the other view, b = sign(output) with the gradient of
    p, and s_ij = cos(b_i, b_j):

        contrast  = mean over rows i of log sum over j != i of exp(s_ij / tau) - s_ii' / tau, i' the other view of i
        agreement = beta * mean over rows of sum over bits of KL(p || p'), p' without gradient

    The first is NT-Xent (Chen et al., SimCLR, ICML 2020) on codes. One view has nothing to compare and counts 0.
    O(B^2 K).
    """

    source = "Qiu et al., Unsupervised Hashing with Contrastive Information Bottleneck, IJCAI 2021"
    formula = "section 3; code qiuzx2/CIBHash, read"
    use = "without labels: learns what augmentation or dropout leaves unchanged"
    needs: ClassVar[tuple[str, ...]] = ("two views",)
    n_views = 2

    tau: Annotated[float, Number("temperature", above=0)] = 0.3
    beta: Annotated[float, Number("weight of the agreement", least=0)] = 0.001

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "contrast" and "agreement"."""
        outputs = batch.outputs
        if batch.views < 2 or not len(outputs):
            return {"contrast": outputs.sum() * 0, "agreement": outputs.sum() * 0}
        if batch.views > 2 or len(outputs) % 2:
            raise BadCodes(f"CIBHash compares two views, not {batch.views} in {len(outputs)} rows: set train.views = 2")
        p = torch.sigmoid(outputs)
        codes = normalize(_signs(outputs, p))
        scores = inner_products(codes, codes) / self.tau
        partners = scores.diagonal(len(outputs) // 2)
        others = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool, device=scores.device), -torch.inf)
        # log p = output + log(1 - p), which leaves this of KL(p || p').
        target = outputs.detach().roll(len(outputs) // 2, dims=0)
        diverged = p * (outputs - target) + F.logsigmoid(-outputs) - F.logsigmoid(-target)
        return {
            "contrast": others.logsumexp(dim=1).mean() - partners.mean(),
            "agreement": self.beta * diverged.sum(dim=1).mean(),
        }


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
    needs: ClassVar[tuple[str, ...]] = ("features",)
    reads_features = True

    gamma: Annotated[float, Number("weight of the balance", least=0)] = 6.0
    centre: Annotated[bool, Flag("subtract the batch's mean from features of length 1 before they are compared")] = True

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "similarity" and "balance"."""
        outputs, features = batch.outputs, batch.features
        if features is None or features.ndim != 2 or len(features) != len(outputs):
            found = "none" if features is None else tuple(features.shape)
            raise BadCodes(f"BiHalf compares with features of shape ({len(outputs)}, D), but was given {found}")
        x = normalize(raised(features.detach()).to(outputs))
        if self.centre and len(x):
            x = normalize(x - x.mean(dim=0))
        halves = bi_half(outputs.detach())
        codes = normalize(_signs(halves, outputs))
        others = torch.ones(len(x), len(x), dtype=x.dtype, device=x.device).fill_diagonal_(0)
        away = inner_products(codes, codes) - inner_products(x, x)
        return {
            "similarity": mean_where(away.square(), others),
            "balance": self.gamma / 2 * mean((outputs - halves).square()),
        }


def bi_half(outputs: Tensor) -> Tensor:
    """Codes (B, K) of -1 and 1 in which every bit is 1 in the B // 2 rows of its largest outputs."""
    ranks = outputs.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return torch.where(ranks < len(outputs) // 2, 1.0, -1.0).to(outputs)


def _signs(values: Tensor, like: Tensor) -> Tensor:
    """-1 and 1 by the sign of `values` (-1 at 0), with the gradient of `like` (straight through)."""
    signs = torch.where(values > 0, 1.0, -1.0).to(like)
    return signs + (like - like.detach())
