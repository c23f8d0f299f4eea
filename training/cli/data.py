"""Subcommand `data`: list the data sets, and inspect one."""

import inspect as introspection
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hashseek.training.config import parse_assignment
from hashseek.training.data.datasets import DATASETS, build_splits, data_set
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
    files: Annotated[
        bool, typer.Option(help="Read every file: find broken images, and files with equal content.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the content of a data set: counts, labels, bad lines, and missing, broken and duplicate files.

    Problems are only reported. With the option on_error=stop, the exit code is 2 if `train` or `evaluate` would fail.
    """
    name, chosen = _named(name, options or ())
    if "on_error" in introspection.signature(data_set(name)).parameters:
        chosen = {"on_error": "skip", **chosen}  # report problems instead of refusing them
    splits = build_splits(name, **chosen)

    from hashseek.training.data.broken_images import without_broken
    from hashseek.training.data.inspection import as_text, inspect_splits

    if files and splits.train.vectors is None:
        splits = without_broken(splits, source=str(chosen.get("root", name)))
    progress = Progress()
    n_images = len(splits.train) + len(splits.query) + len(splits.database)
    with progress.task("comparing files", n_images if files else 0) as advance:
        facts = {"name": name, "options": chosen, **inspect_splits(splits, duplicates=files, advance=advance)}
    typer.echo(json.dumps(facts, indent=2) if as_json else as_text(facts))


def _named(name: str, options: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """(name, options) of a data set; a folder's name means the data set `folder`."""
    chosen = dict(parse_assignment(option, example="root=/data") for option in options)
    if name not in DATASETS and Path(name).exists():
        return "folder", {"root": name, **chosen}
    return name, chosen
