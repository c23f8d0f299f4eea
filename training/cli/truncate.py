"""Subcommand `truncate`."""

from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.models.truncation import truncate as cut


def truncate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint trained with loss.nested.")],
    bits: Annotated[int, typer.Option(help="Length of the new codes, one that it was trained for.")],
    out: Annotated[Path | None, typer.Option(help="The new checkpoint; default NAME-BITS beside the old one.")] = None,
) -> None:
    """Write the checkpoint of a nested code's first bits: index, search and evaluate it like any other."""
    target = out or checkpoint.with_name(f"{checkpoint.stem}-{bits}{checkpoint.suffix}")
    if target.exists():
        raise BadCheckpoint(f"{target} exists already: choose another name with --out")
    short = cut(load_checkpoint(checkpoint), bits)
    save_checkpoint(
        target,
        short.model,
        short.header.preprocessing,
        label_names=short.header.label_names,
        training=short.header.training,
    )
    typer.echo(target)
