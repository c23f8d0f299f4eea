"""Nested codes: one network whose first 16, 32, 48 ... bits are each a good code."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses.batches import check_memory, raised
from hashseek.training.losses.hyperparameters import Number, check


class Nested(nn.Module):
    """The same loss on several prefixes of the outputs, each with its own proxies or centres.

    total = sum over lengths k of weights[k] * loss_k(first k outputs). The terms are named `<term>@<length>`. The idea
    is that of Matryoshka representations (Kusupati et al., NeurIPS 2022, Eq. 1), there for classification of real
    embeddings. It costs as much as the losses of all lengths together.

    Args:
        build: builds the loss for a code of the given number of bits.
        n_bits: K, width of the outputs.
        lengths: prefix lengths, ascending; the last one is K, otherwise the bits after it would learn nothing.
        weights: one weight per length; None: all 1.

    Raises:
        BadConfig: lengths that are not ascending whole numbers from 1 to K, a different number of weights and
            lengths, a weight < 0, or no weight above 0.
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
        if not isinstance(lengths, list | tuple) or not lengths:
            raise BadConfig(f"nested.lengths must be a list of numbers of bits, got {lengths!r}")
        for length in lengths:
            check("a length in nested.lengths", length, Number("a number of bits", least=1, whole=True))
        if any(long <= short for short, long in pairwise(lengths)) or lengths[-1] != n_bits:
            raise BadConfig(f"nested.lengths is {list(lengths)}, but must ascend and end with all {n_bits} bits")
        weights = [1.0] * len(lengths) if weights is None else weights
        if not isinstance(weights, list | tuple) or len(weights) != len(lengths):
            raise BadConfig(f"nested.weights is {weights!r}, but must be a list of {len(lengths)}: one per length")
        for weight in weights:
            check("a weight in nested.weights", weight, Number("the weight of one length", least=0))
        if not any(weights):
            raise BadConfig("nested.weights are all 0, so nothing would be learned: set at least one above 0")
        self.n_bits = n_bits
        self.lengths = tuple(lengths)
        self.weights = tuple(weights)
        self.losses = nn.ModuleList(build(length) for length in lengths)

    def forward(self, outputs: Tensor, labels: Tensor, *, memory: object = None, **given: Any) -> dict[str, Tensor]:
        """Terms "<term>@<length>"; the rows of a memory are cut to the same prefixes. See `Loss.forward`."""
        if outputs.ndim != 2 or outputs.shape[1] != self.n_bits:
            raise BadCodes(f"the loss expects outputs of shape (B, {self.n_bits}), got {tuple(outputs.shape)}")
        held = check_memory(memory, raised(outputs), n_classes=labels.shape[-1], n_bits=self.n_bits)
        terms = {}
        for length, weight, loss in zip(self.lengths, self.weights, self.losses, strict=True):
            cut = None if held is None else (held.ref[:, :length], held.ref_y)
            found = loss(outputs[:, :length], labels, memory=cut, **given)
            terms.update({f"{term}@{length}": weight * value for term, value in found.items()})
        return terms
