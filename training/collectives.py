"""Rows and gradients of several processes, moved by torch.distributed.

Every process computes the loss of the whole batch from gathered rows, so contrastive and pair losses see the same rows
as in one process. Each then takes the gradient of its own rows only, and the parameter gradients are summed.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def several() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def parts_of(rows: Tensor) -> list[Tensor]:
    """Rows (B, ...) of every rank, in the order of ranks, without gradients. Ranks may differ in B."""
    n_ranks = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(n_ranks)]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(lengths))
    # all_gather needs equal shapes: pad, and cut the padding off again.
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in range(n_ranks)]
    dist.all_gather(parts, padded)
    return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]


def gather_rows(rows: Tensor) -> Tensor:
    """Rows (B, ...) of all ranks one after the other, without a gradient; `rows` itself if there is one process."""
    return torch.cat(parts_of(rows)) if several() else rows


def gather(rows: Tensor) -> Tensor:
    """As `gather_rows`, but with a gradient for the rows of this process."""
    if not several():
        return rows
    parts = parts_of(rows)
    # Every process has the same loss of the same rows: its part of the gradient is already complete.
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients over all processes, as one flat tensor."""
    if not several():
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
