"""Arguments and options that several subcommands share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.errors import BadConfig

EngineName = Literal["auto", "torch", "openvino"]
PrecisionName = Literal["auto", "fp32", "bf16"]

CollectionArgument = Annotated[Path, typer.Argument(help="Folder of the collection.")]
STORE_HELP = (
    "Folder of the collection; or in Milvus, milvus://HOST:19530/NAME, with ?index=ivf for a new one and "
    "?consistency=bounded for faster reads that may lack the last seconds."
)
StoreArgument = Annotated[Path, typer.Argument(help=STORE_HELP)]
Device = Annotated[str, typer.Option(help="Device that encodes: auto, cpu, cuda or cuda:N.")]
Precision = Annotated[
    PrecisionName, typer.Option(help="Precision of the network; auto: the faster one on this device.")
]
Engine = Annotated[
    EngineName, typer.Option(help="Library that runs the network; auto: openvino on a CPU, torch on a GPU.")
]
AllowPrivate = Annotated[
    bool, typer.Option("--allow-private", help="Also download URLs of this machine and of private networks.")
]


def refuse(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that were given beside `option`.

    Raises:
        BadConfig: one of `others` was given.
    """
    for name, value in others.items():
        if value:
            raise BadConfig(f"{option} and {name} cannot be used together: leave one out")


def not_default(device: str, precision: str, engine: str) -> dict[str, object]:
    """Those options of an encoder that were given, for `refuse` where no image is encoded."""
    given = {"--device": device, "--precision": precision, "--engine": engine}
    return {name: value for name, value in given.items() if value != "auto"}


def encoder_options(device: str, precision: str, engine: str) -> EncoderOptions:
    """The options of an encoder.

    Raises:
        BadConfig: the device has a name that no machine knows; what this machine has is checked when it is used.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise BadConfig(f"there is no device {device!r}: use auto, cpu, cuda or cuda:N")
    return EncoderOptions(device=device, precision=precision, engine=engine)
