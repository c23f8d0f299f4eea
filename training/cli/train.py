"""Subcommand `train`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.label_files import OnError
from hashseek.training.config import load_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.progress import Progress
from hashseek.training.torchrun import torchrun


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file, or the name of a shipped configuration.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, such as model.n_bits=24.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/NAME-OF-THE-TOML-FILE.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run in the folder, with the same settings.")] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Number of processes that share each batch, one per GPU or share of the CPU; default: train.devices."
        ),
    ] = None,
    on_error: Annotated[
        OnError | None,
        typer.Option(help="skip: leave out bad lines and images; stop (default): refuse them."),
    ] = None,
) -> None:
    """Train a hash model from a TOML configuration, and print the path of the best checkpoint.

    Under torchrun, its processes share each batch, and an existing run in the folder is continued:
    torchrun --nproc-per-node 2 --max-restarts 3 -m hashseek train CONFIG
    """
    started = torchrun()
    changes = list(overrides or [])
    if on_error is not None:
        changes.append(f"data.on_error={on_error}")
    if started is not None and devices is not None:
        raise BadConfig("--devices cannot be used under torchrun, which starts the processes: leave --devices out")
    if started is not None:
        devices, resume = started.n_processes, True  # it starts the same command again after a failure
    if devices is not None:
        changes.append(f"train.devices={devices}")
    settings = load_config(config, changes)
    folder = out or Path("runs") / config.stem
    if not resume and (folder / "config.json").is_file():
        raise BadConfig(f"{folder} already holds a run: continue it with --resume, or choose another folder with --out")
    if started is None or started.local_rank == 0:  # bad input is refused before torch is loaded
        build_splits(settings.data.name, **settings.data.options())

    from hashseek.training.loop.fit import fit

    progress = Progress(quiet=started is not None and started.rank > 0)
    if resume and started is None and not (folder / "config.json").is_file():
        progress.console.print(f"note: {folder} holds no run to continue: starting one", markup=False)
    result = fit(settings, out=folder, resume=resume, quiet=progress.quiet)
    if math.isnan(result.best_score):
        chosen = f"last epoch {result.best_epoch}"
    else:
        chosen = f"best epoch {result.best_epoch} with validation mAP {result.best_score:.4f}"
    progress.console.print(f"{chosen}; run folder {folder}", markup=False)
    if not progress.quiet:
        typer.echo(result.run.best)
