"""The command `hashseek truncate`."""

from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import BadCheckpoint


def truncate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint trained with loss.nested.")],
    bits: Annotated[
        int, typer.Option(min=1, help="Length of the new codes; one of those the checkpoint was trained for.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The new checkpoint. Default: NAME-BITS next to the old one.")
    ] = None,
) -> None:
    """Write a checkpoint for the first bits of a nested code. It can be indexed, searched and evaluated as usual."""
    target = out or checkpoint.with_name(f"{checkpoint.stem}-{bits}{checkpoint.suffix}")
    if target.exists():
        raise BadCheckpoint(f"{target} already exists: choose another file with --out")
    from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
    from hashseek.retrieval.truncation import truncate as cut

    short = cut(load_checkpoint(checkpoint), bits)
    save_checkpoint(
        target,
        short.model,
        short.header.preprocessing,
        label_names=short.header.label_names,
        training=short.header.training,
    )
    typer.echo(target)
