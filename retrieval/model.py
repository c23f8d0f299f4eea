"""The hash model: a backbone and a linear hash layer."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from retrieval.backbones import build_backbone
from retrieval.codes import check_n_bits


class HashModel(nn.Module):
    """Normalised images (B, 3, H, W) -> real outputs (B, K), whose signs are the code.

    Args:
        backbone: a name in `BACKBONES`; it starts with random weights.
        n_bits: K, 1 to 1024.
        freeze_batch_norm: keep batch norm in evaluation mode while training (statistics as loaded). Needed where
            batch norm was folded into the weights, and for small batches.
    """

    def __init__(self, *, backbone: str, n_bits: int, freeze_batch_norm: bool = False) -> None:
        super().__init__()
        self.backbone_name = backbone
        self.n_bits = check_n_bits(n_bits)
        self.freeze_batch_norm = freeze_batch_norm
        self.backbone, self.n_features = build_backbone(backbone)
        self.head = nn.Linear(self.n_features, n_bits)

    def features(self, images: Tensor) -> Tensor:
        """Features (B, D) of normalised images (B, 3, H, W)."""
        features: Tensor = self.backbone(images)
        return features.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        """Outputs (B, K) of normalised images (B, 3, H, W); the hash layer always computes in float32."""
        features = self.features(images)
        with torch.autocast(features.device.type, enabled=False):
            outputs: Tensor = self.head(features.float())
        return outputs

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, except batch norm where it is frozen."""
        super().train(mode)
        if mode and self.freeze_batch_norm:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self
