"""Checkpoints: one safetensors file that holds everything needed to encode.

The tensors are the model's weights. The file's metadata has one key, "hashseek", with a JSON header:

    format_version   1; a newer one is refused
    model            {"backbone", "n_bits"}
    preprocessing    what `Preprocessing` holds
    label_names      labels the model was trained on
    training         the training configuration, as it was run
    scores           figures measured on the validation part of the training split
    fingerprint      SHA-256 over weights, model and preprocessing: codes are comparable iff it is equal
    checksum         SHA-256 over the header itself, so that a changed header is noticed too
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from retrieval.errors import BadCheckpoint
from retrieval.files import write_atomically
from retrieval.images import Preprocessing
from retrieval.model import HashModel

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Header:
    """What a checkpoint says about itself."""

    backbone: str
    n_bits: int
    preprocessing: Preprocessing
    label_names: tuple[str, ...]
    fingerprint: str
    training: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode with its header."""

    model: HashModel
    header: Header


def fingerprint(model: HashModel, preprocessing: Preprocessing) -> str:
    """Hexadecimal SHA-256 over everything that decides a code: weights, architecture, K and preprocessing."""
    digest = hashlib.sha256()
    description = {"model": _describe(model), "preprocessing": preprocessing.as_dict()}
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
    preprocessing: Preprocessing,
    *,
    label_names: tuple[str, ...],
    training: dict[str, Any] | None = None,
    scores: dict[str, Any] | None = None,
) -> Header:
    """Write a checkpoint atomically: the file is either the old one or the whole new one.

    Returns:
        The header that was written.
    """
    header = Header(
        backbone=model.backbone_name,
        n_bits=model.n_bits,
        preprocessing=preprocessing,
        label_names=label_names,
        fingerprint=fingerprint(model, preprocessing),
        training=training or {},
        scores=scores or {},
    )
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "model": _describe(model),
        "preprocessing": preprocessing.as_dict(),
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
    content, tensors = _read(path, weights=True)
    header = _parse(path, content)
    model = HashModel(backbone=header.backbone, n_bits=header.n_bits)
    try:
        model.load_state_dict(tensors)
    except RuntimeError:
        raise BadCheckpoint(
            f"{path} was tampered with: its weights are not those of a {header.backbone} with {header.n_bits} bits"
        ) from None
    found = fingerprint(model, header.preprocessing)
    if found != header.fingerprint:
        raise BadCheckpoint(
            f"{path} was tampered with: its content has fingerprint {found[:12]}, its header says "
            f"{header.fingerprint[:12]}; fetch the original again"
        )
    return Checkpoint(model.eval(), header)


def _describe(model: HashModel) -> dict[str, Any]:
    return {"backbone": model.backbone_name, "n_bits": model.n_bits}


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
        with safe_open(path, framework="pt") as opened:
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
    return Header(
        backbone=str(content["model"]["backbone"]),
        n_bits=int(content["model"]["n_bits"]),
        preprocessing=Preprocessing.from_dict(content["preprocessing"]),
        label_names=tuple(content["label_names"]),
        fingerprint=str(content["fingerprint"]),
        training=dict(content["training"]),
        scores=dict(content["scores"]),
    )
