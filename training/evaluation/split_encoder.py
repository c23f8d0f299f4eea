"""Splits of images or of vectors into outputs and codes, by one backbone and any number of heads on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hashseek.retrieval.checkpoint import Checkpoint, Header
from hashseek.retrieval.codes import pack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Pixels, decode_for, read_bytes
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.heads import build_head
from hashseek.retrieval.models.mlp import Mlp, n_inputs_of
from hashseek.training.config import parse_config
from hashseek.training.data.splits import Split, Splits
from hashseek.training.data.training_images import without_broken
from hashseek.training.evaluation.report import Part
from hashseek.training.loop.fit import initial_model
from hashseek.training.runs.progress import Progress


class SplitEncoder:
    """A checkpoint's backbone.

    Args:
        checkpoint: its head is one to give to `encode`. device, precision: see `Encoder`.
    """

    def __init__(self, checkpoint: Checkpoint, *, device: str, precision: str) -> None:
        self.header = checkpoint.header
        self.encoder = None
        if self.header.preprocessing is not None:
            self.encoder = Encoder(checkpoint, device=device, precision=precision)
        self.model = checkpoint.model.eval()

    def encode(self, split: Split, heads: Sequence[nn.Module], progress: Progress, title: str) -> list[Part]:
        """Outputs and codes of a split, in its order, for each head: the features are computed once."""
        rows = (
            self._of_vectors(split, heads) if self.encoder is None else self._of_images(split, heads, progress, title)
        )
        return [Part(pack(part), part, split.labels, split.paths) for part in rows]

    def describe(self) -> dict[str, Any]:
        """For the certificate."""
        return describe_model(self.header, "float32 on cpu" if self.encoder is None else self.encoder.engine)

    def _of_images(
        self, split: Split, heads: Sequence[nn.Module], progress: Progress, title: str
    ) -> list[NDArray[np.float32]]:
        encoder = self.encoder
        assert encoder is not None
        widths: list[int] = []

        def encode(pixels: Pixels) -> NDArray[np.float32]:
            features = encoder.features(pixels)
            outputs = [encoder.apply_head(features, head) for head in heads]
            widths[:] = [part.shape[1] for part in outputs]
            return np.concatenate(outputs, axis=1)

        def load(path: Path) -> tuple[Path, Pixels]:
            data = read_bytes(path)
            with encoder.decoding():
                return path, decode_for(data, encoder.preprocessing, name=str(path))[1]

        rows = []
        with progress.task(title, len(split)) as advance:
            for _, row in encoder.stream(split.paths, load, encode):
                if row is not None:
                    rows.append(row)
                    advance(1)
        parts: list[NDArray[np.float32]] = np.split(np.stack(rows), np.cumsum(widths)[:-1], axis=1)
        return parts

    def _of_vectors(self, split: Split, heads: Sequence[nn.Module]) -> list[NDArray[np.float32]]:
        with torch.inference_mode():
            features = self.model.features(torch.from_numpy(split.vectors)).float()
            return [head(features).numpy() for head in heads]


def describe_model(header: Header, computed_in: str) -> dict[str, Any]:
    """A checkpoint, for the certificate."""
    preprocessing = header.preprocessing
    return {
        "backbone": header.backbone,
        "head": header.head,
        "preprocessing": "none (vectors)" if preprocessing is None else preprocessing.as_dict(),
        "computed_in": computed_in,
        "validation": header.scores,
    }


def check_kind(header: Header, splits: Splits, *, name: str = "this checkpoint") -> None:
    """Raise `BadConfig` unless a checkpoint of this header encodes what the data set holds: images, or its vectors."""
    vectors = splits.query.vectors
    if header.preprocessing is not None:
        if vectors is not None:
            raise BadConfig(f"{name} encodes images, but the data set has vectors: choose one with images")
        return
    width = n_inputs_of(header.backbone)
    if vectors is None or vectors.shape[1] != width:
        has = "images" if vectors is None else f"vectors of {vectors.shape[1]}"
        raise BadConfig(
            f"{name} encodes vectors of {width} numbers, but the data set has {has}: choose the set it was trained on"
        )


def usable(splits: Splits, data_name: str, progress: Progress) -> tuple[Split, Split, list[str]]:
    """Query and database without broken images, and the notes on what was left out."""
    if splits.query.vectors is not None:
        return splits.query, splits.database, [str(problem) for problem in splits.problems]
    query, query_problems = without_broken(splits.query, on_error=splits.on_error, source=f"{data_name} (query)")
    database, problems = without_broken(splits.database, on_error=splits.on_error, source=f"{data_name} (database)")
    every = [*splits.problems, *query_problems, *problems]
    progress.problems(every, [])
    return query, database, [str(problem) for problem in every]


def titled(query: Split, database: Split) -> list[tuple[Split, str]]:
    """Both splits with what a progress bar calls their encoding."""
    return [(query, "encoding the queries"), (database, "encoding the database")]


def random_head(name: str, n_features: int, n_bits: int, *, seed: int) -> nn.Module:
    """A freshly drawn head of the same kind: what training has to beat."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_head(name, n_features=n_features, n_bits=n_bits).eval()


def untrained(checkpoint: Checkpoint) -> HashModel:
    """The model as it was before its first training step.

    Raises:
        BadConfig: the checkpoint does not say how it was trained.
    """
    notes = ("splits_sha256", "held_out")  # beside the configuration
    training = {key: value for key, value in checkpoint.header.training.items() if key not in notes}
    if not training:
        raise BadConfig("the checkpoint does not say how it was trained, so its untrained model cannot be rebuilt")
    with torch.random.fork_rng():
        model = initial_model(parse_config(training, source="the checkpoint's configuration")).eval()
    trained = checkpoint.model.backbone
    if isinstance(model.backbone, Mlp) and isinstance(trained, Mlp):
        model.backbone.standardize(trained.mean, trained.std)  # the input's statistics are not what training learns
    return model
