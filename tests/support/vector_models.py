"""Splits of vectors and untrained models of them: a whole evaluation takes a tenth of a second."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from hashseek.retrieval.checkpoint import save_checkpoint
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.splits import Split, Splits

NAMES = ("a", "b", "c")


def vector_split(seed: int, n: int) -> Split:
    vectors = np.random.default_rng(seed).standard_normal((n, 6)).astype(np.float32)
    paths = tuple(Path(f"set.npz#{seed}-{i}") for i in range(n))
    return Split(paths, (vectors[:, :3] > 0.3).astype(np.uint8), tuple(f"row {i}" for i in range(n)), vectors)


VECTOR_SPLITS = Splits(vector_split(0, 20), vector_split(1, 15), vector_split(2, 50), NAMES, "f" * 64)


def save_vector_model(
    path: Path, n_bits: int, *, seed: int = 0, backbone: nn.Module | None = None, training: dict | None = None
) -> Path:
    """A model of the vectors with random weights, or with those of `backbone`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HashModel(backbone="mlp:6-16", n_bits=n_bits)
    if backbone is not None:
        model.backbone.load_state_dict(backbone.state_dict())
    save_checkpoint(path, model, None, label_names=NAMES, training=training)
    return path
