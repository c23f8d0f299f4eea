"""Tiny checkpoints and training runs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hashseek.retrieval.checkpoint import save_checkpoint
from hashseek.retrieval.images import Preprocessing, normalizer, preprocess
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import Config, parse_config
from support.pictures import N_PICTURES, draw

PREPROCESSING = Preprocessing(size=64, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def tiny_checkpoint(path: Path, *, n_bits: int, seed: int) -> Path:
    """An untrained SqueezeNet whose bits split the drawn pictures in halves, so that their codes differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HashModel(backbone="squeezenet1_1", n_bits=n_bits).eval()
    pixels = np.stack([preprocess(draw(i), PREPROCESSING) for i in range(N_PICTURES)])
    with torch.inference_mode():
        outputs = model(normalizer(PREPROCESSING, torch.device("cpu"))(torch.from_numpy(pixels)))
        model.head.bias -= outputs.median(dim=0).values
    save_checkpoint(path, model, PREPROCESSING, label_names=("even", "odd"))
    return path


def run_config(root: Path, **changes: Any) -> Config:
    """A tiny training run on a folder of pictures; `train={"epochs": 2}` or `train__epochs=2` changes a setting."""
    content: dict[str, dict[str, Any]] = {
        "data": {"name": "folder", "root": str(root)},
        "model": {"backbone": "squeezenet1_1", "n_bits": 12, "size": 48, "crop_fraction": 1.0},
        "loss": {"name": "hyp2"},
        "optimizer": {"name": "adamw", "lr": 1e-3, "proxy_lr": 1e-2},
        "train": {"epochs": 2, "batch_size": 16, "device": "cpu", "precision": "fp32"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        content[section] = content.get(section, {}) | ({name: value} if name else value)
    return parse_config(content, source="test")
