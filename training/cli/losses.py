"""The command `hashseek losses`: list the losses, show one in full, or write the tables of docs/reference/losses.md."""

import shutil
from typing import Annotated

import typer

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses import check_name


def losses(
    name: Annotated[str | None, typer.Argument(help="Show this loss in full; MODULE:CLASS for your own.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/reference/losses.md.")] = False,
) -> None:
    """List the losses, or show one in full: source, formula, what it needs, hyperparameters, defaults and limits."""
    if markdown and name is not None:
        raise BadConfig(f"--markdown prints the tables of all losses: leave out {name!r} or --markdown")
    if name is not None:
        check_name(name)
    from hashseek.training.losses.catalogue import as_markdown, in_full, listing  # loads torch

    width = max(40, min(shutil.get_terminal_size().columns, 110))
    if markdown:
        typer.echo(as_markdown(), nl=False)
    else:
        typer.echo(listing(width) if name is None else in_full(name, width))
