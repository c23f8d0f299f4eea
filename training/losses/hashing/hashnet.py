"""HashNet: similar and dissimilar pairs have the same total weight, and tanh becomes steeper during training."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hyperparameters import Choice, Flag, Number
from hashseek.training.losses.numerics import inner_products, jaccard, logistic, mean_where, share_label


class HashNet(Loss):
    """Balanced pair likelihood. With h = tanh(scale u), theta the inner product of two h, and S = 1 if the rows share a
    label:

        pairs = mean over ordered pairs with S = 1 of softplus(a theta) - a theta
              + mean over ordered pairs with S = 0 of softplus(a theta)

    The pairs of a row with itself count. With a memory, whose rows are outputs before tanh, the pairs are all of
    batch x memory. There is no quantisation term: the growing scale takes its place. O(B^2 (K + C)), with a memory
    O(B Q (K + C)).
    """

    source = "Cao et al., HashNet: Deep Learning to Hash by Continuation, ICCV 2017"
    formula = "authors' code (thuml 85387b8); DeepHash-pytorch ab14068"
    use = "where similar pairs are rare; tanh sharpens with the epochs in place of a quantisation term"
    memory_kind = "raw"

    a: Annotated[
        float,
        Number(
            "factor of theta; none: 10 / K as in the authors' code; 0.1 in DeepHash-pytorch",
            above=0,
            derived=lambda loss: 10 / loss.n_bits,
        ),
    ]
    continuation: Annotated[
        str,
        Choice(
            'scale of tanh: "epoch": sqrt(1 + epoch // 20) (DeepHash-pytorch); "iteration": sqrt(1 + 0.005 it), where '
            'it counts the training batches in a buffer, updated every 200 batches (authors); "none": 1',
            ("epoch", "iteration", "none"),
        ),
    ] = "epoch"
    jaccard: Annotated[
        bool, Flag("similar pairs weigh shared / joint labels, the paper's c_ij; the mean divides by their number")
    ] = False
    class_num: Annotated[
        float | None,
        Number(
            "weight of similar pairs, with 1 for others, in one weighted mean, as in the authors' code; none: the "
            "two means",
            above=0,
        ),
    ] = None

    iterations: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("iterations", torch.zeros((), dtype=torch.long))

    def scaled(self, outputs: Tensor, epoch: int) -> Tensor:
        """`outputs` times the scale of the given epoch or of the counted iterations."""
        if self.continuation == "epoch":
            return outputs * math.sqrt(1 + epoch // 20)
        if self.continuation == "iteration":
            updates = self.iterations.div(200, rounding_mode="floor").to(outputs)
            return outputs * torch.sqrt(1 + updates)  # 0.005 * 200 = 1
        return outputs

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "pairs"."""
        if self.training and self.continuation == "iteration":
            self.iterations += 1
        h, y = torch.tanh(self.scaled(batch.outputs, batch.epoch)), batch.labels
        ref, ref_y = h, y
        if batch.memory is not None:
            ref, ref_y = torch.tanh(self.scaled(batch.memory.ref, batch.epoch)), batch.memory.ref_y
        similar = share_label(y, ref_y)
        pairs = logistic(self.a * inner_products(h, ref), similar)
        if self.jaccard:
            overlaps = jaccard(y @ ref_y.T, y.sum(dim=1, keepdim=True), ref_y.sum(dim=1))
            pairs = pairs * (overlaps + (1 - similar))
        if self.class_num is None:
            return {"pairs": mean_where(pairs, similar) + mean_where(pairs, 1 - similar)}
        weights = 1 + (self.class_num - 1) * similar
        total = weights.sum()
        return {"pairs": (weights * pairs).sum() / torch.where(total > 0, total, 1.0)}
