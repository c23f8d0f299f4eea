"""Backbones: name -> function giving (module, feature width), with the input each was made for.

A backbone maps normalised images (B, 3, H, W) to features (B, D). It is the torchvision network without its last
layer, so that torchvision's own state dicts load by their own names.
"""

from collections.abc import Callable

import torch
from torch import nn
from torchvision import models

from retrieval.errors import BadConfig
from retrieval.images import Preprocessing

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


def _without_fc(network: nn.Module) -> tuple[nn.Module, int]:
    width = int(network.fc.in_features)  # type: ignore[union-attr, arg-type]
    network.fc = nn.Identity()
    return network, width


def alexnet() -> tuple[nn.Module, int]:
    """AlexNet up to fc7 (Krizhevsky, 2014); 4096 features."""
    network = models.alexnet(weights=None)
    network.classifier[6] = nn.Identity()
    return network, 4096


def googlenet() -> tuple[nn.Module, int]:
    """GoogLeNet (Szegedy et al., 2015) without auxiliary heads; 1024 features."""
    # transform_input would renormalise ImageNet statistics to mean = std = 0.5; our preprocessing says so directly.
    return _without_fc(models.googlenet(weights=None, aux_logits=False, transform_input=False, init_weights=True))


def inception_v3() -> tuple[nn.Module, int]:
    """Inception v3 (Szegedy et al., 2016) without auxiliary head; 2048 features."""
    return _without_fc(models.inception_v3(weights=None, aux_logits=False, transform_input=False, init_weights=True))


def resnet18() -> tuple[nn.Module, int]:
    """ResNet-18 (He et al., 2016); 512 features."""
    return _without_fc(models.resnet18(weights=None))


def resnet50() -> tuple[nn.Module, int]:
    """ResNet-50 (He et al., 2016); 2048 features."""
    return _without_fc(models.resnet50(weights=None))


def resnet101() -> tuple[nn.Module, int]:
    """ResNet-101 (He et al., 2016); 2048 features."""
    return _without_fc(models.resnet101(weights=None))


def mobilenet_v2() -> tuple[nn.Module, int]:
    """MobileNet v2 (Sandler et al., 2018); 1280 features."""
    network = models.mobilenet_v2(weights=None)
    network.classifier = nn.Identity()
    return network, 1280


class _SqueezeNet(nn.Module):
    """SqueezeNet's classifier is a convolution; its features are the mean over the feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.features = models.squeezenet1_1(weights=None).features

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.features(images)
        return features.mean(dim=(2, 3))


def squeezenet1_1() -> tuple[nn.Module, int]:
    """SqueezeNet 1.1 (Iandola et al., 2016); 512 features."""
    return _SqueezeNet(), 512


BACKBONES: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "alexnet": alexnet,
    "googlenet": googlenet,
    "inception_v3": inception_v3,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "mobilenet_v2": mobilenet_v2,
    "squeezenet1_1": squeezenet1_1,
}

# Parameters that belong to the last layer or to auxiliary heads: left out when weights are loaded.
HEAD_PREFIXES: dict[str, tuple[str, ...]] = {
    "alexnet": ("classifier.6.",),
    "googlenet": ("fc.", "aux1.", "aux2."),
    "inception_v3": ("fc.", "AuxLogits."),
    "resnet18": ("fc.",),
    "resnet50": ("fc.",),
    "resnet101": ("fc.",),
    "mobilenet_v2": ("classifier.",),
    "squeezenet1_1": ("classifier.",),
}


def build_backbone(name: str) -> tuple[nn.Module, int]:
    """The backbone `name` with random weights, and the width D of its features."""
    if name not in BACKBONES:
        raise BadConfig(f"there is no backbone {name!r}: choose one of {', '.join(BACKBONES)}")
    return BACKBONES[name]()


def default_preprocessing(name: str) -> Preprocessing:
    """The input that torchvision's weights of backbone `name` were trained with."""
    if name == "googlenet":
        return Preprocessing(size=224, mean=HALF, std=HALF)
    if name == "inception_v3":
        return Preprocessing(size=299, mean=HALF, std=HALF)
    return Preprocessing(size=224, mean=IMAGENET_MEAN, std=IMAGENET_STD)
