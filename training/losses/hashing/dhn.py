"""DHN: as DPSH, with a smooth quantiser and, on request, the choices of the authors' TensorFlow code."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_choice,
    check_flag,
    check_positive,
    check_sizes,
    inner_products,
    logistic,
    mean,
    memory_rows,
    normalize,
    share_label,
)
from hashseek.training.losses.hashing.quantization import QUANTIZERS


class DHN(nn.Module):
    """DHN loss (Zhu et al., "Deep Hashing Network for Efficient Similarity Retrieval", AAAI 2016).

    With theta the inner product of two outputs and S = 1 if they share a label:

        pairs        = mean over ordered pairs, those of a row with itself included, of
                       softplus(inner theta) - S inner theta
        quantization = lam * mean over entries of log cosh(|u| - 1)

    With a memory, the pairs are all of batch x memory. O(B^2 (K + C)), with a memory O(B Q (K + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        lam: weight of the quantisation.
        inner: factor of theta; 0.5 as in both published codes, 1 as in the paper.
        quantizer: "logcosh", or another of `QUANTIZERS`; "square" in the authors' TensorFlow code.
        normed: theta is the cosine, the TensorFlow code's default.
        clip: theta is cut to [-clip, clip], 15 in the TensorFlow code where it is not `normed`; None cuts nothing.
        balance: similar pairs weigh (all pairs) / (similar pairs), as in the TensorFlow code.

    Raises:
        BadConfig: lam < 0, inner <= 0, clip <= 0, or an unknown quantizer.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        lam: float = 0.1,
        inner: float = 0.5,
        quantizer: str = "logcosh",
        normed: bool = False,
        clip: float | None = None,
        balance: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("lam", lam, 0, "weighs the quantisation")
        check_positive("inner", inner, "multiplies the inner products", "0.5")
        check_choice("quantizer", quantizer, QUANTIZERS)
        check_flag("normed", normed)
        check_flag("balance", balance)
        if clip is not None:
            check_positive("clip", clip, "limits the inner products", "15")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.lam = lam
        self.inner = inner
        self.quantizer = quantizer
        self.normed = normed
        self.clip = clip
        self.balance = balance

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
            theta = inner_products(normalize(outputs), normalize(ref)) if self.normed else inner_products(outputs, ref)
            if self.clip is not None:
                theta = theta.clamp(-self.clip, self.clip)
            similar = share_label(labels, ref_y)
            pairs = logistic(self.inner * theta, similar)
            if self.balance:
                heavier = similar.numel() / similar.sum().clamp_min(1)
                pairs = pairs * (1 + (heavier - 1) * similar)
            return {"pairs": mean(pairs), "quantization": self.lam * QUANTIZERS[self.quantizer](outputs)}
