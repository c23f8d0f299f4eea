"""`python -m experiments`: runs published experiments and prints our scores next to the published ones."""

import json
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.api import cli
from hashseek.retrieval.errors import BadConfig
from hashseek.training.data.datasets import vectors

reproduce = typer.Typer(no_args_is_help=True)


Methods = Annotated[list[str] | None, typer.Option("--method", help="Only this method; may be repeated.")]


@reproduce.callback()
def about() -> None:
    """Run a published experiment. The same command continues an interrupted run, or prints a finished one."""


@reproduce.command("hbl-table-2")
def hbl_table_2(
    data: Annotated[Literal["scene", "yeast"] | None, typer.Option(help="Only this data set.")] = None,
    method: Methods = None,
    root: Annotated[str, typer.Option(help="Folder with scene.npz and yeast.npz.")] = vectors.HOME,
    out: Annotated[Path, typer.Option(help="Run folder; finished runs in it are kept.")] = Path("runs/hbl-table-2"),
    trials: Annotated[
        int, typer.Option(min=1, help="Number of settings to try for each method on each data set.")
    ] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Number of training runs with the chosen settings.")] = 5,
    folds: Annotated[int, typer.Option(min=2, help="Number of cross-validation folds of the training split.")] = 3,
) -> None:
    """HBL's Table II: contrastive losses on Scene and Yeast, then a linear probe; our scores next to the paper's.

    Settings are searched only on the training split; the test part is scored once per seed, with the chosen settings.
    Two processes can share a run folder if each works on one data set (--data).
    """
    from experiments.hbl import METHODS
    from experiments.hbl_report import as_markdown
    from experiments.hbl_table_2 import rows_file, run
    from hashseek.training.runs.run_folder import read_records

    methods = _known(method, METHODS)
    for name in [data] if data else ("scene", "yeast"):
        run(
            out,
            name,
            getattr(vectors, name)(root=root),
            methods=methods,
            n_trials=trials,
            n_seeds=seeds,
            n_folds=folds,
            say=_say,
        )
    typer.echo(
        as_markdown([row for name in ("scene", "yeast") for row in read_records(rows_file(out, name))]), nl=False
    )


@reproduce.command("losses")
def losses(
    data: Annotated[
        str,
        typer.Option(help="Data for the comparison: a name in experiments/inputs.py, or your own configuration."),
    ] = "mirflickr",
    method: Methods = None,
    bits: Annotated[list[int] | None, typer.Option(help="Code length; may be repeated. Default: 12 24 36 48.")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of repetitions, each with its own searches and runs of every method.")
    ] = 5,
    trials: Annotated[
        int, typer.Option(min=1, help="Number of settings that each search tries, at 12 and at 48 bits.")
    ] = 12,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each run.")] = 30,
    jobs: Annotated[int, typer.Option(min=1, help="Number of methods to run in parallel.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/DATA. Finished runs are kept.")] = None,
) -> None:
    """Every hashing and contrastive loss on the same data under one protocol, compared with untrained layers.

    On photographs the network is a frozen MobileNet v2 (mirflickr), on another split of the same photographs
    (mirflickr-second), or SqueezeNet (mirflickr-squeezenet, mirflickr-squeezenet-second); on vectors (scene, yeast) it
    is an MLP trained from scratch. Hyperparameters are chosen on a validation part of the training split, with the same
    number of trials for each method; BiHalf, which uses no labels, has fixed ones. Each run is scored on the query
    split once.
    """
    from experiments.comparison import Experiment, run
    from experiments.methods import COMPARED

    methods, folder = _known(method, COMPARED), out or Path("runs") / Path(data).stem
    experiment = Experiment(data, tuple(dict.fromkeys(bits or (12, 24, 36, 48))), seeds, trials, epochs)
    run(folder, experiment, methods=methods, jobs=jobs, say=_say)
    _show(folder)


