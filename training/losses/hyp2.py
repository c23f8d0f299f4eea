"""HyP2: proxies for labels, plus a push between multi-label samples that share none."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from retrieval.errors import BadConfig
from training.losses._common import (
    SHORTEST,
    check_at_least,
    check_between,
    check_choice,
    check_number,
    check_shapes,
    check_sizes,
    check_values,
    distance_from_binary,
    gradient_of_rows,
    inner_products,
    mean_where,
    normalize,
    once_differentiable,
    read,
    share_label,
)
from training.losses.zeta import zeta as best_zeta

TERMS = {
    "proxy+irrelevant": ("proxy", "irrelevant"),
    "proxy": ("proxy",),
    "pair": ("pair",),
    "proxy+pair": ("proxy", "pair"),
}
PARTS = tuple(TERMS)
EXACT = 2**24  # float32 counts so far


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
        if torch.is_autocast_enabled(outputs.device.type):
            with torch.autocast(outputs.device.type, enabled=False):
                return self.forward(outputs, labels)
        outputs, labels = check_shapes(outputs, labels, n_classes=self.n_classes, width=self.n_bits)
        proxies: Tensor | None = self.proxies
        if proxies is not None:
            proxies = proxies.to(outputs.dtype)
        names = TERMS[self.parts]
        weight = self.beta if len(names) == 2 and self.beta is not None else 1.0
        terms = plain_terms if torch.compiler.is_compiling() else _Terms.apply
        values = terms(outputs, proxies, labels, self.parts, weight, self.zeta, self.offset)
        return dict(zip(names, values, strict=True))


class _Terms(torch.autograd.Function):
    """The terms that `parts` names, as functions of outputs (B, K) and proxies (C, K).

    They are piecewise linear in the cosines with known slopes (Eq. 6), so that products with these give the gradients
    and the values, and backward has only to weigh what forward found. At this size an operation takes as long to start
    as to run, so there are few of them: what counts cells and what checks values is read at once, numbers are Python's
    from there on, and masks are floats, for operations that make booleans are slow. Irrelevant pairs are looked for
    among the rows with more than one label alone.
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
        unit = outputs.contiguous() if proxies is None else torch.cat([outputs, proxies])
        norms = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
        per_row = labels.sum(dim=1)
        ends = norms.aminmax() if len(norms) else norms.new_zeros(2)
        sums = [distance_from_binary(labels), per_row.sum(dtype=count_type(labels)), *ends]
        some = near = None
        if parts == "proxy+irrelevant":
            some = torch.where(per_row > 1)[0]
            chosen = labels.index_select(0, some)
            near = share_label(chosen, chosen)
        elif parts != "proxy":
            near = share_label(labels, labels).fill_diagonal_(1)
        if near is not None:
            sums.append(near.sum(dtype=count_type(near)))
        wrong, n_positive, shortest, longest, *n_near = read(sums)
        if wrong != 0 or not math.isfinite(longest):  # also where it is NaN
            check_values(outputs, labels)
            if proxies is not None:
                check_values(proxies, labels, what="proxies")
            # Neither finds anything if only a norm overflowed.
        short = shortest <= SHORTEST
        unit = torch.div(unit, norms.clamp_min_(SHORTEST) if short else norms, out=None if unit is outputs else unit)

        values, gradients = [], []
        rows, points = torch.split(unit, [n_rows, len(unit) - n_rows])
        if proxies is not None:
            slopes, n_above, n_far = push_and_pull(
                rows, points, labels, n_near=n_positive, n_pull=n_positive, zeta=zeta
            )
            gradient = torch.empty_like(unit)
            at_rows, at_points = torch.split(gradient, [n_rows, len(points)])
            at_rows.addmm_(slopes, points, beta=0, alpha=1 / n_far)
            at_points.addmm_(slopes.T, rows, beta=0, alpha=1 / n_far)
            values.append(value_of(at_rows, rows, n_above, zeta / n_far, offset if n_positive else 0))
            gradients.append(gradient)
        if near is not None:
            n_pull = 0 if some is not None else n_near[0] - n_rows  # no row pulls itself
            part = rows if some is None else rows.index_select(0, some)
            slopes, n_above, n_far = push_and_pull(
                part, part, near, n_near=n_near[0], n_pull=n_pull, zeta=zeta, out=None if n_pull else near
            )
            if n_pull:
                slopes.fill_diagonal_(0)
            scale = weight / n_far
            at_rows = torch.empty_like(part).addmm_(slopes, part, beta=0, alpha=scale)
            values.append(value_of(at_rows, part, n_above, zeta * scale, weight * offset if n_pull else 0))
            gradients.append(at_rows)
        ctx.n_rows, ctx.has_proxies, ctx.short = n_rows, proxies is not None, short
        ctx.save_for_backward(unit, norms, some, *gradients)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        unit, norms, some, *gradients = ctx.saved_tensors
        scaled = [gradient * factor for gradient, factor in zip(gradients, upstream, strict=True)]
        grad = scaled[0] if ctx.has_proxies else torch.zeros_like(unit)
        # Slopes between samples are symmetric, and every row stands on both sides: twice.
        if some is not None:
            grad.index_add_(0, some, scaled[-1], alpha=2)
        elif len(scaled) > ctx.has_proxies:
            grad[: ctx.n_rows].add_(scaled[-1], alpha=2)
        grad = gradient_of_rows(grad, unit, norms, short=ctx.short)
        at_rows, at_points = torch.split(grad, [ctx.n_rows, len(unit) - ctx.n_rows])
        return at_rows, at_points if ctx.has_proxies else None, None, None, None, None, None


