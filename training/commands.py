"""Subcommands `train` and `evaluate`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrieval.checkpoint import load_header
from retrieval.errors import BadConfig
from training.config import find_config, load_config
from training.datasets import DATASETS, build_splits
from training.progress import Progress


def train(
    config: Annotated[Path, typer.Argument(help="TOML file, or the name of one that Hashseek ships.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, such as model.n_bits=24.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME of the TOML file.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in the folder.")] = False,
    devices: Annotated[
        int | None, typer.Option(help="Processes, one a GPU or a share of the processor; the batch is split.")
    ] = None,
    on_error: Annotated[
        Literal["skip", "stop"] | None, typer.Option(help="Leave bad lines and images out, or refuse (default).")
    ] = None,
) -> None:
    """Train a hash model as a TOML file says; prints the path of the best checkpoint."""
    from training.fit import fit

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


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint made by `hashseek train`.")],
    data: Annotated[
        str | None,
        typer.Option(help="A folder with labels.csv, a data set's name, or a TOML file; default: as in training."),
    ] = None,
    n: Annotated[
        list[str] | None, typer.Option("--n", "-n", help="N of mAP@N, or all; may be given several times.")
    ] = None,
    normalizer: Annotated[
        Literal["retrieved", "possible", "relevant"], typer.Option(help="What AP is divided by.")
    ] = "retrieved",
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
        typer.Option(help="Instead of a report, check that this service gives the ranking and figures of the library."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report; default beside the checkpoint.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[Literal["auto", "fp32", "bf16"], typer.Option(help="Of the network.")] = "auto",
) -> None:
    """Write a report on how well a checkpoint retrieves, on the query and database splits of a data set."""
    from retrieval.report import summary
    from training.evaluate import evaluate as run

    if url is not None and (baseline != "none" or out is not None):
        raise BadConfig(
            "--url compares a service with the library and writes no report: leave --baseline and --out out"
        )
    ns = _numbers(n or ["100", "1000", "5000"])
    name, options = data_options(checkpoint, data)
    changes: dict[str, Any] = {"drop_labels": drop_labels, "ignore_columns": ignore_column, "on_error": on_error}
    options |= {key: value for key, value in changes.items() if value}
    splits = build_splits(name, **options)
    called = data or str(options.get("root", name))
    if url is not None:
        from training.served import check_service

        agreement = check_service(
            url,
            checkpoint,
            splits,
            data_name=called,
            ns=ns,
            normalizer=normalizer,
            device=device,
            precision=precision,
            progress=Progress(),
        )
        typer.echo(agreement.as_markdown(), nl=False)
        raise typer.Exit(1 if agreement.differences else 0)
    folder = out or checkpoint.parent / f"evaluation-{checkpoint.stem}"
    folder.mkdir(parents=True, exist_ok=True)  # what cannot be written is said before the work, not after
    evaluation = run(
        checkpoint,
        splits,
        data_name=called,
        ns=ns,
        normalizer=normalizer,
        baseline=baseline,
        n_points=points,
        seed=seed,
        device=device,
        precision=precision,
        command=shlex.join(["hashseek", *sys.argv[1:]]),
        progress=Progress(),
    )
    page = evaluation.write(folder)[0]
    typer.echo(summary(evaluation.report))
    typer.echo(f"the report is {page}", err=True)


def _numbers(words: list[str]) -> tuple[int | None, ...]:
    """The N of figures in ascending order, None for "all"."""
    for word in words:
        if word != "all" and not word.removeprefix("-").isdecimal():
            raise BadConfig(f"N is a number of ranks or all, not {word!r}")
    numbers = sorted({int(word) for word in words if word != "all"})
    return *numbers, *([None] if "all" in words else [])


def data_options(checkpoint: Path, data: str | None) -> tuple[str, dict[str, Any]]:
    """Name and options of the data set that `--data` means."""
    if data is None:
        section = load_header(checkpoint).training.get("data")
        if not section:
            raise BadConfig(f"{checkpoint} does not say what it was trained on: name a data set with --data")
        return section["name"], {key: value for key, value in section.items() if key != "name"}
    if data.endswith(".toml"):
        section = load_config(find_config(Path(data))).data
        return section.name, section.options()
    if data in DATASETS and data != "folder" and not Path(data).is_dir():
        return data, {}
    return "folder", {"root": data}
