"""Dropout drawn from (seed, epoch, row, view): the same for a row in any process, chunk or resumed run.

PyTorch's layers draw from a running generator, so what they drop depends on the batch and the process of a row.
"""

from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# The class of a layer (PyTorch's, torchvision's, timm's): its rate, and whether it drops whole rows.
_KINDS = {"Dropout": ("p", False), "StochasticDepth": ("p", True), "DropPath": ("drop_prob", True)}
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's, as int64
_BITS = 24


class RowSeeds:
    """The seeds (B,) of the rows in the current forward pass, which all dropout layers share."""

    def __init__(self) -> None:
        self.now: Tensor | None = None


def seed_by_row(network: nn.Module) -> RowSeeds:
    """Let the dropout layers of `network` draw from the seeds that are set in the result, in place.

    Layers of other classes are left unchanged.
    """
    seeds, numbers = RowSeeds(), count()
    for module in network.modules():
        if type(module).__name__ in _KINDS:
            name, whole_rows = _KINDS[type(module).__name__]
            rate = getattr(module, name)
            module.__class__ = _RowDropout
            assert isinstance(module, _RowDropout)
            module.rate, module.whole_rows, module.seeds, module.number = rate, whole_rows, seeds, next(numbers)
    return seeds


def row_seeds(rows: NDArray[np.int64], *, seed: int, epoch: int, views: int = 1) -> Tensor:
    """Seeds int64 (views * b,) of the rows of the data set, view after view."""
    start = np.random.SeedSequence((seed, epoch)).generate_state(views, np.uint64).view(np.int64)
    return _mixed((torch.from_numpy(start)[:, None] + torch.from_numpy(rows) * _GOLDEN).flatten())


class _RowDropout(nn.Module):
    rate: float
    whole_rows: bool
    seeds: RowSeeds
    number: int

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return inputs
        seeds = self.seeds.now
        assert seeds is not None
        n_draws = 1 if self.whole_rows else inputs.numel() // len(seeds)
        counters = torch.arange(1, n_draws + 1, device=inputs.device) * _GOLDEN
        draws = _mixed(_mixed(seeds + self.number)[:, None] + counters)
        kept = _shifted(draws, 64 - _BITS) >= round(self.rate * 2**_BITS)
        shape = (-1, *[1] * (inputs.ndim - 1)) if self.whole_rows else inputs.shape
        outputs: Tensor = inputs * kept.to(inputs.dtype).reshape(shape) / (1 - self.rate)
        return outputs


def _mixed(values: Tensor) -> Tensor:
    """The output function of SplitMix64 (Steele et al., OOPSLA 2014) on int64 numbers, which wrap around."""
    values = (values ^ _shifted(values, 30)).mul_(_FIRST)
    values = values.bitwise_xor_(_shifted(values, 27)).mul_(_SECOND)
    return values.bitwise_xor_(_shifted(values, 31))


def _shifted(values: Tensor, n: int) -> Tensor:
    """Shifted right by n bits, with zeros from the left."""
    return (values >> n).bitwise_and_((1 << (64 - n)) - 1)
