"""Subcommand `demo`: train, index, evaluate and serve on the built-in data set, with the commands a user would type."""

import csv
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import HashseekError

CONFIG = "shapes_shufflenet_v2_hyp2_48"


def demo(
    serve: Annotated[bool, typer.Option(help="Serve the search page when done.")] = True,
    folder: Annotated[Path, typer.Option(help="Folder for the data, the run and the collection.")] = Path(".demo"),
    port: Annotated[int, typer.Option(help="Port of the search page.")] = 8000,
) -> None:
    """Train on the built-in data set, index it, evaluate, and serve the search page.

    A second run reuses the results of the first.
    """
    started = time.perf_counter()
    data, run, collection = folder / "shapes", folder / "run", folder / "collection"
    unlabelled = folder / "without-labels"
    checkpoint, report = run / "best.safetensors", run / "evaluation" / "report.md"
    if not (run / "last.safetensors").is_file():  # training renders the data set first
        _step("train", CONFIG, f"data.root={data}", "--out", run, *(["--resume"] if run.exists() else []))
    _step("index", "add", collection, data / "labels.csv", "--split", "database", "--checkpoint", checkpoint)
    # The same pictures without their labels: a hash layer is fitted to their colours, with no network to download.
    query, pictures = _without_labels(data / "labels.csv", folder / "pictures.txt")
    _step("index", "add", unlabelled, pictures, "--backbone", "pixels", "--bits", 48)
    _step("search", unlabelled, query, "-k", 5)
    values = report.with_name("report.json")  # written after report.md
    if values.is_file():
        typer.echo(report.read_text(encoding="utf-8"))
    else:
        both = checkpoint, unlabelled / "checkpoint.safetensors"
        _step("evaluate", *both, "-n", 100, "-n", 1000, "--out", report.parent)
    typer.echo(f"checkpoint  {checkpoint}")
    typer.echo(f"report      {report}")
    typer.echo(f"done in {time.perf_counter() - started:.0f} s")
    for line, place in zip(gain(values), (collection, unlabelled), strict=True):
        typer.echo(f"{line}  hashseek serve {shlex.quote(str(place))}")
    if serve:  # in this process, so that the service ends with it
        words = _announced("serve", collection, "--port", port)
        os.execv(sys.executable, [sys.executable, "-m", "hashseek", *words])


def _without_labels(labels: Path, target: Path) -> tuple[Path, Path]:
    """Write the database images of a list, without labels, to `target`; returns a query image, and `target`."""
    with labels.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [str(labels.resolve().parent / row["file"]) for row in rows if row["split"] == "database"]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return labels.parent / next(row["file"] for row in rows if row["split"] == "query"), target


def gain(report: Path) -> list[str]:
    """What report.json says about each of the two checkpoints, the trained one and the fitted one, in one line."""
    found, lines = json.loads(report.read_text(encoding="utf-8")), []
    for how, model in zip(("trained with labels", "no labels, no network"), found["models"], strict=True):
        score = next(score for score in model["scores"] if score["n"] == found["main_n"])
        lines.append(f"{how:21}  mAP@{score['n']} {score['mean_average_precision']['expected']:.3f}")
    return lines


def _announced(*arguments: object) -> list[str]:
    words = [str(argument) for argument in arguments]
    typer.secho(f"$ hashseek {shlex.join(words)}", bold=True, err=True)
    return words


def _step(*arguments: object) -> None:
    words = _announced(*arguments)
    code = subprocess.run([sys.executable, "-m", "hashseek", *words], check=False).returncode
    if code:
        raise HashseekError(f"the demo stopped because `hashseek {shlex.join(words)}` failed: see the message above")
