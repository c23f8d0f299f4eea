"""Arithmetic shared by the losses: stable logarithms, means of possibly empty sets, cosines.

Sets of cells are matrices of 0.0 and 1.0 here and in the losses: on a CPU, arithmetic with them takes a fraction of the
time of comparisons and `where`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def mean(values: Tensor) -> Tensor:
    """Mean of `values`; exactly 0, still attached to the graph, where there are none."""
    return values.sum() / max(values.numel(), 1)


def mean_where(values: Tensor, cells: Tensor) -> Tensor:
    """Mean of finite `values` over `cells` (1 in, 0 out); exactly 0, still attached to the graph, where none is in."""
    return (values * cells).sum() / cells.sum().clamp_min(1)


def share_label(labels: Tensor, others: Tensor) -> Tensor:
    """1 where two rows share a label, else 0: labels (B, C), others (Q, C) -> (B, Q), in the type of the labels."""
    return (labels @ others.T).clamp_(max=1)


def jaccard(shared: Tensor, sizes: Tensor, other_sizes: Tensor) -> Tensor:
    """Shared labels over labels in either row (B, Q); 0 where neither has one. Sizes: labels per row (B, 1), (Q,)."""
    return shared / (sizes + other_sizes - shared).clamp_min_(1)


def logistic(scores: Tensor, targets: Tensor) -> Tensor:
    """softplus(t) - s t of scores t and targets s in [0, 1], the logistic loss; exact for scores of any size."""
    return F.binary_cross_entropy_with_logits(scores, targets, reduction="none")


def log_one_plus_sum_exp(scores: Tensor, mask: Tensor, *, dim: int) -> Tensor:
    """log(1 + sum of exp(score) where `mask` holds) along `dim`, without overflow; 0 where it holds nowhere."""
    scores = torch.where(mask, scores, -math.inf)
    shape = list(scores.shape)
    shape[dim] = 1
    return torch.cat([scores.new_zeros(shape), scores], dim=dim).logsumexp(dim)


def normalize(rows: Tensor) -> Tensor:
    """Rows (N, K) divided by max(their L2 norm, 1e-12), so that a zero row stays zero."""
    return F.normalize(rows, dim=1, eps=1e-12)


def inner_products(rows: Tensor, points: Tensor) -> Tensor:
    """Inner products (N, P) of rows (N, K) and points (P, K), in their type forward and backward.

    Plain `@` computes its gradient in half precision where `backward()` is called under autocast. This cannot be
    differentiated twice.
    """
    # Pass the same tensor only once: a compiled graph does not accept it twice.
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
