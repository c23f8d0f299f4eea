"""Features by OpenVINO on a CPU, several times as fast as PyTorch for small networks. Needs `hashseek[openvino]`.

Every image is a request of its own, and OpenVINO runs as many in parallel as suits the processor. That is faster than
batches of 32, whose activations do not fit the caches, and an image's features cannot depend on its batch.
"""

import importlib
import importlib.util
import sys
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hashseek.retrieval.devices import pick_device, pick_inference_dtype
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Pixels, Preprocessing


class OpenVinoEngine:
    """See `Engine`. Converting a network takes some seconds.

    Raises:
        BadConfig: OpenVINO is not installed or cannot convert this network, or the device or precision does not exist.
    """

    def __init__(
        self, network: nn.Module, preprocessing: Preprocessing, *, device: str = "auto", precision: str = "auto"
    ) -> None:
        check_openvino(device)
        self.device = torch.device("cpu")
        wanted = pick_inference_dtype(precision, self.device)
        ov = _import_openvino()
        model = _converted(ov, network, preprocessing)
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if wanted == torch.bfloat16 else "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        core = ov.Core()
        # A single image gets all threads; many images get one or a few threads each. Both give the same numbers.
        self._alone = core.compile_model(model, "CPU", settings | {"PERFORMANCE_HINT": "LATENCY"})
        self._many = core.compile_model(model, "CPU", settings | {"PERFORMANCE_HINT": "THROUGHPUT"})
        found = str(self._alone.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        self.dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[found]
        if self.dtype != wanted:
            raise BadConfig(f"OpenVINO runs in {found} on this processor, not in {precision}: use --precision auto")
        self._request = self._alone.create_infer_request()
        self._queue = ov.AsyncInferQueue(self._many)
        self._queue.set_callback(_keep)
        self.batch_size = 128  # large, because some cores idle at the end of a batch
        self.name = f"openvino cpu {str(self.dtype).removeprefix('torch.')}"

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


def _converted(ov: Any, network: nn.Module, preprocessing: Preprocessing) -> Any:
    """OpenVINO's form of `network` for one image of uint8 pixels (1, 3, size, size), normalisation included."""
    size = preprocessing.size
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # PyTorch's own deprecations, which OpenVINO triggers
            exported = torch.export.export(network.cpu(), (torch.zeros(1, 3, size, size),))
            model = ov.convert_model(exported)
        model.reshape([1, 3, size, size])
        steps = ov.preprocess.PrePostProcessor(model)
        pixels = steps.input()
        pixels.tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NCHW"))
        pixels.model().set_layout(ov.Layout("NCHW"))
        pixels.preprocess().convert_element_type(ov.Type.f32)
        pixels.preprocess().mean([255 * value for value in preprocessing.mean])
        pixels.preprocess().scale([255 * value for value in preprocessing.std])
        return steps.build()
    except Exception as error:  # PyTorch and OpenVINO raise dozens of types
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise BadConfig(f"OpenVINO cannot convert this backbone ({reason}): use --engine torch") from None


def check_openvino(device: str) -> None:
    """Raise `BadConfig` unless the package is installed and `device` is "auto" or a CPU."""
    if device != "auto" and pick_device(device).type != "cpu":
        raise BadConfig(f"the engine openvino runs on the CPU, not on {device}: use --device cpu")
    if importlib.util.find_spec("openvino") is None:
        raise BadConfig(
            "the engine openvino needs the package openvino: install it with pip install 'hashseek[openvino]'"
        )


def _import_openvino() -> Any:
    # OpenVINO sends telemetry on import and with each conversion unless this package is missing.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    ov = importlib.import_module("openvino")
    importlib.import_module("openvino.preprocess")
    return ov
