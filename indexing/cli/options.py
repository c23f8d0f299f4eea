"""Arguments and options that several subcommands share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.indexing.catalog.filters import FILTER_HELP
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.errors import BadConfig

EngineName = Literal["auto", "torch", "openvino"]
PrecisionName = Literal["auto", "fp32", "bf16"]

CollectionArgument = Annotated[Path, typer.Argument(help="Folder of the collection.")]
STORE_HELP = (
    "Folder of the collection; or in Milvus, milvus://HOST:19530/NAME, with ?index=ivf for a new one and "
    "?consistency=bounded for faster reads that may miss changes of the last few seconds."
)
StoreArgument = Annotated[Path, typer.Argument(help=STORE_HELP)]
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


def refuse(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that cannot be combined with `option`.

    Raises:
        BadConfig: one of `others` was given.
    """
    for name, value in others.items():
        if value:
            raise BadConfig(f"{option} and {name} cannot be used together: leave one out")


def not_default(device: str, precision: str, engine: str) -> dict[str, object]:
    """The encoder options that were given, for `refuse` if no image is encoded."""
    given = {"--device": device, "--precision": precision, "--engine": engine}
    return {name: value for name, value in given.items() if value != "auto"}


def encoder_options(device: str, precision: str, engine: str) -> EncoderOptions:
    """The options of an encoder.

    Raises:
        BadConfig: the device name is invalid; whether this machine has the device is checked when it is used.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise BadConfig(f"there is no device {device!r}: use auto, cpu, cuda or cuda:N")
    return EncoderOptions(device=device, precision=precision, engine=engine)
