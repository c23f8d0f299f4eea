"""What every loss needs: checked inputs and settings, float32 arithmetic, and means that give 0 on an empty set."""

import math
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import function

from hashseek.retrieval.errors import BadCodes, BadConfig

SHORTEST = 1e-12  # a shorter row counts as having this norm
REDUCTIONS = ("mean", "sum")
CENTRES = ("auto", "hadamard", "balanced", "bernoulli")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's, which refuses a second derivative, without its cost where none can be taken."""
    guarded = function.once_differentiable(backward)

    @wraps(backward)
    def choose(*given: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(*given)

    return choose


# Settings


def check_sizes(n_classes: int, n_bits: int) -> None:
    """Raise BadConfig unless C and K are whole numbers of at least 1."""
    check_count("n_classes", n_classes, 1, "is the number of labels")
    check_count("n_bits", n_bits, 1, "is the width of the outputs")


def check_count(name: str, value: int, least: int, role: str) -> None:
    """Raise BadConfig unless `value` is a whole number of at least `least`."""
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        raise BadConfig(f"{name} {role} and must be a whole number of at least {least}, not {value!r}")


def check_number(name: str, value: float, role: str) -> None:
    """Raise BadConfig unless `value` is a finite number."""
    if not _is_number(value):
        raise BadConfig(f"{name} {role} and must be a finite number, not {value!r}")


def check_at_least(name: str, value: float | None, least: float, role: str) -> None:
    """Raise BadConfig unless `value` is a finite number of at least `least`."""
    if not (_is_number(value) and value >= least):
        raise BadConfig(f"{name} {role} and must be at least {least:g}, not {value!r}")


def check_positive(name: str, value: float, role: str, usual: str) -> None:
    """Raise BadConfig unless `value` is a finite number above 0."""
    if not (_is_number(value) and value > 0):
        raise BadConfig(f"{name} {role} and must be greater than 0, not {value!r}: {usual} is usual")


def check_between(name: str, value: float, least: float, most: float, role: str) -> None:
    """Raise BadConfig unless `value` is a number from `least` to `most`, both included."""
    if not (_is_number(value) and least <= value <= most):
        raise BadConfig(f"{name} {role} and must lie between {least:g} and {most:g}, not {value!r}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise BadConfig unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise BadConfig(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def check_flag(name: str, value: bool) -> None:
    """Raise BadConfig unless `value` is true or false."""
    if not isinstance(value, bool):
        raise BadConfig(f"{name} switches an option on and must be true or false, not {value!r}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Batches


def check_batch(outputs: Tensor, labels: Tensor, *, n_classes: int, n_bits: int) -> tuple[Tensor, Tensor]:
    """Check a batch and return (outputs (B, K) in float32 or float64, labels (B, C) in the same type).

    Half-precision outputs are raised to float32: losses never compute in less.

    Raises:
        BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
    """
    return _check_rows(outputs, labels, n_classes=n_classes, width=n_bits, what="outputs")


def check_shapes(
    rows: Tensor, labels: Tensor, *, n_classes: int, width: int, what: str = "outputs"
) -> tuple[Tensor, Tensor]:
    """As `check_batch`, for rows (B, width), but without a look at the values: for a loss that reads them with others.

    Raises:
        BadCodes: wrong shapes.
    """
    if rows.ndim != 2 or rows.shape[1] != width:
        raise BadCodes(f"the loss expects {what} of shape (B, {width}), not {tuple(rows.shape)}")
    if labels.ndim != 2 or labels.shape != (rows.shape[0], n_classes):
        raise BadCodes(f"the loss expects labels of shape ({rows.shape[0]}, {n_classes}), not {tuple(labels.shape)}")
    rows = raised(rows)
    return rows, labels.to(rows)


def read(numbers: list[Tensor]) -> list[float]:
    """The values of 0-dimensional tensors: one wait for a GPU, and no operation on a CPU."""
    if numbers[0].device.type == "cpu":
        return [number.item() for number in numbers]
    values: list[float] = torch.stack(numbers).tolist()
    return values


def distance_from_binary(labels: Tensor) -> Tensor:
    """0 if every label is 0 or 1 (or within 1e-23 of 0, whose square is none), else not; two operations on floats."""
    distance: Tensor = torch.linalg.vector_norm(torch.addcmul(labels, labels, labels, value=-1))
    return distance


def check_values(rows: Tensor, labels: Tensor, *, what: str = "outputs") -> None:
    """Raise BadCodes that names a label (B, C) that is not 0 or 1, or the first row (N, K) that is not finite."""
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise BadCodes(f"labels must be 0 or 1, but one is {_short(wrong[0].item())}: give multi-hot labels")
    for row in (~torch.isfinite(rows)).any(dim=1).nonzero()[:1].flatten().tolist():
        raise BadCodes(f"the {what} hold NaN or infinity in row {row}: lower the learning rate")


def _short(number: float) -> str:
    """2 for 2.0, but 1.0000001 as it is."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def check_logits(
    outputs: Tensor, labels: Tensor, logits: Tensor | None, *, n_classes: int, n_bits: int
) -> tuple[Tensor, Tensor]:
    """Check the batch of a classification loss and return (logits (B, C), labels (B, C)), as `check_batch` does.

    The rule of every classification loss: it reads `logits` when they are given and nothing else; without them the
    outputs themselves are the logits, one per label, which takes a loss built with n_bits = n_classes.

    Raises:
        BadCodes: no logits while n_bits differs from n_classes, or what `check_batch` refuses.
    """
    if logits is not None:
        return _check_rows(logits, labels, n_classes=n_classes, width=n_classes, what="logits")
    if n_bits != n_classes:
        raise BadCodes(
            f"a classification loss needs one logit per label, but the {n_bits} outputs do not match the "
            f"{n_classes} labels: pass logits of shape (B, {n_classes})"
        )
    return _check_rows(outputs, labels, n_classes=n_classes, width=n_bits, what="outputs")


def memory_rows(memory: object, like: Tensor, *, n_classes: int, n_bits: int) -> tuple[Tensor, Tensor] | None:
    """(ref (Q, K), ref_y (Q, C)) of `memory` without gradient, in the type and on the device of `like`, or None.

    `memory` has attributes ref and ref_y, or is a pair of them.

    Raises:
        BadCodes: `memory` is neither, or its rows are as bad as `check_batch` describes.
    """
    if memory is None:
        return None
    if isinstance(memory, tuple | list) and len(memory) == 2:
        ref, ref_y = memory
    else:
        ref, ref_y = getattr(memory, "ref", None), getattr(memory, "ref_y", None)
    if not (isinstance(ref, Tensor) and isinstance(ref_y, Tensor)):
        raise BadCodes(
            f"the memory is a {type(memory).__name__}, but must hold tensors ref (Q, {n_bits}) and ref_y "
            f"(Q, {n_classes}): give a pair of them"
        )
    try:
        ref, ref_y = check_batch(ref.detach(), ref_y.detach(), n_classes=n_classes, n_bits=n_bits)
    except BadCodes as error:
        raise BadCodes(f"the memory does not fit: {error}") from error
    return ref.to(like), ref_y.to(like)


def raised(rows: Tensor) -> Tensor:
    """`rows` in float32, or in float64 where they already are: losses never compute in less."""
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _check_rows(rows: Tensor, labels: Tensor, *, n_classes: int, width: int, what: str) -> tuple[Tensor, Tensor]:
    rows, binary = check_shapes(rows, labels, n_classes=n_classes, width=width, what=what)
    # Reading values would break a compiled graph. One number is read: 0 times the sum is NaN if a row is not finite.
    if (
        not torch.compiler.is_compiling()
        and torch.add(distance_from_binary(binary), rows.detach().sum(), alpha=0).item() != 0
    ):
        check_values(rows, labels, what=what)  # which finds nothing if only the sum overflowed
    return rows, binary


# Means


def mean(values: Tensor) -> Tensor:
    """Mean of `values`; exactly 0, still attached to the graph, where there are none."""
    return values.sum() / max(values.numel(), 1)


def mean_where(values: Tensor, cells: Tensor) -> Tensor:
    """Mean of finite `values` over `cells` (1 in, 0 out); exactly 0, still attached to the graph, where none is in."""
    return (values * cells).sum() / cells.sum().clamp_min(1)


def reduce(values: Tensor, reduction: str) -> Tensor:
    """Mean or sum of `values`, by a name in `REDUCTIONS`."""
    return mean(values) if reduction == "mean" else values.sum()


# Formulas


def normalize(rows: Tensor) -> Tensor:
    """Rows divided by max(their L2 norm, 1e-12), so that a zero row stays zero.

    The gradient is written out because on short rows the one of `F.normalize` takes twice the time of all else. It
    cannot be differentiated again.
    """
    unit: Tensor = _Normalize.apply(rows)
    return unit


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        unit, norms = unit_rows(rows)
        ctx.save_for_backward(unit, norms)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        unit, norms = ctx.saved_tensors
        return gradient_of_rows(grad, unit, norms)


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, K) divided by their norms (N, 1), and these."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(SHORTEST)
    return rows / norms, norms


def gradient_of_rows(grad: Tensor, unit: Tensor, norms: Tensor, *, short: bool = True) -> Tensor:
    """Gradient (N, K) at the rows of what `unit_rows` returned, from `grad` (N, K) at the unit rows.

    `short`: whether a norm may have been clamped.
    """
    along = (grad * unit).sum(dim=1, keepdim=True)
    if short:
        along.mul_(norms > SHORTEST)  # a clamped norm is a constant
    return torch.addcmul(grad, unit, along, value=-1).div_(norms)


def inner_products(rows: Tensor, points: Tensor) -> Tensor:
    """Inner products (N, P) of rows (N, K) and points (P, K), in their type forward and backward.

    Plain `@` has its gradient computed in half precision where `backward()` is called, or was traced, under autocast.
    It cannot be differentiated twice.
    """
    # Given once where it stands on both sides: a compiled graph takes no tensor twice.
    products: Tensor = _InnerProducts.apply(rows, None if points is rows else points)
    return products


class _InnerProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, points: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, points)
        return rows @ (rows if points is None else points).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, points = ctx.saved_tensors
        with torch.autocast(rows.device.type, enabled=False):
            if points is None:
                return torch.addmm(grad @ rows, grad.T, rows), None
            at_rows, at_points = ctx.needs_input_grad
            return grad @ points if at_rows else None, grad.T @ rows if at_points else None


def share_label(labels: Tensor, others: Tensor) -> Tensor:
    """1 where two rows share a label, else 0: labels (B, C), others (Q, C) -> (B, Q), in the type of the labels.

    A float and no mask, for on a CPU arithmetic is several times faster than comparisons and `where`.
    """
    return (labels @ others.T).clamp_(max=1)


def logistic(scores: Tensor, targets: Tensor) -> Tensor:
    """softplus(t) - s t of scores t and targets s in [0, 1], the logistic loss; exact for scores of any size."""
    return F.binary_cross_entropy_with_logits(scores, targets, reduction="none")


def log_one_plus_sum_exp(scores: Tensor, mask: Tensor, *, dim: int) -> Tensor:
    """log(1 + sum of exp(score) where `mask` holds) along `dim`, without overflow; 0 where it holds nowhere."""
    scores = torch.where(mask, scores, -math.inf)
    shape = list(scores.shape)
    shape[dim] = 1
    return torch.cat([scores.new_zeros(shape), scores], dim=dim).logsumexp(dim)


# Centres


def make_centres(kind: str, *, n_classes: int, n_bits: int, seed: int) -> Tensor:
    """Fixed centres (C, K) of -1 and 1, one per label.

    `hadamard` takes the rows of the Hadamard matrix and their negatives, which are K / 2 bits apart or more; it needs K
    to be a power of 2, and beyond 2 K labels it goes on with balanced rows. `balanced` draws rows with as many -1 as
    1, `bernoulli` draws every bit alone; of 20 draws the one whose closest rows are farthest apart is kept. `auto`
    is `hadamard` where K is a power of 2 and `balanced` elsewhere.

    Raises:
        BadConfig: an unknown kind, `hadamard` for another K, or a seed that is not a whole number from 0.
    """
    check_choice("centres", kind, CENTRES)
    check_count("seed", seed, 0, "fixes the random centres")
    generator = torch.Generator().manual_seed(seed)
    power_of_2 = n_bits & (n_bits - 1) == 0
    if kind == "hadamard" and not power_of_2:
        raise BadConfig(
            f"Hadamard centres need n_bits to be a power of 2, not {n_bits}: set centres to 'balanced' or 'auto'"
        )
    if kind == "auto":
        kind = "hadamard" if power_of_2 else "balanced"
    fixed = torch.empty(0, n_bits)
    if kind == "hadamard":
        matrix = _hadamard(n_bits)
        fixed = torch.cat([matrix, -matrix])[:n_classes]
    draw = _bernoulli if kind == "bernoulli" else _balanced
    best, closest = fixed, math.inf
    for _ in range(20 if n_classes <= 2048 else 1):  # comparing the draws takes C x C numbers
        if len(fixed) == n_classes:
            break
        centres = torch.cat([fixed, draw(n_classes - len(fixed), n_bits, generator)])
        agreement = float((centres @ centres.T).fill_diagonal_(-n_bits).max())
        if agreement < closest:
            best, closest = centres, agreement
    return best


def random_signs(n: int, *, seed: int) -> Tensor:
    """A vector (n,) of -1 and 1, fixed by `seed`."""
    return _bernoulli(1, n, torch.Generator().manual_seed(seed))[0]


def _hadamard(n: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix


def _bernoulli(n: int, n_bits: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (n, n_bits), generator=generator) * 2.0 - 1


def _balanced(n: int, n_bits: int, generator: torch.Generator) -> Tensor:
    order = torch.rand(n, n_bits, generator=generator).argsort(dim=1)
    odd_one = torch.randint(0, 1 + n_bits % 2, (n, 1), generator=generator)  # an odd K cannot be split evenly
    return torch.where(order < n_bits // 2 + odd_one, 1.0, -1.0)
