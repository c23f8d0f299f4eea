"""Arguments and options that several subcommands share."""

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Annotated

import typer

from hashseek.indexing.catalog.filters import FILTER_HELP
from hashseek.indexing.milvus_uri import is_in_milvus
from hashseek.retrieval.devices import EncoderOptions, EngineName, PrecisionName
from hashseek.retrieval.errors import BadConfig

ENCODING = ("--device", "--precision", "--engine")  # for `refuse`


def _no_url(collection: Path) -> Path:
    if re.match(r"[A-Za-z][\w+.-]*:/", str(collection)) and not is_in_milvus(collection):
        raise BadConfig(
            f"the collection must be a folder, or in Milvus (milvus://HOST:19530/NAME), not {collection}: to use a "
            "running service, call its HTTP API, for example with curl or `hashseek.Client`"
        )
    return collection


CollectionArgument = Annotated[Path, typer.Argument(help="Folder of the collection.", callback=_no_url)]
STORE_HELP = (
    "Folder of the collection; or in Milvus, milvus://HOST:19530/NAME, with ?index=ivf for a new one and "
    "?consistency=bounded for faster reads that may miss changes of the last few seconds."
)
StoreArgument = Annotated[Path, typer.Argument(help=STORE_HELP, callback=_no_url)]
Device = Annotated[str, typer.Option(help="Device for encoding: auto, cpu, cuda or cuda:N.")]
Precision = Annotated[
    PrecisionName, typer.Option(help="Precision of the network; auto: the faster one on this device.")
]
Engine = Annotated[
    EngineName, typer.Option(help="Library that runs the network; auto: openvino on a CPU, torch on a GPU.")
]
AllowPrivate = Annotated[
    bool, typer.Option("--allow-private", help="Also download from this machine and private networks.")
]
WithLabel = Annotated[list[str] | None, typer.Option(help=FILTER_HELP["all_labels"])]
WithAnyLabel = Annotated[list[str] | None, typer.Option(help=FILTER_HELP["any_labels"])]
WithoutLabel = Annotated[list[str] | None, typer.Option(help=FILTER_HELP["no_labels"])]
Where = Annotated[list[str] | None, typer.Option(help=FILTER_HELP["where"])]
AddedAfter = Annotated[str | None, typer.Option(help=FILTER_HELP["added_after"])]
AddedBefore = Annotated[str | None, typer.Option(help=FILTER_HELP["added_before"])]


def given_options(context: typer.Context) -> set[str]:
    """The options on the command line, such as `--device`, and the names of the arguments."""
    parameters = {one.opts[0]: context.get_parameter_source(str(one.name)) for one in context.command.params}
    return {name for name, source in parameters.items() if source is not None and source.name == "COMMANDLINE"}


def refuse(option: str, others: Iterable[str], given: Container[str]) -> None:
    """Refuse options that cannot be combined with `option`.

    Raises:
        BadConfig: one of `others` was given.
    """
    for name in others:
        if name in given:
            raise BadConfig(f"{option} and {name} cannot be used together: leave one out")


def refuse_without(needed: Iterable[str], options: Iterable[str], given: Container[str]) -> None:
    """Refuse options that have no effect without one of those needed.

    Raises:
        BadConfig: one of `options` was given, and none of `needed`.
    """
    if not any(name in given for name in needed):
        for name in options:
            if name in given:
                raise BadConfig(f"{name} needs {' or '.join(needed)}: add that, or leave out {name}")


def encoder_options(device: str, precision: str, engine: str) -> EncoderOptions:
    """The options of an encoder.

    Raises:
        BadConfig: the device name is invalid; whether this machine has the device is checked when it is used.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise BadConfig(f"there is no device {device!r}: use auto, cpu, cuda or cuda:N")
    return EncoderOptions(device=device, precision=precision, engine=engine)
