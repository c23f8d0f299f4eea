"""Features by OpenVINO on a CPU, several times as fast as PyTorch for small networks.

Every image is a request of its own, and OpenVINO runs as many in parallel as suits the processor. That is faster than
batches of 32, whose activations do not fit the caches, and an image's features cannot depend on its batch.
"""

import importlib
import importlib.util
import sys
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.devices import in_bf16, is_cpu, n_threads
from hashseek.retrieval.engines.openvino_models import load_model, reason_of
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Pixels, Preprocessing
from hashseek.retrieval.models.lazy_backbone import LazyBackbone


class OpenVinoEngine:
    """See `Engine`. Converting a network takes some seconds, reading a converted one from the cache tenths of a second.

    Args:
        network, preprocessing, precision: see `build_engine`, which has checked that OpenVINO is installed.

    Raises:
        BadConfig: OpenVINO cannot convert this network, or cannot run it in this precision.
    """

    def __init__(self, network: LazyBackbone, preprocessing: Preprocessing, *, precision: str) -> None:
        wanted = "bf16" if in_bf16(precision, cpu=True) else "f32"
        self._ov = _import_openvino()
        self._model = load_model(self._ov, network, preprocessing)
        self._settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": wanted,
            "INFERENCE_NUM_THREADS": n_threads(),
            "ENABLE_CPU_PINNING": False,  # two processes with one thread each would share a core
        }
        # A single image gets all threads; many images get one or a few threads each. Both give the same numbers.
        alone = self._compiled("LATENCY")
        self._request = alone.create_infer_request()
        found = str(alone.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        if found != wanted:
            raise BadConfig(f"OpenVINO runs in {found} on this processor, not {precision}: use --precision auto")
        self.batch_size = 128  # large, because some cores idle at the end of a batch
        self.online_batch_size = 1  # with all threads, nearly as fast as many at a time, and each is done sooner
        self.name = f"openvino cpu {'bfloat16' if found == 'bf16' else 'float32'}"

    def _compiled(self, hint: str) -> Any:
        try:
            return self._ov.Core().compile_model(self._model, "CPU", self._settings | {"PERFORMANCE_HINT": hint})
        except RuntimeError as error:
            raise BadConfig(f"OpenVINO cannot run this backbone ({reason_of(error)}): use --engine torch") from None

    @cached_property
    def _queue(self) -> Any:
        """Compiled on first use, because not every search needs it."""
        compiled = self._compiled("THROUGHPUT")
        # As many again as run at a time: the next one waits ready while Python copies the features of the last one.
        n_requests = 2 * int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        queue: Any = self._ov.AsyncInferQueue(compiled, n_requests)
        queue.set_callback(_keep)
        return queue

    def __call__(self, pixels: Pixels) -> NDArray[np.float32]:
        """Features (B, D) of preprocessed uint8 pixels (B, 3, size, size)."""
        if len(pixels) == 1:
            return _features(self._request.infer([pixels], share_inputs=True)[0])
        rows: list[NDArray[np.float32]] = [np.zeros((0, 0), np.float32)] * len(pixels)
        for place in range(len(pixels)):
            self._queue.start_async([pixels[place : place + 1]], userdata=(rows, place), share_inputs=True)
        self._queue.wait_all()
        return np.concatenate(rows)


def _keep(request: Any, userdata: tuple[list[NDArray[np.float32]], int]) -> None:
    rows, place = userdata
    rows[place] = _features(request.get_output_tensor(0).data)


def _features(outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """A copy, because OpenVINO reuses the memory for the next image."""
    return outputs.reshape(1, -1).astype(np.float32)


def check_openvino(device: str) -> None:
    """Raise `BadConfig` unless the package is installed and `device` is "auto" or a CPU."""
    if device != "auto" and not is_cpu(device):
        raise BadConfig(f"the engine openvino runs on the CPU, not on {device}: use --device cpu")
    if not has_openvino():
        raise BadConfig("the engine openvino is not installed: run pip install openvino, or use --engine torch")


def has_openvino() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("openvino") is not None


def _import_openvino() -> Any:
    # OpenVINO sends telemetry on import and with each conversion unless this package is missing.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    ov = importlib.import_module("openvino")
    importlib.import_module("openvino.preprocess")
    return ov
