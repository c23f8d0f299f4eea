"""HyP2: proxies for labels, plus a push between multi-label samples that share none."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retrieval.errors import BadConfig
from training.losses._common import (
    check_at_least,
    check_batch,
    check_between,
    check_choice,
    check_number,
    check_sizes,
    gradient_of_rows,
    share_label,
    unit_rows,
)
from training.losses.zeta import zeta as best_zeta

TERMS = {
    "proxy+irrelevant": ("proxy", "irrelevant"),
    "proxy": ("proxy",),
    "pair": ("pair",),
    "proxy+pair": ("proxy", "pair"),
}
PARTS = tuple(TERMS)


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
            VOC (Table 5), useful in [0.5, 1.25]. With one term alone it stays as it is, or None.
        zeta: margin; None takes the exact value for K and C from coding theory (`training.losses.zeta`).
        offset: constant in the positive term; 1 as in the code, 0 as in the paper. The gradient is the same.
        parts: "proxy+irrelevant" (the method), "proxy", "pair", or "proxy+pair". Only with "proxy" in it has the
            module `proxies` (C, K).

    Raises:
        BadConfig: beta < 0 or for one term alone, zeta outside [-1, 1], unknown parts, or no exact zeta for K and C.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        beta: float | None = 0.5,
        zeta: float | None = None,
        offset: float = 1.0,
        parts: str = "proxy+irrelevant",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_number("offset", offset, "is the constant of the positive term")
        check_choice("parts", parts, PARTS)
        if len(TERMS[parts]) == 2:
            check_at_least("beta", beta, 0, "weighs pairs of samples")
        elif beta not in (None, 0.5):
            raise BadConfig(
                f"beta weighs pairs beside proxies, but parts {parts!r} is one term: leave beta={beta!r} out"
            )
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
            proxies = None if self.proxies is None else self.proxies.to(outputs.dtype)
            weight = self.beta if len(TERMS[self.parts]) == 2 else 1.0
            values = _Terms.apply(outputs, proxies, labels, self.parts, weight, self.zeta, self.offset)
            return dict(zip(TERMS[self.parts], values, strict=True))


class _Terms(torch.autograd.Function):
    """The terms that `parts` names, as functions of outputs (B, K) and proxies (C, K).

    They are piecewise linear in the cosines with known slopes (Eq. 6), so that their gradients are matrix products.
    At this size an operation takes as long to start as to run, so there are few of them: in place, and on floats, for
    comparisons are slow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        proxies: Tensor | None,
        labels: Tensor,
        parts: str,
        weight: float,
        zeta: float,
        offset: float,
    ) -> tuple[Tensor, ...]:
        unit, norms = unit_rows(outputs if proxies is None else torch.cat([outputs, proxies]))
        z, p = unit[: len(outputs)], unit[len(outputs) :]
        values, slopes = [], []
        if proxies is not None:
            value, *to_proxies = pull_and_push(z, p, labels, -labels, zeta=zeta, offset=offset)
            values.append(value)
            slopes += to_proxies
        if parts != "proxy":
            pull, push = (None, irrelevant(labels)) if parts == "proxy+irrelevant" else related(labels)
            value, *to_rows = pull_and_push(z, z, pull, push, zeta=zeta, offset=offset)
            values.append(value * weight)
            slopes += to_rows
        ctx.has_proxies = proxies is not None
        ctx.weight = weight
        ctx.save_for_backward(unit, norms, *slopes)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        unit, norms, *slopes = ctx.saved_tensors
        n_rows = len(slopes[0])
        z, p = unit[:n_rows], unit[n_rows:]
        grad = torch.zeros_like(unit)
        at_rows, at_proxies = grad[:n_rows], grad[n_rows:]
        with torch.autocast(unit.device.type, enabled=False):  # backward may be called where it is on
            if ctx.has_proxies:
                to_proxies, scale = slopes[0], upstream[0] / slopes[1]
                torch.mm(to_proxies, p, out=at_rows)
                torch.mm(to_proxies.T, z, out=at_proxies)
                grad *= scale
            if len(upstream) > ctx.has_proxies:  # pairs: symmetric, and every row stands on both sides
                at_rows.addcmul_(slopes[-2] @ z, upstream[-1] / slopes[-1], value=2 * ctx.weight)
            grad = gradient_of_rows(grad, unit, norms)
        return grad[:n_rows], grad[n_rows:] if ctx.has_proxies else None, None, None, None, None, None


def irrelevant(labels: Tensor) -> Tensor:
    """0 where two rows of `labels` (B, C) share none and both carry more than one, -1 or less elsewhere (B, B)."""
    missing = labels.sum(dim=1).sub_(2).clamp_(max=0)
    return (missing[:, None] + missing).addmm_(labels, labels.T, alpha=-1)


def related(labels: Tensor) -> tuple[Tensor, Tensor]:
    """1 where two different rows of `labels` (B, C) share one, else 0; and 0 where two share none, else -1 (B, B)."""
    share = share_label(labels, labels)
    return share.fill_diagonal_(0), share.neg().fill_diagonal_(-1)


def pull_and_push(
    rows: Tensor, points: Tensor, pull: Tensor | None, push: Tensor, *, zeta: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of offset - cos over some cells plus mean of relu(cos - zeta) over others, and its slopes in the cosines.

    Args:
        rows: unit rows (B, K).
        points: unit rows (P, K).
        pull: 1 in the cells (B, P) of the first mean, else 0; None where there is none.
        push: 0 in the cells (B, P) of the second mean, -1 in those of the first, -1 or less elsewhere. It is used up.
        zeta: margin of the second mean.
        offset: constant of the first mean.

    Returns:
        The value; its slopes (B, P) times a number; that number.
    """
    n_push = push.clamp(min=-1).sum().add_(push.numel()).clamp_min_(1)
    above = push.addmm_(rows, points.T, beta=3).sub_(zeta)  # 3 below a cosine is out of reach
    if pull is None:
        hinge = above.relu_()
        return hinge.sum() / n_push, hinge.sign_(), n_push
    n_cells = pull.sum()
    n_pull = n_cells.clamp_min(1)
    pulled = (n_cells * (offset - zeta - 3) - torch.dot(pull.flatten(), above.flatten())) / n_pull
    hinge = above.relu_()
    return pulled + hinge.sum() / n_push, hinge.sign_().addcmul_(pull, n_push / n_pull, value=-1), n_push
