"""The command `hashseek`: a table of subcommands, of which only the one that is called gets loaded."""

import importlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer

from hashseek.indexing.printing import printable
from hashseek.retrieval.errors import HashseekError

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer exports no name for it

# name -> (where it lives, one line of help). Strings, so that `serve` loads no training code and `--help` nothing.
COMMANDS = {
    "train": ("hashseek.training.cli.train:train", "Train a hash model as a TOML file says."),
    "evaluate": (
        "hashseek.training.cli.evaluate:evaluate",
        "Report how well a checkpoint retrieves: a page, figures, tables.",
    ),
    "compare": ("hashseek.training.cli.compare:compare", "Put reports of one protocol side by side."),
    "probe": ("hashseek.training.cli.probe:probe", "Classify with a linear probe on a frozen checkpoint."),
    "truncate": ("hashseek.training.cli.truncate:truncate", "Shorter codes from a nested checkpoint."),
    "sweep": ("hashseek.training.cli.sweep:sweep", "Search hyperparameters on the validation part."),
    "data": ("hashseek.training.cli.data:data", "List, inspect, check or render data sets."),
    "losses": ("hashseek.training.cli.losses:losses", "List the losses, or show one."),
    "index": (
        "hashseek.indexing.cli.collection:app",
        "Add, remove, verify images; build the index; snapshots, export, a new model.",
    ),
    "search": ("hashseek.indexing.cli.collection:search", "Find the stored images most similar to a picture."),
    "serve": ("hashseek.api.serve:serve", "Serve a collection over HTTP, with a search page."),
    "demo": ("hashseek.api.demo:demo", "The whole way on the built-in data set: train, index, evaluate, serve."),
}


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application, with the subcommand that `arguments` name loaded and the others as lines of help."""
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
        command = _load(target) if name == chosen else _placeholder
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=text)
        else:
            app.command(name, help=None if name == chosen else text)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: a mistake of the user's is one sentence on standard error, and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    logging.basicConfig(level=logging.WARNING, format="hashseek: %(message)s")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may hold what the terminal cannot show
    warnings.filterwarnings("ignore", module=r"PIL\.")  # remarks about metadata; what cannot be decoded is an error
    if "" in arguments:  # as a folder it would be the current one, as a value nobody knows what
        before = " ".join(arguments[: arguments.index("")])
        fail(f"after `hashseek {before}` comes an empty argument: is a variable of the shell empty? Give it a value")
    run(lambda: build(arguments)(args=arguments, prog_name="hashseek", standalone_mode=False))


def run(command: Callable[[], Any]) -> NoReturn:
    """Run `command` and exit with its code: a mistake of the user's is one line on standard error, and exit code 2."""
    try:
        code = command()
    except HashseekError as error:
        fail(str(error))
    except _UsageError as error:
        # Typer spreads choices over lines, and says which library found a value wrong.
        message = " ".join(str(error.format_message()).split()).replace("Value error, ", "").rstrip(".")
        message += _given(error, message)
        colon = "" if message.endswith("?") else ":"  # typer asks whether a similar name was meant
        place = error.ctx.command_path if error.ctx else "hashseek"
        fail(f"{message[:1].lower()}{message[1:]}{colon} see `{place} --help`")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; there is nobody to tell
        sys.exit(1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        fail(f"{place}{error.strerror or error}")
    sys.exit(code if isinstance(code, int) else 0)


def _given(error: Exception, message: str) -> str:
    """The value that was found wrong, where Typer's sentence says only what it should have been."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()  # of pydantic
    return f" (given: {found[0]['input']!r})" if found and repr(found[0]["input"]) not in message else ""


def fail(message: str) -> NoReturn:
    """Print one sentence to standard error and exit with 2."""
    sys.stderr.write(f"hashseek: {printable(message)}\n")
    sys.exit(2)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _placeholder() -> None:
    """Stands for a subcommand that was not called."""
