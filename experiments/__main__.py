"""`python -m experiments`: runs published experiments and prints our scores beside the published ones."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hashseek.api.cli import run
from hashseek.retrieval.errors import BadConfig
from hashseek.training.data.datasets import vectors
from hashseek.training.runs.progress import Progress

reproduce = typer.Typer(no_args_is_help=True)

LENGTHS = (12, 24, 36, 48)


class Method(StrEnum):
    """A row of HBL's Table II."""

    ANY = "any"
    ANY_HBL = "any+hbl"
    MULSUPCON = "mulsupcon"
    MULSUPCON_HBL = "mulsupcon+hbl"


class Data(StrEnum):
    """A half of HBL's Table II."""

    SCENE = "scene"
    YEAST = "yeast"


Methods = Annotated[list[str] | None, typer.Option("--method", help="Only this method; may be given again.")]
Bits = Annotated[list[int] | None, typer.Option(help="Code length; may be given again. Default 12 24 36 48.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each method at each length.")]
Trials = Annotated[int, typer.Option(min=1, help="Settings tried for each method on the validation part.")]
Epochs = Annotated[int, typer.Option(min=1, help="Of every run.")]
Jobs = Annotated[int, typer.Option(min=1, help="Methods that run side by side.")]
Out = Annotated[Path, typer.Option(help="Run folder; finished runs in it are kept.")]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", help="Print the tables of the finished runs in the run folder.")
]


@reproduce.callback()
def about() -> None:
    """Run a published experiment. Each resumes where it was stopped."""


@reproduce.command("hbl-table-2")
def hbl_table_2(
    data: Annotated[list[Data] | None, typer.Option(help="Only this data set; may be given again.")] = None,
    method: Annotated[list[Method] | None, typer.Option(help="Only this method; may be given again.")] = None,
    root: Annotated[str, typer.Option(help="Folder of scene.npz and yeast.npz.")] = vectors.HOME,
    out: Out = Path("runs/hbl-table-2"),
    trials: Annotated[int, typer.Option(min=1, help="Settings tried for each method on each data set.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of the chosen settings.")] = 5,
    folds: Annotated[int, typer.Option(min=2, help="Parts of the training split that validate in turn.")] = 3,
    report_only: ReportOnly = False,
) -> None:
    """HBL's Table II: contrastive losses on Scene and Yeast, then a linear probe; ours beside the paper's scores.

    Settings are searched on the training split only; the test part is scored once per seed, with the chosen settings.
    An interrupted run continues with the same command. Two processes can share a run folder if each works on one data
    set (--data).
    """
    from experiments.comparison import read_rows
    from experiments.hbl_report import as_markdown
    from experiments.hbl_table_2 import rows_file, run

    if report_only:
        if not any(rows_file(out, name).is_file() for name in Data):
            raise BadConfig(f"{out} holds no finished seed yet: run without --report-only first")
    else:
        for name in data or list(Data):
            run(
                out,
                name.value,
                getattr(vectors, name.value)(root=root),
                methods=[one.value for one in method or list(Method)],
                n_trials=trials,
                n_seeds=seeds,
                n_folds=folds,
                say=_say,
            )
    typer.echo(as_markdown([row for name in Data for row in read_rows(rows_file(out, name))]), nl=False)


@reproduce.command("mirflickr")
def mirflickr(
    method: Methods = None,
    bits: Bits = None,
    seeds: Seeds = 3,
    trials: Trials = 8,
    epochs: Epochs = 40,
    jobs: Jobs = 2,
    out: Out = Path("runs/mirflickr"),
    finetuned: Annotated[
        bool, typer.Option(help="Then fine-tune the network at 48 bits with HyP2 and the two strongest others.")
    ] = True,
    report_only: ReportOnly = False,
) -> None:
    """Every hashing and contrastive loss on the same photographs: HyP2's Tables 3, 5 and 6 with a frozen MobileNet v2.

    Hyperparameters are chosen on a validation part of the training split, with the same number of trials for each
    method. Each run is scored on the query split once. An interrupted run continues with the same command. Which
    methods are fine-tuned depends on their validation scores at the longest code.
    """
    from experiments.comparison import Experiment, as_markdown, run
    from experiments.finetuned import finetuned_markdown, run_finetuned, strongest

    methods = _methods(method)
    if not report_only:
        progress = Progress()
        experiment = Experiment("mirflickr", tuple(bits or LENGTHS), seeds, trials, epochs)
        run(out, experiment, methods=methods, jobs=jobs, say=_say)
        if finetuned:
            run_finetuned(out, strongest(out, methods, 2), progress=progress)
    typer.echo(as_markdown(out, methods=methods) + finetuned_markdown(out), nl=False)


@reproduce.command("vectors")
def on_vectors(
    data: Annotated[Data, typer.Option(help="Data set of vectors.")],
    method: Methods = None,
    bits: Bits = None,
    seeds: Seeds = 3,
    trials: Trials = 6,
    epochs: Epochs = 30,
    jobs: Jobs = 2,
    out: Annotated[Path | None, typer.Option(help="Run folder, default runs/DATA; finished runs are kept.")] = None,
    report_only: ReportOnly = False,
) -> None:
    """The comparison of `mirflickr` on vectors, with an MLP trained from scratch.

    Queries are the official test part, the database is the training part. An interrupted run continues with the same
    command.
    """
    from experiments.comparison import Experiment, as_markdown, run

    methods, folder = _methods(method), out or Path("runs") / data.value
    if not report_only:
        experiment = Experiment(data.value, tuple(bits or LENGTHS), seeds, trials, epochs)
        run(folder, experiment, methods=methods, jobs=jobs, say=_say)
    typer.echo(as_markdown(folder, methods=methods), nl=False)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _methods(chosen: list[str] | None) -> list[str]:
    from experiments.comparison import METHODS

    for name in chosen or ():
        if name not in METHODS:
            raise BadConfig(f"there is no method {name!r}: choose one of {', '.join(METHODS)}")
    return chosen or list(METHODS)


if __name__ == "__main__":
    run(lambda: reproduce(prog_name="python -m experiments", standalone_mode=False))
