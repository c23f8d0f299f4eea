"""HyP2: proxies for labels, plus a push between multi-label samples that share none."""

from typing import Any, NamedTuple

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


class Sums(NamedTuple):
    """Cells of the mean of relu(cos - zeta), at least 1; those above zeta; and 1 if the mean of -cos has a cell,
    0 if it has none, None if there is no such mean."""

    n_push: Tensor
    n_above: Tensor
    pulled: Tensor | None


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

    They are piecewise linear in the cosines with known slopes (Eq. 6), so that products with these give the gradients
    and the values, and backward has only to weigh what forward found. At this size an operation takes as long to start
    as to run, so there are few of them: in place, and on floats, for those that make booleans are slow.
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
        n_rows = len(outputs)
        unit, norms = unit_rows(outputs if proxies is None else torch.cat([outputs, proxies]))
        z, p = unit[:n_rows], unit[n_rows:]
        values, gradients = [], []
        if proxies is not None:
            slopes, sums = pull_and_push(z, p, labels, -labels, zeta=zeta)
            gradient = torch.empty_like(unit)
            at_rows = torch.mm(slopes, p, out=gradient[:n_rows])
            torch.mm(slopes.T, z, out=gradient[n_rows:])
            values.append(value_of(at_rows, z, sums, zeta=zeta, offset=offset))
            gradients += [gradient, sums.n_push]
        if parts != "proxy":
            pull, push = (None, irrelevant(labels)) if parts == "proxy+irrelevant" else related(labels)
            slopes, sums = pull_and_push(z, z, pull, push, zeta=zeta)
            at_rows = slopes @ z
            values.append(value_of(at_rows, z, sums, zeta=zeta, offset=offset).mul_(weight))
            gradients += [at_rows, sums.n_push]
        ctx.n_rows, ctx.has_proxies, ctx.weight = n_rows, proxies is not None, weight
        ctx.save_for_backward(unit, norms, *gradients)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        unit, norms, *gradients = ctx.saved_tensors
        grad = gradients[0] * (upstream[0] / gradients[1]) if ctx.has_proxies else torch.zeros_like(unit)
        at_rows = grad[: ctx.n_rows]
        if len(upstream) > ctx.has_proxies:  # pairs: symmetric, and every row stands on both sides
            at_rows.addcmul_(gradients[-2], upstream[-1] / gradients[-1], value=2 * ctx.weight)
        grad = gradient_of_rows(grad, unit, norms)
        return grad[: ctx.n_rows], grad[ctx.n_rows :] if ctx.has_proxies else None, None, None, None, None, None


def irrelevant(labels: Tensor) -> Tensor:
    """0 where two rows of `labels` (B, C) share none and both carry more than one, -1 elsewhere (B, B)."""
    missing = labels.sum(dim=1).sub_(2).clamp_(max=0)
    return (missing[:, None] + missing).addmm_(labels, labels.T, alpha=-1).clamp_(min=-1)


def related(labels: Tensor) -> tuple[Tensor, Tensor]:
    """1 where two different rows of `labels` (B, C) share one, else 0; and 0 where two share none, else -1 (B, B)."""
    share = share_label(labels, labels)
    return share.fill_diagonal_(0), share.neg().fill_diagonal_(-1)


def pull_and_push(
    rows: Tensor, points: Tensor, pull: Tensor | None, push: Tensor, *, zeta: float
) -> tuple[Tensor, Sums]:
    """Slopes in the cosines of the mean of -cos over some cells plus the mean of relu(cos - zeta) over others.

    Args:
        rows: unit rows (B, K).
        points: unit rows (P, K).
        pull: 1 in the cells (B, P) of the first mean, else 0; None where there is none.
        push: 0 in the cells (B, P) of the second mean, -1 elsewhere. It is used up.
        zeta: margin of the second mean.

    Returns:
        Slopes (B, P) times `n_push`, and sums over the cells.
    """
    n_push = push.sum().add_(push.numel()).clamp_min_(1)
    slopes = push.addmm_(rows, points.T, beta=3).gt_(zeta)  # 3 below a cosine is out of reach
    n_above = slopes.sum()
    if pull is None:
        return slopes, Sums(n_push, n_above, None)
    n_pull = pull.sum()
    per_pull = 1 / n_pull.clamp_min(1)
    return slopes.addcmul_(pull, n_push * per_pull, value=-1), Sums(n_push, n_above, n_pull.mul_(per_pull))


def value_of(at_rows: Tensor, rows: Tensor, sums: Sums, *, zeta: float, offset: float) -> Tensor:
    """The value that has the slopes of `pull_and_push`; `at_rows` (B, K) is their product with the points."""
    value = torch.dot(at_rows.flatten(), rows.flatten())
    value = value.sub_(sums.n_above, alpha=zeta).div_(sums.n_push)
    return value if sums.pulled is None else value.add_(sums.pulled, alpha=offset)
