"""HashNet: similar and other pairs weigh the same in total, and tanh grows steeper as training goes on."""

import math

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_batch,
    check_choice,
    check_flag,
    check_positive,
    check_sizes,
    inner_products,
    logistic,
    mean_where,
    memory_rows,
    share_label,
)

CONTINUATIONS = ("epoch", "iteration", "none")


class HashNet(nn.Module):
    """HashNet loss (Cao et al., "HashNet: Deep Learning to Hash by Continuation", ICCV 2017).

    With h = tanh(scale u), theta the inner product of two h, and S = 1 if the rows share a label:

        pairs = mean over ordered pairs with S = 1 of softplus(a theta) - a theta
              + mean over ordered pairs with S = 0 of softplus(a theta)

    The pairs of a row with itself count. With a memory, whose rows are outputs before tanh, the pairs are all of
    batch x memory. There is no quantisation term: the continuation takes its place. O(B^2 (K + C)), with a memory
    O(B Q (K + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        a: factor of theta; None takes 10 / K as in the authors' code, 0.1 in DeepHash-pytorch.
        continuation: scale of tanh. "epoch" takes sqrt(1 + epoch // 20) from the `epoch` that is passed
            (DeepHash-pytorch); "iteration" counts the batches seen in training mode, in a buffer, and takes
            sqrt(1 + 0.005 it), refreshed at every 200th of them (the authors); "none" takes 1.
        jaccard: similar pairs weigh shared / joint labels, the c_ij of the paper; the mean still divides by
            their number.
        class_num: similar pairs weigh this much and the others 1 in one weighted mean, as in the authors' code; None
            takes the two means.

    Raises:
        BadConfig: a <= 0, class_num <= 0, or an unknown continuation.
    """

    iterations: Tensor

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        a: float | None = None,
        continuation: str = "epoch",
        jaccard: bool = False,
        class_num: float | None = None,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        if a is None:
            a = 10 / n_bits
        check_positive("a", a, "multiplies the inner products", "10 / K")
        check_choice("continuation", continuation, CONTINUATIONS)
        check_flag("jaccard", jaccard)
        if class_num is not None:
            check_positive("class_num", class_num, "weighs similar pairs", "the number of labels")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.a = a
        self.continuation = continuation
        self.jaccard = jaccard
        self.class_num = class_num
        self.register_buffer("iterations", torch.zeros((), dtype=torch.long))

    def scaled(self, outputs: Tensor, epoch: int) -> Tensor:
        """`outputs` times the scale of the given epoch or of the counted iterations."""
        if self.continuation == "epoch":
            return outputs * math.sqrt(1 + epoch // 20)
        if self.continuation == "iteration":
            refreshed = self.iterations.div(200, rounding_mode="floor").to(outputs)
            return outputs * torch.sqrt(1 + refreshed)  # 0.005 * 200 = 1
        return outputs

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,
    ) -> dict[str, Tensor]:
        """Term {"pairs"} of outputs (B, K) with labels (B, C), against `memory` if given.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            rows = memory_rows(memory, outputs, n_classes=self.n_classes, n_bits=self.n_bits)
            if self.training and self.continuation == "iteration":
                self.iterations += 1
            h = torch.tanh(self.scaled(outputs, epoch))
            ref, ref_y = (h, labels) if rows is None else (torch.tanh(self.scaled(rows[0], epoch)), rows[1])
            similar = share_label(labels, ref_y)
            pairs = logistic(self.a * inner_products(h, ref), similar)
            if self.jaccard:
                shared = labels @ ref_y.T
                joint = labels.sum(dim=1)[:, None] + ref_y.sum(dim=1) - shared
                pairs = pairs * (shared / joint.clamp_min(1) + (1 - similar))
            if self.class_num is None:
                return {"pairs": mean_where(pairs, similar) + mean_where(pairs, 1 - similar)}
            weights = 1 + (self.class_num - 1) * similar
            total = weights.sum()
            return {"pairs": (weights * pairs).sum() / torch.where(total > 0, total, 1.0)}
