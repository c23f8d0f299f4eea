"""HBL: a contrastive loss, plus margins on the hardest rows of each anchor."""

import warnings
from typing import Annotated, Any

import torch
from torch import Tensor

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.contrast_sets import (
    Contrast,
    ContrastiveLoss,
    any_positives,
    contrast,
    label_means,
    overlaps,
    reduce_anchors,
    reduce_labels,
    reductions,
    row_means,
    scores_of,
    some,
    weighted_sum,
)
from hashseek.training.losses.hyperparameters import Choice, Number
from hashseek.training.losses.numerics import jaccard

# Label overlaps are ratios of whole numbers: rounding must not move one across the median that equals it.
SLACK = 1e-6


class HBL(ContrastiveLoss):
    """Margins between levels of label overlap, on top of SupCon ANY or MulSupCon.

    For anchor i the positives P share a label, the others of A(i) are N. With J the Jaccard overlap of labels and
    theta its median over P, P splits into soft (J >= theta, close in labels) and hard (J < theta). With c the cosines
    without temperature:

        rel_i = max(0, max over hard of c - min over soft of c + m_rel)       Eq. 4, which prints the min over P
        abs_i = max(0, max over N of c - min over hard of c + m_abs)          0 if N is empty
        HBL_i = rel_i + gamma * abs_i if the gate is open, else 0             Eq. 6
        loss  = base + mean over all B anchors of lam * HBL_i                 Eq. 7; the base is Eq. 1

    The gate is open where P has at least k_min rows and neither soft nor hard is empty. A(i) is the batch without i,
    or exactly the memory; a batch rarely holds k_min positives, so use a queue. The gradient of a margin goes to
    the one row at each maximum and minimum. `reduction` applies to the base only. No published code is available.
    O(B A (D + C)), and O(B A log A) where there are so many labels that overlaps are sorted and not counted.
    """

    source = (
        "Learning Semantic Boundaries: An Adaptive Structural Loss for Multi-Label Contrastive Learning (Hierarchical "
        "Boundary Learning), OpenReview lGvQaiBiD2"
    )
    formula = "Eqs. 1-7"
    use = "margins between close and distant positives and negatives; needs a queue: a batch rarely has k_min positives"

    base: Annotated[str, Choice("SupCon with ANY positives, or MulSupCon", ("any", "mulsupcon"))] = "any"
    lam: Annotated[float, Number("weight of the margins, the best on Scene; searched in {0.001 ... 1}", least=0)] = 0.01
    gamma: Annotated[
        float, Number("weight of abs against rel, the best on Scene; searched in {0.5 ... 2}", least=0)
    ] = 0.8
    m_rel: Annotated[float, Number("margin between hard and soft positives; 0.05 or 0.1", least=0)] = 0.1
    m_abs: Annotated[float, Number("margin between negatives and hard positives; 0.2 or 0.3", least=0)] = 0.2
    k_min: Annotated[int, Number("positives that an anchor needs; 64, 128 or 256", least=1, whole=True)] = 64
    gate: Annotated[
        str, Choice("what k_min counts: positives (the text), or soft ones (Eq. 6)", ("positives", "soft"))
    ] = "positives"
    median: Annotated[
        str,
        Choice("median of an even number: mean of the middle two, or the lower (`torch.median`)", ("mean", "lower")),
    ] = "mean"
    reduction: Annotated[str, reductions("batch", "valid", "sum", "labels", "sample")] = "batch"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.base == "any" and self.reduction in ("labels", "sample"):
            raise BadConfig(f"reduction {self.reduction!r} needs sums over labels: set base='mulsupcon' or use 'batch'")
        self._warned = False

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "base" and "margins".

        Warns once if there is no memory and the batch is too small to ever open the gate.
        """
        c = contrast(batch)
        if c.in_batch and len(c.z) <= self.k_min and not (self._warned or torch.compiler.is_compiling()):
            self._warned = True
            warnings.warn(
                f"HBL's margins need {self.k_min} positives (k_min) but a batch of {len(c.z)} rows has fewer "
                "others: only the base is trained; use a queue, a larger batch or a smaller k_min",
                stacklevel=2,
            )
        scores = scores_of(c, self.tau)
        shared = overlaps(c)
        positive = any_positives(shared)
        log_p = scores.log_softmax(dim=1)
        if self.base == "any":
            base = reduce_anchors(-row_means(positive, log_p), some(positive), self.reduction)
        else:
            weights = label_means(c)
            base = reduce_labels(-weighted_sum(weights, log_p), weights, c.y, self.reduction)
        margins = self._margins(c, scores.detach(), shared, positive).sum() / max(len(c.z), 1)
        return {"base": base, "margins": self.lam * margins}

    def _margins(self, c: Contrast, scores: Tensor, shared: Tensor, positive: Tensor) -> Tensor:
        """HBL_i (B,) from tempered scores (B, A) without gradient and the number of shared labels (B, A)."""
        n_anchors, n_rows = shared.shape
        if n_anchors == 0 or n_rows < self.k_min:
            return c.z.sum(dim=1) * 0  # stays attached to the graph
        n_labels, sizes = c.y.sum(dim=1, keepdim=True), c.ref_y.sum(dim=1)
        n_positives = positive.sum(dim=1, keepdim=True)
        theta = median_overlaps(shared, positive, n_labels, sizes, self.median) - SLACK
        # Overlap < theta, multiplied out; true of all negatives.
        not_soft = torch.addcmul(sizes, shared, 1 + 1 / theta, value=-1).add_(n_labels).sign_().relu_()
        not_hard = torch.sub(not_soft, positive).abs_()
        n_soft = n_rows - not_soft.sum(dim=1, keepdim=True)
        counted = n_positives if self.gate == "positives" else n_soft
        is_open = (counted >= self.k_min) & (n_soft < n_positives)  # soft holds the largest overlap: never empty

        # What is not in a set is moved out of reach; the scores of what is in it stay exact. Memory is reused:
        # allocating a new B x A tensor costs more than computing it.
        away = 3 / self.tau
        far_unless_soft = torch.add(scores, not_soft, alpha=away, out=not_soft)
        if c.in_batch:
            far_unless_soft.fill_diagonal_(away)  # a row has the lowest score with itself
        low_soft = far_unless_soft.min(dim=1, keepdim=True).indices
        top_hard = torch.sub(scores, not_hard, alpha=away, out=not_soft).max(dim=1, keepdim=True).indices
        far_unless_hard = torch.add(scores, not_hard, alpha=away, out=not_hard)
        if c.in_batch:
            far_unless_hard.fill_diagonal_(away)
        low_hard = far_unless_hard.min(dim=1, keepdim=True).indices
        top_negative = torch.sub(scores, positive, alpha=away, out=not_hard).max(dim=1, keepdim=True).indices
        # Only the picked rows take part in the graph: four products a row instead of four gradients of B x A.
        picked = torch.cat([top_hard, low_soft, low_hard, top_negative], dim=1)
        best = (c.z[:, None] * c.ref[picked]).sum(dim=2)
        rel = torch.relu(best[:, 0] - best[:, 1] + self.m_rel)
        absolute = torch.relu(best[:, 3] - best[:, 2] + self.m_abs)
        has_negatives = n_positives < n_rows - c.in_batch
        margins = torch.where(has_negatives.squeeze(1), rel + self.gamma * absolute, rel)
        return torch.where(is_open.squeeze(1), margins, 0.0)


def median_overlaps(shared: Tensor, positive: Tensor, n_labels: Tensor, sizes: Tensor, kind: str) -> Tensor:
    """Median (B, 1) of the Jaccard overlaps of each anchor with its positives; any number where it has none.

    Of an even number: the mean of the two middle values, or with kind "lower" the lower of them.

    An overlap follows from two small numbers, the labels shared and those of the other row. Pairs are counted by these,
    which takes a fraction of the time of sorting them.

    Args:
        shared: labels that anchor and row share (B, A).
        positive: 1 where there are any (B, A), else 0.
        n_labels: labels of the anchors (B, 1).
        sizes: labels of the rows (A,).
        kind: "mean" or "lower".
    """
    counted = not torch.compiler.is_compiling()  # counting has to read three numbers, which breaks a compiled graph
    if counted:
        limits = [int(n) + 1 for n in torch.stack([shared.max(), sizes.max(), n_labels.max()]).tolist()]
        counted = limits[0] * limits[1] <= shared.shape[1]  # or there are more cells to count in than pairs
    if counted:
        overlaps, counts = counted_overlaps(shared, n_labels, sizes, *limits)
    else:
        overlaps, order = jaccard(shared, n_labels, sizes).sort(dim=1)
        counts = positive.gather(1, order).long()
    upto = counts.cumsum(dim=1)
    n_positives = upto[:, -1:]
    middle = torch.cat([n_positives - 1, n_positives], dim=1).div(2, rounding_mode="floor")
    found = overlaps.gather(1, torch.searchsorted(upto, middle, right=True).clamp_max_(upto.shape[1] - 1))
    return found[:, :1] if kind == "lower" else found.mean(dim=1, keepdim=True)


def counted_overlaps(
    shared: Tensor, n_labels: Tensor, sizes: Tensor, most: int, width: int, height: int
) -> tuple[Tensor, Tensor]:
    """Overlaps that positives can have, ascending for each anchor (B, most * width), and how many have each.

    All `shared` (B, A) are below `most`, `sizes` (A,) below `width`, `n_labels` (B, 1) below `height`.
    """
    n_anchors, n_cells = len(shared), most * width
    cell = shared.int().mul_(width).add_(sizes.int())
    cell += torch.arange(0, n_anchors * n_cells, n_cells, dtype=torch.int32, device=cell.device)[:, None]
    counts = torch.bincount(cell.view(-1), minlength=n_anchors * n_cells).view(n_anchors, most, width)
    counts[:, 0] = 0  # negatives
    # The order depends on the anchor only by its number of labels, of which there are few.
    own = torch.arange(height, device=cell.device)[:, None]
    both = torch.arange(most, device=cell.device).repeat_interleave(width)
    other = torch.arange(width, device=cell.device).repeat(most)
    overlaps, order = jaccard(both.to(shared), own, other).sort(dim=1)
    which = n_labels.long().squeeze(1)
    return overlaps[which], counts.flatten(1).gather(1, order[which])
