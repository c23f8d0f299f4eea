"""Options of `index add` and `index refit` for fitting a hash layer, and the subcommand `index refit`."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Annotated, Any

import typer

from hashseek.indexing.cli.maintenance import DropOld, WithoutMissing, follow_change
from hashseek.indexing.cli.options import AllowPrivate, CollectionArgument, Device, Engine, Precision, encoder_options
from hashseek.indexing.cli.output import Output
from hashseek.indexing.collection import Collection
from hashseek.indexing.fit_options import DEFAULT_BACKBONE, DEFAULT_BITS, FitOptions, network_for_refit
from hashseek.indexing.fitting import Fitting, Progress
from hashseek.indexing.maintenance.refit import change_codes, fit_to_collection
from hashseek.retrieval.errors import BadConfig

Bits = Annotated[int | None, typer.Option(help=f"Bits of a code; default of a new collection: {DEFAULT_BITS}.")]
Backbone = Annotated[
    str | None,
    typer.Option(help=f"A network of torchvision, or timm:NAME; default of a new collection: {DEFAULT_BACKBONE}."),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Weights file of --backbone, or a checkpoint; default for a new network: pretrained weights, downloaded "
        "once."
    ),
]
PreprocessingOption = Annotated[
    str | None,
    typer.Option(
        help="How the input of the weights differs from that of the pretrained ones: size, mean, std, crop_fraction "
        "or interpolation, such as mean=0.5,std=0.5 or mean=0.48/0.46/0.41."
    ),
]


def fit_options(bits: int | None, backbone: str | None, weights: str | None, preprocessing: str | None) -> FitOptions:
    """The options as they were given; `preprocessing` is text such as "size=192,mean=0.5".

    Raises:
        BadConfig: a part of the preprocessing is not NAME=VALUE.
    """
    changes = dict(map(_change, preprocessing.split(","))) if preprocessing is not None else {}
    return FitOptions(bits, backbone, weights, changes)


def _change(text: str) -> tuple[str, Any]:
    """The name and the value of "NAME=VALUE"; `changed` checks both."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise BadConfig(f"cannot parse {text!r} in --preprocessing: write NAME=VALUE, such as mean=0.5,std=0.5")
    with suppress(ValueError):
        numbers = [float(number) for number in value.split("/")]
        return name, numbers if len(numbers) > 1 else int(value) if value.isdecimal() else numbers[0]
    return name, value


def refit(
    collection: CollectionArgument,
    bits: Bits = None,
    backbone: Backbone = None,
    weights: Weights = None,
    preprocessing: PreprocessingOption = None,
    drop_old: DropOld = False,
    without_missing: WithoutMissing = False,
    allow_private: AllowPrivate = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
) -> None:
    """Refit the hash layer to the images now in the collection, without labels, and switch to it.

    Without options, the network and the number of bits stay the same. Searches use the old codes until every image has
    a new one. If interrupted, run the same command again.
    """
    options = encoder_options(device, precision, engine)
    chosen = fit_options(bits, backbone, weights, preprocessing)
    with closing(Collection(collection)) as opened:
        network = network_for_refit(opened, chosen)
        network.download()

        with fit_progress(Output()) as progress:
            fitting, codes = fit_to_collection(
                opened, network, allow_private=allow_private, progress=progress, **options
            )
        print_fit(fitting)
        steps = change_codes(opened, fitting, codes, without_missing=without_missing, allow_private=allow_private)
        follow_change(opened, steps, drop_old=drop_old)


@contextmanager
def fit_progress(output: Output) -> Iterator[Progress]:
    """Show the progress of a fit. After Ctrl-C, print that nothing was written."""
    shown: Progress | None = None
    try:
        with ExitStack() as bar:

            def progress(done: int, total: int) -> None:
                nonlocal shown
                if shown is None:  # until then, weights may be downloaded, which has a bar of its own
                    shown = bar.enter_context(output.progress("computing features"))
                shown(done, total)

            yield progress
    except KeyboardInterrupt:
        typer.echo("stopped during the fit: nothing was written", err=True)
        raise


def print_fit(fitting: Fitting) -> None:
    """Print how a hash layer was fitted."""
    method = "a random rotation of" if fitting.fallback else "weighted ITQ on"
    typer.echo(
        f"fitted {fitting.model.n_bits} bits to {fitting.record['n_images']:,} images without labels: {method} the "
        f"features of {fitting.network.backbone}"
    )
    if fitting.fallback:
        typer.echo(f"{fitting.fallback}, with `hashseek index refit`")
