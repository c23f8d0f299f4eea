"""Subcommand `index calibrate`."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from hashseek.indexing.calibration import N_QUERIES, calibrate_collection
from hashseek.indexing.collection import Collection
from hashseek.indexing.printing import printable

_SHOWN = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


def calibrate(
    collection: Annotated[Path, typer.Argument(help="Folder of the collection.")],
    labels: Annotated[
        list[str] | None, typer.Option(help="Label that decides relevance; may be repeated; default: all.")
    ] = None,
    queries: Annotated[int, typer.Option(help="So many of the labelled images, drawn at random, are queries.")] = (
        N_QUERIES
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 0,
) -> None:
    """Learn from the labelled images what a distance is worth, and keep it for `search --min-precision`."""
    with closing(Collection(collection)) as opened:
        made = calibrate_collection(opened, labels=labels or (), n_queries=queries, seed=seed)
    found = made.calibration
    typer.echo(
        f"{found.n_queries} queries over {made.n_images} labelled images, labels {printable(', '.join(made.labels))}"
    )
    typer.echo("precision  radius")
    for precision in _SHOWN:
        radius = found.radius(precision)
        typer.echo(f"{precision:9.2f}  {'none gives so much' if radius is None else radius}")
