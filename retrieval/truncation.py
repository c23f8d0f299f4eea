"""Shorter codes from a nested checkpoint: its first bits are a code of their own."""

import copy
from dataclasses import replace

from torch import nn

from hashseek.retrieval.checkpoint import Checkpoint, fingerprint
from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.models.mlp import BatchNorm


def lengths_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The code lengths that the checkpoint was trained for, ascending; the last is its own.

    A loss on the features or the projection does not train prefixes of the code, and a truncated checkpoint has lost
    the bits beyond its own length.
    """
    loss = checkpoint.header.training.get("loss") or {}
    nested = loss.get("nested") if loss.get("on", "outputs") == "outputs" else None
    own = checkpoint.header.n_bits
    return *(length for length in (nested or {}).get("lengths", ()) if length < own), own


def truncate(checkpoint: Checkpoint, n_bits: int) -> Checkpoint:
    """The checkpoint whose codes are the first `n_bits` bits of this one's, with its own fingerprint.

    Raises:
        BadCheckpoint: it was not trained for that length.
    """
    lengths = lengths_of(checkpoint)
    if n_bits not in lengths:
        raise BadCheckpoint(
            f"the checkpoint was trained for codes of {', '.join(map(str, lengths))} bits, not of {n_bits}: choose one "
            f"of them, or train with loss.nested = {{lengths = [{n_bits}, {checkpoint.header.n_bits}]}}"
        )
    model = copy.deepcopy(checkpoint.model)
    model.n_bits = n_bits
    if isinstance(model.head, nn.Linear):
        model.head = _first(model.head, n_bits)
    else:
        layers = list(model.head.children())
        last = max(index for index, layer in enumerate(layers) if isinstance(layer, nn.Linear))
        cut = [_first(layer, n_bits) if index >= last else layer for index, layer in enumerate(layers)]
        model.head = nn.Sequential(*cut)
    header = replace(checkpoint.header, n_bits=n_bits, fingerprint=fingerprint(model, checkpoint.header.preprocessing))
    return Checkpoint.of(model, header)


def _first(layer: nn.Module, n_bits: int) -> nn.Module:
    """The part of a linear layer, or of batch norm, that computes the first outputs."""
    if isinstance(layer, nn.Linear):
        cut = type(layer)(layer.in_features, n_bits)
        cut.load_state_dict({name: tensor[:n_bits] for name, tensor in layer.state_dict().items()})
        return cut
    if isinstance(layer, BatchNorm):
        norm = BatchNorm(n_bits)
        state = layer.state_dict()
        norm.load_state_dict({name: tensor[:n_bits] if tensor.ndim else tensor for name, tensor in state.items()})
        return norm
    return layer
