"""Engines: libraries that run a backbone for the encoder.

    torch      PyTorch, on a CPU or a GPU
    openvino   OpenVINO, on a CPU
    auto       OpenVINO on a CPU; PyTorch on a GPU, without OpenVINO, and for networks that it cannot convert

The environment variable HASHSEEK_ENGINE sets which engine "auto" means. docs/benchmarks.md compares their speed and
shows how well their codes agree.
"""

import logging
import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.devices import ENGINES, in_bf16, is_cpu
from hashseek.retrieval.engines.openvino_engine import OpenVinoEngine, check_openvino, has_openvino
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Pixels, Preprocessing
from hashseek.retrieval.models.lazy_backbone import LazyBackbone


class Engine(Protocol):
    """Computes the features of a backbone.

    `name` consists of engine, device and precision. A collection stores it with every code, so it must stay the same
    from version to version. `batch_size` is a good number of images per call for throughput, and `online_batch_size`
    the largest while somebody waits for each result.
    """

    name: str
    batch_size: int
    online_batch_size: int

    def __call__(self, pixels: Pixels) -> NDArray[np.float32]:
        """Features (B, D) of preprocessed uint8 pixels (B, 3, size, size), B >= 1. Not thread-safe."""


_log = logging.getLogger("hashseek")


def build_engine(
    name: str,
    network: LazyBackbone,
    preprocessing: Preprocessing,
    *,
    device: str = "auto",
    precision: str = "auto",
) -> Engine:
    """The engine `name` for a backbone, which runs in evaluation mode.

    Args:
        name: one of `ENGINES`.
        network: the backbone.
        preprocessing: size, mean and standard deviation of the input.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "fp32", "bf16" or "auto": the faster one on this device, see `in_bf16`.

    Raises:
        BadConfig: the engine is unknown, or cannot run this network on this device in this precision.
    """
    check_engine(name, device=device, precision=precision)
    name = _chosen(name)
    if name == "openvino" or (name == "auto" and is_cpu(device) and has_openvino()):
        try:
            return OpenVinoEngine(network, preprocessing, precision=precision)
        except BadConfig as error:
            if name == "openvino":
                raise
            _log.warning("encoding with torch: %s", error)
    from hashseek.retrieval.engines.torch_engine import TorchEngine

    return TorchEngine(network.build(), preprocessing, device=device, precision=precision)


def check_engine(engine: str = "auto", *, device: str = "auto", precision: str = "auto") -> None:
    """Check that this machine has the engine, the device and the precision, before a model is loaded.

    Raises:
        BadConfig: it does not.
    """
    name = _chosen(engine)
    if name not in ENGINES:
        raise BadConfig(f"there is no engine {name!r}: use one of {', '.join(ENGINES)}")
    is_cpu(device)
    in_bf16(precision, cpu=True)
    if name == "openvino":
        check_openvino(device)


def _chosen(name: str) -> str:
    return os.environ.get("HASHSEEK_ENGINE", "auto") if name == "auto" else name
