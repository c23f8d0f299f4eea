"""Features by PyTorch: batch norm folded, channels last, weights converted to the precision once."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hashseek.retrieval.devices import in_bf16, n_threads, pick_device
from hashseek.retrieval.images import Pixels, Preprocessing, normalizer
from hashseek.retrieval.models.batch_norm_folding import fold

# The activations of larger passes no longer fit the caches: MobileNet v2 takes 11 ms per image in passes of 32 and 8 ms
# in passes of 8, ResNet-50 takes 29 and 26 ms.
_IMAGES_PER_THREAD = 8


class TorchEngine:
    """See `Engine`.

    Raises:
        BadConfig: there is no such device or precision.
    """

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, *, device: str, precision: str) -> None:
        self.device = pick_device(device)
        if self.device.type == "cpu":
            torch.set_num_threads(n_threads())
        self._half = in_bf16(precision, cpu=self.device.type == "cpu")
        folded, n_folded = fold(network)
        if self._half:
            # Convert once what autocast would convert before every pass; normalisation layers stay in float32.
            for module in folded.modules():
                if type(module) in (nn.Conv2d, nn.Linear):
                    module.to(torch.bfloat16)
        self._network = folded.to(self.device).to(memory_format=torch.channels_last)
        self._normalize = normalizer(preprocessing, self.device)
        self.batch_size = self.online_batch_size = 64 if self.device.type == "cpu" else 256
        kind = "bfloat16" if self._half else "float32"
        self.name = f"torch {self.device.type} {kind}{' folded' if n_folded else ''}"

    def __call__(self, pixels: Pixels) -> NDArray[np.float32]:
        """Features (B, D) of preprocessed uint8 pixels (B, 3, size, size)."""
        n, step = len(pixels), _IMAGES_PER_THREAD * torch.get_num_threads()
        if self.device.type == "cuda":
            # cuDNN takes seconds to prepare its kernels for a new batch size, so batches are padded to powers of two.
            step = 1 << (n - 1).bit_length()
            if step > n:
                pixels = np.concatenate((pixels, np.zeros((step - n, *pixels.shape[1:]), np.uint8)))
        rows = []
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._half):
            for start in range(0, len(pixels), step):
                part = torch.from_numpy(pixels[start : start + step])
                features: torch.Tensor = self._network(self._normalize(part))
                rows.append(features.flatten(1).float().cpu().numpy())
        return np.concatenate(rows)[:n]
