"""Subcommand `demo`: the whole way on the built-in data set, by the commands that a person would type."""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import HashseekError

CONFIG = "shapes_shufflenet_v2_hyp2_48"


class DemoFailed(HashseekError):
    """A step of the demo ended with an error, which it has printed."""


def demo(
    serve: Annotated[bool, typer.Option(help="Serve the search page at the end.")] = True,
    folder: Annotated[Path, typer.Option(help="Where data, run and collection go.")] = Path(".demo"),
    port: Annotated[int, typer.Option(help="Port of the search page.")] = 8000,
) -> None:
    """Render the built-in data set, train on it, index and evaluate it, and serve the search page.

    A second run reuses what is there.
    """
    started = time.perf_counter()
    data, run, collection = folder / "shapes", folder / "run", folder / "collection"
    checkpoint, report = run / "best.safetensors", run / "evaluation" / "report.md"
    _step("data", "render", data, "--n-query", 300, "--n-database", 2000)
    if not (run / "last.safetensors").is_file():
        _step("train", CONFIG, f"data.root={data}", "--out", run, *(["--resume"] if run.exists() else []))
    _step("index", "add", collection, data / "labels.csv", "--split", "database", "--checkpoint", checkpoint)
    if not report.is_file() or load_header(checkpoint).fingerprint not in report.read_text(encoding="utf-8"):
        _step("evaluate", checkpoint, "-n", 100, "-n", 1000, "--baseline", "untrained", "--out", report.parent)
    else:
        typer.echo(report.read_text(encoding="utf-8"))
    typer.echo(f"checkpoint  {checkpoint}")
    typer.echo(f"report      {report}")
    typer.echo(f"collection  {collection}")
    typer.echo(f"done in {time.perf_counter() - started:.0f} s")
    if serve:
        _step("serve", collection, "--port", port)


def _step(*arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    typer.secho(f"$ hashseek {shlex.join(words)}", bold=True, err=True)
    program = "from hashseek.api.cli import main; main()"
    try:
        code = subprocess.run([sys.executable, "-c", program, *words], check=False).returncode
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if code:
        raise DemoFailed(f"the demo stopped at `hashseek {shlex.join(words)}`, which said above what to do")
