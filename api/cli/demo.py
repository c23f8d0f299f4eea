"""Subcommand `demo`: train, index, evaluate and serve on the built-in data set, with the commands a user would type."""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import HashseekError

CONFIG = "shapes_shufflenet_v2_hyp2_48"


class DemoFailed(HashseekError):
    """A step of the demo failed; its own message has already been printed."""


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
    # The same pictures as if they had no labels: a hash layer is fitted to their colours, with no network to download.
    _step("index", "add", unlabelled, data / "labels.csv", "--split", "database", "--backbone", "pixels", "--bits", 48)
    if _is_about(checkpoint, report):
        typer.echo(report.read_text(encoding="utf-8"))
    else:
        both = (checkpoint, unlabelled / "checkpoint.safetensors")
        _step("evaluate", *both, "-n", 100, "-n", 1000, "--out", report.parent)
    typer.echo(f"checkpoint  {checkpoint}")
    typer.echo(f"report      {report}")
    typer.echo(f"collection  {collection}")
    typer.echo(f"done in {time.perf_counter() - started:.0f} s")
    if serve:
        _step("serve", collection, "--port", port)


def _is_about(checkpoint: Path, report: Path) -> bool:
    from hashseek.retrieval.checkpoint import load_header

    return report.is_file() and load_header(checkpoint).fingerprint in report.read_text(encoding="utf-8")


def _step(*arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    command = f"hashseek {shlex.join(words)}"
    typer.secho(f"$ {command}", bold=True, err=True)
    try:
        code = subprocess.run([sys.executable, "-m", "hashseek", *words], check=False).returncode
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if code:
        raise DemoFailed(f"the demo stopped because `{command}` failed: see the message above")
