"""Backbones for vectors: fully connected layers over standardised inputs.

`mlp:294-512-512` has 294 inputs and two hidden layers of 512; `mlp_bn:294-512-512` has batch norm before each
ReLU. `mlp:294` has no hidden layer: the features are the vectors.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.names import MLP_BN, widths_of


class BatchNorm(nn.BatchNorm1d):
    """Batch norm of (B, D) that uses its running statistics for a batch of one."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalised (B, D)."""
        if self.training and len(inputs) == 1:
            return F.batch_norm(inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(inputs)


class Mlp(nn.Module):
    """Vectors (B, n_inputs) -> features (B, widths[-1]), or the vectors themselves without widths.

    Args:
        n_inputs: length of a vector.
        widths: widths of the hidden layers, each followed by a ReLU.
        batch_norm: normalise before each ReLU.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, n_inputs: int, widths: tuple[int, ...], *, batch_norm: bool = False) -> None:
        super().__init__()
        self.n_inputs = n_inputs
        self.register_buffer("mean", torch.zeros(n_inputs))
        self.register_buffer("std", torch.ones(n_inputs))
        layers: list[nn.Module] = []
        for before, width in zip((n_inputs, *widths), widths, strict=False):
            layers += [nn.Linear(before, width), *([BatchNorm(width)] if batch_norm else []), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def standardize(self, mean: Tensor, std: Tensor) -> None:
        """From now on subtract `mean` (n_inputs,) from the input and divide it by `std` (n_inputs,).

        An input that never changes (std 0) is only shifted.
        """
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 0, std, torch.ones_like(std)))

    def forward(self, vectors: Tensor) -> Tensor:
        """Features (B, widths[-1]) of vectors (B, n_inputs)."""
        if vectors.dim() != 2 or vectors.shape[1] != self.n_inputs:
            raise BadConfig(
                f"this model expects vectors of {self.n_inputs} numbers, got input of shape {tuple(vectors.shape)}: "
                "use a backbone with the width of the data, mlp:WIDTH-..."
            )
        features: Tensor = self.layers((vectors.float() - self.mean) / self.std)
        return features


def build(name: str) -> tuple[Mlp, int]:
    """The backbone `name`, such as mlp:294-512-512, and the width of its features.

    Raises:
        BadConfig: the widths are not whole numbers from 1 to 100,000.
    """
    widths = widths_of(name)
    return Mlp(widths[0], tuple(widths[1:]), batch_norm=name.startswith(MLP_BN)), widths[-1]
