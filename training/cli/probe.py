"""The command `hashseek probe`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.files import write_atomically
from hashseek.training.cli.evaluate import DataOption, Device, Precision, data_options
from hashseek.training.data.datasets import build_splits
from hashseek.training.progress import Progress


def probe(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint from `hashseek train`.")],
    data: DataOption = None,
    layer: Annotated[
        Literal["features", "outputs"],
        typer.Option(help="Input of the classifier: the backbone's features, or the outputs whose signs are the code."),
    ] = "features",
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the metrics to this JSON file.")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Train a linear classifier on the frozen encoder, and print its F1, Hamming loss, p@1 and mAP on the queries."""
    from hashseek.training.evaluation.linear_probe import probe_checkpoint

    name, options = data_options(checkpoint, data)
    found = probe_checkpoint(
        load_checkpoint(checkpoint),
        build_splits(name, **options),
        layer=layer,
        device=device,
        precision=precision,
        as_trained=data is None,
        progress=Progress(),
    )
    for key, value in found.items():
        typer.echo(f"{key:13s} {value:.4g}" if key == "weight_decay" else f"{key:13s} {value:.4f}")
    if out is not None:
        write_atomically(out, json.dumps(found, indent=2).encode())
        typer.echo(f"wrote the metrics to {out}", err=True)
