"""HyP2: proxies for labels, plus a push between multi-label samples that share none."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.common import (
    SHORTEST,
    check_at_least,
    check_batch,
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
from hashseek.training.losses.hashing.zeta import zeta as best_zeta

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
        zeta: margin; None takes the exact value for K and C from coding theory (`training.losses.hashing.zeta`).
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
        is_quick = self.parts == "proxy+irrelevant" and not torch.compiler.is_compiling()
        if is_quick:
            outputs, labels = check_shapes(outputs, labels, n_classes=self.n_classes, width=self.n_bits)
        else:
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
        proxies: Tensor | None = self.proxies
        if proxies is not None and proxies.dtype != outputs.dtype:
            proxies = proxies.to(outputs.dtype)
        if is_quick:
            proxy, irrelevant = _Terms.apply(outputs, proxies, labels, self.beta, self.zeta, self.offset)
            return {"proxy": proxy, "irrelevant": irrelevant}
        names = TERMS[self.parts]
        weight = self.beta if len(names) == 2 and self.beta is not None else 1.0
        values = plain_terms(outputs, proxies, labels, self.parts, weight, self.zeta, self.offset)
        return dict(zip(names, values, strict=True))


class _Terms(torch.autograd.Function):
    """The two terms of the method, as functions of outputs (B, K) and proxies (C, K).

    They are piecewise linear in the cosines with known slopes (Eq. 6), so that products with these give the gradients
    and the values, and backward has only to weigh what forward found. At this size an operation takes as long to start
    as to run, so there are few of them, in one body: what counts cells and what checks values is read at once, numbers
    are Python's from there on, and masks are floats, for operations that make booleans are slow. Irrelevant pairs are
    looked for among the rows with more than one label alone.
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, proxies: Tensor, labels: Tensor, beta: float, zeta: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        sizes = [len(outputs), len(proxies)]
        unit = torch.cat([outputs, proxies])
        norms = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
        per_row = labels.sum(dim=1)
        several = torch.where(per_row > 1)[0]
        theirs = labels.index_select(0, several)
        near = share_label(theirs, theirs)
        wrong, shortest, longest, n_positive, n_near = read(
            [
                distance_from_binary(labels),
                *norms.aminmax(),
                per_row.sum(dtype=count_type(labels)),
                near.sum(dtype=count_type(near)),
            ]
        )
        if wrong != 0 or not math.isfinite(longest):  # also where it is NaN
            check_values(outputs, labels)
            check_values(proxies, labels, what="proxies")
            # Neither finds anything if only a norm overflowed.
        ctx.short = shortest <= SHORTEST
        unit.div_(norms.clamp_min_(SHORTEST) if ctx.short else norms)
        rows, points = torch.split(unit, sizes)

        # The mean of -cos over positive cells, and of relu(cos - zeta) over the others: 3 below it is out of reach.
        n_far = max(labels.numel() - n_positive, 1)
        slopes = torch.addmm(labels, rows, points.T, beta=-3).gt_(zeta)
        n_above = slopes.sum()
        if n_positive:
            slopes.sub_(labels, alpha=n_far / n_positive)
        gradient = torch.empty_like(unit)
        at_rows, at_points = torch.split(gradient, sizes)
        at_rows.addmm_(slopes, points, beta=0, alpha=1 / n_far)
        at_points.addmm_(slopes.T, rows, beta=0, alpha=1 / n_far)
        proxy = torch.dot(at_rows.view(-1), rows.view(-1)).sub_(n_above, alpha=zeta / n_far)
        if n_positive:
            proxy.add_(offset)

        # The mean of relu(cos - zeta) over ordered pairs that share no label. Slopes are symmetric: half of a gradient.
        each = beta / max(near.numel() - n_near, 1)
        rows = rows.index_select(0, several)
        slopes = near.addmm_(rows, rows.T, beta=-3).gt_(zeta)
        half = torch.empty_like(rows).addmm_(slopes, rows, beta=0, alpha=each)
        irrelevant = torch.dot(half.view(-1), rows.view(-1)).sub_(slopes.sum(), alpha=zeta * each)
        ctx.sizes = sizes
        ctx.save_for_backward(unit, norms, gradient, several, half)
        return proxy, irrelevant

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, proxy: Tensor, irrelevant: Tensor) -> tuple[Tensor | None, ...]:
        unit, norms, gradient, several, half = ctx.saved_tensors
        grad = (gradient * proxy).index_add_(0, several, half * irrelevant, alpha=2)
        at_rows, at_points = torch.split(gradient_of_rows(grad, unit, norms, short=ctx.short), ctx.sizes)
        return at_rows, at_points, None, None, None, None


def count_type(cells: Tensor) -> torch.dtype | None:
    """The type in which the ones among so many cells are counted exactly; None for their own."""
    return torch.float64 if cells.numel() > EXACT else None


def plain_terms(
    outputs: Tensor, proxies: Tensor | None, labels: Tensor, parts: str, weight: float, zeta: float, offset: float
) -> list[Tensor]:
    """The terms of any `parts`, formula by formula and without reading a value, as `torch.compile` needs it.

    Outputs (B, K), proxies (C, K) where `parts` has them, labels (B, C); the terms are numbers, pairs times `weight`.
    """
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
