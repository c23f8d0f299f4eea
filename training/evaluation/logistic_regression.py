"""Logistic regression on frozen features, one for each label, all labels at once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hashseek.retrieval.errors import BadCodes


@dataclass(frozen=True)
class Probe:
    """Logits of C labels: ((features - shift) / scale) @ weight + bias.

    weight (D, C), bias (C,), shift (D,), scale 0-dim.
    """

    weight: Tensor
    bias: Tensor
    shift: Tensor
    scale: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Logits (n, C) of features (n, D)."""
        return (features - self.shift) / self.scale @ self.weight + self.bias

    def probabilities(self, features: Tensor) -> Tensor:
        """Probabilities (n, C) of features (n, D)."""
        return torch.sigmoid(self.logits(features))


def fit_probe(
    features: Tensor,
    labels: Tensor,
    *,
    weight_decay: float,
    start: Probe | None = None,
    max_iterations: int = 100,
    tolerance: float = 1e-7,
) -> Probe:
    """Fit C logistic regressions to features (n, D) and labels (n, C) by full-batch L-BFGS.

    For every label this minimises mean BCE + weight_decay / 2 * |weight|^2 (the bias is free) on features that are
    centred and divided by a single number, their mean standard deviation, so that `weight_decay` does not depend on the
    scale of the features. It equals scikit-learn's LogisticRegression with C = 1 / (n weight_decay). The problem is
    convex and nothing is random: the same input always yields the same probe.

    Args:
        features: (n, D), float32 or float64.
        labels: (n, C), 0/1.
        weight_decay: strength of the penalty, the same for all labels.
        start: a probe of the same features and labels to start from, such as the one with the next larger weight_decay.
        max_iterations: largest number of iterations of L-BFGS.
        tolerance: stop when a step changes the objective by less than this. At the default, probabilities are accurate
            to about 1e-3.

    Raises:
        BadCodes: features are NaN or infinite.
    """
    if not features.isfinite().all():
        raise BadCodes("the features for a probe contain NaN or infinity: check the checkpoint and the data")
    features, y = features.detach(), labels.to(features.dtype)
    shift = features.mean(dim=0)
    scale = features.std(dim=0, correction=0).mean().clamp_min(1e-12)
    x = (features - shift) / scale
    weight = torch.zeros(x.shape[1], y.shape[1], dtype=x.dtype) if start is None else start.weight.clone()
    bias = torch.zeros(y.shape[1], dtype=x.dtype) if start is None else start.bias.clone()
    weight.requires_grad_()
    bias.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=max_iterations, tolerance_change=tolerance, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x @ weight + bias, y, reduction="sum") / len(x)
        total = loss + weight_decay / 2 * weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return Probe(weight.detach(), bias.detach(), shift, scale)
