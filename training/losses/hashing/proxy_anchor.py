"""Proxy Anchor: every label's proxy pulls its hardest positives and pushes its hardest negatives."""

import torch
from torch import Tensor, nn

from hashseek.training.losses.common import (
    check_batch,
    check_number,
    check_positive,
    check_sizes,
    inner_products,
    log_one_plus_sum_exp,
    normalize,
)


class ProxyAnchor(nn.Module):
    """Proxy Anchor loss (Kim et al., "Proxy Anchor Loss for Deep Metric Learning", CVPR 2020, Eq. 4).

    With c_ij the cosine of output i and proxy j:

        positive = mean over labels j that some row has of log(1 + sum over rows i with label j of
                   exp(-alpha (c_ij - delta)))
        negative = mean over all labels j of log(1 + sum over rows i without label j of exp(alpha (c_ij + delta)))

    The authors have one label a row; here a row is positive for each of its labels. O(B C K).

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        alpha: scale of the exponents.
        delta: margin.

    Raises:
        BadConfig: alpha <= 0, or delta that is not a number.
    """

    def __init__(self, *, n_classes: int, n_bits: int, alpha: float = 32.0, delta: float = 0.1) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_positive("alpha", alpha, "scales the exponents", "32")
        check_number("delta", delta, "is a margin between cosines")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.alpha = alpha
        self.delta = delta
        self.proxies = nn.Parameter(torch.empty(n_classes, n_bits))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,  # noqa: ARG002
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"positive", "negative"} of outputs (B, K) with labels (B, C).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, labels = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            cosines = inner_products(normalize(outputs), normalize(self.proxies.to(outputs.dtype)))
            positive = labels > 0
            pull = log_one_plus_sum_exp(-self.alpha * (cosines - self.delta), positive, dim=0)
            push = log_one_plus_sum_exp(self.alpha * (cosines + self.delta), ~positive, dim=0)
            n_present = positive.any(dim=0).sum().clamp_min(1)
            return {"positive": pull.sum() / n_present, "negative": push.sum() / self.n_classes}
