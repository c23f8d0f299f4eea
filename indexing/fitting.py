"""Fits the hash layer of a collection to its own pictures, without labels: when it is created, and for a refit.

The backbone is a published network and stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.collection import CHECKPOINT, check_place
from hashseek.indexing.fit_options import FitOptions, Network, changed, find_network
from hashseek.indexing.ingest.loading import Fetch, LoadedImage, Loader, Stamp, checked_path, stamp_of
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.remote import fetch
from hashseek.indexing.ingest.sources import Found
from hashseek.retrieval import scores
from hashseek.retrieval.checkpoint import Checkpoint, Header, save_checkpoint
from hashseek.retrieval.codes import Codes, pack
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.errors import BadCheckpoint, BadConfig, BadDataset, BadImage
from hashseek.retrieval.hash_layers import HashLayer, fit_hash_layer, normalized
from hashseek.retrieval.images import Pixels, read_bytes
from hashseek.retrieval.label_files import OnError, Problem

if TYPE_CHECKING:
    from hashseek.retrieval.encoder import Encoder
    from hashseek.retrieval.models.hash_model import HashModel

MAX_FITTED = 20_000  # pictures
SEED = 0

Features = NDArray[np.float32]
Place = Path | str  # of an image, see `ImageSource.uri`
Progress = Callable[[int, int], object]  # called with the pictures done and their number


def count_different(sources: Iterable[Found]) -> int:
    """The number of images; refuses images from which no hash layer can be fitted. Reads only as many as it must.

    Raises:
        BadDataset: there is none, or all files have the same content.
    """
    n, contents = 0, set[str]()
    for found in sources:
        if isinstance(found, ImageSource):
            n += 1
            if len(contents) < 2:
                contents.add(_content(found))
    if n == 0:
        raise BadDataset("no images were found in these paths: name a folder that has some")
    if len(contents) == 1:
        raise too_few(n)
    return n


@dataclass(frozen=True)
class Plan:
    """How to make a new collection of images alone; nothing speaks against it so far.

    Args:
        network: whose weights may have to be downloaded.
        n_bits: K.
        n_sources: the number of images.
    """

    network: Network
    n_bits: int
    n_sources: int


def plan_collection(folder: Path, options: FitOptions, sources: Iterable[Found]) -> Plan:
    """Refuse, without importing torch, what cannot become a collection in `folder`.

    Raises:
        BadCollection: the folder is not empty.
        BadConfig, BadCheckpoint: as `find_network`.
        BadDataset: as `count_different`.
    """
    check_place(folder)
    return Plan(find_network(options), options.n_bits, count_different(sources))


def _content(source: ImageSource) -> str:
    """The hash of a file; something of its own for a URL, and for a file that cannot be read."""
    try:
        return str(source.uri) if isinstance(source.uri, str) else hashlib.sha256(read_bytes(source.uri)).hexdigest()
    except BadImage:
        return str(source.uri)


def too_few(n: int) -> BadDataset:
    """The error about `n` images, all alike."""
    found = {0: "is no image that can be used", 1: "is only one image"}.get(n, f"are {n:,} images, all alike")
    return BadDataset(
        f"a hash layer is fitted to what differs between images, but there {found}: add other images, or name a "
        "trained checkpoint (--checkpoint FILE)"
    )


class Fitting:
    """A hash model whose hash layer is about to be fitted, and the encoder that runs it.

    Args:
        network: from `find_network`.
        n_bits: K.
        options: of the encoder.

    Attributes:
        encoder: computes features at once, codes once the layer is fitted; its header is complete once it is saved.
        record: for the header of the checkpoint: how the layer was fitted; empty before.

    Raises:
        BadCheckpoint: the weights do not fit the backbone.
        BadConfig: the backbone cannot take such images.
    """

    def __init__(self, network: Network, n_bits: int, **options: Unpack[EncoderOptions]) -> None:
        from hashseek.retrieval.encoder import Encoder
        from hashseek.retrieval.models.backbones import default_preprocessing
        from hashseek.retrieval.models.hash_model import HashModel
        from hashseek.retrieval.models.pretrained_weights import load_backbone_weights

        self.network = network
        published = default_preprocessing(network.backbone)
        preprocessing = published if network.own is None else network.own.image_preprocessing()
        if preprocessing is None:
            raise BadConfig(f"the backbone {network.backbone} takes vectors, not images: choose one for images")
        self.preprocessing = changed(preprocessing, network.changes)
        self.model: HashModel = HashModel(backbone=network.backbone, n_bits=n_bits, head="normalized").eval()
        load_backbone_weights(self.model.backbone, name=network.backbone, weights=network.weights)
        self.model.check_input_size(self.preprocessing.size)
        header = Header(network.backbone, n_bits, self.preprocessing, (), fingerprint="", head="normalized")
        self.encoder: Encoder = Encoder(Checkpoint(self.model, header), **options)
        self.record: dict[str, Any] = {}

    def fit(self, features: Features) -> str:
        """Fit the hash layer to features (N, D) of different images.

        Returns:
            Why the layer was not fitted by weighted ITQ; empty if it was.

        Raises:
            BadDataset: the features are all alike.
            BadCheckpoint: the network does not give numbers.
        """
        import torch

        from hashseek.retrieval.models.pretrained_weights import copy_state

        if not np.isfinite(features).all():
            raise BadCheckpoint(
                f"{self.network.backbone} with the weights {self.network.weights} gives features that are not numbers: "
                "use other weights"
            )
        rows = normalized(features)
        if np.abs(rows - rows[0]).max() < 1e-6:
            raise too_few(len(features))
        method, layer, reason = fitted_layer(features, self.model.n_bits)
        copy_state(self.encoder.head, {"weight": torch.from_numpy(layer.weight), "bias": torch.from_numpy(layer.bias)})
        self.record = {"method": method, "n_images": len(features), "labels": "none", "seed": SEED}
        return reason

    def codes(self, features: Features) -> Codes:
        """Packed codes (N, code_size): for features (N, D), the same that the encoder gives."""
        return pack(self.encoder.apply_head(features, self.encoder.head))

    def save(self, path: Path) -> None:
        """Write the checkpoint, which gives the encoder its fingerprint."""
        self.encoder.header = save_checkpoint(
            path,
            self.model,
            self.preprocessing,
            label_names=(),
            training={"fit": self.record | self.network.describe()},
        )


def fitted_layer(features: Features, n_bits: int) -> tuple[str, HashLayer, str]:
    """Method, hash layer for features (N, D), and why the method is not weighted ITQ."""
    try:
        return "weighted_itq", fit_hash_layer(features, n_bits=n_bits, method="weighted_itq", seed=SEED), ""
    except BadConfig:
        n, width = features.shape
        reason = f"ITQ cannot make {n_bits} bits of {n:,} features of {width:,} numbers"
    return "random", fit_hash_layer(features, n_bits=n_bits, method="random", seed=SEED), reason


@dataclass(frozen=True)
class FirstFit:
    """The hash layer of a new collection.

    Args:
        fitting: with the fitted layer.
        n_images: images to which it was fitted, all different.
        fallback: why it was not fitted by weighted ITQ; empty if it was.
        encoded: these images with their codes, and with size and time of their files before they were read.
    """

    fitting: Fitting
    n_images: int
    fallback: str
    encoded: Mapping[Place, tuple[Stamp | None, NewImage]]

    def reuse(self, sources: Iterable[Found]) -> Iterator[Found | LoadedImage]:
        """The sources for `ingest`; images that were encoded need not be read again unless their files have changed."""
        for found in sources:
            yield found if isinstance(found, Problem) else self._as_encoded(found)

    def _as_encoded(self, source: ImageSource) -> ImageSource | LoadedImage:
        stamp, image = self.encoded.get(source.uri, (None, None))
        if image is None or stamp != _stamp(source):
            return source
        try:
            path = checked_path(source)
        except (BadImage, BadConfig):  # loading it will say so
            return source
        labels, key, attributes = source.labels, source.key, source.attributes
        return LoadedImage(source, replace(image, path=path, labels=labels, key=key, attributes=attributes))

    @contextmanager
    def checkpoint(self) -> Iterator[Path]:
        """The checkpoint in a file that is deleted afterwards: a collection keeps a copy."""
        with TemporaryDirectory(prefix="hashseek-") as scratch:
            self.fitting.save(Path(scratch) / CHECKPOINT)
            yield Path(scratch) / CHECKPOINT


def fit_to_sources(
    sources: Iterable[Found],
    plan: Plan,
    *,
    on_error: OnError = "skip",
    fetch: Fetch = fetch,
    progress: Progress = lambda *_: None,
    **options: Unpack[EncoderOptions],
) -> FirstFit:
    """Fit the hash layer of a new collection to images that will be its first ones. Writes nothing.

    Args:
        sources: the images; problems among them are left to `ingest`. Of more than `MAX_FITTED`, a random sample is
            used.
        plan: from `plan_collection`.
        on_error: "stop" refuses an image that cannot be used.
        fetch: returns the content behind a URL.
        progress: called after each batch.
        options: of the encoder.

    Raises:
        BadImage: an image cannot be used and `on_error` is "stop".
        BadDataset: no two images that can be used differ.
        BadCheckpoint: the weights cannot be downloaded, or do not fit the backbone.
    """
    plan.network.download()
    fitting = Fitting(plan.network, plan.n_bits, **options)
    encoder = fitting.encoder
    loader = Loader(None, encoder.preprocessing, 2 * encoder.batch_size, fetch)
    stamps: dict[Place, Stamp | None] = {}

    def stamped() -> Iterator[Found]:
        for source in chosen(sources, plan.n_sources):
            stamps[source.uri] = _stamp(source)
            yield source

    steps = loader.load(stamped())
    rows: dict[str, int] = {}  # by content hash
    parts: list[Features] = []
    images: list[tuple[ImageSource, NewImage]] = []
    done, total = 0, min(plan.n_sources, MAX_FITTED)
    while batch := list(islice(steps, encoder.batch_size)):
        usable = [_usable(step, on_error) for step in batch]
        fresh = {one.sha256: pixels for _, one, pixels in filter(None, usable) if one.sha256 not in rows}
        if fresh:
            rows |= {sha256: len(rows) + place for place, sha256 in enumerate(fresh)}
            parts.append(encoder.features(np.stack(list(fresh.values()))))
        images += [(source, image) for source, image, _ in filter(None, usable)]
        done += len(batch)
        progress(done, total)
    if len(rows) < 2:
        raise too_few(len(images))
    features = np.concatenate(parts)
    fallback = fitting.fit(features)
    codes, kept = fitting.codes(features), scores.normalized(features)
    encoded = {}
    for source, image in images:
        row = rows[image.sha256]
        encoded[source.uri] = (
            stamps[source.uri],
            replace(image, code=codes[row], feature=kept[row], engine=encoder.engine),
        )
    return FirstFit(fitting, len(features), fallback, encoded)


def chosen(sources: Iterable[Found], n: int) -> Iterator[ImageSource]:
    """The images among `sources`, `n` of them; if there are too many, a random choice of `MAX_FITTED`, in order."""
    places = None if n <= MAX_FITTED else frozenset(sample(n).tolist())
    images = (found for found in sources if isinstance(found, ImageSource))
    return (image for place, image in enumerate(images) if places is None or place in places)


def sample(n: int) -> NDArray[np.int64]:
    """Row numbers, ascending: all of `n`, or a random choice of `MAX_FITTED` that is always the same."""
    if n <= MAX_FITTED:
        return np.arange(n)
    return np.sort(np.random.default_rng(SEED).choice(n, MAX_FITTED, replace=False))


def _usable(step: LoadedImage | Problem, on_error: OnError) -> tuple[ImageSource, NewImage, Pixels] | None:
    if isinstance(step, Problem) and step.skipped and on_error == "stop":
        raise BadImage(f"{step} (use --on-error skip to leave such images out)")
    if isinstance(step, LoadedImage) and step.image is not None and step.pixels is not None:
        return step.source, step.image, step.pixels
    return None


def _stamp(source: ImageSource) -> Stamp | None:
    """Size and time of the file that holds a source; None for a URL."""
    return stamp_of(source.uri) if isinstance(source.uri, Path) else None
