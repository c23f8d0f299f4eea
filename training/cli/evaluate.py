"""Subcommand `evaluate`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hashseek.retrieval.checkpoint import Header, load_header
from hashseek.retrieval.errors import BadConfig
from hashseek.training.config import find_config, load_config, without_held_out
from hashseek.training.data.datasets import DATASETS, build_splits
from hashseek.training.evaluation.report import summary
from hashseek.training.runs.progress import Progress


def evaluate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            help="Checkpoints made by `hashseek train`: the page is about the first and compares the others."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="A folder with labels.csv, a data set's name, or a TOML file; default: as in training."),
    ] = None,
    n: Annotated[
        list[str] | None,
        typer.Option("--n", "-n", help="N of mAP@N, or all; may be repeated; default 100, 1000 and 5000."),
    ] = None,
    normalizer: Annotated[
        Literal["retrieved", "possible", "relevant"],
        typer.Option(help="Relevant images that AP is divided by: those retrieved, min(N, all), or all."),
    ] = "retrieved",
    labels: Annotated[
        Literal["held-out", "seen", "all"] | None,
        typer.Option(help="Of a checkpoint trained without some labels: evaluate on these; default held-out."),
    ] = None,
    lengths: Annotated[bool, typer.Option("--lengths", help="Also each shorter length of nested checkpoints.")] = False,
    drop_labels: Annotated[list[str] | None, typer.Option(help="Labels to leave out, such as '*_r1'.")] = None,
    ignore_column: Annotated[list[str] | None, typer.Option(help="Column of the list that is not needed.")] = None,
    on_error: Annotated[
        Literal["skip", "stop"] | None, typer.Option(help="Leave bad lines and images out, or refuse (default).")
    ] = None,
    baseline: Annotated[
        Literal["none", "random-directions", "untrained"],
        typer.Option(help="Also evaluate the same backbone with a random hash layer, or the model before training."),
    ] = "none",
    points: Annotated[int, typer.Option(help="Database images in the t-SNE; 0 leaves it out.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of random directions, intervals, t-SNE and the queries shown.")] = 0,
    url: Annotated[
        str | None,
        typer.Option(help="Check that this service gives the ranking and figures of the library; --out reports on it."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Also keep what a distance is worth with this collection, for `search --min-precision`."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; default evaluation-NAME beside the checkpoint.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[Literal["auto", "fp32", "bf16"], typer.Option(help="Of the network.")] = "auto",
) -> None:
    """Write a report on how well a checkpoint retrieves, on the query and database splits of a data set.

    With --url, exits with 1 if a ranking of the service differs from the library's.
    """
    if url is not None and (baseline != "none" or lengths or calibrate is not None or len(checkpoints) > 1):
        raise BadConfig(
            "--url compares a service with the library on its own codes: give one checkpoint, and leave --baseline, "
            "--lengths and --calibrate out"
        )
    if calibrate is not None:
        from hashseek.training.evaluation.evaluate import check_calibrates, keep_calibration

        check_calibrates(calibrate, load_header(checkpoints[0]).fingerprint)
    ns = _numbers(n or ["100", "1000", "5000"])
    name, options = data_options(checkpoints[0], data)
    if data is None:
        _check_same_data(checkpoints)
    changes: dict[str, Any] = {"drop_labels": drop_labels, "ignore_columns": ignore_column, "on_error": on_error}
    options |= {key: value for key, value in changes.items() if value}
    splits = build_splits(name, **options)
    folder = out or checkpoints[0].parent / f"evaluation-{checkpoints[0].stem}"
    if out is not None or url is None:
        folder.mkdir(parents=True, exist_ok=True)  # what cannot be written is said before the work, not after
    common: dict[str, Any] = {
        "data_name": data or str(options.get("root", name)),
        "labels": labels,
        "ns": ns,
        "normalizer": normalizer,
        "seed": seed,
        "device": device,
        "precision": precision,
        "command": shlex.join(["hashseek", *sys.argv[1:]]),
        "progress": Progress(),
    }
    if url is not None:
        from hashseek.training.evaluation.service_check import check_service

        agreement = check_service(url, checkpoints[0], splits, whole=out is not None, **common)
        typer.echo(agreement.as_markdown(), nl=False)
        if out is not None:
            typer.echo(f"the report is {agreement.evaluation.write(folder)[0]}", err=True)
        raise typer.Exit(1 if agreement.differences else 0)
    from hashseek.training.evaluation.evaluate import evaluate as run

    evaluation = run(
        checkpoints[0],
        splits,
        others=checkpoints[1:],
        lengths=lengths,
        baseline=baseline,
        n_points=points,
        **common,
    )
    page = evaluation.write(folder)[0]
    typer.echo(summary(evaluation.report))
    if calibrate is not None:
        keep_calibration(calibrate, evaluation.report)
        typer.echo(f"{calibrate} is calibrated by it", err=True)
    typer.echo(f"the report is {page}", err=True)


def data_options(checkpoint: Path, data: str | None) -> tuple[str, dict[str, Any]]:
    """Name and options of the data set that `--data` means."""
    if data is None:
        section = load_header(checkpoint).training.get("data")
        if not section:
            raise BadConfig(f"{checkpoint} does not say what it was trained on: name a data set with --data")
        return section["name"], {key: value for key, value in without_held_out(section).items() if key != "name"}
    if data.endswith(".toml"):
        section = load_config(find_config(Path(data))).data
        return section.name, section.options()
    if data in DATASETS and data != "folder" and not Path(data).is_dir():
        return data, {}
    return "folder", {"root": data}


def _check_same_data(checkpoints: Sequence[Path]) -> None:
    """Raise `BadConfig` unless all were trained on the data set of the first, which is the one that is evaluated on."""
    first = load_header(checkpoints[0])
    for path in checkpoints[1:]:
        other = load_header(path)
        if _trained_on(other) != _trained_on(first):
            raise BadConfig(
                f"{checkpoints[0]} and {path} were not trained on the same splits: name the data set to evaluate both "
                "on with --data"
            )


def _trained_on(header: Header) -> Any:
    """What must be equal for two checkpoints to be of one data set: its hash, or without one its name and options."""
    return header.training.get("splits_sha256") or without_held_out(header.training.get("data") or {})


def _numbers(words: list[str]) -> tuple[int | None, ...]:
    """The N of figures in ascending order, None for "all"."""
    for word in words:
        if word != "all" and not word.removeprefix("-").isdecimal():
            raise BadConfig(f"N is a number of ranks or all, not {word!r}")
    numbers = sorted({int(word) for word in words if word != "all"})
    return *numbers, *([None] if "all" in words else [])
