"""Backbones by name, with the preprocessing that each was trained with; `HashModel` builds on them.

A backbone maps normalised images (B, 3, H, W), or the rows (B, D) of a vector data set, to features. There are five
kinds of names:

    resnet18            a classification network of torchvision without its last layer; torchvision's state dicts fit
    pixels              no network: the picture shrunk to 8 x 8 pixels, which captures colours and layout
    timm:convnext_atto  a network of the optional package timm
    mlp:294-512-512     fully connected layers over vectors of 294 numbers
    my_module:function  a function from outside the package that returns (nn.Module, feature width)
"""

from torch import nn

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models import mlp, timm_backbones
from hashseek.retrieval.models.names import PIXELS, TIMM, is_from_outside, is_vector_backbone, unknown_backbone
from hashseek.retrieval.models.torchvision_weights import FILES
from hashseek.retrieval.plugins import built, load_named

# The weights of these networks expect mean = std = 0.5. torchvision uses ImageNet's and converts them inside the
# network (transform_input); here the preprocessing has them.
_HALF = ("googlenet", "inception_v3")


class Removed(nn.Identity):
    """Replaces the classifier; parameters under its name are ignored when weights are loaded."""


def _torchvision(name: str) -> tuple[nn.Module, int]:
    """torchvision's network `name` without its classifier and auxiliary heads."""
    from torchvision import models  # takes seconds

    options: dict[str, object] = {}
    if name in _HALF:
        options = {"aux_logits": False, "transform_input": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": _torchvision_preprocessing(name, "default").size}
    return _without_classifier(models.get_model_builder(name)(weights=None, **options))


def _without_classifier(network: nn.Module) -> tuple[nn.Module, int]:
    """Remove the last linear layer (of SqueezeNet: the last convolution) and the dropout before it."""
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


def build_backbone(name: str) -> tuple[nn.Module, int]:
    """The backbone `name` with random weights, and the width D of its features.

    A name "module:function" imports the module and calls the function.

    Raises:
        BadConfig: there is no backbone of that name, or its package is missing.
    """
    if is_vector_backbone(name):
        return mlp.build(name)
    if name == PIXELS:
        return nn.AdaptiveAvgPool2d(8), 3 * 8 * 8
    if name.startswith(TIMM):
        return timm_backbones.build(name)
    if is_from_outside(name):
        return _from_outside(name)
    if name not in FILES:
        raise unknown_backbone(name)
    return _torchvision(name)


def default_preprocessing(name: str, *, weights: str = "default") -> Preprocessing | None:
    """The preprocessing that the weights of backbone `name` were trained with; None for a backbone of vectors.

    Args:
        name: the backbone. One from outside gets ImageNet's usual preprocessing, which the configuration may change.
        weights: the name of one of torchvision's weight sets for it, such as "IMAGENET1K_V2"; any other value means
            its default weights.

    Raises:
        BadConfig: there is no backbone of that name, or its package is missing.
    """
    if is_vector_backbone(name):
        return None
    if name.startswith(TIMM):
        return timm_backbones.preprocessing(name)
    if name == PIXELS:
        return Preprocessing(size=64, mean=(0, 0, 0), std=(1, 1, 1), crop_fraction=1.0)
    if is_from_outside(name):
        return _torchvision_preprocessing("resnet50", "IMAGENET1K_V1")
    if name not in FILES:
        raise unknown_backbone(name)
    return _torchvision_preprocessing(name, weights)


def _torchvision_preprocessing(name: str, weights: str) -> Preprocessing:
    from torchvision import models

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


def _from_outside(name: str) -> tuple[nn.Module, int]:
    made = load_named(name, kind="backbone")()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and isinstance(made[1], int)):
        raise BadConfig(f"the backbone {name!r} must return (nn.Module, feature width), not {type(made).__name__}")
    built.add(name)
    return made
