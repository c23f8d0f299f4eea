"""Subcommand `probe`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.files import write_atomically
from hashseek.training.cli.evaluate import data_options
from hashseek.training.data.datasets import build_splits
from hashseek.training.runs.progress import Progress


def probe(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint made by `hashseek train`.")],
    data: Annotated[
        str | None,
        typer.Option(help="A folder with labels.csv, a data set's name, or a TOML file; default: as in training."),
    ] = None,
    layer: Annotated[
        Literal["features", "outputs"], typer.Option(help="The backbone's features, or the outputs behind the code.")
    ] = "features",
    seed: Annotated[int, typer.Option(help="Of the draw of the validation part, which chooses the weight decay.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[Literal["auto", "fp32", "bf16"], typer.Option(help="Of the network.")] = "auto",
) -> None:
    """Classify with a linear probe on the frozen encoder: F1, Hamming loss, p@1, mAP of the query split."""
    from hashseek.training.evaluation.linear_probe import probe_checkpoint

    name, options = data_options(checkpoint, data)
    found = probe_checkpoint(
        load_checkpoint(checkpoint),
        build_splits(name, **options),
        layer=layer,
        seed=seed,
        device=device,
        precision=precision,
        progress=Progress(),
    )
    for key, value in found.items():
        typer.echo(f"{key:13s} {value:.4g}" if key == "weight_decay" else f"{key:13s} {value:.4f}")
    if out is not None:
        write_atomically(out, json.dumps(found, indent=2).encode())
        typer.echo(f"written to {out}", err=True)
