"""Fits the hash layer of a collection to its own pictures, without labels: when it is created, and for a refit.

The backbone is a pretrained network and stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.catalog.records import StoredCode, stored_codes
from hashseek.indexing.collection import CHECKPOINT, check_place
from hashseek.indexing.fit_options import FeatureNetwork, FitOptions, changed, find_network
from hashseek.indexing.ingest.loading import Fetch, LoadedImage, Loader
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import Found
from hashseek.indexing.remote import fetch
from hashseek.indexing.uris import Stamp, stamp_of
from hashseek.retrieval.checkpoint import Checkpoint, Header, save_checkpoint
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadCheckpoint, BadConfig, BadDataset, BadImage
from hashseek.retrieval.hash_layers import Features, fit_hash_layer, normalized
from hashseek.retrieval.images import Pixels, Preprocessing, decode, read_bytes
from hashseek.retrieval.label_files import OnError, Problem
from hashseek.retrieval.models.fully_connected import as_arrays, head_of

if TYPE_CHECKING:
    from hashseek.retrieval.models.hash_model import HashModel

MAX_FITTED = 20_000  # pictures
REFIT_FACTOR = 4  # a collection that has grown by this factor may gain from a refit
SEED = 0

Place = Path | str  # of an image, see `ImageSource.uri`
Progress = Callable[[int, int], object]  # called with the number of pictures done and the number of all


def plan_collection(folder: Path, options: FitOptions, sources: Iterable[Found]) -> tuple[FeatureNetwork, int]:
    """The network for a new collection in `folder`, and the number of images. Does not import torch.

    Raises:
        BadCollection: the folder is not empty.
        BadConfig, BadCheckpoint: see `find_network`.
        BadDataset: there is no image, or all files have the same content.
        BadImage: the same, and that content is not an image.
    """
    check_place(folder)
    network, n, problems, contents = find_network(options), 0, list[str](), dict[str, ImageSource]()
    for found in sources:
        if isinstance(found, Problem):
            problems.append(str(found))
            continue
        n += 1
        if len(contents) < 2:  # reads only as many files as it takes to find two that differ
            contents[_content(found)] = found
    if n == 0:
        first = problems[0] if problems else "there are no images to fit a hash layer to: add some"
        raise BadDataset(first + (f" (and {len(problems) - 1:,} more problems)" if len(problems) > 1 else ""))
    if len(contents) == 1:
        only = next(iter(contents.values()))
        if isinstance(only.uri, Path):  # perhaps it is no image at all, which decoding reports
            decode(read_bytes(only.uri), name=only.name)
        raise too_few(n, problems)
    return network, n


def _content(source: ImageSource) -> str:
    """The hash of a file; a unique value for a URL or a file that cannot be read."""
    try:
        return str(source.uri) if isinstance(source.uri, str) else hashlib.sha256(read_bytes(source.uri)).hexdigest()
    except BadImage:
        return str(source.uri)


def too_few(n: int, problems: Sequence[str]) -> BadDataset:
    """The error for `n` images, all identical; `problems` are the reasons why others cannot be used."""
    found = {0: "is no usable image", 1: "is only one image"}.get(n, f"are {n:,} images, all identical")
    unusable = f" ({len(problems):,} cannot be used, the first: {problems[0]})" if problems else ""
    return BadDataset(
        f"fitting a hash layer needs different images, but there {found}{unusable}: add other images, or "
        "use a trained checkpoint (--checkpoint FILE; for a collection that exists, with `hashseek index reencode`)"
    )


class Fitting:
    """A hash model whose hash layer is fitted to features of its backbone, and the encoder that runs it.

    Args:
        network: what `find_network` returned.
        options: where and how to encode.

    Attributes:
        encoder: computes codes once the layer is fitted; its header is complete once the checkpoint is written.
        record: how the layer was fitted, and to how many different images, for the header of the checkpoint; empty
            before.
        fallback: why it was not fitted by weighted ITQ; empty if it was.
        encoded: the first images of a new collection, to which it was fitted, by place: with their codes, their
            sources, and the size and time of their files before they were read; `reuse` removes them.

    Raises:
        BadCheckpoint: the weights do not fit the backbone.
        BadConfig: the backbone does not accept such images.
    """

    def __init__(self, network: FeatureNetwork, **options: Unpack[EncoderOptions]) -> None:
        from hashseek.retrieval.models.backbones import default_preprocessing
        from hashseek.retrieval.models.hash_model import HashModel
        from hashseek.retrieval.models.weight_loading import load_backbone_weights

        self.network = network
        own = network.own
        published = default_preprocessing(network.backbone) if own is None else own.image_preprocessing()
        assert published is not None  # `find_network` refuses backbones of vectors
        preprocessing = changed(published, network.changes)
        self.model: HashModel = HashModel(backbone=network.backbone, n_bits=network.n_bits, head="normalized").eval()
        load_backbone_weights(self.model.backbone, name=network.backbone, weights=network.weights)
        self.model.check_input_size(preprocessing.size)
        header = Header(network.backbone, network.n_bits, preprocessing, (), fingerprint="", head="normalized")
        self.encoder = Encoder(Checkpoint.of(self.model, header), **options)
        self.record: dict[str, Any] = {}
        self.fallback = ""
        self.encoded: dict[Place, tuple[ImageSource, Stamp | None, NewImage]] = {}

    def fit(
        self, images: Iterable[tuple[str, Pixels] | str], total: int, progress: Progress = lambda *_: None
    ) -> dict[str, StoredCode]:
        """Fit the hash layer.

        Args:
            images: content hash and pixels of each, or why it cannot be used; equal contents count once.
            total: their number.
            progress: called at the start and after each batch.

        Returns:
            The code of each content, by its hash.

        Raises:
            BadDataset: no two images differ.
            BadCheckpoint: the network's features are not finite numbers.
        """
        found: dict[str, Features] = {}
        problems, done, remaining = list[str](), 0, iter(images)
        progress(done, total)
        while batch := list(islice(remaining, self.encoder.batch_size)):
            usable = [image for image in batch if not isinstance(image, str)]
            problems += [image for image in batch if isinstance(image, str)]
            if fresh := {sha256: pixels for sha256, pixels in usable if sha256 not in found}:
                found |= zip(fresh, self.encoder.features(np.stack(list(fresh.values()))), strict=True)
            done += len(batch)
            progress(done, total)
        if len(found) < 2:
            raise too_few(done - len(problems), problems)
        features = np.stack(list(found.values()))
        if not np.isfinite(features).all():
            raise BadCheckpoint(
                f"{self.network.backbone} with the weights {self.network.weights} returns features that are not finite "
                "numbers: use other weights"
            )
        if all_alike(features):
            raise too_few(len(features), problems)
        record, self.fallback = fit_head(self.model, features, what="images")
        self.record = record | {"n_images": len(features)} | self.network.describe()
        self.encoder.head = head_of("normalized", as_arrays(self.model.head))
        codes = stored_codes(self.encoder.engine, features, self.encoder.head(features))
        return dict(zip(found, codes, strict=True))

    @contextmanager
    def checkpoint(self) -> Iterator[Path]:
        """The checkpoint in a file that is deleted afterwards. Writing it sets the encoder's fingerprint."""
        with saved(self.model, self.encoder.preprocessing, self.record) as (path, self.encoder.header):
            yield path

    def reuse(self, sources: Iterable[Found]) -> Iterator[Found | LoadedImage]:
        """The sources for `ingest`; images that were encoded need not be read again unless their files have changed."""
        for found in sources:
            if isinstance(found, ImageSource) and found.uri in self.encoded:
                before, stamp, image = self.encoded.pop(found.uri)
                yield LoadedImage(found, image) if (before, stamp) == (found, stamp_of(found.uri)) else found
            else:
                yield found


