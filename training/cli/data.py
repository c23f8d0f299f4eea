"""Subcommand `data`: list the data sets, and inspect one."""

import inspect as introspection
import json
from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import BadConfig, suggest
from hashseek.retrieval.label_files import write_label_file
from hashseek.training.config import DataSection, load_data_section, parse_assignment
from hashseek.training.data.datasets import DATASETS, build_splits, data_set
from hashseek.training.data.paths import expand
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
    name: Annotated[
        str, typer.Argument(help="A data set (`hashseek data list`), a folder or its list, or a TOML file.")
    ],
    options: Annotated[list[str] | None, typer.Argument(help="Its options, such as root=/data year=2017.")] = None,
    files: Annotated[
        bool, typer.Option(help="Read every file: find broken images, and files with equal content.")
    ] = True,
    label_file: Annotated[
        Path | None,
        typer.Option(
            "--write-labels",
            metavar="FILE",
            help="Also write the images of a folder, with their labels and splits, to this new CSV file.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the content of a data set: counts, labels, bad lines, and missing, broken and duplicate files.

    Bad lines and files are only reported. With the option on_error=stop, the exit code is 2 if `train` or `evaluate`
    would fail.
    """
    found = find_data(name)
    given = (option.removeprefix("data.") for option in options or ())  # `train` has them in the section `data`
    chosen = found.options() | dict(parse_assignment(option, example="root=/data") for option in given)
    name = found.name
    if label_file is not None and name != "folder":
        raise BadConfig(f"--write-labels is for a folder of images, not for the data set {name!r}: leave it out")
    if label_file is not None and label_file.suffix.lower() != ".csv":
        raise BadConfig(f"--write-labels writes a CSV file, but {label_file} does not end in .csv: rename it")
    if label_file is not None and label_file.exists():
        raise BadConfig(f"--write-labels would replace {label_file}: choose another file")
    if "on_error" in introspection.signature(data_set(name)).parameters:
        chosen = {"on_error": "skip", **chosen}  # report problems instead of refusing them
    splits = build_splits(name, **chosen)

    from hashseek.training.data.broken_images import without_broken
    from hashseek.training.data.inspection import as_text, inspect_splits, listed

    if files:
        splits = without_broken(splits, source=str(chosen.get("root", name)))
    progress = Progress()
    n_images = len(splits.train) + len(splits.query) + len(splits.database)
    with progress.task("comparing files", n_images if files else 0) as advance:
        facts = {"name": name, "options": chosen, **inspect_splits(splits, duplicates=files, advance=advance)}
    typer.echo(json.dumps(facts, indent=2) if as_json else as_text(facts))
    if label_file is not None:
        write_label_file(label_file, listed(splits))
        typer.echo(f"wrote the labels to {label_file}", err=True)


def find_data(word: str) -> DataSection:
    """The data set that a command names: by its name, as a folder or label file, or in a TOML file.

    Raises:
        BadConfig: there is none of these.
    """
    if word.endswith(".toml"):
        return load_data_section(Path(word))
    if word in DATASETS:
        return DataSection(name=word)
    if expand(word).exists():
        return DataSection.model_validate({"name": "folder", "root": word})
    if ":" not in word:  # "module:function"
        remedy = "correct the path" if "/" in word or "." in word else suggest(word, DATASETS)
        raise BadConfig(f"there is no data set, folder or file {word!r}: {remedy}")
    return DataSection(name=word)
