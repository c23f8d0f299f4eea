"""Subcommand `data`: list the data sets, inspect one, check a folder."""

import inspect as introspection
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import Problem, find_label_file, read_label_file, refuse
from hashseek.training.config import parse_assignment
from hashseek.training.data.datasets import DATASETS, Splits, build_splits, data_set
from hashseek.training.data.datasets.folder import expand
from hashseek.training.progress import Progress

data = typer.Typer(no_args_is_help=True)


@data.command("list")
def list_data_sets() -> None:
    """List the data sets with their options; options without a default are required."""
    for name in DATASETS:
        function = data_set(name)
        purpose, *_ = (introspection.getdoc(function) or "").splitlines()
        typer.echo(f"{name}: {purpose}")
        for option, parameter in introspection.signature(function).parameters.items():
            default = parameter.default
            value = "" if default is parameter.empty else f" = {'none' if default is None else json.dumps(default)}"
            typer.echo(f"    {option}{value}")


@data.command("inspect")
def inspect(
    name: Annotated[str, typer.Argument(help="A data set (`hashseek data list`), or a folder.")],
    options: Annotated[list[str] | None, typer.Argument(help="Its options, such as root=/data year=2017.")] = None,
    duplicates: Annotated[bool, typer.Option(help="Find files with equal content; reads every file.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the content of a data set: counts, labels, missing and duplicate files."""
    from hashseek.training.data.inspection import as_text, inspect_splits

    name, chosen = _named(name, options or ())
    if "on_error" in introspection.signature(data_set(name)).parameters:
        chosen = {"on_error": "skip", **chosen}  # report problems instead of refusing them
    splits = build_splits(name, **chosen)
    progress = Progress()
    n_images = len(splits.train) + len(splits.query) + len(splits.database)
    with progress.task("comparing files", n_images if duplicates else 0) as advance:
        facts = {"name": name, "options": chosen, **inspect_splits(splits, duplicates=duplicates, advance=advance)}
    typer.echo(json.dumps(facts, indent=2) if as_json else as_text(facts))


@data.command("check")
def check(
    root: Annotated[Path, typer.Argument(help="A folder of labelled images, or a labels.csv or labels.jsonl.")],
    on_error: Annotated[
        Literal["skip", "stop"],
        typer.Option(help="stop: exit with code 2 if `train` or `evaluate` would fail; skip: report problems only."),
    ] = "stop",
    ignore_column: Annotated[
        list[str] | None, typer.Option(help="Column of the list to ignore; may be repeated.")
    ] = None,
    drop_labels: Annotated[list[str] | None, typer.Option(help="Labels to leave out, such as '*_r1'.")] = None,
    split_file: Annotated[
        Path | None, typer.Option(help="Write the images with their labels and splits to this list.")
    ] = None,
) -> None:
    """Check a folder before training: decode every image, report every problem, and count images and labels."""
    options: dict[str, Any] = {
        "root": str(root),
        "ignore_columns": ignore_column or (),
        "drop_labels": drop_labels or (),
    }
    try:
        written = None if split_file is None else str(split_file)
        splits = build_splits("folder", **options, on_error="skip", split_file=written)
    except BadDataset:
        source = find_label_file(Path(expand(str(root))))
        if source is not None:  # the problems of its lines may be the cause
            _show(read_label_file(source, ignore_columns=ignore_column or ()).problems)
        raise
    from hashseek.training.data.training_images import without_broken  # late: it loads torch

    broken: list[Problem] = []
    for part in (splits.train, splits.query, splits.database):
        broken += without_broken(part, on_error="skip", source=str(root))[1]
    broken = list(dict.fromkeys(broken))  # training images may be in the database too
    _show([*splits.problems, *broken])
    typer.echo(_summary(splits))
    if on_error == "stop":
        build_splits("folder", **options, on_error="stop")
        if broken:
            refuse(root, broken)


def _show(problems: Sequence[Problem]) -> None:
    for problem in problems:
        typer.echo(f"{'skipped' if problem.skipped else 'note'}: {problem}")


def _named(name: str, options: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """(name, options) of a data set; a folder's name means the data set `folder`."""
    chosen = dict(parse_assignment(option, example="root=/data") for option in options)
    if name not in DATASETS and Path(name).exists():
        return "folder", {"root": name, **chosen}
    return name, chosen


def _summary(splits: Splits) -> str:
    from hashseek.training.data.inspection import distinct

    parts = [f"{name} {len(getattr(splits, name))}" for name in ("train", "query", "database")]
    everything = distinct(splits)  # training images may be in the database too
    counts = everything.labels.sum(axis=0, dtype=int)
    labels = ", ".join(f"{name} {count}" for name, count in zip(splits.label_names, counts, strict=True))
    images = f"{', '.join(parts)} ({len(everything)} different ones)"
    return f"images: {images}\nlabels ({len(splits.label_names)}): {labels}\nsplits: {splits.fingerprint}"