def all_alike(features: Features) -> bool:
    """Whether the rows (N, D) all have the same direction."""
    rows = normalized(features)
    return bool(np.abs(rows - rows[0]).max() < 1e-6)


def fit_head(model: HashModel, features: Features, *, what: Literal["images", "vectors"]) -> tuple[dict[str, Any], str]:
    """Fit the hash layer of a model to features (N, D) of images, or vectors.

    Returns:
        (how it was fitted, for the header of its checkpoint; why weighted ITQ was not used, empty if it was).
    """
    from hashseek.retrieval.models.heads import fill_head

    (n, width), n_bits = features.shape, model.n_bits
    method, fallback = "weighted_itq", ""
    try:
        layer = fit_hash_layer(features, n_bits=n_bits, method=method, seed=SEED)
    except BadConfig:
        method = "random"
        layer = fit_hash_layer(features, n_bits=n_bits, method=method, seed=SEED)
        if n_bits > width:
            fallback = f"{n_bits} bits cannot be learned from {width:,} numbers: use at most {width:,} bits (--bits)"
        elif n <= n_bits:
            fallback = f"{n:,} {what} are too few to learn {n_bits} bits: use more than {n_bits} {what}, or fewer bits"
        else:
            fallback = f"{n:,} {what} are too alike to learn {n_bits} bits: use more different {what}, or fewer bits"
    fill_head(model.head, layer)
    return {"method": method, "labels": "none", "seed": SEED, "width": width}, fallback


