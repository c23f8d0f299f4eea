"""The part of the training split that is held out to choose the best epoch, and its score."""

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.metrics import average_precision, histograms, without_self
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.collectives import gather_rows
from hashseek.training.config import Config
from hashseek.training.data.batches import TrainingData
from hashseek.training.data.splits import Rows
from hashseek.training.loop.network import is_unsupervised

# Validation ranks at most this many training images: enough to compare epochs, and cheap on large data sets.
MAX_DATABASE = 10_000


def validation_part(n: int, config: Config) -> tuple[Rows, Rows]:
    """Rows to train on and rows to validate on, of `n`, each ascending; an unsupervised loss trains on all."""
    settings = config.train
    n_val = 0 if is_unsupervised(config) else round(n * settings.val_fraction)
    at_least = max(2, settings.devices)  # a pair, and an image for each process
    if n - n_val < at_least:
        left = f"; train.val_fraction = {settings.val_fraction} leaves {n - n_val} of {n}" if n_val else ""
        raise BadDataset(
            f"train.devices = {settings.devices} needs at least {at_least} images to train on, not {n - n_val}{left}: "
            "add images"
        )
    if is_unsupervised(config):
        return np.arange(n), np.arange(0)
    at_least = 2 if settings.val_database == "held-out" else 1  # "held-out" ranks them among each other
    if n_val < at_least:
        raise BadDataset(
            f"train.val_fraction {settings.val_fraction} of {n} training images leaves {n_val} to validate on, but "
            f"train.val_database = {settings.val_database!r} needs at least {at_least}: raise it, or add images"
        )
    return divided(n, n_val, seed=settings.seed)


def divided(n: int, n_val: int, *, seed: int) -> tuple[Rows, Rows]:
    """`n` rows without `n_val` random ones, and these; each ascending."""
    order = np.random.default_rng((seed, 0xA11)).permutation(n)
    return np.sort(order[n_val:]), np.sort(order[:n_val])


def validate(fabric: Fabric, config: Config, model: HashModel, data: TrainingData) -> float:
    """mAP@val_n of the validation images as queries, searched among the images trained on or among each other.

    Training images rank better than new ones, the more so the more a model has memorised them. To choose
    hyperparameters, search new images among new ones: `train.val_database = "held-out"`. Each process encodes its
    share, then each ranks everything, which is fast.
    """
    among_themselves = config.train.val_database == "held-out"
    database = data.val_rows if among_themselves else data.fit_rows
    if len(database) > MAX_DATABASE and not among_themselves:
        database = np.sort(np.random.default_rng((config.train.seed, 0xDB)).permutation(database)[:MAX_DATABASE])

    def encode(rows: Rows) -> NDArray[np.uint8]:
        share = np.array_split(rows, fabric.world_size)[fabric.global_rank]
        outputs = torch.from_numpy(data.source.encode(model, share)).to(fabric.device)
        return pack(gather_rows(outputs).cpu().numpy())

    queries = encode(data.val_rows)
    codes = queries if among_themselves else encode(database)
    found = histograms(queries, codes, data.labels[data.val_rows], data.labels[database], n_bits=config.model.n_bits)
    if among_themselves:
        found = without_self(found, data.labels[data.val_rows])
    return float(average_precision(found, n=config.train.val_n).expected.mean())
