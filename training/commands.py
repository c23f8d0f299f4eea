"""Subcommands `train`, `evaluate` and `data`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrieval.checkpoint import load_header
from retrieval.errors import BadConfig
from retrieval.files import write_atomically
from training.config import find_config, load_config
from training.datasets import DATASETS, Splits, build_splits
from training.progress import Progress


def train(
    config: Annotated[Path, typer.Argument(help="TOML file, or the name of one that Hashseek ships.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, such as model.n_bits=24.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME of the TOML file.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in the folder.")] = False,
    on_error: Annotated[
        Literal["skip", "stop"] | None, typer.Option(help="Leave bad lines and images out, or refuse (default).")
    ] = None,
) -> None:
    """Train a hash model as a TOML file says; prints the path of the best checkpoint."""
    from training.fit import fit

    progress = Progress()
    if on_error is not None:
        overrides = [*(overrides or []), f"data.on_error={on_error}"]
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
    n: Annotated[list[int] | None, typer.Option("--n", "-n", help="N of mAP@N; may be given several times.")] = None,
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
    seed: Annotated[int, typer.Option(help="Of the random directions.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and report.md.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[Literal["auto", "fp32", "bf16"], typer.Option(help="Of the network.")] = "auto",
) -> None:
    """Report mAP@N and precision@N of a checkpoint on the query and database splits of a data set."""
    from retrieval.report import as_markdown
    from training.evaluate import evaluate as run

    name, options = _data_options(checkpoint, data)
    changes: dict[str, Any] = {"drop_labels": drop_labels, "ignore_columns": ignore_column, "on_error": on_error}
    options |= {key: value for key, value in changes.items() if value}
    report = run(
        checkpoint,
        build_splits(name, **options),
        data_name=data or str(options.get("root", name)),
        ns=tuple(sorted(set(n or (100, 1000, 5000)))),
        normalizer=normalizer,
        baseline=baseline,
        seed=seed,
        device=device,
        precision=precision,
        command=shlex.join(["hashseek", *sys.argv[1:]]),
        progress=Progress(),
    )
    folder = out or checkpoint.parent / f"evaluation-{checkpoint.stem}"
    write_atomically(folder / "report.json", report.as_json().encode())
    write_atomically(folder / "report.md", as_markdown(report).encode())
    typer.echo(as_markdown(report))
    typer.echo(f"written to {folder / 'report.json'} and {folder / 'report.md'}", err=True)


def _data_options(checkpoint: Path, data: str | None) -> tuple[str, dict[str, Any]]:
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


data = typer.Typer(no_args_is_help=True)


@data.command("render")
def render(
    folder: Annotated[Path, typer.Argument(help="Where the pictures and labels.csv go.")],
    n_query: Annotated[int, typer.Option(help="Pictures in the query split.")] = 400,
    n_train: Annotated[int, typer.Option(help="Pictures in the train split.")] = 3000,
    n_database: Annotated[int, typer.Option(help="Pictures in the database split.")] = 3600,
    size: Annotated[int, typer.Option(help="Pixels a side.")] = 160,
    seed: Annotated[int, typer.Option(help="Another seed, other pictures.")] = 0,
) -> None:
    """Render the built-in data set `shapes` into a folder."""
    splits = build_splits(
        "shapes", root=str(folder), n_query=n_query, n_train=n_train, n_database=n_database, size=size, seed=seed
    )
    typer.echo(_summary(splits))


@data.command("check")
def check(
    root: Annotated[Path, typer.Argument(help="A folder with labels.csv or labels.jsonl, or such a list.")],
    on_error: Annotated[
        Literal["skip", "stop"], typer.Option(help="Leave bad lines and images out, or refuse.")
    ] = "skip",
    ignore_column: Annotated[list[str] | None, typer.Option(help="Column of the list that is not needed.")] = None,
    drop_labels: Annotated[list[str] | None, typer.Option(help="Labels to leave out, such as '*_r1'.")] = None,
    split_file: Annotated[
        Path | None, typer.Option(help="Where to write the split, if the list has none: a list to train with.")
    ] = None,
) -> None:
    """Read a labelled folder, decode every image, and say what is wrong with it and what is in it."""
    from training.images import without_broken

    splits = build_splits(
        "folder",
        root=str(root),
        on_error=on_error,
        ignore_columns=ignore_column or (),
        drop_labels=drop_labels or (),
        split_file=None if split_file is None else str(split_file),
    )
    problems = list(splits.problems)
    for part in (splits.train, splits.query, splits.database):
        problems += without_broken(part, on_error=on_error, source=str(root))[1]
    for problem in problems:
        typer.echo(f"{'skipped' if problem.skipped else 'note'}: {problem}")
    typer.echo(_summary(splits))


def _summary(splits: Splits) -> str:
    parts = [f"{name} {len(getattr(splits, name))}" for name in ("train", "query", "database")]
    counts = sum(part.labels.sum(axis=0, dtype=int) for part in (splits.train, splits.query, splits.database))
    labels = ", ".join(f"{name} {count}" for name, count in zip(splits.label_names, counts, strict=True))
    return f"images: {', '.join(parts)}\nlabels ({len(splits.label_names)}): {labels}\nsplits: {splits.fingerprint}"
