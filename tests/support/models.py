"""Tiny checkpoints and training runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from hashseek.retrieval.checkpoint import save_checkpoint
from hashseek.retrieval.images import Preprocessing, load_file, normalizer
from hashseek.retrieval.models.backbones import build_backbone
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import Config, parse_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.splits import Splits
from support.pictures import N_PICTURES, draw, encoded

# A contrastive loss on a projection with a queue, beside a classification loss: every part of training at once.
EVERYTHING: dict[str, Any] = {
    "loss": {"name": "mulsupcon", "on": "projection", "tau": 0.2},
    "projection": {"width": 16, "hidden": 24},
    "memory": {"size": 40, "momentum": 0.9},  # not a multiple of the batch
    "partner": {"name": "asl", "weight": 0.5},
}
PREPROCESSING = Preprocessing(size=64, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


class Noise(nn.Module):
    """A layer as a user may write it, which draws from PyTorch's generator."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn_like(inputs) if self.training else inputs


def noisy_backbone() -> tuple[nn.Module, int]:
    """A backbone from outside Hashseek with such a layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), Noise(), nn.Linear(48, 16)), 16


def tiny_checkpoint(path: Path, *, n_bits: int, seed: int) -> Path:
    """An untrained SqueezeNet; each bit has both values among the drawn pictures, so that their codes differ.

    The bias puts 0 in the middle of a wide gap between two outputs: processors and batch sizes round float32
    differently, which must not change the code of any drawn picture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HashModel(backbone="squeezenet1_1", n_bits=n_bits).eval()
    files = [encoded(draw(i), kind) for i in range(N_PICTURES) for kind in ("PNG", "JPEG")]
    pixels = np.stack([load_file(data, PREPROCESSING).pixels for data in files])
    with torch.inference_mode():
        outputs = model(normalizer(PREPROCESSING, torch.device("cpu"))(torch.from_numpy(pixels)))
        ordered = outputs.sort(dim=0).values
        quarter = len(files) // 4
        gaps = ordered.diff(dim=0)[quarter:-quarter]
        widest = gaps.argmax(dim=0, keepdim=True) + quarter
        model.head.bias -= (ordered.gather(0, widest) + ordered.gather(0, widest + 1))[0] / 2
        margin = gaps.amax(dim=0).min() / 2
        assert margin > 1e-4 * outputs.abs().max(), "an output is so near 0 that rounding may flip its bit"
    save_checkpoint(path, model, PREPROCESSING, label_names=("even", "odd"))
    return path


def untrained_checkpoint(path: Path, *, n_bits: int, root: Path) -> Path:
    """A SqueezeNet with random weights that names the folder `root` as its training data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HashModel(backbone="squeezenet1_1", n_bits=n_bits)
    preprocessing = Preprocessing(size=48, mean=(0.5,) * 3, std=(0.25,) * 3, crop_fraction=1.0)
    training = {"data": {"name": "folder", "root": str(root)}}
    save_checkpoint(path, model, preprocessing, label_names=("a",), training=training)
    return path


def squeezenet_weights(path: Path) -> Path:
    """An untrained SqueezeNet as plain weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network, _ = build_backbone("squeezenet1_1")
    save_file(network.state_dict(), path)
    return path


def folder_of_this_process(*, root: str) -> Splits:
    """A folder that has other files on the host of each process."""
    return replace(build_splits("folder", root=root), fingerprint=str(dist.get_rank()))


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
