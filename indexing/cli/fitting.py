"""Options of `index add` and `index refit` that say what to fit, and the subcommand `index refit`."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.cli.maintenance import DropOld, WithoutMissing, follow_change
from hashseek.indexing.cli.options import AllowPrivate, CollectionArgument, Device, Engine, Precision, encoder_options
from hashseek.indexing.cli.output import Output
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.fit_options import DEFAULT_BACKBONE, DEFAULT_BITS, FitOptions, find_network, network_for_refit
from hashseek.indexing.fitting import Fitting, Progress
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Preprocessing

Bits = Annotated[int | None, typer.Option(help=f"Length of the codes that are fitted; default: {DEFAULT_BITS}.")]
Backbone = Annotated[
    str | None,
    typer.Option(help=f"Network of torchvision, or timm:NAME, whose features are used; default: {DEFAULT_BACKBONE}."),
]
Weights = Annotated[
    str | None, typer.Option(help="Weights file for it; default: the published weights, which are downloaded once.")
]
PreprocessingOption = Annotated[
    str | None,
    typer.Option(
        help="How the weights' input differs from that of the published ones: size, mean, std, crop_fraction or "
        "interpolation, such as mean=0.5,std=0.5 or mean=0.48/0.46/0.41."
    ),
]


@dataclass(frozen=True)
class FitChoice:
    """The options as they were given; None: not given."""

    bits: int | None
    backbone: str | None
    weights: str | None
    preprocessing: str | None

    @property
    def is_given(self) -> bool:
        """Whether any was given."""
        return self != FitChoice(None, None, None, None)

    def options(self) -> FitOptions:
        """The options with their defaults.

        Raises:
            BadConfig: the preprocessing cannot be read.
        """
        changes = {} if self.preprocessing is None else _parsed(self.preprocessing)
        bits = DEFAULT_BITS if self.bits is None else self.bits
        return FitOptions(bits, self.backbone, self.weights or "default", changes)

    def check_agrees(self, folder: Path) -> None:
        """Refuse options that differ from what the existing collection in `folder` was made with.

        Raises:
            BadConfig: one differs.
        """
        with closing(Catalog(folder / CATALOG, read_only=True)) as catalog:
            header = load_header(folder / catalog.space.checkpoint)
        found = {"bits": (self.bits, header.n_bits), "backbone": (self.backbone, header.backbone)}
        for name, value in self.options().preprocessing.items():
            found[name] = value, getattr(header.image_preprocessing(), name)
        differ: dict[str, Any] = {name: pair for name, pair in found.items() if pair[0] not in (None, pair[1])}
        if self.weights is not None:
            network = find_network(FitOptions(backbone=header.backbone, weights=self.weights))
            network.download()  # to compare their content
            record = header.training.get("fit", {})
            if _content(network.describe()) != _content(record):
                differ["weights"] = self.weights, record.get("weights", "those of its checkpoint")
        for name, (given, stored) in differ.items():
            raise BadConfig(
                f"{folder} was made with {name} {stored}, not {given}: leave the option out, or change the collection "
                "with `hashseek index refit`"
            )


def _content(record: Mapping[str, Any]) -> str | None:
    """What tells weights apart: their hash; without a file, "default" or "none"."""
    return record.get("weights_sha256") or record.get("weights")


def _parsed(text: str) -> dict[str, Any]:
    """The fields of `Preprocessing` in text such as "size=192,mean=0.5"."""
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            if name in ("mean", "std"):
                numbers = tuple(float(number) for number in value.split("/"))
                changes[name] = numbers * 3 if len(numbers) == 1 else numbers
            elif name in ("size", "crop_fraction"):
                changes[name] = int(value) if name == "size" else float(value)
            elif name == "interpolation":
                changes[name] = value
            else:
                raise ValueError
        except ValueError:
            names = ", ".join(Preprocessing.__dataclass_fields__)
            raise BadConfig(
                f"--preprocessing cannot read {part.strip()!r}: write NAME=VALUE with a name among {names}, separated "
                "by commas, such as mean=0.5,std=0.5"
            ) from None
    return changes


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
    """Fit the hash layer anew to the images that the collection holds by now, without labels, and change to it.

    Without options it keeps the network and the number of bits. Searches use the old codes until every image has a new
    one. If it is interrupted, run the same command again.
    """
    options = encoder_options(device, precision, engine)
    choice = FitChoice(bits, backbone, weights, preprocessing)
    with closing(Collection(collection)) as opened:
        wanted = choice.options() if bits is not None else replace(choice.options(), n_bits=opened.n_bits)
        network = network_for_refit(opened, wanted)
        network.download()

        from hashseek.indexing.maintenance.refit import change_codes, fit_to_collection

        with fit_progress(Output()) as progress:
            fitting, codes = fit_to_collection(
                opened, network, wanted.n_bits, allow_private=allow_private, progress=progress, **options
            )
        print_fit(fitting)
        steps = change_codes(opened, fitting, codes, without_missing=without_missing, allow_private=allow_private)
        follow_change(opened, steps, drop_old=drop_old)


@contextmanager
def fit_progress(output: Output) -> Iterator[Progress]:
    """Show the progress of a fit. Ctrl-C says that nothing was written."""
    try:
        with output.progress("computing features") as progress:
            yield progress
    except KeyboardInterrupt:
        typer.echo("stopped during the fit: nothing was written", err=True)
        raise


def print_fit(fitting: Fitting) -> None:
    """Say how a hash layer was fitted."""
    method = "a random rotation of" if fitting.fallback else "weighted ITQ on"
    typer.echo(
        f"fitted {fitting.model.n_bits} bits to {fitting.n_images:,} images without labels: {method} the features of "
        f"{fitting.network.backbone}"
    )
    if fitting.fallback:
        typer.echo(f"{fitting.fallback}; when the collection has grown, fit it anew with `hashseek index refit`")
