"""The backbone that an engine runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """A backbone that may not be built yet. With OpenVINO's cache, neither it nor torchvision is often needed.

    Args:
        build: returns the backbone: normalised images (B, 3, size, size) -> features (B, D, ...).
        tensors: its state dict.
        name: the backbone's name, to cache its converted form; None: it is not cached.
    """

    build: Callable[[], nn.Module]
    tensors: Mapping[str, Tensor]
    name: str | None = None

    @classmethod
    def of(cls, module: nn.Module, name: str | None = None) -> Self:
        """A backbone that is built."""
        return cls(lambda: module, module.state_dict(), name)
