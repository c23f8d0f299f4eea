"""Loads weights into a backbone: pretrained ones, or a local file, which is read as tensors and never executed."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hashseek.retrieval.errors import BadCheckpoint, HashseekError, first_line
from hashseek.retrieval.models import timm_backbones
from hashseek.retrieval.models.backbones import Removed
from hashseek.retrieval.models.names import PIXELS, TIMM
from hashseek.retrieval.models.torchvision_weights import FILES, check_weights_file, fetch_weights

# Heads in addition to the classifier, which some networks use only in training.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
# Names of layers in torchvision's files that are older than the present names: of DenseNet and of vision transformers.
_OLD_NAMES = (
    (re.compile(r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)
# How many batches the batch norm has seen: nothing here needs it, and files from before PyTorch 0.4.1 lack it.
_COUNTER = ".num_batches_tracked"


def load_backbone_weights(backbone: nn.Module, *, name: str, weights: str) -> None:
    """Fill `backbone`, built as `name`, in place.

    Args:
        backbone: the module returned by `build_backbone(name)`.
        name: its name.
        weights: "none" (leave it random), "default" (torchvision's or timm's, downloaded once), the name of one of
            torchvision's weight sets for it (such as "IMAGENET1K_V2"), or a path to a `.safetensors`, `.pth` or `.pt`
            state dict or a Hashseek checkpoint. Its classifier, auxiliary heads and hash layer are ignored; everything
            else must match.

    Raises:
        BadCheckpoint: no such weights, the file is missing or damaged, or keys or shapes do not match.
    """
    if weights == "none" or (weights == "default" and name == PIXELS):
        return
    if weights == "default" and name not in FILES and not name.startswith(TIMM):
        raise BadCheckpoint(f"there are no pretrained weights for {name}: set model.weights to none or a file")
    downloads = weights == "default" or weights in weight_sets(name)
    state = _downloaded(name, weights) if downloads else _read_state(Path(weights))
    _load_matching(backbone, state, name=name, source=weights)


def weight_sets(name: str) -> tuple[str, ...]:
    """Names of torchvision's weight sets for the backbone `name`; none for other kinds of backbones."""
    return tuple(_torchvision_sets(name).__members__) if name in FILES else ()


def _torchvision_sets(name: str) -> Any:
    from torchvision import models  # takes seconds

    return models.get_model_weights(name)


def _check_size(name: str, weights: str) -> None:
    """Refuse weights of a vision transformer for another image size, before they are downloaded.

    Its position embeddings fit one size only, and it is built for that of the default weights.
    """
    if weights == "default" or not name.startswith("vit_"):
        return
    sets = _torchvision_sets(name)
    own, size = (one.transforms().crop_size[0] for one in (sets[weights], sets.DEFAULT))
    if own != size:
        raise BadCheckpoint(
            f"the weights {weights} of {name} are for images of {own} px, but this network is built for {size} px: use "
            "another set of weights"
        )


def _downloaded(name: str, weights: str) -> dict[str, Tensor]:
    if not name.startswith(TIMM):
        _check_size(name, weights)
        file = FILES[name] if weights == "default" else _torchvision_sets(name)[weights].url.rpartition("/")[2]
        return _read_state(fetch_weights(file))
    try:
        return timm_backbones.downloaded(name)
    except HashseekError:
        raise
    except Exception as error:  # URLError, HTTPError, a timeout, a damaged cache: the remedy is the same
        raise BadCheckpoint(
            f"the weights of {name} could not be downloaded ({first_line(error)}): go online once, or use a local "
            "file (--weights FILE, in training model.weights=FILE, or model.weights=none to train from scratch)"
        ) from None


def _read_state(path: Path) -> dict[str, Tensor]:
    check_weights_file(path)
    state: Any
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a torn file raises nearly anything
        raise BadCheckpoint(f"{path} is damaged or contains objects other than tensors: {first_line(error)}") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadCheckpoint(f"{path} is not a state dict of tensors")
    return {key.removeprefix("module."): value for key, value in state.items()}


def _load_matching(backbone: nn.Module, state: dict[str, Tensor], *, name: str, source: str) -> None:
    wanted = backbone.state_dict()
    if state and all(key.startswith(("backbone.", "head.")) for key in state):  # a Hashseek checkpoint
        state = {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
    prefixed = {f"features.{key}": value for key, value in state.items()}
    if not wanted.keys() & state.keys() and wanted.keys() & prefixed.keys():
        state = prefixed  # a file of the convolutional layers only
    if name.startswith(TIMM):
        state = timm_backbones.converted(backbone, state)
    elif name in FILES:
        state = {_present_name(key): value for key, value in state.items()}
    left_out = left_out_prefixes(backbone, name)
    state = {key: value for key, value in state.items() if key in wanted or not key.startswith(left_out)}
    state = {key: value for key, value in wanted.items() if key.endswith(_COUNTER)} | state
    problems = [f"missing {key}" for key in wanted if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in wanted]
    problems += [
        f"{key} has shape {tuple(state[key].shape)}, not {tuple(wanted[key].shape)}"
        for key in wanted
        if key in state and state[key].shape != wanted[key].shape
    ]
    if problems:
        more = f"; and {len(problems) - 2:,} more" if len(problems) > 2 else ""
        raise BadCheckpoint(
            f"the weights {source} do not fit the backbone {name} ({'; '.join(problems[:2])}{more}): name the network "
            "that they belong to (--backbone NAME, in training model.backbone=NAME)"
        )
    copy_state(backbone, state)


def _present_name(key: str) -> str:
    for old, new in _OLD_NAMES:
        key = old.sub(new, key)
    return key


def copy_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy tensors of the same names and shapes into `module`.

    `load_state_dict` would also ask MNASNet for version numbers, which are not in files of tensors.
    """
    with torch.no_grad():
        for key, value in module.state_dict().items():
            value.copy_(state[key])


def left_out_prefixes(backbone: nn.Module, name: str) -> tuple[str, ...]:
    """Prefixes of the keys that the backbone does not have: those of the classifier and of auxiliary heads."""
    if name.startswith(TIMM):
        places = timm_backbones.classifiers(name)
    else:
        places = tuple(place for place, module in backbone.named_modules() if isinstance(module, Removed))
    return tuple(f"{place}." for place in places) + _AUXILIARY
