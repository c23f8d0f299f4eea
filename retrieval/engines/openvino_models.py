"""OpenVINO's form of a backbone. Converting takes seconds, so the result is cached in `$HASHSEEK_CACHE/openvino`.

A file holds a SHA-256 over the rest, the length of the graph, the graph (XML) and the weights. Nothing in it depends on
the processor or the precision. Files may be deleted at any time; the most recently used ones are kept. For a network
that cannot be converted, a file with the reason saves the next start from trying again.

PyTorch is imported to convert a network, but not to read a converted one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hashseek.retrieval.checkpoint import digest_weights
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import CACHE_REMEDY, cached_file, delete_oldest, mark_used, write_atomically
from hashseek.retrieval.images import Preprocessing, normalizer
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from hashseek.retrieval.models.names import TIMM, is_from_outside

if TYPE_CHECKING:
    from torch import nn

_FORMAT = 1  # raise it when the conversion changes
_KEPT_BYTES = 2 * 2**30
_MAX_DIFFERENCE = 0.01  # of the largest feature; measured: below 0.0001

_log = logging.getLogger("hashseek")


def load_model(ov: Any, network: LazyBackbone, preprocessing: Preprocessing) -> Any:
    """OpenVINO's form of `network` for one image of uint8 pixels (1, 3, size, size), normalisation included.

    Args:
        ov: the package openvino.
        network: the backbone. One from outside, whose code may change, is never cached.
        preprocessing: how images become its input.

    Raises:
        BadConfig: OpenVINO cannot convert the network.
    """
    if is_from_outside(network.name):
        return _converted(ov, network.build(), preprocessing)
    file = _file(network, preprocessing)
    content = _read(file)
    if content is None:
        model = _converted_or_remembered(ov, network, preprocessing, file.with_suffix(".reason"))
        try:
            content = _as_bytes(ov, model)
            write_atomically(file, content)
            delete_oldest(file.parent, "*.model", keep=_KEPT_BYTES)
        except (OSError, RuntimeError) as error:
            _log.warning(
                "the converted network cannot be cached, so every start converts it again (%s): %s", error, CACHE_REMEDY
            )
            return model
    length = int.from_bytes(content[32:40], "little")
    weights = np.frombuffer(content, np.uint8, offset=40 + length)
    return ov.Core().read_model(content[40 : 40 + length], ov.Tensor(weights))


def _file(network: LazyBackbone, preprocessing: Preprocessing) -> Path:
    packages = ["openvino", "torch", "torchvision", *(["timm"] if network.name.startswith(TIMM) else [])]
    versions = [(package, version(package)) for package in packages]
    key = json.dumps([_FORMAT, versions, network.name, digest_weights(network.tensors), preprocessing.as_dict()])
    return cached_file("openvino", key, suffix=".model")


def _read(file: Path) -> bytes | None:
    """The content of a file; None if there is no undamaged file."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if content[:32] != hashlib.sha256(memoryview(content)[32:]).digest():
        _log.warning("%s is damaged: the network is converted again", file)
        return None
    mark_used(file)
    return content


def _converted_or_remembered(ov: Any, network: LazyBackbone, preprocessing: Preprocessing, reason: Path) -> Any:
    """The converted network. Why one cannot be converted is written to the file `reason`, and read from there."""
    with suppress(OSError):
        raise BadConfig(reason.read_text(encoding="utf-8"))
    built = network.build()
    try:
        return _converted(ov, built, preprocessing)
    except BadConfig as error:
        with suppress(OSError):
            write_atomically(reason, f"{error} (to try again, delete {reason})".encode())
        raise


def _as_bytes(ov: Any, model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder, "model.xml")
        ov.save_model(model, graph, compress_to_fp16=False)
        xml, weights = graph.read_bytes(), graph.with_suffix(".bin").read_bytes()
    content = len(xml).to_bytes(8, "little") + xml + weights
    return hashlib.sha256(content).digest() + content


def _converted(ov: Any, network: nn.Module, preprocessing: Preprocessing) -> Any:
    import torch

    from hashseek.retrieval.models.timm_backbones import for_one_size

    size = preprocessing.size
    network = network.cpu().eval()
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # PyTorch's own deprecations, which OpenVINO triggers
            fixed = for_one_size(network, size)
            exported = torch.export.export(fixed, (torch.zeros(1, 3, size, size),))
            level = logging.root.level
            try:
                model = ov.convert_model(exported)
            finally:
                logging.root.setLevel(level)  # `convert_model` changes it, and does not restore it if it fails
        model.reshape([1, 3, size, size])
        steps = ov.preprocess.PrePostProcessor(model)
        pixels = steps.input()
        pixels.tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NCHW"))
        pixels.model().set_layout(ov.Layout("NCHW"))
        pixels.preprocess().convert_element_type(ov.Type.f32)
        pixels.preprocess().mean([255 * value for value in preprocessing.mean])
        pixels.preprocess().scale([255 * value for value in preprocessing.std])
        model = steps.build()
        difference = _difference(ov, model, network, preprocessing)
    except Exception as error:  # PyTorch and OpenVINO raise dozens of types
        raise BadConfig(f"OpenVINO cannot convert this backbone ({reason_of(error)}): use --engine torch") from None
    if not difference <= _MAX_DIFFERENCE:  # nan is not
        raise BadConfig(
            f"OpenVINO converts this backbone incorrectly (its features differ by {difference:.1%}): use --engine torch"
        )
    return model


def _difference(ov: Any, model: Any, network: nn.Module, preprocessing: Preprocessing) -> float:
    """Largest difference from PyTorch's features of a random image, as a share of the largest feature."""
    import torch

    size = preprocessing.size
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, size, size), dtype=np.uint8)
    with torch.inference_mode():
        expected = network(normalizer(preprocessing, torch.device("cpu"))(torch.from_numpy(pixels))).flatten().numpy()
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled([pixels])[0].reshape(-1)
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-12))


def reason_of(error: Exception) -> str:
    """The most informative line of an error message: PyTorch writes it first, OpenVINO last."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return lines[-1 if type(error).__module__.startswith("openvino") else 0]
