"""Checkpoints: a round trip keeps every code, and nothing damaged, foreign or changed is ever trusted."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from retrieval.checkpoint import fingerprint, load_checkpoint, load_header, save_checkpoint
from retrieval.encoder import Encoder
from retrieval.errors import BadCheckpoint
from retrieval.images import Preprocessing
from retrieval.model import HashModel

PREPROCESSING = Preprocessing(size=64, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_fraction=1.0)


@pytest.fixture
def model() -> HashModel:
    torch.manual_seed(0)
    return HashModel(backbone="squeezenet1_1", n_bits=20)


@pytest.fixture
def path(model, tmp_path) -> Path:
    file = tmp_path / "model.safetensors"
    save_checkpoint(file, model, PREPROCESSING, label_names=("a", "b"), training={"x": 1}, scores={"val_mAP@5": 0.5})
    return file


def rewrite(path: Path, change, tensors=None) -> None:
    """Write the file again with a changed header."""
    with safe_open(path, framework="pt") as opened:
        content = json.loads(opened.metadata()["hashseek"])
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(content)
    save_file(kept if tensors is None else tensors(kept), path, metadata={"hashseek": json.dumps(content)})


def test_a_round_trip_keeps_everything(model, path):
    loaded = load_checkpoint(path)
    assert loaded.header == load_header(path)
    assert loaded.header.preprocessing == PREPROCESSING
    assert loaded.header.label_names == ("a", "b")
    assert loaded.header.training == {"x": 1}
    assert loaded.header.fingerprint == fingerprint(model, PREPROCESSING)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 64, 64), dtype=np.uint8)
    with torch.no_grad():
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (PREPROCESSING.mean, PREPROCESSING.std))
        expected = model.eval()((torch.from_numpy(pixels) / 255 - mean) / std).numpy()
    outputs = Encoder(loaded, device="cpu", precision="fp32").outputs(pixels)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)


def test_the_fingerprint_depends_on_weights_preprocessing_and_length(model):
    first = fingerprint(model, PREPROCESSING)
    assert first == fingerprint(model, PREPROCESSING)
    other = Preprocessing(size=65, mean=PREPROCESSING.mean, std=PREPROCESSING.std, crop_fraction=1.0)
    assert first != fingerprint(model, other)
    with torch.no_grad():
        model.head.bias[3] += 1e-3
    assert first != fingerprint(model, PREPROCESSING)


def test_a_missing_file(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"no checkpoint .*train one with"):
        load_checkpoint(tmp_path / "none.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_file(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    for load in (load_header, load_checkpoint):
        with pytest.raises(BadCheckpoint, match="truncated or no safetensors file"):
            load(path)


def test_a_foreign_file(tmp_path):
    foreign = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(3)}, foreign)
    with pytest.raises(BadCheckpoint, match="no Hashseek header"):
        load_checkpoint(foreign)
    foreign.write_text("a text file that was renamed")
    with pytest.raises(BadCheckpoint, match="no safetensors file"):
        load_checkpoint(foreign)


def test_a_newer_format(path):
    rewrite(path, lambda content: content.update(format_version=7))
    with pytest.raises(BadCheckpoint, match="format 7, this Hashseek reads up to 1: update"):
        load_header(path)


def test_a_changed_header(path):
    rewrite(path, lambda content: content["scores"].update({"val_mAP@5": 0.99}))
    with pytest.raises(BadCheckpoint, match="tampered with: its header"):
        load_header(path)


def test_changed_weights(path):
    def flip(tensors):
        tensors["head.weight"][0, 0] += 1
        return tensors

    rewrite(path, lambda content: None, flip)
    with pytest.raises(BadCheckpoint, match="tampered with: its content has fingerprint"):
        load_checkpoint(path)


def test_missing_weights(path):
    rewrite(path, lambda content: None, lambda tensors: {"head.weight": tensors["head.weight"]})
    with pytest.raises(BadCheckpoint, match="tampered with: its weights are not those of a squeezenet1_1"):
        load_checkpoint(path)
