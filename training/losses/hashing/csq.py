"""CSQ: every row is drawn to one fixed binary centre, the majority of the centres of its labels."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_sizes,
    logistic,
    make_centres,
    mean_where,
    random_signs,
)


class CSQ(nn.Module):
    """CSQ loss (Yuan et al., "Central Similarity Quantization for Efficient Image and Video Retrieval", CVPR 2020).

    Every label has a fixed centre of -1 and 1. The target t of a row is, bit by bit, the sign of the sum of the
    centres of its labels; a bit with as many of one as of the other takes the value of one fixed random vector.

        centre       = mean over entries of labelled rows of the binary cross-entropy of sigmoid(2 u), that is
                       (1 + tanh u) / 2, with (t + 1) / 2
        quantization = lam * mean over the same entries of (|tanh u| - 1)^2

    O(B C K).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        lam: weight of the quantisation; 1e-4 in DeepHash-pytorch, 0.05 in the authors' code (which also adds a
            pairwise term that is left out here).
        centres: "auto", "hadamard", "balanced" or "bernoulli", see `make_centres`. Hadamard needs K to be a power
            of 2; "auto" takes it there and balanced random centres elsewhere.
        seed: fixes the random centres and the tie vector. Both are buffers (`centres` (C, K), `tie` (K,)), so a
            checkpoint keeps them.

    Raises:
        BadConfig: lam < 0, unknown centres, Hadamard for another K, or a seed that is not a whole number from 0.
    """

    centres: Tensor
    tie: Tensor

    def __init__(self, *, n_classes: int, n_bits: int, lam: float = 1e-4, centres: str = "auto", seed: int = 0) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("lam", lam, 0, "weighs the quantisation")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.lam = lam
        self.register_buffer("centres", make_centres(centres, n_classes=n_classes, n_bits=n_bits, seed=seed))
        self.register_buffer("tie", random_signs(n_bits, seed=seed))

    def targets(self, labels: Tensor) -> Tensor:
        """Majority centres (B, K) of -1 and 1 for labels (B, C); the tie vector for a row without labels."""
        votes = labels @ self.centres.to(labels.dtype)  # whole numbers: a tie is exactly 0
        return torch.where(votes == 0, self.tie.to(labels.dtype), votes.sign())

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,  # noqa: ARG002
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"centre", "quantization"} of outputs (B, K) with labels (B, C).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            labelled = labels.sum(dim=1, keepdim=True).clamp_(max=1).expand_as(outputs)
            centre = logistic(2 * outputs, (self.targets(labels) + 1) / 2)
            away = (torch.tanh(outputs).abs() - 1).square()
            return {
                "centre": mean_where(centre, labelled),
                "quantization": self.lam * mean_where(away, labelled),
            }
