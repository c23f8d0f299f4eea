"""HyP2: proxies for labels, plus a push between multi-label samples that share none."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from training.losses._common import (
    check_at_least,
    check_batch,
    check_between,
    check_choice,
    check_number,
    check_sizes,
    normalize,
)
from training.losses.zeta import zeta as best_zeta

PARTS = ("proxy+irrelevant", "proxy", "pair", "proxy+pair")


class HyP2(nn.Module):
    """HyP2 loss (Xu et al., ACM MM 2022, Eqs. 2-4; code JerryXu0129/HyP2-Loss e9c1c24).

    With c_ij = cos(output i, proxy j):

        proxy      = mean over y_ij = 1 of (offset - c_ij)  +  mean over y_ij = 0 of relu(c_ij - zeta)
        irrelevant = beta * mean over ordered pairs (i, k) that both carry more than one label and share none
                     of relu(cos(output i, output k) - zeta)

    Every mean divides by all its cells, inactive ones included; an empty set gives 0. The cosine is signed, as in the
    authors' code and Eq. 6 (Eq. 2 prints an absolute value). O(B C K + B^2 (K + C)).

    `parts` chooses the ablations of Table 5, for which the paper gives neither formula nor code. Their pair term is
    the proxy term with samples in place of proxies, over ordered pairs of different rows with any number of labels:

        pair       = mean over pairs that share a label of (offset - cos)  +  mean over the others of relu(cos - zeta)

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        beta: weight of the irrelevant-pair term, or of the pair term beside the proxy term; 1.0 for Flickr, 0.5 for
            VOC (Table 5), useful in [0.5, 1.25].
        zeta: margin; None takes the exact value for K and C from coding theory (`training.losses.zeta`).
        offset: constant in the positive term; 1 as in the code, 0 as in the paper. The gradient is the same.
        parts: "proxy+irrelevant" (the method), "proxy", "pair", or "proxy+pair". Only with "proxy" in it has the
            module `proxies` (C, K).

    Raises:
        BadConfig: beta < 0, zeta outside [-1, 1], unknown parts, or no exact zeta for K and C.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        beta: float = 0.5,
        zeta: float | None = None,
        offset: float = 1.0,
        parts: str = "proxy+irrelevant",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("beta", beta, 0, "weighs pairs of samples")
        check_number("offset", offset, "is the constant of the positive term")
        check_choice("parts", parts, PARTS)
        if zeta is None:
            zeta = best_zeta(n_bits, n_classes)
        check_between("zeta", zeta, -1, 1, "is compared with cosines")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.beta = beta
        self.zeta = zeta
        self.offset = offset
        self.parts = parts
        self.proxies: nn.Parameter | None = None
        if "proxy" in parts:
            self.proxies = nn.Parameter(torch.empty(n_classes, n_bits))
            nn.init.kaiming_normal_(self.proxies, mode="fan_out")

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,  # noqa: ARG002
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"proxy", "irrelevant"} of outputs (B, K) with labels (B, C), or those that `parts` names.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            z = normalize(outputs)
            terms = {}
            if self.proxies is not None:
                to_proxies = normalize(self.proxies.to(z.dtype))
                terms["proxy"] = pull_and_push(z, to_proxies, labels, 1 - labels, zeta=self.zeta, offset=self.offset)
            if self.parts == "proxy+irrelevant":
                push = pull_and_push(z, None, None, irrelevant_pairs(labels), zeta=self.zeta, offset=self.offset)
                terms["irrelevant"] = self.beta * push
            elif "pair" in self.parts:
                apart = torch.relu_(1 - labels @ labels.T)
                related = (1 - apart).fill_diagonal_(0)
                pair = pull_and_push(z, None, related, apart.fill_diagonal_(0), zeta=self.zeta, offset=self.offset)
                terms["pair"] = pair if self.parts == "pair" else self.beta * pair
            return terms


def irrelevant_pairs(labels: Tensor) -> Tensor:
    """1 where two rows of `labels` (B, C) both carry more than one label and share none, else 0: (B, B)."""
    several = (labels.sum(dim=1) > 1).to(labels.dtype)
    both = several[:, None] + (several - 1)  # 1 where both rows carry several labels, else 0 or -1
    return both.addmm_(labels, labels.T, alpha=-1).relu_()


def pull_and_push(
    rows: Tensor, points: Tensor | None, pull: Tensor | None, push: Tensor, *, zeta: float, offset: float
) -> Tensor:
    """Mean of offset - cos over the cells of `pull`, plus mean of relu(cos - zeta) over the cells of `push`.

    Args:
        rows: unit rows (B, K).
        points: unit rows (P, K) to compare them with, or None for `rows` themselves.
        pull: 1 in the cells (B, P) of the first mean, else 0; None where there is none.
        push: the same for the second mean. Without `points`, both must be symmetric.
        zeta: margin of the second mean.
        offset: constant of the first mean.
    """
    value: Tensor = _PullAndPush.apply(rows, points, pull, push, zeta, offset)
    return value


class _PullAndPush(torch.autograd.Function):
    """The value is piecewise linear in the cosines and its slopes are known (Eq. 6), so that backward is one product.

    Left to autograd, the masks and means would take longer than the matrix products. The masks are floats because
    comparisons and `where` are several times slower than arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, points: Tensor | None, pull: Tensor | None, push: Tensor, zeta: float, offset: float
    ) -> Tensor:
        above = (rows @ (rows if points is None else points).T).sub_(zeta)
        n_push = push.sum().clamp_min_(1)
        value = torch.zeros_like(n_push)
        if pull is not None:
            n_cells = pull.sum()
            n_pull = n_cells.clamp_min(1)
            value = ((offset - zeta) * n_cells - (above * pull).sum()) / n_pull
        hinge = above.relu_().mul_(push)
        value += hinge.sum() / n_push
        slopes = hinge.sign_()  # times n_push, which backward takes out again
        if pull is not None:
            slopes.addcmul_(pull, n_push / n_pull, value=-1)
        ctx.save_for_backward(rows, points, slopes, n_push)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, points, slopes, n_push = ctx.saved_tensors
        grad = grad / n_push
        with torch.autocast(rows.device.type, enabled=False):  # backward may be called where it is on
            if points is None:
                return (slopes @ rows).mul_(2 * grad), None, None, None, None, None
            return (slopes @ points).mul_(grad), (slopes.T @ rows).mul_(grad), None, None, None, None
