"""Checkpoints: one safetensors file that holds everything needed to encode.

The tensors are the model's weights. The file's metadata has one key, "hashseek", with a JSON header:

    format_version   1; 2 where the head is not linear or the input is no image; a newer one is refused
    model            {"backbone", "n_bits"}, and "head" where it is not linear
    preprocessing    what `Preprocessing` holds; null for a model of vectors, which has its statistics as weights
    label_names      labels the model was trained on
    training         the training configuration, as it was run
    scores           figures measured on the validation part of the training split
    fingerprint      SHA-256 over weights, model and preprocessing: codes are comparable iff it is equal
    checksum         SHA-256 over the header itself, so that a changed header is noticed too
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.images import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hashseek.retrieval.models.hash_model import HashModel

FORMAT_VERSION = 2


@dataclass(frozen=True)
class Header:
    """What a checkpoint says about itself. `preprocessing` is None where the model encodes vectors, not images."""

    backbone: str
    n_bits: int
    preprocessing: Preprocessing | None
    label_names: tuple[str, ...]
    fingerprint: str
    training: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    head: str = "linear"

    def image_preprocessing(self) -> Preprocessing:
        """How an image becomes the model's input.

        Raises:
            BadCheckpoint: the model encodes vectors.
        """
        if self.preprocessing is None:
            from hashseek.retrieval.models.mlp import n_inputs_of

            raise BadCheckpoint(
                f"this checkpoint encodes vectors of {n_inputs_of(self.backbone)} numbers, not images: use "
                "`hashseek evaluate` with its own data set, or a checkpoint that was trained on images"
            )
        return self.preprocessing


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode with its header."""

    model: HashModel
    header: Header


def fingerprint(model: HashModel, preprocessing: Preprocessing | None) -> str:
    """Hexadecimal SHA-256 over everything that decides a code: weights, architecture, K and preprocessing."""
    digest = hashlib.sha256()
    description = {"model": _describe(model), "preprocessing": _as_json(preprocessing)}
    digest.update(json.dumps(description, sort_keys=True).encode())
    digest.update(digest_weights(model).encode())
    return digest.hexdigest()


def digest_weights(module: nn.Module) -> str:
    """Hexadecimal SHA-256 over names, types, shapes and values of a module's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(module).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(
    path: Path,
    model: HashModel,
    preprocessing: Preprocessing | None,
    *,
    label_names: tuple[str, ...],
    training: dict[str, Any] | None = None,
    scores: dict[str, Any] | None = None,
) -> Header:
    """Write a checkpoint atomically: the file is either the old one or the whole new one.

    Args:
        path: the file.
        model: what to save.
        preprocessing: how images become its input; None for a model of vectors, and only for such a one.
        label_names, training, scores: recorded in the header.

    Returns:
        The header that was written.
    """
    from safetensors.torch import save

    from hashseek.retrieval.models.backbones import is_vector_backbone

    if (preprocessing is None) != is_vector_backbone(model.backbone_name):
        raise ValueError(f"a checkpoint of {model.backbone_name} cannot have the preprocessing {preprocessing}")
    header = Header(
        backbone=model.backbone_name,
        n_bits=model.n_bits,
        preprocessing=preprocessing,
        label_names=label_names,
        fingerprint=fingerprint(model, preprocessing),
        training=training or {},
        scores=scores or {},
        head=model.head_name,
    )
    content: dict[str, Any] = {
        # The oldest that can hold it: an older Hashseek then reads what it can, and says what it cannot.
        "format_version": 1 if model.head_name == "linear" and preprocessing is not None else 2,
        "model": _describe(model),
        "preprocessing": _as_json(preprocessing),
        "label_names": list(label_names),
        "training": header.training,
        "scores": header.scores,
        "fingerprint": header.fingerprint,
    }
    content["checksum"] = _checksum(content)
    write_atomically(path, save(_tensors(model), metadata={"hashseek": json.dumps(content)}))
    return header


def load_header(path: Path) -> Header:
    """Read a checkpoint's header without its weights: fast, for messages and listings.

    Raises:
        BadCheckpoint: missing, foreign, truncated, of a newer format, or with a changed header.
    """
    return _parse(path, _read(path, weights=False)[0])


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check that its weights are the ones its fingerprint names.

    Raises:
        BadCheckpoint: missing, foreign, truncated, of a newer format, or tampered with.
    """
    # Here, not above: commands that read only headers start without torch.
    from hashseek.retrieval.models.hash_model import HashModel
    from hashseek.retrieval.models.pretrained_weights import copy_state

    content, tensors = _read(path, weights=True)
    header = _parse(path, content)
    model = HashModel(backbone=header.backbone, n_bits=header.n_bits, head=header.head)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
        raise BadCheckpoint(
            f"{path} was tampered with: its weights are not those of a {header.backbone} with {header.n_bits} bits"
        )
    copy_state(model, tensors)
    found = fingerprint(model, header.preprocessing)
    if found != header.fingerprint:
        raise BadCheckpoint(
            f"{path} was tampered with: its content has fingerprint {found[:12]}, its header says "
            f"{header.fingerprint[:12]}; fetch the original again"
        )
    return Checkpoint(model.eval(), header)


def _describe(model: HashModel) -> dict[str, Any]:
    head = {} if model.head_name == "linear" else {"head": model.head_name}
    return {"backbone": model.backbone_name, "n_bits": model.n_bits, **head}


def _as_json(preprocessing: Preprocessing | None) -> dict[str, Any] | None:
    return None if preprocessing is None else preprocessing.as_dict()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}


def _checksum(content: dict[str, Any]) -> str:
    kept = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _read(path: Path, *, weights: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise BadCheckpoint(f"there is no checkpoint {path}: train one with `hashseek train`, or correct the path")
    if not os.access(path, os.R_OK):
        raise BadCheckpoint(f"the checkpoint {path} cannot be read: permission denied")
    try:
        with safe_open(path, framework="pt" if weights else "np") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()} if weights else {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} is truncated or no safetensors file at all: {error}") from None
    if "hashseek" not in metadata:
        raise BadCheckpoint(
            f"{path} holds tensors but no Hashseek header: it may be plain weights, which belong into the "
            "training configuration as weights = PATH"
        )
    try:
        content = json.loads(metadata["hashseek"])
    except json.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} was tampered with: its header is not a JSON object")
    return content, tensors


def _parse(path: Path, content: dict[str, Any]) -> Header:
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BadCheckpoint(
            f"{path} has checkpoint format {version}, this Hashseek reads up to {FORMAT_VERSION}: update Hashseek"
        )
    if content.get("checksum") != _checksum(content):
        raise BadCheckpoint(f"{path} was tampered with: its header does not match its checksum")
    preprocessing = content["preprocessing"]
    return Header(
        backbone=str(content["model"]["backbone"]),
        n_bits=int(content["model"]["n_bits"]),
        preprocessing=None if preprocessing is None else Preprocessing.from_dict(preprocessing),
        label_names=tuple(content["label_names"]),
        fingerprint=str(content["fingerprint"]),
        training=dict(content["training"]),
        scores=dict(content["scores"]),
        head=str(content["model"].get("head", "linear")),
    )
