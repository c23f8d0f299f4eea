"""The same network in less time: what PyTorch does slowly on a processor is done another way.

Three things (MobileNet v2, 224 px, bf16, one core of a Xeon with AMX; time of a step with all of them: a half):

- Batch norm that is frozen is folded into the convolution in front of it, anew in every pass, so that weights, scales
  and shifts all learn as before: no pass over the activations, forward or backward, is left of it.
- The gradient of a depthwise convolution with a stride is computed by PyTorch 2.15 in bf16 with a reference kernel
  (140 ms for 16 x 96 x 112 x 112). The same sum is a convolution without a stride of the gradient with zeros between
  its values, for which there is a quick kernel (10 to 60 ms).
- ReLU6 in place keeps a copy of its input for the backward pass; its output does as well.

Modules stay where they are and keep their parameters: state dicts, optimizers and copies do not notice.
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hashseek.retrieval.models.batch_norm_folding import conv_norm_pairs


def quicken(backbone: nn.Module, *, frozen_batch_norm: bool, device: torch.device) -> None:
    """Make the modules of `backbone` quick, in place; a network that can be traced has its batch norm folded.

    Args:
        backbone: the network.
        frozen_batch_norm: its batch norm stays in evaluation mode while training.
        device: what it will compute on; strides and ReLU6 are slow on a processor only.
    """
    if frozen_batch_norm:
        for conv_name, norm_name in conv_norm_pairs(backbone):
            conv, norm = backbone.get_submodule(conv_name), backbone.get_submodule(norm_name)
            if type(norm) is nn.BatchNorm2d and norm.affine:  # timm's has its activation within
                conv.__class__ = _QuickConv
                # Not registered as a submodule: the tree of modules stays as it was.
                object.__setattr__(conv, "norm", norm)
                norm.__class__ = _Folded
    if device.type != "cpu":
        return
    for module in backbone.modules():
        if type(module) is nn.Conv2d and _is_strided_depthwise(module):
            module.__class__ = _QuickConv
        elif type(module) is nn.ReLU6 and module.inplace:
            module.__class__ = _QuickReLU6


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for the next batch, where it would hand it back and fetch it anew.

    Every large tensor on a processor is otherwise a fresh mapping that the system fills with zeros page by page: a
    fifth of the time of a step. For the rest of the process; where the C library is not glibc, nothing happens.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


class _QuickConv(nn.Conv2d):
    """A convolution, with the batch norm that follows it if there is one folded in."""

    norm: nn.BatchNorm2d | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        norm = self.norm
        if norm is not None and not norm.training:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = (norm.running_var + norm.eps).rsqrt() * norm.weight
            shift = norm.bias - norm.running_mean * scale
            bias = shift if bias is None else bias * scale + shift
            weight = weight * scale[:, None, None, None]
        if _is_strided_depthwise(self) and inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            kind = torch.get_autocast_dtype("cpu")
            given = (inputs.to(kind), weight.to(kind), None if bias is None else bias.to(kind))
            strided: Tensor = _StridedDepthwise.apply(*given, self.stride, self.padding)
            return strided
        outputs: Tensor = self._conv_forward(inputs, weight, bias)
        return outputs


class _Folded(nn.BatchNorm2d):
    """Batch norm that the convolution in front of it does, unless it is in training mode."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.training else inputs


class _QuickReLU6(nn.ReLU6):
    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.requires_grad:
            return super().forward(inputs)
        outputs: Tensor = _ReLU6.apply(inputs)
        return outputs


class _ReLU6(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.mark_dirty(inputs)
        outputs = F.hardtanh_(inputs, 0.0, 6.0)
        ctx.save_for_backward(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (outputs,) = ctx.saved_tensors  # 0 and 6 have no slope, like what lies beyond them
        slope: Tensor = torch.ops.aten.hardtanh_backward(grads[0], outputs, 0.0, 6.0)
        return slope


class _StridedDepthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.stride, ctx.padding, ctx.has_bias = stride, padding, bias is not None
        return F.conv2d(inputs, weight, bias, stride, padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        (grad,), stride, padding = grads, ctx.stride, ctx.padding
        kernel = weight.shape[2:]
        to_inputs = None
        if ctx.needs_input_grad[0]:
            rows, columns = (n - k + 1 + 2 * p for n, k, p in zip(inputs.shape[2:], kernel, padding, strict=True))
            size = (*inputs.shape[:2], rows, columns)
            apart = torch.empty(size, dtype=grad.dtype, memory_format=torch.channels_last).zero_()
            apart[:, :, :: stride[0], :: stride[1]] = grad
            turned = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
            to_inputs = F.conv2d(apart, weight.flip(2, 3), None, 1, turned, groups=len(weight))
        _, to_weight, to_bias = torch.ops.aten.convolution_backward(
            grad,
            inputs,
            weight,
            [len(weight)] if ctx.has_bias else None,
            stride,
            padding,
            [1, 1],
            False,
            [0, 0],
            len(weight),
            [False, True, ctx.has_bias],
        )
        return to_inputs, to_weight, to_bias if ctx.has_bias else None, None, None


def _is_strided_depthwise(conv: nn.Conv2d) -> bool:
    return (
        1 < conv.groups == conv.in_channels == conv.out_channels
        and max(conv.stride) > 1
        and max(conv.dilation) == 1
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and all(p < k for p, k in zip(conv.padding, conv.kernel_size, strict=True))
    )