def refit_may_help(header: Header, n_images: int) -> bool:
    """Whether a refit may improve the codes of a collection with this checkpoint that now holds `n_images`."""
    fit = header.training.get("fit", {})
    n_fitted = fit.get("n_images", MAX_FITTED)
    if fit.get("method") == "random":  # for weighted ITQ, there were too few images, or features too short or alike
        return bool(n_fitted <= header.n_bits < n_images and header.n_bits <= fit.get("width", header.n_bits))
    return bool(n_fitted < MAX_FITTED and REFIT_FACTOR * n_fitted <= n_images)


@contextmanager
def saved(
    model: HashModel, preprocessing: Preprocessing | None, record: Mapping[str, Any]
) -> Iterator[tuple[Path, Header]]:
    """The checkpoint of a fitted model, in a file that is deleted afterwards, and its header."""
    with TemporaryDirectory(prefix="hashseek-") as scratch:
        path = Path(scratch) / CHECKPOINT
        yield path, save_checkpoint(path, model, preprocessing, label_names=(), training={"fit": record})


def fit_to_sources(
    sources: Iterable[Found],
    network: FeatureNetwork,
    n_sources: int,
    *,
    on_error: OnError = "skip",
    fetch: Fetch = fetch,
    progress: Progress = lambda *_: None,
    **options: Unpack[EncoderOptions],
) -> Fitting:
    """Fit the hash layer of a new collection to images that will be its first ones. Writes nothing.

    Args:
        sources: the images; problems among them are left to `ingest`. Of more than `MAX_FITTED`, a random sample is
            used.
        network, n_sources: from `plan_collection`.
        on_error: "stop" refuses an image that cannot be used.
        fetch: returns the content behind a URL.
        progress: called once the network is loaded, and after each batch.
        options: where and how to encode.

    Raises:
        BadImage: an image cannot be used and `on_error` is "stop".
        BadDataset: no two images that can be used differ.
        BadCheckpoint: the weights cannot be downloaded, or do not fit the backbone.
    """
    network.download()
    fitting = Fitting(network, **options)
    loader = Loader(None, fitting.encoder, fetch)
    stamps: dict[Place, Stamp | None] = {}
    loaded: list[tuple[ImageSource, NewImage]] = []

    def stamped() -> Iterator[Found]:
        for source in chosen(sources, n_sources):
            stamps[source.uri] = stamp_of(source.uri)
            yield source

    def images() -> Iterator[tuple[str, Pixels] | str]:
        for step in loader.load(stamped()):
            if isinstance(step, Problem):
                if on_error == "stop":
                    raise BadImage(f"{step} (use --on-error skip to leave such images out)")
                yield str(step)
            elif step.image is not None and step.pixels is not None:
                loaded.append((step.source, step.image))
                yield step.image.sha256, step.pixels

    codes = fitting.fit(images(), min(n_sources, MAX_FITTED), progress)
    fitting.encoded = {
        source.uri: (source, stamps[source.uri], replace(image, **codes[image.sha256]._asdict()))
        for source, image in loaded
    }
    return fitting


def chosen(sources: Iterable[Found], n: int) -> Iterator[ImageSource]:
    """The images among `sources`, `n` of them; if there are too many, a random choice of `MAX_FITTED`, in order."""
    places = frozenset(sample(n).tolist())
    images = (found for found in sources if isinstance(found, ImageSource))
    return (image for place, image in enumerate(images) if place in places)


def sample(n: int) -> NDArray[np.int64]:
    """Row numbers, ascending: all of `n`, or a random choice of `MAX_FITTED` that is always the same."""
    if n <= MAX_FITTED:
        return np.arange(n)
    return np.sort(np.random.default_rng(SEED).choice(n, MAX_FITTED, replace=False))
