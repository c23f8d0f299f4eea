"""Backbones of the optional package timm: `timm:NAME`, with or without a tag, such as timm:resnet10t.c3_in1k."""

import copy
import importlib
from typing import Any, cast

from torch import Tensor, nn

from hashseek.retrieval.errors import BadConfig, first_line, suggest
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.names import TIMM, check_image_backbone


def build(name: str) -> tuple[nn.Module, int]:
    """timm's network `name` without its classifier and with random weights, and the width of its features.

    Raises:
        BadConfig: timm is not installed, or has no such network for three colour channels.
    """
    timm, model_name, _ = _find(name)
    try:
        # Vision transformers then accept sizes other than that of their weights, by resampling their positions.
        network = timm.create_model(model_name, pretrained=False, num_classes=0, dynamic_img_size=True)
    except TypeError:  # every other network
        network = timm.create_model(model_name, pretrained=False, num_classes=0)
    return network, int(getattr(network, "head_hidden_size", None) or network.num_features)


def preprocessing(name: str) -> Preprocessing:
    """The input that timm's weights of `name` were trained with.

    Raises:
        BadConfig: see `build`.
    """
    timm, _, config = _find(name)
    data = timm.data.resolve_data_config(pretrained_cfg=config)
    return Preprocessing(
        size=int(data["input_size"][-1]),
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        crop_fraction=min(1.0, float(data["crop_pct"])),
        interpolation="bicubic" if data["interpolation"] == "bicubic" else "bilinear",
    )


def classifiers(name: str) -> tuple[str, ...]:
    """Names of the layers that timm's weights of `name` have and the backbone lacks."""
    classifier = _find(name)[2].get("classifier") or ()
    return (classifier,) if isinstance(classifier, str) else tuple(classifier)


def downloaded(name: str) -> dict[str, Tensor]:
    """timm's own weights of `name`, downloaded once, without the classifier."""
    timm, model_name, config = _find(name)
    if config.get("hf_hub_id"):
        _check_reachable(config["hf_hub_id"])
    state: dict[str, Tensor] = timm.create_model(model_name, pretrained=True, num_classes=0).state_dict()
    return state


def _check_reachable(repository: str) -> None:
    """Raise at once if the weights have to be downloaded and cannot be. timm would retry for a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    if try_to_load_from_cache(repository, "model.safetensors") is not None:
        return
    url = hf_hub_url(repository, "model.safetensors")
    try:
        get_hf_file_metadata(url, timeout=10)
    except EntryNotFoundError:
        pass  # the weights may have another file name
    except Exception as error:  # of httpx, of the hub, or of the system
        raise ConnectionError(f"{url}: {first_line(error)}") from None


def converted(network: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as their authors published them, under the names that timm's `network` has; others as they are."""
    convert = getattr(importlib.import_module(type(network).__module__), "checkpoint_filter_fn", None)
    if convert is None or network.state_dict().keys() <= state.keys():
        return state
    try:
        renamed: dict[str, Tensor] = convert(dict(state), network)
    except Exception:  # made for other weights; the caller reports which names do not fit
        return state
    return renamed


def for_one_size(network: Any, size: int) -> nn.Module:
    """A copy of timm's `VisionTransformer` that accepts images of this size only; any other network unchanged.

    Built as above, it resamples its positions whenever it is exported, an operation that OpenVINO lacks.
    """
    if type(network).__name__ != "VisionTransformer" or not getattr(network, "dynamic_img_size", False):
        return cast(nn.Module, network)
    network = copy.deepcopy(network)
    network.set_input_size((size, size))
    network.dynamic_img_size, network.patch_embed.flatten = False, True
    return cast(nn.Module, network)


def _find(name: str) -> tuple[Any, str, dict[str, Any]]:
    """timm, the name it knows the network by, and what it knows about the network's weights."""
    check_image_backbone(name)
    timm = importlib.import_module("timm")
    model_name = name.removeprefix(TIMM)
    architecture = model_name.partition(".")[0]
    if not timm.is_model(architecture):
        hint = suggest(architecture, timm.list_models())
        raise BadConfig(f"timm {timm.__version__} has no network {architecture!r}: {hint}")
    try:
        config = timm.models.get_pretrained_cfg(model_name)
    except RuntimeError:
        hint = suggest(model_name, timm.list_pretrained(f"{architecture}.*"))
        raise BadConfig(f"timm {timm.__version__} has no weights {model_name!r}: {hint}") from None
    values: dict[str, Any] = {} if config is None else config.to_dict()
    if values.get("input_size", (3,))[0] != 3:
        raise BadConfig(
            f"the backbone {name} expects {values['input_size'][0]} channels, but images have 3: choose another"
        )
    return timm, model_name, values
