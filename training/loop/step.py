"""One step: heads of a batch, losses over all processes, gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hashseek.training.collectives import gather, sum_gradients
from hashseek.training.loop.network import Heads, Keys, Network, Objective

Autocast = Callable[[], AbstractContextManager[None]]
Seeded = tuple[Tensor, Tensor]
"""Inputs and the seeds of their rows."""


def backward(
    network: Network,
    objective: Objective,
    keys: Keys | None,
    inputs: Tensor,
    labels: Tensor,
    *,
    seeds: Tensor,
    epoch: int,
    autocast: Autocast,
    chunk_size: int | None = None,
    views: int = 1,
) -> dict[str, Tensor]:
    """Add the gradients of the summed loss terms to the parameters; returns the terms, detached.

    With `chunk_size` only that many rows are in memory at once, and the loss is still that of the whole batch: heads
    are computed without a graph first, the loss gives their gradients, then each chunk is computed a second time and
    its gradients are passed back (GradCache; Gao et al., RepL4NLP 2021).

    Args:
        inputs: (views * b, ...), view after view; with a key encoder, the second view is used only for the keys.
        labels: (b, C).
        seeds: (views * b,), for dropout.
        autocast: entered for the networks' forward passes only; losses and gradients stay outside.

    Raises:
        BadCodes: NaN in the heads.
    """
    if keys is not None:
        keys.follow(network)
    seen, key_inputs = (inputs, seeds), (inputs, seeds)
    if views > 1:
        if keys is None or keys.encoder is None:
            labels = labels.repeat(views, 1)
        else:
            n = len(labels)
            seen, key_inputs = (inputs[:n], seeds[:n]), (inputs[n:], seeds[n:])

    def terms_of(heads: Heads) -> dict[str, Tensor]:
        """The loss terms of the whole batch; their gradients are passed back to the heads of this process."""
        memory = None
        if keys is not None:
            with autocast():
                own = keys.of(*key_inputs, heads, chunk_size=chunk_size)
            memory = keys.memory(own, labels)
        everyone = {name: gather(rows) for name, rows in heads.items()}
        terms: dict[str, Tensor] = objective(everyone, gather(labels), memory=memory, epoch=epoch)
        torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
        return terms

    if chunk_size is None or len(seen[0]) <= chunk_size:
        with autocast():
            heads = network(*seen)
        terms = terms_of(heads)
    else:
        terms = _in_chunks(network, _split(seen, chunk_size), terms_of, autocast)
    sum_gradients(network.parameters())
    return {name: value.detach() for name, value in terms.items()}


def _in_chunks(
    network: Network, chunks: list[Seeded], terms_of: Callable[[Heads], dict[str, Tensor]], autocast: Autocast
) -> dict[str, Tensor]:
    with torch.no_grad(), autocast():
        parts = [network(*chunk) for chunk in chunks]
    heads = {name: torch.cat([part[name] for part in parts]).requires_grad_() for name in parts[0]}
    terms = terms_of(heads)
    start = 0
    for chunk in chunks:
        with autocast():
            again = network(*chunk)
        # Features of a frozen backbone do not require a gradient.
        wanted = [name for name in again if heads[name].grad is not None and again[name].requires_grad]
        stop = start + len(chunk[0])
        gradients = [heads[name].grad[start:stop] for name in wanted]  # type: ignore[index]
        torch.autograd.backward([again[name] for name in wanted], gradients)
        start = stop
    return terms


def _split(inputs: Seeded, chunk_size: int) -> list[Seeded]:
    return list(zip(*(torch.split(part, chunk_size) for part in inputs), strict=True))
