"""Batches for training and outputs for validation, from augmented images, cached features, or feature vectors.

All randomness is drawn from (seed, epoch, row), so that a resumed run sees the same batches as an uninterrupted one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor

from hashseek.retrieval.engines import build_engine
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import normalizer
from hashseek.retrieval.load_ahead import one_ahead
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from hashseek.retrieval.vectors import check_vectors
from hashseek.training.config import Config, TrainSection
from hashseek.training.data.augmentation import flip_and_crop, generators, only_flips_and_crops
from hashseek.training.data.cached_features import features_of
from hashseek.training.data.splits import Labels, Rows, Split
from hashseek.training.data.training_images import Images
from hashseek.training.progress import Progress


@dataclass(frozen=True)
class Source:
    """Batches for the network, and features without augmentation.

    `batches(rows, batch_size, epoch)` yields (inputs, rows); inputs hold all rows of the first view, then all of the
    second; `features(model, rows)` yields features (b, D) of a model in evaluation mode, on its device. `engine` has
    computed the features of a frozen backbone; None without one.
    """

    batches: Callable[[Rows, int, int], Iterator[tuple[Tensor, Rows]]]
    features: Callable[[HashModel, Rows], Iterator[Tensor]]
    engine: str | None = None

    def encode(self, model: HashModel, rows: Rows) -> NDArray[np.float32]:
        """Outputs (n, K) without augmentation."""
        model.eval()
        with torch.inference_mode():
            parts = [model.outputs(features).cpu().numpy() for features in self.features(model, rows)]
        return np.concatenate([np.zeros((0, model.n_bits), np.float32), *parts])


@dataclass(frozen=True)
class TrainingData:
    """The training split, divided into rows to fit and rows to validate on.

    `labels` (n, C) are complete and used for validation; `observed` (n, C), on the device, are used for training.
    """

    source: Source
    labels: Labels
    observed: Tensor
    fit_rows: Rows
    val_rows: Rows


def build_source(
    config: Config, model: HashModel, train: Split, images: Images | None, *, fabric: Fabric, progress: Progress
) -> Source:
    """The source for the training split: vectors if it has any, cached features if the backbone is frozen.

    Raises:
        BadConfig: vectors for an image backbone, images for a vector backbone, or noise for images.
    """
    if train.vectors is not None:
        if config.model.freeze_backbone:
            raise BadConfig("model.freeze_backbone is set, but a backbone for vectors is not pretrained: leave it out")
        return _vectors(config, model, train.vectors, fabric.device)
    if images is None:
        raise BadConfig(
            f"the backbone {config.model.backbone!r} is for feature vectors, but the data set {config.data.name!r} has "
            "images: choose a backbone for images"
        )
    if config.train.noise:
        raise BadConfig(
            f"train.noise is {config.train.noise}, but it is added to feature vectors and the data set "
            f"{config.data.name!r} has images: leave it out, or set train.jitter"
        )
    if config.model.freeze_backbone:
        return _frozen(config, model, images, fabric, progress)
    return _augmented(config, images, fabric)


def _frozen(config: Config, model: HashModel, images: Images, fabric: Fabric, progress: Progress) -> Source:
    network, precision = LazyBackbone.of(model.backbone, model.backbone_name), config.train.precision
    engine = build_engine("auto", network, images.preprocessing, device=str(fabric.device), precision=precision)
    # The first process of a host computes the features into the cache, the others read them there.
    with fabric.rank_zero_first(local=True), progress.task("features of the frozen backbone", len(images)) as advance:
        features = features_of(network, images, engine=engine, n_features=model.n_features, advance=advance)
    return replace(_in_memory(torch.from_numpy(features).to(fabric.device), lambda _, rows: rows), engine=engine.name)


def _vectors(config: Config, model: HashModel, vectors: NDArray[np.float32], device: torch.device) -> Source:
    width = getattr(model.backbone, "n_inputs", None)
    if width != vectors.shape[1]:
        takes = f"expects vectors of {width}" if width else "expects images"
        raise BadConfig(
            f"the data set {config.data.name!r} has vectors of {vectors.shape[1]} numbers, but the backbone "
            f"{config.model.backbone!r} {takes}: choose mlp:{vectors.shape[1]}-512-512"
        )
    check_vectors(vectors, name=f"the data set {config.data.name!r}")
    rows, train = torch.from_numpy(vectors).to(device), config.train
    noise = rows.std(dim=0) * train.noise if train.noise else None
    return _in_memory(rows, lambda model, rows: model.features(rows), views=train.views, noise=noise, seed=train.seed)


def _in_memory(
    stored: Tensor,
    features: Callable[[HashModel, Tensor], Tensor],
    *,
    views: int = 1,
    noise: Tensor | None = None,
    seed: int = 0,
) -> Source:
    """Batches of the rows of `stored` (n, D), with Gaussian noise of the standard deviations `noise` (D,)."""

    def batches(rows: Rows, batch_size: int, epoch: int) -> Iterator[tuple[Tensor, Rows]]:
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            inputs = stored[torch.from_numpy(np.tile(chosen, views)).to(stored.device)]
            if noise is not None:
                drawn = [
                    np.random.default_rng((seed, epoch, row, view)).standard_normal(inputs.shape[1], np.float32)
                    for view in range(views)
                    for row in chosen
                ]
                inputs = inputs + noise * torch.from_numpy(np.stack(drawn)).to(stored.device)
            yield inputs, chosen

    return Source(
        batches, lambda model, rows: iter([features(model, stored[torch.from_numpy(rows).to(stored.device)])])
    )


def _augmented(config: Config, images: Images, fabric: Fabric) -> Source:
    normalize, settings = normalizer(images.preprocessing, fabric.device), config.train
    # In threads, Python limits augmentation to about 2,000 images/s, however many cores there are: too few for a GPU.
    on_gpu = fabric.device.type == "cuda" and only_flips_and_crops(settings)

    def batches(rows: Rows, batch_size: int, epoch: int) -> Iterator[tuple[Tensor, Rows]]:
        seed = (settings.seed, epoch)
        if on_gpu:
            stored = images.batches(rows, batch_size=batch_size)
            for pixels, chosen in one_ahead(augmented_on_device(stored, settings, seed=seed, device=fabric.device)):
                yield normalize(pixels), chosen
            return
        for pixels, chosen in images.batches(rows, batch_size=batch_size, augmentation=settings, seed=seed):
            yield normalize(pixels), chosen

    def features(model: HashModel, rows: Rows) -> Iterator[Tensor]:
        for pixels, _ in images.batches(rows, batch_size=settings.batch_size):
            with fabric.autocast():
                found = model.features(normalize(pixels))
            yield found

    return Source(batches, features)


def augmented_on_device(
    batches: Iterator[tuple[Tensor, Rows]], settings: TrainSection, *, seed: tuple[int, ...], device: torch.device
) -> Iterator[tuple[Tensor, Rows]]:
    """Flip and crop batches (b, 3, size, size) on a device: (views * b, 3, size, size) with their rows (b,)."""
    for pixels, rows in batches:
        by_row = [generators(seed, int(row), views=settings.views) for row in rows]
        rngs = [rngs[view] for view in range(settings.views) for rngs in by_row]
        yield flip_and_crop(pixels.to(device).repeat(settings.views, 1, 1, 1), rngs, settings), rows
