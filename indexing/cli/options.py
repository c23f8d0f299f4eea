"""Options that several subcommands have: where and by what images are encoded."""

from typing import Annotated, Literal

import typer

EngineName = Literal["torch", "openvino"]
PrecisionName = Literal["auto", "fp32", "bf16"]

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[PrecisionName, typer.Option(help="Of the network; auto is the quicker one on this device.")]
Engine = Annotated[
    EngineName, typer.Option(help="What computes the network; openvino: quicker on a CPU, an optional package.")
]
