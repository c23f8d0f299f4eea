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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.files import checksum_of, write_atomically
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.fully_connected import FullyConnected, Weights, as_arrays, head_of, mlp_of
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from hashseek.retrieval.models.names import check_image_backbone, is_from_outside, is_vector_backbone, widths_of
from hashseek.retrieval.plugins import check_trusted

if TYPE_CHECKING:
    from hashseek.retrieval.models.hash_model import HashModel

FORMAT_VERSION = 2
_PLAIN_WEIGHTS = (
    "if it has the weights of a network, use them with `hashseek index add --backbone NAME --weights FILE`, or train "
    "with model.weights=FILE"
)


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
            raise BadCheckpoint(
                f"this checkpoint encodes vectors of {widths_of(self.backbone)[0]} numbers, not images: pass "
                "vectors (on the command line with --vectors or --vector), or use a checkpoint for images"
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
        return widths_of(self.backbone)[0]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A header and the weights of a model, which is built on first use: importing PyTorch takes seconds."""

    header: Header
    tensors: Weights = field(repr=False)

    @classmethod
    def of(cls, model: HashModel, header: Header) -> Checkpoint:
        """The checkpoint of a model that is already built. They share their weights."""
        checkpoint = cls(header, as_arrays(model))
        vars(checkpoint)["model"] = model.eval()
        return checkpoint

    @cached_property
    def model(self) -> HashModel:
        """The model in evaluation mode.

        Raises:
            BadCheckpoint: the weights do not fit the model.
        """
        import torch

        from hashseek.retrieval.models.hash_model import HashModel
        from hashseek.retrieval.models.weight_loading import copy_state

        header = self.header
        model = HashModel(backbone=header.backbone, n_bits=header.n_bits, head=header.head)
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if wanted != {name: values.shape for name, values in self.tensors.items()}:
            raise self._modified()
        copy_state(model, {name: torch.from_numpy(values) for name, values in self.tensors.items()})
        return model.eval()

    @property
    def head(self) -> FullyConnected:
        """The model's head in evaluation mode.

        Raises:
            BadCheckpoint: the weights do not fit the head, or contain NaN.
        """
        return self._checked(lambda: head_of(self.header.head, self.part("head.")), self.n_features, self.header.n_bits)

    @property
    def vector_backbone(self) -> FullyConnected:
        """The backbone of a model of vectors in evaluation mode.

        Raises:
            BadCheckpoint: the model encodes images, or the weights do not fit the backbone or contain NaN.
        """
        return self._checked(lambda: mlp_of(self.part("backbone.")), self.header.vector_width(), self.n_features)

    def _checked(self, build: Callable[[], FullyConnected], n_inputs: int, n_outputs: int) -> FullyConnected:
        try:
            layers = build()
            with np.errstate(all="ignore"):
                outputs = layers(np.zeros((1, n_inputs), np.float32))
        except (KeyError, ValueError):  # missing weights, or shapes that do not fit together
            raise self._modified() from None
        if outputs.shape != (1, n_outputs) or np.isnan(outputs).any():
            raise self._modified()
        return layers

    def _modified(self) -> BadCheckpoint:
        return BadCheckpoint(
            f"the checkpoint {self.header.fingerprint[:12]} has been modified: its weights are not those of a "
            f"{self.header.backbone} with {self.header.n_bits} bits"
        )

    @property
    def n_features(self) -> int:
        """D, the width of the features: for vectors by the backbone's name, else that of the head's input."""
        if self.header.preprocessing is None:
            return widths_of(self.header.backbone)[-1]
        return next((values.shape[1] for _, values in sorted(self.part("head.").items()) if values.ndim == 2), 0)

    def network(self) -> LazyBackbone:
        """The model's backbone for an engine."""
        return LazyBackbone(lambda: self.model.backbone, self.part("backbone."), self.header.backbone)

    def part(self, prefix: str) -> Weights:
        """The weights whose names begin with "backbone." or "head.", without that prefix.

        If the model is built, it may have been trained further, so its weights count.
        """
        weights = as_arrays(self.model) if "model" in vars(self) else self.tensors
        return {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}


def fingerprint_of(header: Header, tensors: Weights) -> str:
    """Hexadecimal SHA-256 over everything that decides a code: weights, architecture, K and preprocessing."""
    description = {"model": _describe(header), "preprocessing": _as_json(header.preprocessing)}
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    digest.update(digest_weights(tensors).encode())
    return digest.hexdigest()


def digest_weights(tensors: Weights) -> str:
    """Hexadecimal SHA-256 over names, types, shapes and values of a state dict."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} torch.{values.dtype} {values.shape}\n".encode())  # PyTorch's name of the type
        digest.update(values.tobytes())
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
    if (preprocessing is None) != is_vector_backbone(model.backbone_name):
        raise ValueError(f"a checkpoint of {model.backbone_name} cannot have the preprocessing {preprocessing}")
    tensors = {name: np.array(values, order="C") for name, values in as_arrays(model).items()}
    header = Header(
        backbone=model.backbone_name,
        n_bits=model.n_bits,
        preprocessing=preprocessing,
        label_names=label_names,
        fingerprint="",
        training=training or {},
        scores=scores or {},
        head=model.head_name,
    )
    header = replace(header, fingerprint=fingerprint_of(header, tensors))
    content: dict[str, Any] = {
        # The oldest version that can represent it, so that an older Hashseek can read it where possible.
        "format_version": 1 if model.head_name == "linear" and preprocessing is not None else 2,
        "model": _describe(header),
        "preprocessing": _as_json(preprocessing),
        "label_names": list(label_names),
        "training": header.training,
        "scores": header.scores,
        "fingerprint": header.fingerprint,
    }
    content["checksum"] = checksum_of(content)
    write_atomically(path, save(tensors, metadata={"hashseek": json.dumps(content)}))
    return header


def load_header(path: Path) -> Header:
    """Read a checkpoint's header without its weights, which is fast.

    Raises:
        BadCheckpoint: missing, not from Hashseek, truncated, of a newer format, or with a modified header.
    """
    return _parse(path, _read(path, weights=False)[0])


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check its weights against its fingerprint.

    A backbone "module:function" is accepted only if it is trusted, see `check_trusted`: building it runs that function.

    Raises:
        BadCheckpoint: missing, not from Hashseek, truncated, of a newer format, modified, or with a backbone that is
            not trusted.
        BadConfig: there is no such backbone, or its package is missing.
    """
    header, tensors = _read_intact(path)
    if header.preprocessing is not None:
        check_image_backbone(header.backbone)
    if is_from_outside(header.backbone):
        check_trusted(header.backbone, kind="backbone", source=path)
    return Checkpoint(header, tensors)


def check_intact(path: Path) -> Header:
    """The header of a checkpoint whose weights match its fingerprint. Builds no network.

    Raises:
        BadCheckpoint: missing, foreign, truncated, of a newer format, or changed.
    """
    return _read_intact(path)[0]


def _read_intact(path: Path) -> tuple[Header, Weights]:
    content, tensors = _read(path, weights=True)
    header = _parse(path, content)
    found = fingerprint_of(header, tensors)
    if found != header.fingerprint:
        raise BadCheckpoint(
            f"{path} has been modified: its content has the fingerprint {found[:12]}, but its header has "
            f"{header.fingerprint[:12]}; restore the original file"
        )
    return header, tensors


def _describe(header: Header) -> dict[str, Any]:
    head = {} if header.head == "linear" else {"head": header.head}
    return {"backbone": header.backbone, "n_bits": header.n_bits, **head}


def _as_json(preprocessing: Preprocessing | None) -> dict[str, Any] | None:
    return None if preprocessing is None else preprocessing.as_dict()


def _read(path: Path, *, weights: bool) -> tuple[dict[str, Any], Weights]:
    if path.is_dir():
        example = next(path.glob("*.safetensors"), path / "best.safetensors")
        raise BadCheckpoint(f"{path} is a folder: pass a checkpoint in it, such as {example}")
    if not path.is_file():
        raise BadCheckpoint(
            f"there is no checkpoint {path}: correct the path, or train one with `hashseek train`; if a collection has "
            "lost its own, run `hashseek index verify`"
        )
    if not os.access(path, os.R_OK):
        raise BadCheckpoint(f"the checkpoint {path} cannot be read: permission denied")
    try:
        with safe_open(path, framework="np") as opened:
            metadata = opened.metadata() or {}
            names = opened.keys() if weights and "hashseek" in metadata else ()
            tensors = {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError, TypeError) as error:  # TypeError: a type that NumPy lacks
        raise BadCheckpoint(f"{path} is truncated or not a safetensors file: {error}; {_PLAIN_WEIGHTS}") from None
    if "hashseek" not in metadata:
        raise BadCheckpoint(f"{path} is not a checkpoint of Hashseek: {_PLAIN_WEIGHTS}")
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