@reproduce.command("finetuned")
def finetuned(
    method: Methods = None,
    bits: Annotated[list[int] | None, typer.Option(help="Code length; may be repeated. Default: 48 12.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs per method and length.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs in parallel.")] = 2,
    out: Annotated[Path, typer.Option(help="Run folder of the comparison; finished runs are kept.")] = Path(
        "runs/mirflickr"
    ),
) -> None:
    """Fine-tune the whole network on MIRFLICKR with the settings that the comparison `losses` has chosen.

    By default, the eight methods of docs/explanation/reproduction.md. Each run is scored on the query split once.
    """
    from experiments.comparison import TUNED
    from experiments.finetuned import CHOSEN, FOLDER, run_finetuned
    from experiments.methods import COMPARED, METHODS

    lengths = tuple(dict.fromkeys(bits or TUNED[::-1]))
    if unknown := set(lengths) - set(TUNED):
        raise BadConfig(f"no settings are searched at {min(unknown)} bits: choose among {TUNED[0]} and {TUNED[1]}")
    methods = _known(method, [name for name in COMPARED if METHODS[name].space]) if method else list(CHOSEN)
    _searched_budget(out, methods, lengths, seeds)
    run_finetuned(out, methods, lengths=lengths, seeds=seeds, jobs=jobs, say=_say)
    _show(out / FOLDER)


@reproduce.command("hyp2-tables")
def hyp2_tables(
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs per variant and length.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Number of variants to run in parallel.")] = 2,
    out: Annotated[Path, typer.Option(help="Run folder of the comparison; finished runs are kept.")] = Path(
        "runs/mirflickr"
    ),
) -> None:
    """HyP2's Tables 5 and 6 on MIRFLICKR: ablations with searches of their own, and HyP2 as chosen by `losses`."""
    from experiments import hyp2_tables as tables
    from experiments.comparison import TUNED, Experiment

    budget = _searched_budget(out, ["hyp2"], TUNED, seeds)
    tables.run(out, Experiment(n_seeds=seeds, **budget), jobs=jobs, say=_say)
    typer.echo(tables.as_markdown(out), nl=False)


@reproduce.command("unsupervised")
def unsupervised(
    bits: Annotated[
        list[int] | None, typer.Option(help="Code length; may be repeated. Default: 16 32 48 64 128 256.")
    ] = None,
) -> None:
    """Codes without labels on MIRFLICKR, compared with supervised ones and with the features themselves.

    Nothing is kept: each call trains and fits again, which takes minutes.
    """
    from experiments.unsupervised import BITS, run

    run(bits or BITS, say=typer.echo)


@reproduce.command("unsupervised-settings")
def unsupervised_settings() -> None:
    """Other settings of weighted ITQ, ITQ-CCA and BiHalf, scored on the training pictures of MIRFLICKR.

    Nothing is kept: each call trains and fits again, which takes minutes.
    """
    from experiments.unsupervised_settings import run

    run(say=typer.echo)


def _searched_budget(folder: Path, methods: Collection[str], lengths: Collection[int], seeds: int) -> dict[str, int]:
    """The budget of a comparison, which later runs share; nothing if the folder does not record it.

    Raises:
        BadConfig: the folder is not a comparison on mirflickr that has chosen settings of the methods at these lengths,
            with these seeds.
    """
    from experiments.comparison import chosen_settings

    for method, n_bits, seed in product(methods, lengths, range(seeds)):
        chosen_settings(folder, method, n_bits, seed)
    file = folder / "experiment.json"
    if not file.is_file():  # the settings in experiments/results
        return {}
    budget = json.loads(file.read_text(encoding="utf-8"))
    if budget["data"] != "mirflickr":
        raise BadConfig(
            f"{folder} is a comparison on {budget['data']}, but this command is for mirflickr: choose another --out"
        )
    return {name: budget[name] for name in ("epochs", "n_trials")}


def _show(folder: Path) -> None:
    """Write the diagrams of a comparison, and print its tables: of all methods with finished runs in its folder."""
    from experiments.comparison_report import as_markdown, write_plots

    for file in write_plots(folder):
        _say(f"wrote {file}")
    typer.echo(as_markdown(folder), nl=False)


def _known(chosen: list[str] | None, methods: Collection[str]) -> list[str]:
    for name in chosen or ():
        if name not in methods:
            raise BadConfig(f"there is no method {name!r}: choose one of {', '.join(methods)}")
    return list(dict.fromkeys(chosen or methods))


def _say(line: str) -> None:
    typer.echo(line, err=True)


if __name__ == "__main__":
    cli.run(lambda: reproduce(prog_name="python -m experiments", standalone_mode=False))