def count_type(cells: Tensor) -> torch.dtype | None:
    """The type in which the ones among so many cells are counted exactly; None for their own."""
    return torch.float64 if cells.numel() > EXACT else None


def push_and_pull(
    rows: Tensor, points: Tensor, near: Tensor, *, n_near: float, n_pull: float, zeta: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """Slopes in the cosines of the mean of relu(cos - zeta) over some cells plus the mean of -cos over the others.

    Args:
        rows: unit rows (B, K).
        points: unit rows (P, K).
        near: 0 in the cells (B, P) of the first mean, 1 in the others.
        n_near: cells of the latter kind.
        n_pull: by how many their mean divides; 0 where there is no such mean.
        zeta: margin of the first mean.
        out: takes the slopes; may be `near` itself where nothing pulls.

    Returns:
        Slopes (B, P) times the number of far cells, how many of these are above zeta, and that number, at least 1.
    """
    n_far = max(near.numel() - n_near, 1)
    slopes = torch.addmm(near, rows, points.T, beta=-3, out=out).gt_(zeta)  # 3 below a cosine is out of reach
    n_above = slopes.sum()
    return slopes.sub_(near, alpha=n_far / n_pull) if n_pull else slopes, n_above, n_far


def value_of(at_rows: Tensor, rows: Tensor, n_above: Tensor, each: float, offset: float) -> Tensor:
    """The value that has the gradient `at_rows` (B, K) at unit rows, `each` less per cell above zeta, plus `offset`."""
    value = torch.dot(at_rows.view(-1), rows.view(-1)).sub_(n_above, alpha=each)
    return value.add_(offset) if offset else value


def plain_terms(
    outputs: Tensor, proxies: Tensor | None, labels: Tensor, parts: str, weight: float, zeta: float, offset: float
) -> list[Tensor]:
    """As `_Terms`, formula by formula and without reading a value, for `torch.compile`, which joins the operations."""
    rows, values = normalize(outputs), []
    if proxies is not None:
        cosines = inner_products(rows, normalize(proxies))
        values.append(mean_where(offset - cosines, labels) + mean_where((cosines - zeta).relu(), 1 - labels))
    if parts != "proxy":
        cosines, share = inner_products(rows, rows), share_label(labels, labels)
        if parts == "proxy+irrelevant":
            several = (labels.sum(dim=1) > 1).to(labels)
            far, pull = several[:, None] * several * (1 - share), None
        else:
            others = 1 - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
            far, pull = others * (1 - share), others * share
        value = mean_where((cosines - zeta).relu(), far)
        values.append(weight * (value if pull is None else value + mean_where(offset - cosines, pull)))
    return values
