"""DPSH: the likelihood of pairwise similarity under inner products, and outputs near their signs."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_sizes,
    inner_products,
    logistic,
    mean,
    memory_rows,
    share_label,
)
from hashseek.training.losses.hashing.quantization import l2


class DPSH(nn.Module):
    """DPSH loss (Li et al., "Feature Learning based Deep Supervised Hashing with Pairwise Labels", IJCAI 2016).

    With theta the inner product of two outputs and S = 1 if they share a label:

        pairs        = mean over ordered pairs, those of a row with itself included, of
                       softplus(theta / 2) - S theta / 2
        quantization = eta * mean over entries of (u - sgn u)^2

    With a memory, the pairs are all of batch x memory. O(B^2 (K + C)), with a memory O(B Q (K + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        eta: weight of the quantisation; 0.1 as in DeepHash-pytorch. The authors' 50, which they divide by the size of
            their training set, is eta = 50 K / (images in the training set).

    Raises:
        BadConfig: eta < 0.
    """

    def __init__(self, *, n_classes: int, n_bits: int, eta: float = 0.1) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("eta", eta, 0, "weighs the quantisation")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.eta = eta

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
            pairs = mean(logistic(inner_products(outputs, ref) / 2, share_label(labels, ref_y)))
            return {"pairs": pairs, "quantization": self.eta * l2(outputs)}
