"""Nested codes: one network whose first 16, 32, 48 ... bits are each a good code."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses.common import check_at_least, check_count, memory_rows, raised


class Nested(nn.Module):
    """The same loss on several prefixes of the outputs, each with its own proxies or centres.

    total = sum over lengths k of weights[k] * loss_k(first k outputs). The terms are named `<term>@<length>`. The idea
    is that of Matryoshka representations (Kusupati et al., NeurIPS 2022, Eq. 1), there for classification of real
    embeddings. It costs what the losses of all lengths cost.

    Args:
        build: builds the loss for a code of so many bits.
        n_bits: K, width of the outputs.
        lengths: prefix lengths, ascending; the last one is K, or the bits behind it would learn nothing.
        weights: one weight a length; None weighs each 1.

    Raises:
        BadConfig: lengths that are not ascending whole numbers from 1 to K, another number of weights than lengths,
            a weight < 0, or no weight above 0.
    """

    def __init__(
        self,
        build: Callable[[int], nn.Module],
        *,
        n_bits: int,
        lengths: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_lengths(lengths, n_bits)
        weights = [1.0] * len(lengths) if weights is None else weights
        check_weights(weights, lengths)
        self.n_bits = n_bits
        self.lengths = tuple(lengths)
        self.weights = tuple(weights)
        self.losses = nn.ModuleList(build(length) for length in lengths)

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,
        epoch: int = 0,
    ) -> dict[str, Tensor]:
        """Terms "<term>@<length>" of outputs (B, K) with labels (B, C); the rows of a memory are cut likewise.

        Raises:
            BadCodes: outputs of another width, or what the loss refuses.
        """
        if outputs.ndim != 2 or outputs.shape[1] != self.n_bits:
            raise BadCodes(f"the loss expects outputs of shape (B, {self.n_bits}), not {tuple(outputs.shape)}")
        rows = memory_rows(memory, raised(outputs), n_classes=labels.shape[-1], n_bits=self.n_bits)
        terms = {}
        for length, weight, loss in zip(self.lengths, self.weights, self.losses, strict=True):
            seen = None if rows is None else (rows[0][:, :length], rows[1])
            found = loss(outputs[:, :length], labels, memory=seen, logits=logits, epoch=epoch)
            terms.update({f"{term}@{length}": weight * value for term, value in found.items()})
        return terms


def check_lengths(lengths: Sequence[int], n_bits: int) -> None:
    """Raise BadConfig unless `lengths` ascend from 1 or more to `n_bits`."""
    if not isinstance(lengths, list | tuple):
        raise BadConfig(f"nested.lengths must be a list of numbers of bits, not {lengths!r}")
    for length in lengths:
        check_count("a length in nested.lengths", length, 1, "is a number of bits")
    ascending = all(short < long for short, long in pairwise(lengths))
    if not lengths or not ascending or lengths[-1] != n_bits:
        raise BadConfig(
            f"nested.lengths must ascend to all {n_bits} bits, not be {list(lengths)}: end it with {n_bits}"
        )


def check_weights(weights: Sequence[float], lengths: Sequence[int]) -> None:
    """Raise BadConfig unless there is one weight of at least 0 a length, and not all are 0."""
    if not isinstance(weights, list | tuple):
        raise BadConfig(f"nested.weights must be a list of numbers, not {weights!r}")
    if len(weights) != len(lengths):
        raise BadConfig(f"nested.weights needs one weight for each of the {len(lengths)} lengths, not {len(weights)}")
    for weight in weights:
        check_at_least("a weight in nested.weights", weight, 0, "weighs the loss of one length")
    if math.fsum(weights) == 0:
        raise BadConfig("nested.weights are all 0, so that nothing would be learned: set at least one above 0")
