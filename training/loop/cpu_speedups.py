"""Patches that speed up a training step: folded batch norm, float32 where bf16 is slow, fewer calls to the kernel.

Modules stay in place and keep their parameters, so state dicts, optimizers and copies work as before.
"""

import ctypes

import torch
from torch import Tensor, nn

from hashseek.retrieval.models.batch_norm_folding import conv_norm_pairs


def fold_frozen_batch_norm(backbone: nn.Module) -> None:
    """Let each convolution of `backbone` compute the frozen batch norm after it, in place.

    The fold is computed in every forward pass, so weights, scales and shifts all learn as before, but no separate pass
    over the activations is left, neither forward nor backward. Networks that torch.fx cannot trace are left alone, and
    so is batch norm in training mode.
    """
    for conv_name, norm_name in conv_norm_pairs(backbone):
        conv, norm = backbone.get_submodule(conv_name), backbone.get_submodule(norm_name)
        if type(norm) is nn.BatchNorm2d and norm.affine:  # timm's subclass has an activation inside
            conv.__class__ = _FoldedConv
            # Not registered as a submodule, so that the module tree stays as it is.
            object.__setattr__(conv, "norm", norm)
            norm.__class__ = _FoldedBatchNorm


def compute_depthwise_in_float32(backbone: nn.Module) -> None:
    """Let the depthwise convolutions of `backbone` compute in float32 under autocast, in place.

    Under autocast to bf16, their gradients take up to 20 times as long as in float32. Whole steps of ShuffleNet,
    MobileNet and EfficientNet took longer than without autocast (docs/benchmarks.md).
    """
    for module in backbone.modules():
        if type(module) is nn.Conv2d and _is_depthwise(module):
            module.__class__ = _DepthwiseConv


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next batch instead of returning it to the system.

    Otherwise every large tensor on a CPU is a new mapping that the system fills with zeros page by page, which took a
    fifth of the time of a step. This holds for the rest of the process; with other C libraries nothing happens.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


class _FoldedConv(nn.Conv2d):
    """A convolution followed by batch norm, as one convolution while the batch norm is in evaluation mode."""

    norm: nn.BatchNorm2d

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias, norm = self.weight, self.bias, self.norm
        if not norm.training:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = (norm.running_var + norm.eps).rsqrt() * norm.weight
            shift = norm.bias - norm.running_mean * scale
            bias = shift if bias is None else bias * scale + shift
            weight = weight * scale[:, None, None, None]
        return _convolve(self, inputs, weight, bias)


class _DepthwiseConv(nn.Conv2d):
    def forward(self, inputs: Tensor) -> Tensor:
        return _convolve(self, inputs, self.weight, self.bias)


def _convolve(conv: nn.Conv2d, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs: Tensor
    if _is_depthwise(conv) and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            outputs = conv._conv_forward(inputs.float(), weight, bias)
        return outputs.to(torch.get_autocast_dtype("cpu"))
    outputs = conv._conv_forward(inputs, weight, bias)
    return outputs


def _is_depthwise(conv: nn.Conv2d) -> bool:
    return conv.groups == conv.in_channels > 1


class _FoldedBatchNorm(nn.BatchNorm2d):
    """Batch norm that the convolution in front of it has already computed, except in training mode."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.training else inputs
