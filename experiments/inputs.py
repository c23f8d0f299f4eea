"""What a comparison searches: data sets, their splits, and the features of a frozen backbone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.engines import build_engine
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from hashseek.training.config import Config
from hashseek.training.data.broken_images import without_broken
from hashseek.training.data.cached_features import features_of
from hashseek.training.data.datasets import Splits, build_splits
from hashseek.training.data.training_images import Images
from hashseek.training.loop.fit import initial_model, preprocessing_of


@dataclass(frozen=True)
class Data:
    """The data for a comparison: a configuration, overrides of it, and the N of the validation mAP@N.

    gallery: overrides that select unrelated images, which are searched among each other. val_database: where validation
    images are searched. As in the test: new images among each other, or among the images trained on where these are
    the database. With the wrong one, settings that memorise look too good, or too bad.
    """

    config: Path
    val_n: int
    overrides: tuple[str, ...] = ()
    gallery: tuple[str, ...] = ()
    val_database: Literal["training", "held-out"] = "held-out"


# Of the same sizes as the first split. It was drawn once, with a seed that was not chosen by any result.
_SECOND = (
    'data.ignore_columns=["split", "deephash_split"]',
    "data.query_fraction=0.0403",
    "data.train_fraction=0.163",
    "data.split_seed=1",
)
_SQUEEZENET = (
    "model.backbone=squeezenet1_1",
    "model.weights=$HASHSEEK_DATA/backbones/squeezenet1_1_features.safetensors",
    "model.mean=[0.485, 0.456, 0.406]",
    "model.std=[0.229, 0.224, 0.225]",
)
_COCO = (
    "data.root=$HASHSEEK_DATA/coco256",
    'data.ignore_columns=["split"]',
    'data.on_error="skip"',  # two images have no label
)


def _mirflickr(*overrides: str) -> Data:
    config, start = Path("mirflickr25k_mobilenet_v2_tie_aware_48"), 'model.head_init="itq"'
    return Data(config, 61, (start, *overrides), _COCO)  # N: 61 of 962 images, the share that 1,000 are of the database


DATA = {
    "mirflickr": _mirflickr(),
    "mirflickr-second": _mirflickr(*_SECOND),
    "mirflickr-squeezenet": _mirflickr(*_SQUEEZENET),
    "mirflickr-squeezenet-second": _mirflickr(*_SQUEEZENET, *_SECOND),
    "scene": Data(Path("scene_mlp_tie_aware_48"), 700, val_database="training"),  # N: 700 of 848, and of 1,050
    "yeast": Data(Path("yeast_mlp_tie_aware_48"), 700, val_database="training"),
}


def data_of(name: str) -> Data:
    """An entry of `DATA`, or your own configuration, by its path."""
    return DATA[name] if name in DATA else Data(Path(name), 100)


@dataclass(frozen=True)
class Inputs:
    """The splits, as vectors or as features of the frozen backbone, and those of the gallery if there is one."""

    splits: Splits
    train: NDArray[np.float32]
    query: NDArray[np.float32]
    database: NDArray[np.float32]
    gallery: "Inputs | None" = None

    @property
    def all(self) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """The features (N, D) and labels (N, C) of all images together."""
        splits = self.splits
        labels = [splits.train.labels, splits.query.labels, splits.database.labels]
        return np.concatenate([self.train, self.query, self.database]), np.concatenate(labels)


def intact_splits(config: Config) -> Splits:
    """The splits of a configuration, without images that cannot be decoded."""
    splits = build_splits(config.data.name, **config.data.options())
    return without_broken(splits, source=config.data.name)


def inputs_of(config: Config) -> Inputs:
    """The inputs of a configuration; features come from the cache if available."""
    splits = intact_splits(config)
    parts = [splits.train, splits.query, splits.database]
    vectors = [split.vectors for split in parts if split.vectors is not None]
    if len(vectors) == len(parts):
        return Inputs(splits, *vectors)
    preprocessing = preprocessing_of(config)
    if preprocessing is None or not config.model.freeze_backbone:
        raise BadConfig(
            "methods are compared on vectors, or on photographs with a frozen backbone (model.freeze_backbone)"
        )
    model = initial_model(config)
    network = LazyBackbone.of(model.backbone, model.backbone_name)
    engine = build_engine("auto", network, preprocessing, device="cpu", precision=config.train.precision)
    images = [Images(split, preprocessing, cache="none") for split in parts]
    return Inputs(splits, *[features_of(network, each, engine=engine, n_features=model.n_features) for each in images])
