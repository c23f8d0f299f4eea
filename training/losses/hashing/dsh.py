"""DSH: pull similar outputs together, push others a margin apart, and keep entries near -1 and 1."""

from typing import Annotated

import torch
from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.quantization import l1
from hashseek.training.losses.hyperparameters import Flag, Number
from hashseek.training.losses.numerics import mean, mean_where, share_label


class DSH(Loss):
    """Margin on distances. With d the squared Euclidean distance of two outputs and S = 1 if they share a label:

        pairs        = mean over pairs i < k of (S d + (1 - S) relu(m - d)) / 2
        quantization = alpha * mean over rows of sum over bits of ||u| - 1|

    With a memory, the pairs are all of batch x memory. O(B^2 K), with a memory O(B Q K).
    """

    source = "Liu et al., Deep Supervised Hashing for Fast Image Retrieval, CVPR 2016"
    formula = "authors' Caffe code (lhmRyan 631901f, read); dense: DeepHash-pytorch ab14068"
    use = "baseline on distances of pairs: similar ones together, others a margin apart"
    memory_kind = "raw"

    m: Annotated[
        float,
        Number(
            "margin of the squared distance; none: 2 K, as in the authors' code",
            above=0,
            derived=lambda loss: 2 * loss.n_bits,
        ),
    ]
    alpha: Annotated[
        float,
        Number(
            "weight of the quantisation; none: 0.01 (authors), or 0.1 if dense",
            least=0,
            derived=lambda loss: 0.1 if loss.dense else 0.01,
        ),
    ]
    dense: Annotated[
        bool,
        Flag(
            "the form of DeepHash-pytorch: mean over all ordered pairs, those of a row with itself included, and "
            "the quantisation is a mean over entries"
        ),
    ] = False

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "pairs" and "quantization"."""
        outputs = batch.outputs
        ref, ref_y = batch.others
        # Not from the inner products: those lose the distance of two long rows that are close together.
        distance = torch.cdist(outputs, ref, compute_mode="donot_use_mm_for_euclid_dist").square()
        apart = torch.relu(self.m - distance)
        pairs = torch.where(share_label(batch.labels, ref_y) > 0, distance, apart) / 2
        if batch.memory is None and not self.dense:
            other = torch.ones_like(pairs).fill_diagonal_(0)
            mean_pair = mean_where(pairs, other)  # symmetric: the same as the mean over i < k
        else:
            mean_pair = mean(pairs)
        per_row = 1 if self.dense else self.n_bits
        return {"pairs": mean_pair, "quantization": self.alpha * per_row * l1(outputs)}
