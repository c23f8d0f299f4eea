"""The hash model: a backbone and a head. Training, checkpoints and the encoder use it."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hashseek.retrieval.codes import check_n_bits
from hashseek.retrieval.errors import BadConfig, first_line
from hashseek.retrieval.models.backbones import build_backbone, default_preprocessing
from hashseek.retrieval.models.heads import build_head


class HashModel(nn.Module):
    """Normalised images (B, 3, H, W), or vectors (B, n), -> real outputs (B, K), whose signs are the code.

    Args:
        backbone: a name that `build_backbone` knows; it starts with random weights.
        n_bits: K, 1 to 1024.
        head: a name that `build_head` knows.
        freeze_batch_norm: keep the backbone's batch norm in evaluation mode while training (statistics as loaded).
            Needed where batch norm was folded into the weights, and for small batches.
    """

    def __init__(self, *, backbone: str, n_bits: int, head: str = "linear", freeze_batch_norm: bool = False) -> None:
        super().__init__()
        self.backbone_name = backbone
        self.head_name = head
        self.n_bits = check_n_bits(n_bits)
        self.freeze_batch_norm = freeze_batch_norm
        self.backbone, self.n_features = build_backbone(backbone)
        self.head = build_head(head, n_features=self.n_features, n_bits=n_bits)

    def features(self, inputs: Tensor) -> Tensor:
        """Features (B, D) of normalised images (B, 3, H, W), or of vectors (B, n)."""
        features: Tensor = self.backbone(inputs)
        return features.flatten(1)

    def outputs(self, features: Tensor) -> Tensor:
        """Outputs (B, K) of features (B, D); the head always computes in float32."""
        with torch.autocast(features.device.type, enabled=False):
            outputs: Tensor = self.head(features.float())
        return outputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs (B, K) of normalised images (B, 3, H, W), or of vectors (B, n)."""
        return self.outputs(self.features(inputs))

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, except the backbone's batch norm where it is frozen."""
        super().train(mode)
        if mode and self.freeze_batch_norm:
            for module in self.backbone.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def check_input_size(self, size: int) -> None:
        """Pass one image of `size` x `size` pixels through the backbone, to check early that it accepts that size.

        Raises:
            BadConfig: the backbone does not accept images of that size, or does not return one vector per image.
        """
        default = default_preprocessing(self.backbone_name)
        if default is None:
            raise BadConfig(f"the backbone {self.backbone_name} is for vectors, not images: choose one for images")
        was_training = self.training
        try:
            with torch.inference_mode():
                image = torch.zeros(1, 3, size, size, device=next(self.parameters()).device)
                width = self.eval().features(image).shape[1]
        except Exception as error:  # a network from outside may raise anything
            raise BadConfig(
                f"the backbone {self.backbone_name} does not accept images of {size} x {size} pixels "
                f"({first_line(error)}): set model.size = {default.size}, the size that its weights were trained with"
            ) from None
        finally:
            self.train(was_training)
        if width != self.n_features:
            raise BadConfig(
                f"the backbone {self.backbone_name} returns {width} numbers for an image of {size} x {size} pixels, "
                f"not {self.n_features}: choose a network that pools its features"
            )
