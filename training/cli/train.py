"""Subcommand `train`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.training.config import load_config
from hashseek.training.runs.progress import Progress


def train(
    config: Annotated[
        Path, typer.Argument(help="TOML file, or a shipped one: see docs/reference/shipped-configurations.md.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, such as model.n_bits=24: docs/reference/training-settings.md.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME of the TOML file.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on with the run in the folder; give the same settings again.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Processes, one a GPU or a share of the processor; the batch is split; default train.devices."
        ),
    ] = None,
    on_error: Annotated[
        Literal["skip", "stop"] | None, typer.Option(help="Leave bad lines and images out, or refuse (default).")
    ] = None,
) -> None:
    """Train a hash model as a TOML file says; prints the path of the best checkpoint."""
    from hashseek.training.loop.fit import fit

    progress = Progress()
    if on_error is not None:
        overrides = [*(overrides or []), f"data.on_error={on_error}"]
    if devices is not None:
        overrides = [*(overrides or []), f"train.devices={devices}"]
    folder = out or Path("runs") / config.stem
    result = fit(load_config(config, overrides or []), out=folder, resume=resume, progress=progress)
    progress.console.print(
        f"best epoch {result.best_epoch + 1} with validation mAP {result.best_score:.4f}; run folder {folder}"
    )
    typer.echo(result.run.best)
