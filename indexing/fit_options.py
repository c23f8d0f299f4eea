"""The network whose features a hash layer is fitted to: its name and weights, checked without importing torch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.retrieval.checkpoint import Header, load_header
from hashseek.retrieval.codes import check_n_bits
from hashseek.retrieval.errors import BadCheckpoint, BadConfig
from hashseek.retrieval.files import sha256_of
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.names import check_image_backbone, is_from_outside
from hashseek.retrieval.models.torchvision_weights import FILES, cached, check_weights_file, fetch_weights

# Of torchvision's networks that encode above 100 images/s on one core (docs/benchmarks.md), the pretrained weights of
# this one and of regnet_y_400mf classify ImageNet best (75.3 and 75.8 %); this one needs half of the multiplications.
DEFAULT_BACKBONE = "mobilenet_v3_large"
DEFAULT_BITS = 128
_EXAMPLE = Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  # to check changes of it


@dataclass(frozen=True)
class FitOptions:
    """The network and the number of bits; None where not given.

    Args:
        n_bits: K; None: `DEFAULT_BITS`.
        backbone: a network for images; None: that of `weights` if they are a checkpoint, `DEFAULT_BACKBONE` if they
            are no file. Plain weights in a file need its name.
        weights: "default" (the pretrained ones, like None), "none" (random), or a file, see `load_backbone_weights`.
        preprocessing: the fields of `Preprocessing` in which the weights differ from the backbone's usual ones.
    """

    n_bits: int | None = None
    backbone: str | None = None
    weights: str | None = None
    preprocessing: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self != FitOptions()

    @property
    def bits(self) -> int:
        """K."""
        return DEFAULT_BITS if self.n_bits is None else self.n_bits

    def check_agrees(self, folder: Path) -> None:
        """Refuse options that differ from those with which the existing collection in `folder` was created.

        Raises:
            BadConfig: something differs.
        """
        with closing(Catalog(folder / CATALOG, read_only=True)) as catalog:
            header = load_header(catalog.checkpoint)
        found = {"bits": (self.n_bits, header.n_bits), "backbone": (self.backbone, header.backbone)}
        if self.preprocessing:
            own = header.image_preprocessing()
            wanted = changed(own, self.preprocessing)
            found |= {name: (getattr(wanted, name), getattr(own, name)) for name in self.preprocessing}
        differ: dict[str, Any] = {name: pair for name, pair in found.items() if pair[0] not in (None, pair[1])}
        if self.weights is not None:
            network = find_network(FitOptions(backbone=header.backbone, weights=self.weights))
            network.download()  # to compare their content
            record = header.training.get("fit", {})
            if _content(network.describe()) != _content(record):
                differ["weights"] = self.weights, record.get("weights", "those of its checkpoint")
        if header.preprocessing is None:  # codes of vectors cannot be changed
            remedy = "create another collection"
        else:
            command = "refit" if "fit" in header.training else "reencode"
            remedy = f"change the collection with `hashseek index {command}`"
        for name, (given, stored) in differ.items():
            raise BadConfig(
                f"{folder} was created with {name} {stored}, not {given}: leave the option out, or {remedy}"
            )


def _content(record: Mapping[str, Any]) -> str | None:
    """The identity of weights: their hash; without a file, "default" or "none"."""
    return record.get("weights_sha256") or record.get("weights")


@dataclass(frozen=True)
class FeatureNetwork:
    """A backbone with its weights, to which a hash layer is fitted.

    Args:
        n_bits: K.
        backbone: its name.
        weights: "default", "none" or the path of a file.
        file: the file of the weights, which may have to be downloaded; None if timm keeps them.
        own: header of the file if it is a checkpoint; it has the preprocessing.
        changes: fields in which the preprocessing differs from that header, or from that of the pretrained weights.
    """

    n_bits: int
    backbone: str
    weights: str
    file: Path | None
    own: Header | None
    changes: Mapping[str, Any]

    def download(self) -> None:
        """Get pretrained weights of torchvision if they are missing.

        Raises:
            BadCheckpoint: they cannot be downloaded.
        """
        if self.weights == "default" and self.file is not None:
            fetch_weights(self.file.name)

    def describe(self) -> dict[str, Any]:
        """Its entry in the header of a checkpoint."""
        fitted = {} if self.own is None else self.own.training.get("fit", {})
        if fitted:  # its backbone has the weights from which it was made
            return {name: fitted[name] for name in ("backbone", "weights", "weights_sha256")}
        digest = None if self.file is None else sha256_of(self.file)
        weights = self.weights if self.file is None else self.file.name
        return {"backbone": self.backbone, "weights": weights, "weights_sha256": digest}


def find_network(options: FitOptions) -> FeatureNetwork:
    """The network that the options name. Does not import torch.

    Raises:
        BadConfig: there is no such backbone, the weights need its name, or a value is outside its limits.
        BadCheckpoint: there is no such file, it belongs to another backbone, or the backbone has no pretrained weights.
    """
    check_n_bits(options.bits)
    weights = options.weights or "default"
    file = None if weights in ("default", "none") else Path(weights)
    own = None if file is None else _checked_weights(file)
    if file is not None and own is None and options.backbone is None:
        raise BadConfig(
            f"{file} is not a checkpoint of Hashseek, so it does not name its network: add --backbone NAME, such as "
            f"{DEFAULT_BACKBONE}"
        )
    backbone = options.backbone or (DEFAULT_BACKBONE if own is None else own.backbone)
    check_image_backbone(backbone)
    if own is not None and own.backbone != backbone:
        raise BadCheckpoint(f"{file} is a checkpoint of {own.backbone}, not of {backbone}: leave out the backbone")
    if weights == "default" and is_from_outside(backbone):
        raise BadCheckpoint(f"there are no pretrained weights for {backbone}: pass a weights file (--weights FILE)")
    changed(_EXAMPLE, options.preprocessing)
    if weights == "default" and backbone in FILES:
        file = cached(FILES[backbone])
    return FeatureNetwork(options.bits, backbone, weights, file, own, options.preprocessing)


def network_for_refit(collection: Collection, options: FitOptions) -> FeatureNetwork:
    """The network that the options name; by default that of the collection, with its weights and its K.

    "default" and "none" are weights of the collection's backbone, unless the options name another one.

    Raises:
        BadConfig: the collection has a trained checkpoint, and the options name no network; otherwise as
            `find_network`.
    """
    collection.check_holds_images()
    if options.n_bits is None:
        options = replace(options, n_bits=collection.n_bits)
    header = load_header(collection.checkpoint)
    if options.backbone is None and options.weights in ("default", "none"):
        options = replace(options, backbone=header.backbone)
    if options.backbone is None and options.weights is None:
        if "fit" not in header.training:
            raise BadConfig(
                f"{collection.folder} was created with a trained checkpoint, and a refit without labels would be "
                "worse: train again and run `hashseek index reencode`, or name a network (--backbone or --weights)"
            )
        options = replace(options, backbone=header.backbone, weights=str(collection.checkpoint))
    return find_network(options)


def _checked_weights(path: Path) -> Header | None:
    """The header of a weights file that is a checkpoint of Hashseek; None for plain weights."""
    check_weights_file(path)
    try:
        return load_header(path)
    except BadCheckpoint:  # plain weights, or a damaged file, which loading will report
        return None


def changed(preprocessing: Preprocessing, changes: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing with these fields changed.

    Raises:
        BadConfig: it has no such field, or a value is of the wrong type or outside its limits.
    """
    unknown = set(changes) - set(Preprocessing.__dataclass_fields__)
    if unknown:
        raise BadConfig(
            f"preprocessing has no {', '.join(sorted(unknown))}: use {', '.join(Preprocessing.__dataclass_fields__)}"
        )
    try:
        return replace(preprocessing, **{name: _CONVERSIONS[name](value) for name, value in changes.items()})
    except (TypeError, ValueError) as error:
        raise BadConfig(
            f"the preprocessing {dict(changes)!r} has a value of the wrong type ({error}): correct it"
        ) from None


def _three(value: float | str | Sequence[float]) -> tuple[float, ...]:
    """The number for each channel; a single one is for all three."""
    if isinstance(value, str):
        raise ValueError(f"{value!r} is not a number")
    return (float(value),) * 3 if isinstance(value, int | float) else tuple(float(one) for one in value)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "size": index,
    "mean": _three,
    "std": _three,
    "crop_fraction": float,
    "interpolation": str,
}
