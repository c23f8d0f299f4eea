"""The backbone that an engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from hashseek.retrieval.models.fully_connected import Weights, as_arrays

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class LazyBackbone:
    """A backbone that may not be built yet. With OpenVINO's cache, often neither it nor PyTorch is needed.

    Args:
        build: returns the backbone: normalised images (B, 3, size, size) -> features (B, D, ...).
        tensors: its state dict.
        name: the backbone's name, to cache its converted form. One from outside, "module:function", is not cached.
    """

    build: Callable[[], nn.Module]
    tensors: Weights
    name: str

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Self:
        """A backbone that is built."""
        return cls(lambda: module, as_arrays(module), name)
