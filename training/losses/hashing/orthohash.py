"""OrthoHash: one softmax over the cosines with fixed, nearly orthogonal binary centres."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.centres import CENTRES, SEED, make_centres
from hashseek.training.losses.hyperparameters import Choice, Flag, Number
from hashseek.training.losses.numerics import inner_products, logistic, mean_where, normalize


class OrthoHash(Loss):
    """Softmax over centres. With c_ij the cosine of output i and the centre of label j, and n_i the number of labels of
    row i:

        centre = - mean over labelled rows of sum over its labels j of
                 (1 / n_i) log softmax over all labels of (s (c_ij - m y_ij)), at j

    Centres are fixed vectors of -1 and 1, a buffer `centres` (C, K) that a checkpoint keeps. Put a batch norm after
    the hash layer, as the authors do: this is only the loss. It has no quantisation term. O(B C K).
    """

    source = "Hoe et al., One Loss for All: Deep Hashing with a Single Cosine Similarity, NeurIPS 2021"
    formula = "authors' code (kamwoh 94c4a03)"
    use = "fixed centres and one softmax, no quantisation weight to tune; few labels per image"
    needs = ("centres (fixed)", "batch norm after the hash layer")

    s: Annotated[float, Number("scale of the cosines", above=0)] = 8.0
    m: Annotated[float, Number("margin, for every label of a row", least=0, most=2)] = 0.2
    margin: Annotated[
        str, Choice('"cosine" subtracts m from the cosine, "arc" adds it to the angle, in radians', ("cosine", "arc"))
    ] = "cosine"
    bce: Annotated[
        bool, Flag("binary cross-entropy of the same scores, mean over all labels of labelled rows, not the softmax")
    ] = False
    centre_kind: Annotated[str, CENTRES, "centres"] = "bernoulli"
    seed: Annotated[int, SEED] = 0

    centres: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("centres", make_centres(self.centre_kind, self.n_classes, self.n_bits, seed=self.seed))

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "centre"."""
        z, labels = normalize(batch.outputs), batch.labels
        centres = normalize(self.centres.to(z.dtype))
        cosines = inner_products(z, centres)
        if self.margin == "arc":
            scores = self.s * torch.where(labels > 0, cosines_of_larger_angles(z, centres, cosines, self.m), cosines)
        else:
            scores = self.s * (cosines - self.m * labels)
        n_labels = labels.sum(dim=1, keepdim=True)
        labelled = n_labels.clamp(max=1)
        if self.bce:
            return {"centre": mean_where(logistic(scores, labels), labelled.expand_as(labels))}
        per_row = -(labels / n_labels.clamp_min(1) * torch.log_softmax(scores, dim=1)).sum(dim=1)
        return {"centre": mean_where(per_row, labelled[:, 0])}


def cosines_of_larger_angles(rows: Tensor, centres: Tensor, cosines: Tensor, angle: float) -> Tensor:
    """cos(angle between row and centre + `angle`), (B, C); rows and centres have length 1."""
    # The sine from distances: 1 - cos^2 is mostly rounding noise near 0 and pi, and its root has no gradient there.
    near = torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist")
    far = torch.cdist(rows, -centres, compute_mode="donot_use_mm_for_euclid_dist")
    # A row of zeros has no direction; its cosines are 0, so its sines are 1.
    sines = torch.where((rows.detach() != 0).any(dim=1, keepdim=True), near * far / 2, 1.0)
    return cosines * math.cos(angle) - sines * math.sin(angle)
