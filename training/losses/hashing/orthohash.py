"""OrthoHash: one softmax over the cosines with fixed, nearly orthogonal binary centres."""

import math

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_batch,
    check_between,
    check_choice,
    check_flag,
    check_positive,
    check_sizes,
    inner_products,
    logistic,
    make_centres,
    mean_where,
    normalize,
)


class OrthoHash(nn.Module):
    """OrthoHash loss (Hoe et al., "One Loss for All: Deep Hashing with a Single Cosine Similarity based Learning
    Objective", NeurIPS 2021; code kamwoh 94c4a03).

    With c_ij the cosine of output i and the centre of label j, and n_i the number of labels of row i:

        centre = - mean over labelled rows of sum over its labels j of
                 (1 / n_i) log softmax over all labels of (s (c_ij - m y_ij)), at j

    Centres are fixed vectors of -1 and 1. Put a batch norm behind the hash layer, as the authors do: this is the
    loss only. It has no quantisation term. O(B C K).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        s: scale of the cosines.
        m: margin, on every label of a row; with `margin = "arc"` an angle in radians.
        margin: "cosine" subtracts m from the cosine, "arc" adds it to the angle.
        bce: binary cross-entropy of the same scores, mean over all labels of labelled rows, in place of the softmax.
        centres: "bernoulli" as the authors', or "auto", "hadamard", "balanced", see `make_centres`.
        seed: fixes the random centres. They are a buffer (`centres` (C, K)), so a checkpoint keeps them.

    Raises:
        BadConfig: s <= 0, m outside [0, 2], unknown margin or centres, Hadamard for a K that is no power of 2, or a
            seed that is not a whole number from 0.
    """

    centres: Tensor

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        s: float = 8.0,
        m: float = 0.2,
        margin: str = "cosine",
        bce: bool = False,
        centres: str = "bernoulli",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_positive("s", s, "scales the cosines", "8")
        check_between("m", m, 0, 2, "is a margin between cosines or angles")
        check_choice("margin", margin, ("cosine", "arc"))
        check_flag("bce", bce)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.s = s
        self.m = m
        self.margin = margin
        self.bce = bce
        self.register_buffer("centres", make_centres(centres, n_classes=n_classes, n_bits=n_bits, seed=seed))

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,  # noqa: ARG002
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Term {"centre"} of outputs (B, K) with labels (B, C).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            z, centres = normalize(outputs), normalize(self.centres.to(outputs.dtype))
            cosines = inner_products(z, centres)
            if self.margin == "arc":
                scores = self.s * torch.where(labels > 0, turned(z, centres, cosines, self.m), cosines)
            else:
                scores = self.s * (cosines - self.m * labels)
            n_labels = labels.sum(dim=1, keepdim=True)
            if self.bce:
                return {"centre": mean_where(logistic(scores, labels), n_labels.clamp(max=1).expand_as(labels))}
            per_row = -(labels / n_labels.clamp_min(1) * torch.log_softmax(scores, dim=1)).sum(dim=1)
            return {"centre": mean_where(per_row, n_labels[:, 0].clamp(max=1))}


def turned(rows: Tensor, centres: Tensor, cosines: Tensor, angle: float) -> Tensor:
    """cos(angle between row and centre + `angle`), (B, C); rows and centres have unit length."""
    # The sine by way of distances: 1 - cos^2 is mostly noise near the poles, and its root has no gradient there.
    near = torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist")
    far = torch.cdist(rows, -centres, compute_mode="donot_use_mm_for_euclid_dist")
    # A row of zeros has no length; its cosines are 0, so its sines are 1.
    sines = torch.where((rows.detach() != 0).any(dim=1, keepdim=True), near * far / 2, 1.0)
    return cosines * math.cos(angle) - sines * math.sin(angle)
