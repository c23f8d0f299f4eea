"""The hash layer before the first step, fitted to features of the training images (`model.head_init`)."""

import numpy as np
import torch
from lightning_fabric import Fabric

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.hash_layers import Features, HashLayer, fit_hash_layer
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.heads import fill_head
from hashseek.training.collectives import gather_rows
from hashseek.training.config import Config
from hashseek.training.data.batches import TrainingData
from hashseek.training.progress import Progress

# A projection needs no more images than these, and large data sets have many.
MAX_IMAGES = 10_000


def fit_head(fabric: Fabric, config: Config, model: HashModel, data: TrainingData, *, progress: Progress) -> None:
    """Set the head to the result of `fit_hash_layer` for the features of the training images, up to its scale.

    The layer is scaled so that its outputs have the root mean square of the random layer's: losses and learning rates
    expect outputs of that size. The head "linear" reads features that are not normalised: it takes the directions, and
    a bias that subtracts the mean of those features. All processes use the first one's layer.

    Raises:
        BadConfig: there are too few features or images for that many bits, or they vary in too few directions.
    """
    rows, n_bits = data.fit_rows, config.model.n_bits
    if n_bits > min(model.n_features, len(rows) - 1):
        raise BadConfig(
            f"model.head_init = {config.model.start_of_head!r} needs more than {n_bits} training images and at least "
            f"{n_bits} features, but there are {len(rows):,} images and {model.n_features:,} features: lower "
            "model.n_bits, or set model.head_init = 'random'"
        )
    if len(rows) > MAX_IMAGES:
        rows = np.sort(np.random.default_rng((config.train.seed, 0x17)).permutation(rows)[:MAX_IMAGES])
    own = np.array_split(rows, fabric.world_size)[fabric.global_rank]
    model.eval()
    with progress.task("features for the hash layer", len(own)) as advance, torch.inference_mode():
        parts = []
        for part in data.source.features(model, own):
            parts.append(part.float())
            advance(len(part))
        features = gather_rows(torch.cat(parts))
        size = model.outputs(features).square().mean().sqrt().item()
    fill_head(model.head, fabric.broadcast(_fitted(features.cpu().numpy(), config, size=size)))


def _fitted(features: Features, config: Config, *, size: float) -> HashLayer:
    """The layer, scaled so that its outputs have the root mean square `size`."""
    layer = fit_hash_layer(
        features, n_bits=config.model.n_bits, method=config.model.start_of_head, seed=config.train.seed
    )
    if config.model.head == "normalized":
        bias, outputs = layer.bias, layer(features)
    else:
        bias = -(layer.weight @ features.mean(axis=0))
        outputs = features @ layer.weight.T + bias
    scale = np.float32(size / np.sqrt(np.square(outputs).mean()))
    return HashLayer(layer.weight * scale, bias * scale)
