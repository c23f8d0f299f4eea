"""The command `hashseek`: a table of subcommands. Only the one that is called is imported."""

import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer

from hashseek.indexing.printing import printable
from hashseek.retrieval.errors import HashseekError
from hashseek.retrieval.process_exit import skip_gc_at_exit

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it

# name -> (module:function, help). Strings, so that `serve` imports no training code and `--help` no torch.
COMMANDS = {
    "train": ("hashseek.training.cli.train:train", "Train a hash model from a TOML configuration."),
    "evaluate": (
        "hashseek.training.cli.evaluate:evaluate",
        "Measure the retrieval quality of a checkpoint, and write a report.",
    ),
    "compare": ("hashseek.training.cli.compare:compare", "Compare evaluation reports side by side."),
    "probe": ("hashseek.training.cli.probe:probe", "Score a frozen checkpoint with a linear probe."),
    "truncate": ("hashseek.training.cli.truncate:truncate", "Cut a nested checkpoint to shorter codes."),
    "sweep": ("hashseek.training.cli.sweep:sweep", "Tune hyperparameters on a part of the training split."),
    "data": ("hashseek.training.cli.data:data", "List or inspect data sets."),
    "losses": ("hashseek.training.cli.losses:losses", "List the losses, or describe one."),
    "index": (
        "hashseek.indexing.cli.collection:app",
        "Manage a collection: add images, build the index, back up, change the model.",
    ),
    "search": ("hashseek.indexing.cli.search:search", "Find the stored images most similar to an image."),
    "serve": ("hashseek.api.cli.serve:serve", "Serve a collection over HTTP, with a search page."),
    "keys": ("hashseek.api.keys:app", "Create, list and revoke API keys of the service."),
    "demo": ("hashseek.api.cli.demo:demo", "Train, index, evaluate and serve on a built-in data set."),
}


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application. Imports the subcommand named in `arguments`; the others are only lines of help."""
    app = typer.Typer(
        name="hashseek",
        help="Image retrieval with deep hashing.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            from importlib.metadata import version as installed

            typer.echo(f"hashseek {installed('hashseek')}")
            raise typer.Exit

    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (target, text) in COMMANDS.items():
        module, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module), attribute) if name == chosen else _placeholder
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=text)
        else:
            app.command(name, help=None if name == chosen else text)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Entry point of the installed command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    skip_gc_at_exit()
    # By default, threads of PyTorch that wait for each other spin for milliseconds. If another program uses one of two
    # cores, training then takes 20 times as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    logging.basicConfig(level=logging.WARNING, format="hashseek: %(message)s")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot show
    warnings.filterwarnings("ignore", module=r"PIL\.")  # it warns about metadata
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if it cannot cache the list of fonts
    if "" in arguments:  # as a path, it would mean the current folder
        before = " ".join(arguments[: arguments.index("")])
        fail(f"the argument after `hashseek {before}` is empty: is a shell variable unset?")
    run(lambda: build(arguments)(args=arguments, prog_name="hashseek", standalone_mode=False))


def run(command: Callable[[], Any]) -> NoReturn:
    """Run `command` and exit with its exit code. A HashseekError is one line on stderr and exit code 2."""
    try:
        code = command()
    except HashseekError as error:
        fail(str(error))
    except _UsageError as error:
        # Typer breaks choices into lines, and pydantic adds its own prefix.
        message = " ".join(str(error.format_message()).split()).replace("Value error, ", "").rstrip(".")
        message += _given(error, message)
        colon = "" if message.endswith("?") else ":"  # typer suggests similar names
        place = error.ctx.command_path if error.ctx else "hashseek"
        fail(f"{message[:1].lower()}{message[1:]}{colon} see `{place} --help`")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        fail(f"{place}{error.strerror or error}")
    sys.exit(code if isinstance(code, int) else 0)


def _given(error: Exception, message: str) -> str:
    """The rejected value, where the message does not show it."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()  # of pydantic
    return f" (given: {found[0]['input']!r})" if found and repr(found[0]["input"]) not in message else ""


def fail(message: str) -> NoReturn:
    """Print one line to stderr and exit with 2."""
    sys.stderr.write(f"hashseek: {printable(message)}\n")
    sys.exit(2)


def _placeholder() -> None:
    """Stands in for a subcommand that was not called."""
