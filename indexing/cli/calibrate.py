"""The subcommand `index calibrate`."""

from contextlib import closing
from typing import Annotated

import typer

from hashseek.indexing.calibration import N_QUERIES, calibrate_collection
from hashseek.indexing.cli.options import CollectionArgument
from hashseek.indexing.collection import Collection
from hashseek.indexing.printing import printable

_SHOWN = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


def calibrate(
    collection: CollectionArgument,
    labels: Annotated[
        list[str] | None, typer.Option(help="Only these labels decide relevance; may be repeated; default: all labels.")
    ] = None,
    queries: Annotated[int, typer.Option(help="Number of labelled images, chosen at random, to use as queries.")] = (
        N_QUERIES
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random choice.")] = 0,
) -> None:
    """Measure, on the labelled images, the precision of results at each distance, for `search --min-precision`."""
    with closing(Collection(collection)) as opened:
        stored = calibrate_collection(opened, labels=labels or (), n_queries=queries, seed=seed)
    found = stored.calibration
    names = printable(", ".join(stored.labels))
    typer.echo(f"{found.n_queries} queries over {stored.n_images} labelled images, labels {names}")
    typer.echo("precision  radius")
    for precision in _SHOWN:
        radius = found.radius(precision)
        typer.echo(f"{precision:9.2f}  {'not reached' if radius is None else radius}")
