"""Weights for a backbone: none, torchvision's, or a local file that is only ever read as tensors."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision import models

from retrieval.backbones import HEAD_PREFIXES
from retrieval.errors import BadCheckpoint


def load_backbone_weights(backbone: nn.Module, *, name: str, weights: str) -> None:
    """Fill `backbone`, built as `name`, in place.

    Args:
        backbone: the module that `build_backbone(name)` gave.
        name: its name in `BACKBONES`.
        weights: "none" (leave it random), "default" (torchvision's, downloaded once), or a path to a
            `.safetensors`, `.pth` or `.pt` state dict. The classifier and auxiliary heads in it are left out, whatever
            their width; everything else must match.

    Raises:
        BadCheckpoint: the file is missing or damaged, or keys or shapes do not match; the sentence lists them.
    """
    if weights == "none":
        return
    state = _torchvision_state(name) if weights == "default" else _read_state(Path(weights))
    _load_matching(backbone, state, name=name, source=weights)


def _torchvision_state(name: str) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = models.get_model_weights(name).DEFAULT.get_state_dict(progress=False)
    except Exception as error:  # URLError, HTTPError, timeouts, a damaged cache: the remedy is the same
        raise BadCheckpoint(
            f"torchvision's weights for {name} could not be downloaded ({error}): connect once, or give a local "
            "file with weights = PATH, or train from scratch with weights = none"
        ) from None
    return state


def _read_state(path: Path) -> dict[str, Tensor]:
    state: Any
    if not path.is_file():
        raise BadCheckpoint(f"there is no weights file {path}: give none, default, or the path of an existing file")
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise BadCheckpoint(f"weights must be a .safetensors, .pth or .pt file, not {path.name}")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a torn file raises nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadCheckpoint(f"{path} is damaged or holds more than tensors: {reason}") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadCheckpoint(f"{path} is not a state dict of tensors")
    return {key.removeprefix("module."): value for key, value in state.items()}


def _load_matching(backbone: nn.Module, state: dict[str, Tensor], *, name: str, source: str) -> None:
    wanted = backbone.state_dict()
    prefixed = {f"features.{key}": value for key, value in state.items()}
    if not wanted.keys() & state.keys() and wanted.keys() & prefixed.keys():
        state = prefixed  # a file of the convolutional part alone
    state = {key: value for key, value in state.items() if not key.startswith(HEAD_PREFIXES[name])}
    problems = [f"missing {key}" for key in wanted if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in wanted]
    problems += [
        f"{key} has shape {tuple(state[key].shape)}, not {tuple(wanted[key].shape)}"
        for key in wanted
        if key in state and state[key].shape != wanted[key].shape
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise BadCheckpoint(f"the weights {source} do not fit the backbone {name}: {shown}")
    backbone.load_state_dict(state)
