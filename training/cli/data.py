"""Subcommand `data`: list the data sets, look into one, check a folder, render the built-in set."""

import inspect as introspection
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.label_files import Problem, read_listing
from hashseek.training.data.datasets import DATASETS, Splits, build_splits, data_set
from hashseek.training.data.datasets.folder import expand
from hashseek.training.runs.progress import Progress

data = typer.Typer(no_args_is_help=True)


@data.command("list")
def list_data_sets() -> None:
    """Name every data set, with its options; those without a default must be given."""
    for name in DATASETS:
        function = data_set(name)
        typer.echo(f"{name}: {_purpose(function)}")
        for option, parameter in introspection.signature(function).parameters.items():
            empty = parameter.default is introspection.Parameter.empty
            typer.echo(f"    {option}" + ("" if empty else f" = {_as_toml(parameter.default)}"))


@data.command("inspect")
def inspect(
    name: Annotated[str, typer.Argument(help="A data set (`hashseek data list`), or a folder with labels.csv.")],
    options: Annotated[list[str] | None, typer.Argument(help="Its options, such as root=/data year=2017.")] = None,
    duplicates: Annotated[bool, typer.Option(help="Look for pictures that are there twice; reads every file.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a data set: counts, labels, missing and duplicate files."""
    from hashseek.training.data.inspection import as_text, inspect_splits

    name, chosen = _named(name, options or ())
    if "on_error" in introspection.signature(data_set(name)).parameters:
        chosen = {"on_error": "skip", **chosen}  # to report what is wrong, not to refuse it
    splits = build_splits(name, **chosen)
    progress = Progress()
    n_images = len(splits.train) + len(splits.query) + len(splits.database)
    with progress.task("comparing files", n_images if duplicates else 0) as advance:
        facts = {"name": name, "options": chosen, **inspect_splits(splits, duplicates=duplicates, advance=advance)}
    typer.echo(json.dumps(facts, indent=2) if as_json else as_text(facts))


@data.command("render")
def render(
    folder: Annotated[Path, typer.Argument(help="Where the pictures and labels.csv go.")],
    n_query: Annotated[int, typer.Option(help="Pictures in the query split.")] = 400,
    n_train: Annotated[int, typer.Option(help="Pictures in the train split.")] = 3000,
    n_database: Annotated[int, typer.Option(help="Pictures in the database split.")] = 3600,
    size: Annotated[int, typer.Option(help="Pixels a side.")] = 128,
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
    from hashseek.training.data.training_images import without_broken

    columns, patterns = ignore_column or (), drop_labels or ()
    try:
        splits = build_splits(
            "folder",
            root=str(root),
            on_error=on_error,
            ignore_columns=columns,
            drop_labels=patterns,
            split_file=None if split_file is None else str(split_file),
        )
    except BadDataset:
        if on_error == "skip":  # what is wrong with the lines may be why the whole is refused
            place = Path(expand(str(root)))
            listing = read_listing(
                place, on_error="skip", need_labels=True, ignore_columns=columns, drop_labels=patterns
            )
            for problem in listing.problems:
                typer.echo(_said(problem))
        raise
    problems = list(splits.problems)
    for part in (splits.train, splits.query, splits.database):
        problems += without_broken(part, on_error=on_error, source=str(root))[1]
    for problem in problems:
        typer.echo(_said(problem))
    typer.echo(_summary(splits))


def _said(problem: Problem) -> str:
    return f"{'skipped' if problem.skipped else 'note'}: {problem}"


def _named(name: str, options: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Name and options of the data set that the arguments mean."""
    chosen: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise BadConfig(f"an option of a data set is written key=value, such as root=/data, not {option!r}")
        try:
            chosen[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            chosen[key] = text  # a bare word, such as a path: quotes are for the shell to eat
    if name not in DATASETS and Path(name).exists():
        return "folder", {"root": name, **chosen}
    if name not in DATASETS:
        raise BadConfig(f"there is no data set or folder {name!r}: choose one of {', '.join(DATASETS)}, or a folder")
    return name, chosen


def _purpose(function: Any) -> str:
    return (introspection.getdoc(function) or "").partition("\n")[0]


def _as_toml(value: Any) -> str:
    if value is None:
        return "none"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _summary(splits: Splits) -> str:
    parts = [f"{name} {len(getattr(splits, name))}" for name in ("train", "query", "database")]
    counts = sum(part.labels.sum(axis=0, dtype=int) for part in (splits.train, splits.query, splits.database))
    labels = ", ".join(f"{name} {count}" for name, count in zip(splits.label_names, counts, strict=True))
    return f"images: {', '.join(parts)}\nlabels ({len(splits.label_names)}): {labels}\nsplits: {splits.fingerprint}"
