"""Heads, and backbones for vectors, as the encoder runs them: in NumPy, without importing torch.

Each output is a float64 sum of its own, so it depends neither on the rest of the batch nor on the number of threads,
and hardly ever on the processor. A matrix product adds in an order that depends on all of these; the rounding of an
output near 0, and with it a bit, would then depend on them.

Weights have the names that they have in the PyTorch modules of `heads` and `mlp`, which are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

Weights = Mapping[str, NDArray[Any]]
Rows = NDArray[np.float64]
Step = Callable[[Rows], Rows]

_EPS = 1e-5  # of batch norm, as in PyTorch
_AT_ONCE = 1024  # rows that are in float64 at a time


class FullyConnected:
    """Layers in evaluation mode: rows (B, D) -> rows (B, F), both float32. Later changes of the weights have no effect.

    Args:
        steps: applied one after the other, in float64.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The results (B, F) for rows (B, D)."""
        blocks = [self._apply(rows[start : start + _AT_ONCE]) for start in range(0, len(rows) or 1, _AT_ONCE)]
        return np.concatenate(blocks)

    def _apply(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        found = rows.astype(np.float64)
        for step in self._steps:
            found = step(found)
        return found.astype(np.float32)


def head_of(name: str, weights: Weights) -> FullyConnected:
    """The head `name`, see `hashseek.retrieval.models.heads`, with this state dict: features -> outputs."""
    return FullyConnected([*([_normalized] if name == "normalized" else []), *_layers(weights)])


def mlp_of(weights: Weights) -> FullyConnected:
    """The backbone `mlp:...` or `mlp_bn:...` with this state dict: vectors (B, D) -> features (B, F)."""
    mean, std = (weights[name].astype(np.float64) for name in ("mean", "std"))
    layers = _layers({name.removeprefix("layers."): w for name, w in weights.items() if name.startswith("layers.")})
    return FullyConnected([lambda rows: (rows - mean) / std, *layers, *([_relu] if layers else [])])


def as_arrays(module: nn.Module) -> dict[str, NDArray[Any]]:
    """The state dict of a module; bfloat16, which NumPy lacks, as float32. Arrays may share memory with tensors."""
    import torch

    state = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    return {
        name: (values.float() if values.dtype == torch.bfloat16 else values).numpy() for name, values in state.items()
    }


def _layers(weights: Weights) -> list[Step]:
    """The layers of an `nn.Sequential`, or a single linear one. Numbers without weights are ReLUs."""
    if "weight" in weights:
        return [_linear(weights)]
    by_number: dict[int, dict[str, NDArray[Any]]] = {}
    for name, values in weights.items():
        number, _, own = name.partition(".")
        by_number.setdefault(int(number), {})[own] = values
    steps: list[Step] = []
    for place in range(max(by_number, default=-1) + 1):
        of_layer = by_number.get(place)
        if of_layer is None:
            steps.append(_relu)
        else:
            steps.append(_batch_norm(of_layer) if "running_mean" in of_layer else _linear(of_layer))
    return steps


def _linear(weights: Weights) -> Step:
    weight, bias = weights["weight"].astype(np.float64), weights["bias"].astype(np.float64)
    return lambda rows: np.vecdot(rows[:, None], weight) + bias


def _batch_norm(weights: Weights) -> Step:
    mean, variance, weight, bias = (
        weights[name].astype(np.float64) for name in ("running_mean", "running_var", "weight", "bias")
    )
    scale = weight / np.sqrt(variance + _EPS)
    return lambda rows: (rows - mean) * scale + bias


def _normalized(rows: Rows) -> Rows:
    result: Rows = rows / np.maximum(np.sqrt(np.vecdot(rows, rows)), 1e-12)[:, None]
    return result


_relu: Step = partial(np.maximum, 0)
