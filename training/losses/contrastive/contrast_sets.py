"""Shared parts of the contrastive losses: the contrast set, its log-softmax, label overlaps, reductions.

Every score matrix is anchors x contrast rows, B x A. Without a memory the contrast set of row i is the batch without
row i; the pair (i, i) then has a score of -(largest float) and an overlap of 0, so it drops out of every sum. Sets of
pairs are matrices of 0.0 and 1.0, as in `numerics.py`; nothing they are multiplied with is ever infinite.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hyperparameters import Choice, Number
from hashseek.training.losses.numerics import inner_products, normalize

TAU = Number("temperature, divides the cosines", above=0)
POSITIVES = Choice('"any": rows that share a label with the anchor; "all": rows with the same labels', ("any", "all"))
REDUCTIONS = {
    "valid": "the anchors that have a positive",
    "batch": "all anchors",
    "sum": "1",
    "labels": "the labels of all anchors",
    "sample": "every anchor's own labels, then B",
}


def reductions(*names: str) -> Choice:
    """The hyperparameter `reduction` with the given keys of `REDUCTIONS`."""
    return Choice("divisor: " + "; ".join(f'"{name}": {REDUCTIONS[name]}' for name in names), names)


class ContrastiveLoss(Loss):
    """A loss on a softmax over cosines / tau; by default, a memory replaces the batch as the contrast set."""

    kind = "contrastive"
    memory_kind: ClassVar[Literal["none", "raw", "normalized"]] = "normalized"

    tau: Annotated[float, TAU] = 0.1
    reduction: Annotated[str, reductions("valid", "batch", "sum")] = "valid"


class Contrast(NamedTuple):
    """A batch with its contrast set; rows are normalised."""

    z: Tensor
    """Anchors (B, D)."""
    y: Tensor
    """Their labels (B, C), in the type of z."""
    ref: Tensor
    """Contrast rows (A, D): z itself, or the memory without gradient."""
    ref_y: Tensor
    """Their labels (A, C)."""
    in_batch: bool
    """Whether ref is z, so that row i must not meet itself."""


def contrast(batch: Batch) -> Contrast:
    """The batch with its memory as the contrast set, or with itself if there is no memory."""
    z = normalize(batch.outputs)
    if batch.memory is None:
        return Contrast(z, batch.labels, z, batch.labels, in_batch=True)
    return Contrast(z, batch.labels, normalize(batch.memory.ref), batch.memory.ref_y, in_batch=False)


def scores_of(c: Contrast, tau: float) -> Tensor:
    """Cosines of anchors with contrast rows divided by tau (B, A); lowest for a row with itself."""
    scores = inner_products(c.z / tau, c.ref)
    return lowest_on_diagonal(scores) if c.in_batch else scores


def lowest_on_diagonal(scores: Tensor) -> Tensor:
    """`scores` with a diagonal so low that a softmax gives it exactly 0, changed in place.

    The lowest float rather than -inf: a row that has nothing but itself (B = 1) would otherwise turn into NaN.
    """
    return scores.fill_diagonal_(torch.finfo(scores.dtype).min)


def overlaps(c: Contrast) -> Tensor:
    """Number of shared labels (B, A) of anchors and contrast rows; 0 for a row with itself."""
    shared = c.y @ c.ref_y.T
    return shared.fill_diagonal_(0) if c.in_batch else shared


def any_positives(shared: Tensor) -> Tensor:
    """1 for the pairs (B, A) that share a label, else 0."""
    return shared.clamp(max=1)


def all_positives(shared: Tensor, c: Contrast, *, empty_match: bool = False) -> Tensor:
    """1 for the pairs (B, A) with the same labels, else 0; rows without labels match each other only on request."""
    n_labels = c.y.sum(dim=1)[:, None]
    # Labels in one row only; for a labelled row with itself this is not 0, as its overlap with itself is.
    different = torch.sub(n_labels + c.ref_y.sum(dim=1), shared, alpha=2)
    same = 1 - different.clamp_max_(1)
    if not empty_match:
        return same * n_labels.sign()
    return same.fill_diagonal_(0) if c.in_batch else same


def row_means(chosen: Tensor, values: Tensor) -> Tensor:
    """Mean (B,) of `values` over the `chosen` of each row; 0 for a row without any."""
    return weighted_sum(chosen, values) / chosen.sum(dim=1).clamp_min_(1)


def some(chosen: Tensor) -> Tensor:
    """Whether each row has a weight above 0 (B,); weights are never negative."""
    return chosen.sum(dim=1) > 0


def label_means(c: Contrast) -> Tensor:
    """Weights (B, A) of MulSupCon: for every label of an anchor, the mean over the rows that have it.

    Row i sums to the number of its labels that some contrast row has.
    """
    carriers = c.ref_y.sum(dim=0)
    if c.in_batch:
        carriers = carriers - c.y
    weights = (c.y / carriers.clamp_min(1)) @ c.ref_y.T
    return weights.fill_diagonal_(0) if c.in_batch else weights


def new_prototypes(n_classes: int, n_bits: int) -> nn.Parameter:
    """Prototypes (C, D), one per label, initialised as in the comprehensive study's code (Xavier, uniform)."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(n_classes, n_bits)))


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Sum of weights * values over each row (B,)."""
    return (weights * values).sum(dim=1)


def reduce_anchors(per_anchor: Tensor, valid: Tensor, how: str) -> Tensor:
    """One number of the anchors' values (B,): those that are not `valid` must already be 0.

    `valid` divides by the number of valid anchors, `batch` by the number of anchors, `sum` by 1.
    """
    if how == "sum":
        return per_anchor.sum()
    if how == "batch":
        return per_anchor.sum() / max(len(per_anchor), 1)
    return per_anchor.sum() / valid.sum().clamp_min(1)


def reduce_labels(per_anchor: Tensor, weights: Tensor, y: Tensor, how: str) -> Tensor:
    """One number of MulSupCon's sums over the labels of each anchor (B,).

    `labels` divides by the number of labels of all anchors, `sample` every anchor by its own and then by B; for the
    others see `reduce_anchors`.
    """
    n_labels = y.sum(dim=1)
    if how == "labels":
        return per_anchor.sum() / n_labels.sum().clamp_min(1)
    if how == "sample":
        return reduce_anchors(per_anchor / n_labels.clamp_min(1), n_labels > 0, "batch")
    return reduce_anchors(per_anchor, some(weights), how)
