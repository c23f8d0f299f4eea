"""Backbones: name -> function giving (module, feature width), with the input each was made for.

A backbone maps normalised images (B, 3, H, W), or the rows (B, D) of a vector data set, to features. There are three
kinds of names:

    resnet18            a classification network of torchvision without its last layer, so that torchvision's own
                        state dicts load by their own names
    timm:convnext_atto  a network of the package timm (optional)
    mlp:294-512-512     layers over vectors of 294 numbers
"""

import difflib
from collections.abc import Callable
from functools import partial

from torch import nn
from torchvision import models

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models import mlp, timm_backbones

# Networks whose weights expect mean = std = 0.5. torchvision instead takes ImageNet's and converts them inside the
# network (transform_input); our preprocessing says so directly.
_HALF = ("googlenet", "inception_v3")

class Removed(nn.Identity):
    """Stands where the classifier was; parameters under its name are left out when weights are loaded."""


def _torchvision(name: str) -> tuple[nn.Module, int]:
    """torchvision's network `name` without classifier and auxiliary heads."""
    options: dict[str, object] = {}
    if name in _HALF:
        options = {"aux_logits": False, "transform_input": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": _torchvision_preprocessing(name, "default").size}
    return _without_classifier(models.get_model_builder(name)(weights=None, **options))


def _without_classifier(network: nn.Module) -> tuple[nn.Module, int]:
    """Take out the last linear layer (SqueezeNet, which has none: convolution) and the dropout in front of it."""
    modules = list(network.named_modules())
    layers: list[tuple[str, nn.Linear]] | list[tuple[str, nn.Conv2d]]
    layers = [(place, m) for place, m in modules if isinstance(m, nn.Linear)]
    if layers:
        place, width = layers[-1][0], layers[-1][1].in_features
    else:
        layers = [(place, m) for place, m in modules if isinstance(m, nn.Conv2d)]
        place, width = layers[-1][0], layers[-1][1].in_channels
    parent, _, child = place.rpartition(".")
    around = network.get_submodule(parent)
    setattr(around, child, Removed())
    before = str(int(child) - 1) if child.isdecimal() else ""
    if isinstance(around, nn.Sequential) and isinstance(getattr(around, before, None), nn.Dropout):
        setattr(around, before, nn.Identity())
    return network, width


BACKBONES: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    name: partial(_torchvision, name) for name in models.list_models(module=models)
}


def build_backbone(name: str) -> tuple[nn.Module, int]:
    """The backbone `name` with random weights, and the width D of its features.

    Raises:
        BadConfig: there is no backbone of that name, or its package is missing.
    """
    if is_vector_backbone(name):
        return mlp.build(name)
    if name.startswith(timm_backbones.PREFIX):
        return timm_backbones.build(name)
    return _known(name)()


def is_vector_backbone(name: str) -> bool:
    """Whether the backbone takes vectors instead of images."""
    return name.startswith(mlp.PREFIXES)


def default_preprocessing(name: str, *, weights: str = "default") -> Preprocessing | None:
    """The input that the weights of backbone `name` were trained with; None for a backbone of vectors.

    Args:
        name: the backbone.
        weights: the name of one of torchvision's weight sets for it, such as "IMAGENET1K_V2"; anything else means
            its default one.

    Raises:
        BadConfig: there is no backbone of that name, or its package is missing.
    """
    if is_vector_backbone(name):
        return None
    if name.startswith(timm_backbones.PREFIX):
        return timm_backbones.preprocessing(name)
    _known(name)
    return _torchvision_preprocessing(name, weights)


def _torchvision_preprocessing(name: str, weights: str) -> Preprocessing:
    sets = models.get_model_weights(name)
    transforms = (sets[weights] if weights in sets.__members__ else sets.DEFAULT).transforms()
    size = int(transforms.crop_size[0])
    return Preprocessing(
        size=size,
        mean=(0.5, 0.5, 0.5) if name in _HALF else tuple(transforms.mean),
        std=(0.5, 0.5, 0.5) if name in _HALF else tuple(transforms.std),
        crop_fraction=min(1.0, size / transforms.resize_size[0]),
        interpolation="bicubic" if transforms.interpolation.value == "bicubic" else "bilinear",
    )


def _known(name: str) -> Callable[[], tuple[nn.Module, int]]:
    if name not in BACKBONES:
        close = difflib.get_close_matches(name, BACKBONES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "resnet50 and mobilenet_v2 are good first choices;"
        raise BadConfig(
            f"there is no backbone {name!r}: {hint} torchvision's classification networks, timm:NAME and mlp:WIDTHS "
            "are listed in docs/backbones.md"
        )
    return BACKBONES[name]
