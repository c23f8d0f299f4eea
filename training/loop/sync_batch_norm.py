"""Batch norm over several processes: statistics of the whole batch, as one process would compute them.

`torch.nn.SyncBatchNorm` does not run on CPUs, where this project tests what it runs on several GPUs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hashseek.retrieval.errors import BadConfig


def share_batch_norm(network: nn.Module) -> None:
    """Let every batch norm of `network` compute its statistics over all processes, in place.

    Modules stay in place and keep their parameters, so state dicts, optimizers and copies work as before. Batch
    norm in evaluation mode computes as before. All processes must call the network equally often.
    """
    for module in network.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, _Shared):
            kind = type(module)
            module.__class__ = type(f"Shared{kind.__name__}", (_Shared, kind), {})


class _Shared(_BatchNorm):
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)
        if any(True for _ in self.children()):  # timm's subclasses have an activation inside
            raise BadConfig(
                f"{type(self).__name__.removeprefix('Shared')} is more than a batch norm and does not train in several "
                "processes: set model.freeze_batch_norm = true, or train.devices = 1"
            )
        return _normalized(self, inputs)


def _normalized(norm: _BatchNorm, inputs: Tensor) -> Tensor:
    """Inputs (b, C, ...) of this process, normalised with mean and variance over the rows of all processes."""
    others = [axis for axis in range(inputs.ndim) if axis != 1]
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    rows = inputs.float()
    n: Tensor = _Sum.apply(rows.new_tensor([rows.numel() / rows.shape[1]])).detach()
    mean: Tensor = _Sum.apply(rows.sum(dim=others)) / n
    centred = rows - mean.view(shape)
    # A second pass: E[x^2] - E[x]^2 would cancel.
    variance: Tensor = _Sum.apply(centred.square().sum(dim=others)) / n
    if norm.track_running_stats:
        _follow(norm, mean.detach(), variance.detach() * n / (n - 1))
    outputs = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        outputs = torch.addcmul(norm.bias.view(shape), outputs, norm.weight.view(shape))
    return outputs.to(inputs.dtype)


@torch.no_grad()
def _follow(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics as `nn.BatchNorm` does."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean), share)
    norm.running_var.lerp_(variance.to(norm.running_var), share)


class _Sum(torch.autograd.Function):
    """Sum over all processes; its gradient is the sum of theirs, for each holds the loss's gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ARG004
        return _Sum.apply(grad)
