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
        is_strided_depthwise = self.groups == self.in_channels > 1 and max(self.stride) > 1
        outputs: Tensor
        if is_strided_depthwise and inputs.dtype is torch.bfloat16:
            # Its gradient takes 4 to 20 times as long in bf16 as in float32.
            with torch.autocast("cpu", enabled=False):
                outputs = self._conv_forward(inputs.float(), weight, bias).to(inputs.dtype)
        else:
            outputs = self._conv_forward(inputs, weight, bias)
        return outputs


class _FoldedBatchNorm(nn.BatchNorm2d):
    """Batch norm that the convolution in front of it has already computed, except in training mode."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.training else inputs
