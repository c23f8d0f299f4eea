"""Encodes whole splits of images or vectors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.checkpoint import Checkpoint, Header
from hashseek.retrieval.codes import Codes, pack
from hashseek.retrieval.encoder import Encoder, VectorEncoder
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.fully_connected import FullyConnected
from hashseek.retrieval.models.names import widths_of
from hashseek.retrieval.scores import StoredFeatures, stored_features
from hashseek.retrieval.vectors import as_float32
from hashseek.training.data.cached_features import features_of
from hashseek.training.data.splits import Split, Splits
from hashseek.training.data.training_images import Images
from hashseek.training.evaluation.candidates import method_of, settings_hash
from hashseek.training.progress import Progress

_ROWS = 4096  # of features that are in memory in double precision


@dataclass(frozen=True)
class EncodedSplit:
    """A split by one model: codes (n, code_size), outputs (n, K), labels (n, C), and features (n, D) of length 1."""

    codes: Codes
    outputs: NDArray[np.float32]
    labels: NDArray[np.uint8]
    features: StoredFeatures

    def __len__(self) -> int:
        return len(self.codes)


class SplitEncoder:
    """Encodes with a checkpoint. The features of images are cached (`features_of`), so that another head costs little.

    Args:
        checkpoint: its backbone, and its head unless `encode` gets another one.
        device, precision: see `Encoder`.
    """

    def __init__(self, checkpoint: Checkpoint, *, device: str, precision: str) -> None:
        self.encoder = None
        if checkpoint.header.preprocessing is not None:
            self.encoder = Encoder(checkpoint, device=device, precision=precision)
        self.checkpoint = checkpoint

    @property
    def computed_in(self) -> str:
        """Engine, device and precision."""
        return VectorEncoder.engine if self.encoder is None else self.encoder.engine

    def features(self, split: Split, progress: Progress, title: str) -> NDArray[np.float32]:
        """Features (n, D) of a split, in its order; those of images from the cache if available."""
        if split.vectors is not None:
            return self.checkpoint.vector_backbone(as_float32(split.vectors))
        encoder = self.encoder
        assert encoder is not None
        images, network = Images(split, encoder.preprocessing, cache="none"), self.checkpoint.network()
        with progress.task(title, len(split)) as advance:
            return features_of(network, images, engine=encoder.backbone, n_features=encoder.n_features, advance=advance)

    def encode(
        self, split: Split, progress: Progress, title: str, *, head: FullyConnected | None = None
    ) -> EncodedSplit:
        """Outputs and codes of a split, in its order, by the checkpoint's head or another one."""
        found = self.features(split, progress, title)
        blocks = [stored_features(found[start : start + _ROWS]) for start in range(0, len(found), _ROWS)]
        outputs = (head or self.checkpoint.head)(found)
        return EncodedSplit(pack(outputs), outputs, split.labels, np.concatenate(blocks))


def describe_model(header: Header, computed_in: str) -> dict[str, Any]:
    """A checkpoint, for the protocol of a report."""
    preprocessing = header.preprocessing
    return {
        "method": method_of(header),
        "training_seed": (header.training.get("train") or {}).get("seed"),
        "training_settings_sha256": settings_hash(header),
        "backbone": header.backbone,
        "head": header.head,
        "preprocessing": "none (vectors)" if preprocessing is None else preprocessing.as_dict(),
        "computed_in": computed_in,
        "validation": header.scores,
    }


def check_kind(header: Header, splits: Splits, *, name: str) -> None:
    """Raise `BadConfig` unless the data set has what the checkpoint encodes: images, or vectors of its width."""
    vectors = splits.query.vectors
    has = "images" if vectors is None else f"vectors of {vectors.shape[1]} numbers"
    needs = "images" if header.preprocessing is not None else f"vectors of {widths_of(header.backbone)[0]} numbers"
    if has != needs:
        raise BadConfig(f"{name} encodes {needs}, but the data set has {has}: choose another data set")


def check_trained_on(header: Header, splits: Splits, *, name: str, refuse: bool) -> list[str]:
    """A note if the checkpoint was trained on other splits than these.

    Raises:
        BadConfig: it was, and `refuse` is set.
    """
    if header.training.get("splits_sha256", splits.fingerprint) == splits.fingerprint:
        return []
    if refuse:
        raise BadConfig(
            f"{name} was trained on other splits than those of the data set, so it may have seen query images in "
            "training: restore the data set, or choose one without training images with --data"
        )
    return [f"{name} was trained on other splits, so it may have seen query images in training"]
