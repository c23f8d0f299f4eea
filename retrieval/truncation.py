"""Shorter codes from a nested checkpoint: its first bits are a code of their own."""

from dataclasses import replace

from hashseek.retrieval.checkpoint import Checkpoint, fingerprint_of
from hashseek.retrieval.errors import BadCheckpoint


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
        own = checkpoint.header.n_bits
        setting = f"loss.nested = {{lengths = [{n_bits}, {own}]}}" if n_bits < own else f"model.n_bits = {n_bits}"
        raise BadCheckpoint(
            f"the checkpoint was trained for codes of {', '.join(map(str, lengths))} bits, not of {n_bits}: "
            f"{'choose one of these lengths, or ' if len(lengths) > 1 else ''}train with {setting}"
        )
    last = "head.2." if checkpoint.header.head.startswith("mlp") else "head."  # layers with one row per bit
    tensors = {
        name: values[:n_bits] if name.startswith(last) and values.ndim else values
        for name, values in checkpoint.tensors.items()
    }
    header = replace(checkpoint.header, n_bits=n_bits)
    return Checkpoint(replace(header, fingerprint=fingerprint_of(header, tensors)), tensors)
