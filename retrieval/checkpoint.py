"""Checkpoints: one safetensors file with everything that encoding needs.

The tensors are the model's weights. The file's metadata has one key, "hashseek", with a JSON header:

    format_version   1; 2 if the head is not linear or the input is not an image; newer ones are refused
    model            {"backbone", "n_bits"}, and "head" if it is not linear
    preprocessing    the fields of `Preprocessing`; null for a model of vectors, which has its statistics as weights
    label_names      labels the model was trained on
    training         the training configuration of the run
    scores           metrics measured on the validation part of the training split
    fingerprint      SHA-256 over weights, model and preprocessing: only codes with equal fingerprints are comparable
    checksum         SHA-256 over the header, to detect a changed header
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.files import checksum_of, write_atomically
from hashseek.retrieval.images import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hashseek.retrieval.models.hash_model import HashModel
    from hashseek.retrieval.models.network import Network

FORMAT_VERSION = 2


@dataclass(frozen=True)
class Header:
    """Everything in a checkpoint except the weights. `preprocessing` is None if the model encodes vectors."""

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
                f"this checkpoint encodes vectors of {n_inputs_of(self.backbone)} numbers, not images: give it vectors "
                "(`hashseek index add --vectors`, `hashseek search --vector`, `hashseek evaluate` with its own data "
                "set), or use a checkpoint and a collection for images"
            )
        return self.preprocessing

    def vector_width(self) -> int:
        """The length of the vectors that the model accepts.

        Raises:
            BadCheckpoint: the model encodes images.
        """
        if self.preprocessing is not None:
            raise BadCheckpoint(
                "this checkpoint encodes images, not vectors: create a separate collection for vectors "
                "(`hashseek index add NEW --vectors FILE`)"
            )
        from hashseek.retrieval.models.mlp import n_inputs_of

        return n_inputs_of(self.backbone)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A header and the weights of a model, which is built on first use: importing torchvision takes seconds."""

    header: Header
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: HashModel, header: Header) -> Checkpoint:
        """The checkpoint of a model that is already built. They share their weights."""
        checkpoint = cls(header, model.state_dict())
        vars(checkpoint)["model"] = model.eval()
        return checkpoint

    @cached_property
    def model(self) -> HashModel:
        """The model in evaluation mode.

        Raises:
            BadCheckpoint: the weights do not fit the model.
        """
        from hashseek.retrieval.models.hash_model import HashModel

        header = self.header
        model = HashModel(backbone=header.backbone, n_bits=header.n_bits, head=header.head)
        self._fill(model, self.tensors)
        return model.eval()

    @property
    def head(self) -> nn.Module:
        """The model's head in evaluation mode: its own if it is built, which may have been trained further."""
        from hashseek.retrieval.models.heads import build_head

        if "model" in vars(self):
            return self.model.head
        head = build_head(self.header.head, n_features=self.n_features, n_bits=self.header.n_bits)
        self._fill(head, self._part("head."))
        return head.eval()

    @property
    def n_features(self) -> int:
        """D, the width of the features: the input width of the head's first layer."""
        return next((tensor.shape[1] for _, tensor in sorted(self._part("head.").items()) if tensor.ndim == 2), 0)

    def network(self) -> Network:
        """The model's backbone for an engine."""
        from hashseek.retrieval.models.network import Network

        if "model" in vars(self):
            return Network.of(self.model.backbone, self.header.backbone)
        return Network(lambda: self.model.backbone, self._part("backbone."), self.header.backbone)

    def _part(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def _fill(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        from hashseek.retrieval.models.pretrained_weights import copy_state

        wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
        if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
            raise BadCheckpoint(
                f"the checkpoint {self.header.fingerprint[:12]} has been modified: its weights are not those of a "
                f"{self.header.backbone} with {self.header.n_bits} bits"
            )
        copy_state(module, tensors)


def fingerprint(model: HashModel, preprocessing: Preprocessing | None) -> str:
    """Hexadecimal SHA-256 over everything that decides a code: weights, architecture, K and preprocessing."""
    return _fingerprint(_describe(model), preprocessing, model.state_dict())


def _fingerprint(model: Mapping[str, Any], preprocessing: Preprocessing | None, tensors: Mapping[str, Tensor]) -> str:
    description = {"model": model, "preprocessing": _as_json(preprocessing)}
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    digest.update(digest_weights(tensors).encode())
    return digest.hexdigest()


def digest_weights(tensors: Mapping[str, Tensor]) -> str:
    """Hexadecimal SHA-256 over names, types, shapes and values of the tensors of a state dict."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().reshape(-1).contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
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
        preprocessing: how images become its input; None if, and only if, the model encodes vectors.
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
        # The oldest version that can represent it, so that an older Hashseek can read it where possible.
        "format_version": 1 if model.head_name == "linear" and preprocessing is not None else 2,
        "model": _describe(model),
        "preprocessing": _as_json(preprocessing),
        "label_names": list(label_names),
        "training": header.training,
        "scores": header.scores,
        "fingerprint": header.fingerprint,
    }
    content["checksum"] = checksum_of(content)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(path, save(tensors, metadata={"hashseek": json.dumps(content)}))
    return header


def load_header(path: Path | str) -> Header:
    """Read a checkpoint's header without its weights, which is fast.

    Raises:
        BadCheckpoint: missing, not from Hashseek, truncated, of a newer format, or with a modified header.
    """
    path = Path(path)
    return _parse(path, _read(path, weights=False)[0])


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint and check its weights against its fingerprint.

    Loading a file never makes Python import a module: a backbone "module:function" is built only if the caller has
    imported the module.

    Raises:
        BadCheckpoint: missing, not from Hashseek, truncated, of a newer format, modified, or with a backbone from a
            module that is not imported.
        BadConfig: there is no such backbone, or its package is missing.
    """
    # Here, not above: commands that only read headers start without torch.
    from hashseek.retrieval.models.backbones import is_from_outside, is_trusted
    from hashseek.retrieval.models.published_weights import check_image_backbone

    path = Path(path)
    header, tensors = _read_intact(path)
    if header.preprocessing is not None:
        check_image_backbone(header.backbone)
    if is_from_outside(header.backbone) and not is_trusted(header.backbone):
        raise BadCheckpoint(
            f"{path} has the backbone {header.backbone!r}, which is code outside Hashseek: "
            f"if you trust it, set HASHSEEK_PLUGINS={header.backbone.partition(':')[0]}"
        )
    return Checkpoint(header, tensors)


def check_intact(path: Path) -> Header:
    """The header of a checkpoint whose weights match its fingerprint. Builds no network.

    Raises:
        BadCheckpoint: missing, foreign, truncated, of a newer format, or changed.
    """
    return _read_intact(path)[0]


def _read_intact(path: Path) -> tuple[Header, dict[str, Tensor]]:
    content, tensors = _read(path, weights=True)
    header = _parse(path, content)
    found = _fingerprint(content["model"], header.preprocessing, tensors)
    if found != header.fingerprint:
        raise BadCheckpoint(
            f"{path} has been modified: its content has the fingerprint {found[:12]}, but its header has "
            f"{header.fingerprint[:12]}; restore the original file"
        )
    return header, tensors


def _describe(model: HashModel) -> dict[str, Any]:
    head = {} if model.head_name == "linear" else {"head": model.head_name}
    return {"backbone": model.backbone_name, "n_bits": model.n_bits, **head}


def _as_json(preprocessing: Preprocessing | None) -> dict[str, Any] | None:
    return None if preprocessing is None else preprocessing.as_dict()


def _read(path: Path, *, weights: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise BadCheckpoint(f"there is no checkpoint {path}: train one with `hashseek train`, or correct the path")
    if not os.access(path, os.R_OK):
        raise BadCheckpoint(f"the checkpoint {path} cannot be read: permission denied")
    try:
        with safe_open(path, framework="pt" if weights else "np") as opened:
            metadata = opened.metadata() or {}
            names = opened.keys() if weights else ()
            tensors = {name: opened.get_tensor(name).clone() for name in names}  # a copy, since the file may change
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} is truncated or not a safetensors file: {error}") from None
    if "hashseek" not in metadata:
        raise BadCheckpoint(
            f"{path} has no Hashseek header: if it has plain weights, start training from them with model.weights=PATH"
        )
    try:
        content = json.loads(metadata["hashseek"])
    except json.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} has been modified: its header is not a JSON object")
    return content, tensors


def _parse(path: Path, content: dict[str, Any]) -> Header:
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BadCheckpoint(
            f"{path} has checkpoint format {version}, but this Hashseek reads up to {FORMAT_VERSION}: update Hashseek"
        )
    if content.get("checksum") != checksum_of(content):
        raise BadCheckpoint(f"{path} has been modified: its header does not match its checksum")
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
