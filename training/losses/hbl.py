"""HBL: a contrastive loss, plus margins on the hardest rows of each anchor."""

import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from retrieval.errors import BadConfig
from training.losses._common import check_at_least, check_choice, check_count, check_sizes
from training.losses._contrast import (
    Contrast,
    any_positives,
    check_tau,
    contrast,
    label_means,
    log_softmax,
    overlaps,
    reduce_anchors,
    reduce_labels,
    row_means,
    scores_of,
    some,
    weighted_sum,
)

# Label overlaps are ratios of whole numbers: rounding must not move one across the median that equals it.
SLACK = 1e-6


class HBL(nn.Module):
    """HBL: margins between hierarchy levels on top of SupCon ANY or MulSupCon (Eqs. 1-7; no code could be had).

    For anchor i the positives P share a label, the others of A(i) are N. With J the Jaccard overlap of labels and
    theta its median over P, P splits into soft (J >= theta, close in labels) and hard (J < theta). With c the cosines
    without temperature:

        rel_i = max(0, max over hard of c - min over soft of c + m_rel)
        abs_i = max(0, max over N of c - min over hard of c + m_abs)         0 if N is empty
        HBL_i = rel_i + gamma * abs_i if the gate is open, else 0
        loss  = base + mean over all B anchors of lam * HBL_i

    The gate is open where P has at least k_min rows and neither soft nor hard is empty. A(i) is the batch without i,
    or exactly the memory; a batch rarely holds k_min positives, so a queue is meant. The gradient of a margin goes to
    the one row at each maximum and minimum. O(B A (D + C) + B A log A).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        base: "any" (SupCon with ANY positives) or "mulsupcon".
        tau: temperature of the base; searched in {0.01, 0.1}.
        lam: weight of the margins; searched in {0.001 ... 1}.
        gamma: weight of abs against rel; searched in {0.5 ... 2}.
        m_rel: margin between hard and soft positives; {0.05, 0.1}.
        m_abs: margin between negatives and hard positives; {0.2, 0.3}.
        k_min: positives an anchor needs; {64, 128, 256}.
        gate: what k_min counts: "positives" (the text) or "soft" (the set that Eq. 6 prints).
        median: of an even number of overlaps: "mean" of the two middle ones, or the "lower" (`torch.median`).
        reduction: of the base only. "batch" divides by B (Eq. 7), "valid" by the anchors that have a positive, and
            for MulSupCon "labels" by the number of labels (its own code) and "sample" as described there.

    Raises:
        BadConfig: tau <= 0, lam, gamma, m_rel or m_abs < 0, k_min < 1, or an unknown choice.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        base: str = "any",
        tau: float = 0.1,
        lam: float = 0.01,
        gamma: float = 0.8,
        m_rel: float = 0.1,
        m_abs: float = 0.2,
        k_min: int = 64,
        gate: str = "positives",
        median: str = "mean",
        reduction: str = "batch",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_choice("base", base, ("any", "mulsupcon"))
        check_tau(tau)
        check_at_least("lam", lam, 0, "weighs the margins")
        check_at_least("gamma", gamma, 0, "weighs abs against rel")
        check_at_least("m_rel", m_rel, 0, "is a margin between cosines")
        check_at_least("m_abs", m_abs, 0, "is a margin between cosines")
        check_count("k_min", k_min, 1, "is the number of positives that opens the gate")
        check_choice("gate", gate, ("positives", "soft"))
        check_choice("median", median, ("mean", "lower"))
        check_choice("reduction", reduction, ("batch", "valid", "sum", "labels", "sample"))
        if base == "any" and reduction in ("labels", "sample"):
            raise BadConfig(f"reduction {reduction!r} needs sums over labels: set base='mulsupcon' or use 'batch'")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.base = base
        self.tau = tau
        self.lam = lam
        self.gamma = gamma
        self.m_rel = m_rel
        self.m_abs = m_abs
        self.k_min = k_min
        self.gate = gate
        self.median = median
        self.reduction = reduction
        self._warned = False

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"base", "margins"} of outputs (B, D) with labels (B, C), against `memory` (ref (Q, D), ref_y (Q, C)).

        Warns once if there is no memory and the batch is too small to ever open the gate.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            c = contrast(outputs, labels, memory, n_classes=self.n_classes, n_bits=self.n_bits)
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
            log_p = log_softmax(scores)
            if self.base == "any":
                base = reduce_anchors(-row_means(positive, log_p), some(positive), self.reduction)
            else:
                weights = label_means(c)
                base = reduce_labels(-weighted_sum(weights, log_p), weights, c.y, self.reduction)
            margins = self._margins(c, scores.detach(), shared, positive).sum() / max(len(c.z), 1)
            return {"base": base, "margins": self.lam * margins}

    def _margins(self, c: Contrast, scores: Tensor, shared: Tensor, positive: Tensor) -> Tensor:
        """HBL_i of the anchors that have k_min positives, from tempered scores (B, A) without gradient."""
        n_positives = positive.sum(dim=1).long()
        rows = (n_positives >= self.k_min).nonzero().squeeze(1)
        if len(rows) == 0:
            return c.z.sum(dim=1) * 0  # stays attached to the graph
        # Positives are few: list their columns, so that sorting and picking need not pass over all of A.
        count = n_positives[rows, None]
        cos, positive = scores[rows] * self.tau, positive[rows]
        columns, listed = listed_columns(positive, count)
        both = shared[rows].gather(1, columns)
        overlap = both / (c.y.sum(dim=1)[rows, None] + c.ref_y.sum(dim=1)[columns] - both)
        overlap = torch.where(listed, overlap, 2.0)  # what is not listed sorts last and is not hard
        close = overlap >= medians(overlap, count, self.median) - SLACK
        hard, soft = ~close, close & listed
        counted = count if self.gate == "positives" else soft.sum(dim=1, keepdim=True)
        is_open = (counted >= self.k_min).squeeze(1) & hard.any(dim=1)  # soft holds the largest overlap: never empty

        near = cos.gather(1, columns)
        far = torch.add(cos, positive, alpha=-4)  # cosines of negatives; all others fall below -1
        if c.in_batch:
            far[torch.arange(len(rows), device=far.device), rows] = -4
        picked = [
            columns.gather(1, torch.where(chosen, values, -2.0).max(dim=1, keepdim=True).indices)
            for chosen, values in ((hard, near), (soft, -near), (hard, -near))
        ]
        farthest, where = far.max(dim=1, keepdim=True)
        picked.append(where)
        # Only the picked rows take part in the graph: four products a row instead of four gradients of B x A.
        best = (c.z[rows, None] * c.ref[torch.cat(picked, dim=1)]).sum(dim=2)
        top_hard, low_soft, low_hard, top_negative = best.unbind(dim=1)
        rel = torch.relu(top_hard - low_soft + self.m_rel)
        absolute = torch.relu(top_negative - low_hard + self.m_abs)
        absolute = torch.where(farthest.squeeze(1) > -2, absolute, 0.0)  # without negatives there is nothing to exceed
        return torch.where(is_open, rel + self.gamma * absolute, 0.0)


def listed_columns(chosen: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Columns (R, M) of the `chosen` (R, A) entries of each row, and which of them are filled (R, M).

    M is the largest of `count` (R, 1); shorter rows are filled up with column 0.
    """
    columns = torch.split(chosen.bool().nonzero()[:, 1], count.flatten().tolist())
    padded = pad_sequence(list(columns), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < count


def medians(values: Tensor, count: Tensor, kind: str) -> Tensor:
    """Median (R, 1) of the `count` (R, 1) smallest values of each row (R, M).

    Of an even number: the mean of the two middle values, or with kind "lower" the lower of them.
    """
    ordered = values.sort(dim=1).values
    lower = ordered.gather(1, (count - 1) // 2)
    return lower if kind == "lower" else (lower + ordered.gather(1, count // 2)) / 2
