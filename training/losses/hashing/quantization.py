"""Quantisation terms: how far outputs are from a code of -1 and 1, and a wrapper that adds one to any loss."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses.batches import raised
from hashseek.training.losses.hyperparameters import Choice, Number, check
from hashseek.training.losses.numerics import mean, normalize


def l1(outputs: Tensor) -> Tensor:
    """Mean of ||u| - 1| over the entries of outputs (B, K); DSH (Liu et al., CVPR 2016)."""
    return mean((outputs.abs() - 1).abs())


def l2(outputs: Tensor) -> Tensor:
    """Mean of (u - sgn u)^2, the sign without gradient and 0 at 0; DPSH (Li et al., IJCAI 2016)."""
    return mean((outputs - outputs.detach().sign()).square())


def logcosh(outputs: Tensor) -> Tensor:
    """Mean of log cosh(|u| - 1), a smooth `l1`; DHN (Zhu et al., AAAI 2016)."""
    away = (outputs.abs() - 1).abs()
    return mean(away - math.log(2) - F.logsigmoid(2 * away))  # log cosh a = a + log(1 + exp(-2 a)) - log 2


def cos(outputs: Tensor) -> Tensor:
    """Mean over rows of 1 - cos(u, sgn u), the sign without gradient and 0 at 0; OrthoHash (NeurIPS 2021)."""
    return mean(1 - (normalize(outputs) * normalize(outputs.detach().sign())).sum(dim=1))


def square(outputs: Tensor) -> Tensor:
    """Mean of (|u| - 1)^2: like `l2`, but an output of exactly 0 counts as 1; the TensorFlow code of DHN."""
    return mean((outputs.abs() - 1).square())


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": l1,
    "l2": l2,
    "logcosh": logcosh,
    "cos": cos,
    "square": square,
}


class Quantized(nn.Module):
    """A loss plus a quantisation term, `quantization = weight * QUANTIZERS[kind](outputs)`. O(B K).

    If the loss already has a term with that name, the two are added.

    Args:
        loss: any loss.
        kind: a key of `QUANTIZERS`.
        weight: weight of the term.

    Raises:
        BadConfig: unknown kind, or weight < 0.
    """

    def __init__(self, loss: nn.Module, *, kind: str, weight: float) -> None:
        super().__init__()
        check("quantization.kind", kind, Choice("the term", tuple(QUANTIZERS)))
        check("quantization.weight", weight, Number("its weight", least=0))
        self.loss = loss
        self.kind = kind
        self.weight = weight

    def forward(self, outputs: Tensor, labels: Tensor, **given: Any) -> dict[str, Tensor]:
        """The terms of the loss, and "quantization"; see `Loss.forward`."""
        terms: dict[str, Tensor] = dict(self.loss(outputs, labels, **given))
        with torch.autocast(outputs.device.type, enabled=False):
            term = self.weight * QUANTIZERS[self.kind](raised(outputs))
            if not torch.compiler.is_compiling() and not bool(torch.isfinite(term)):
                # A loss that reads the logits has not looked at the outputs.
                raise BadCodes("the outputs have NaN or infinity: lower the learning rate")
            terms["quantization"] = terms["quantization"] + term if "quantization" in terms else term
        return terms
