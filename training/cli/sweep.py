"""Subcommand `sweep`."""

from pathlib import Path
from typing import Annotated

import typer

from hashseek.training.config import parse_config, read_config
from hashseek.training.progress import Progress


def sweep(
    config: Annotated[
        Path, typer.Argument(help="TOML file with a section sweep.space, or the name of a shipped configuration.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, such as model.n_bits=24.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of trials, including finished ones; default: sweep.trials.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; default: runs/NAME-sweep.")] = None,
) -> None:
    """Search for the settings with the best validation mAP; print the path of the best configuration.

    Run the command again to continue an interrupted sweep, or with a larger --trials to extend it.
    """
    content = read_config(config, [*(overrides or []), *([f"sweep.trials={trials}"] if trials else [])])
    parse_config(content, source=str(config))

    from hashseek.training.sweep import sweep as run  # after the check of the configuration, because it loads torch

    progress = Progress()
    folder = out or Path("runs") / f"{config.stem}-sweep"
    best, *_ = run(content, folder=folder, progress=progress, source=str(config))
    found = f"best: trial {best.trial} with validation mAP {best.score:.4f}: {' '.join(best.settings)}"
    progress.console.print(found, markup=False)
    typer.echo(folder / "best.toml")
