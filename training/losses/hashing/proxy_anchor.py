"""Proxy Anchor: every label's proxy pulls its hardest positives and pushes its hardest negatives."""

from typing import Annotated, Any

from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.centres import new_proxies
from hashseek.training.losses.hyperparameters import Number
from hashseek.training.losses.numerics import inner_products, log_one_plus_sum_exp, normalize


class ProxyAnchor(Loss):
    """Proxy Anchor. With c_ij the cosine of output i and proxy j:

        positive = mean over labels j that some row has of log(1 + sum over rows i with label j of
                   exp(-alpha (c_ij - delta)))
        negative = mean over all labels j of log(1 + sum over rows i without label j of exp(alpha (c_ij + delta)))

    The authors have one label per row; here a row is positive for each of its labels. O(B C K).
    """

    source = "Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020"
    formula = "Eq. 4; authors' code (tjddus9597 51db570)"
    use = "learned proxies that focus on their hardest images; made for one label per image"
    needs = ("proxies (learned)",)

    alpha: Annotated[float, Number("scale of the exponents", above=0)] = 32.0
    delta: Annotated[float, Number("margin between cosines")] = 0.1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.proxies = new_proxies(self.n_classes, self.n_bits)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "positive" and "negative"."""
        cosines = inner_products(normalize(batch.outputs), normalize(self.proxies.to(batch.outputs.dtype)))
        has_label = batch.labels > 0
        pull = log_one_plus_sum_exp(-self.alpha * (cosines - self.delta), has_label, dim=0)
        push = log_one_plus_sum_exp(self.alpha * (cosines + self.delta), ~has_label, dim=0)
        n_present = has_label.any(dim=0).sum().clamp_min(1)
        return {"positive": pull.sum() / n_present, "negative": push.sum() / self.n_classes}
