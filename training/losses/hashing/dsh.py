"""DSH: pull similar outputs together, push others a margin apart, and keep entries near -1 and 1."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_flag,
    check_positive,
    check_sizes,
    mean,
    mean_where,
    memory_rows,
    share_label,
)
from hashseek.training.losses.hashing.quantization import l1


class DSH(nn.Module):
    """DSH loss (Liu et al., "Deep Supervised Hashing for Fast Image Retrieval", CVPR 2016).

    With d the squared Euclidean distance of two outputs and S = 1 if they share a label:

        pairs        = mean over pairs i < k of (S d + (1 - S) relu(m - d)) / 2
        quantization = alpha * mean over rows of sum over bits of ||u| - 1|

    With a memory, the pairs are all of batch x memory. O(B^2 K), with a memory O(B Q K).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        m: margin of the squared distance; None takes 2 K, as the authors do.
        alpha: weight of the quantisation; None takes 0.01 (the authors), with `dense` 0.1.
        dense: the form of DeepHash-pytorch: the mean over all ordered pairs, those of a row with itself included, and
            the quantisation is a mean over entries, not a sum over bits.

    Raises:
        BadConfig: m <= 0 or alpha < 0.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        m: float | None = None,
        alpha: float | None = None,
        dense: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_flag("dense", dense)
        if m is None:
            m = 2 * n_bits
        if alpha is None:
            alpha = 0.1 if dense else 0.01
        check_positive("m", m, "is a squared distance", "2 K")
        check_at_least("alpha", alpha, 0, "weighs the quantisation")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.m = m
        self.alpha = alpha
        self.dense = dense

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"pairs", "quantization"} of outputs (B, K) with labels (B, C), against `memory` if given.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            rows = memory_rows(memory, outputs, n_classes=self.n_classes, n_bits=self.n_bits)
            ref, ref_y = (outputs, labels) if rows is None else rows
            # Not by way of the inner products: those lose the distance of two long rows that are close together.
            distance = torch.cdist(outputs, ref, compute_mode="donot_use_mm_for_euclid_dist").square()
            apart = torch.relu(self.m - distance)
            pairs = torch.where(share_label(labels, ref_y) > 0, distance, apart) / 2
            if rows is None and not self.dense:
                other = 1 - torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)
                mean_pair = mean_where(pairs, other)  # symmetric: the same as the mean over i < k
            else:
                mean_pair = mean(pairs)
            per_row = 1 if self.dense else self.n_bits
            return {"pairs": mean_pair, "quantization": self.alpha * per_row * l1(outputs)}
