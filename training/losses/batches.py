"""The input of a loss: a batch and, for some losses, a memory of earlier rows; and the checks of both."""

from typing import NamedTuple

import torch
from torch import Tensor

from hashseek.retrieval.errors import BadCodes


class Memory(NamedTuple):
    """Rows to compare with, without gradient. A loss accepts it, or any pair of tensors, as `memory`."""

    ref: Tensor
    """Rows (Q, K)."""
    ref_y: Tensor
    """Their labels (Q, C), 0/1."""


class Batch(NamedTuple):
    """A checked batch. All tensors are float32, or all float64."""

    outputs: Tensor
    """Outputs (B, K) of the network; for a classification loss the logits (B, C)."""
    labels: Tensor
    """Labels (B, C), 0/1."""
    memory: Memory | None
    """The argument `memory`, for a loss that uses one."""
    logits: Tensor | None
    """Logits (B, C), for a loss that reads them in addition to the outputs."""
    epoch: int
    """The current epoch, from 0."""
    features: Tensor | None = None
    """Features (B, D) that the outputs are computed from, for a loss that reads them."""

    @property
    def others(self) -> Memory:
        """The rows that the outputs are compared with: the memory, or without one the batch itself."""
        return Memory(self.outputs, self.labels) if self.memory is None else self.memory


def check_batch(
    outputs: Tensor, labels: Tensor, *, n_classes: int, n_bits: int, what: str = "outputs"
) -> tuple[Tensor, Tensor]:
    """Check a batch and return (outputs (B, K) in float32 or float64, labels (B, C) in the same type).

    Half-precision outputs are converted to float32: losses never compute in lower precision.

    Raises:
        BadCodes: wrong shapes, labels that are not 0/1, or outputs that are NaN or infinite.
    """
    if outputs.ndim != 2 or outputs.shape[1] != n_bits:
        raise BadCodes(f"the loss expects {what} of shape (B, {n_bits}), got {tuple(outputs.shape)}")
    if labels.shape != (outputs.shape[0], n_classes):
        raise BadCodes(f"the loss expects labels of shape ({outputs.shape[0]}, {n_classes}), got {tuple(labels.shape)}")
    rows = raised(outputs)
    binary = labels.to(rows)
    # Reading values would break a compiled graph.
    if not torch.compiler.is_compiling() and not _look_valid(rows, binary):
        _refuse_values(rows, labels, what)
    return rows, binary


def check_memory(memory: object, like: Tensor, *, n_classes: int, n_bits: int) -> Memory | None:
    """`memory` without gradient, in the type and on the device of `like`, or None.

    `memory` is a pair of tensors ref (Q, K) and ref_y (Q, C), or an object with these attributes.

    Raises:
        BadCodes: `memory` is neither, or `check_batch` refuses its rows.
    """
    if memory is None:
        return None
    if isinstance(memory, tuple | list) and len(memory) == 2:
        ref, ref_y = memory
    else:
        ref, ref_y = getattr(memory, "ref", None), getattr(memory, "ref_y", None)
    if not (isinstance(ref, Tensor) and isinstance(ref_y, Tensor)):
        raise BadCodes(
            f"the memory is a {type(memory).__name__}, but must be a pair of tensors, ref (Q, {n_bits}) and ref_y "
            f"(Q, {n_classes})"
        )
    try:
        ref, ref_y = check_batch(ref.detach(), ref_y.detach(), n_classes=n_classes, n_bits=n_bits)
    except BadCodes as error:
        raise BadCodes(f"the memory does not fit: {error}") from error
    return Memory(ref.to(like), ref_y.to(like))


def raised(rows: Tensor) -> Tensor:
    """`rows` in float32, or in float64 if they are already float64."""
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _look_valid(rows: Tensor, labels: Tensor) -> bool:
    """Whether all labels are 0 or 1 and all rows are finite; may be False for finite rows whose sum overflows.

    On a queue of thousands of rows this is several times faster than comparing every value: y - y^2 is 0 only for 0 and
    1, and 0 times the sum of the rows is NaN if one of them is not finite.
    """
    distance = torch.linalg.vector_norm(torch.addcmul(labels, labels, labels, value=-1))
    return torch.add(distance, rows.detach().sum(), alpha=0).item() == 0


def _refuse_values(rows: Tensor, labels: Tensor, what: str) -> None:
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise BadCodes(f"labels must be 0 or 1, but one is {wrong[0].item()!r}: use multi-hot labels")
    for row in (~torch.isfinite(rows)).any(dim=1).nonzero()[:1].flatten().tolist():
        raise BadCodes(f"the {what} have NaN or infinity in row {row}: lower the learning rate")
