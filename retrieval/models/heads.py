"""Heads: features (B, D) -> outputs (B, K).

linear      one linear layer, the usual hash layer
linear_bn   a linear layer and batch norm, which centres every bit: each is 1 for about half of the images
mlp         D -> D -> ReLU -> K, the projection head of contrastive learning (Chen et al., SimCLR, 2020)
mlp:1024    the same with 1024 hidden units
normalized  features divided by their length, then a linear layer: what `hashseek.retrieval.hash_layers` fits
"""

import torch
from torch import Tensor, nn

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.hash_layers import HashLayer
from hashseek.retrieval.models import MAX_WIDTH
from hashseek.retrieval.models.mlp import BatchNorm


class Normalized(nn.Linear):
    """A linear layer on features of length 1."""

    def forward(self, input: Tensor) -> Tensor:
        """Outputs (B, K) of features (B, D)."""
        return super().forward(torch.nn.functional.normalize(input, dim=1))


def build_head(name: str, *, n_features: int, n_bits: int) -> nn.Module:
    """The head `name` from `n_features` (D) to `n_bits` (K).

    Raises:
        BadConfig: there is no head of that name.
    """
    kind, colon, hidden = name.partition(":")
    if name == "linear":
        return nn.Linear(n_features, n_bits)
    if name == "normalized":
        return Normalized(n_features, n_bits)
    if name == "linear_bn":
        return nn.Sequential(nn.Linear(n_features, n_bits), BatchNorm(n_bits))
    if kind == "mlp" and (not colon or (hidden.isdecimal() and 1 <= int(hidden) <= MAX_WIDTH)):
        width = int(hidden) if colon else n_features
        return nn.Sequential(nn.Linear(n_features, width), nn.ReLU(), nn.Linear(width, n_bits))
    raise BadConfig(
        f"there is no head {name!r}: use linear, normalized, linear_bn, mlp or mlp:WIDTH (1 to {MAX_WIDTH:,})"
    )


def fill_head(head: nn.Module, layer: HashLayer) -> None:
    """Copy a fitted hash layer into a head `linear` or `normalized`."""
    head.load_state_dict({"weight": torch.from_numpy(layer.weight), "bias": torch.from_numpy(layer.bias)})
