"""`model.head_init`: training starts from the layer that `fit_hash_layer` finds, at the scale of the random layer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.hash_layers import fit_hash_layer
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.batches import Source, TrainingData
from hashseek.training.loop import head_init
from hashseek.training.loop.fit import fit, initial_model
from hashseek.training.loop.head_init import fit_head
from hashseek.training.loop.validation import validation_part
from hashseek.training.progress import Progress
from support.models import run_config

pytestmark = pytest.mark.usefixtures("own_cache")

# Nothing moves at this rate, so that a run ends with the layer that it started from.
STILL = {"optimizer": {"lr": 1e-30}, "train": {"epochs": 1, "batch_size": 32, "seed": 3}}
KEYS = {"loss": {"name": "supcon"}, "memory": {"size": 64, "momentum": 0.9}}


@pytest.mark.parametrize(("head", "method"), [("linear", "itq"), ("normalized", "itq"), ("linear", "weighted_itq")])
def test_the_first_layer_is_the_fitted_one_at_the_scale_of_a_random_one(pictures, tmp_path, own_cache, head, method):
    def started(name: str, *, frozen: bool, **sections) -> Path:
        model = {"head": head, "head_init": method, "freeze_backbone": frozen}
        settings = run_config(pictures, **(STILL | sections), model=model | {"size": 48})
        return fit(settings, out=tmp_path / name).run.folder

    frozen = started("frozen", frozen=True)
    settings = run_config(pictures, **STILL, model__head=head)
    [cached] = (own_cache / "features").glob("*.npy")
    features = np.load(cached)[validation_part(60, settings)[0]]
    expected = fit_hash_layer(features, n_bits=12, method=method, seed=3)
    layer = load_checkpoint(frozen / "last.safetensors").model.head
    scale = float(layer.weight.detach().norm() / np.linalg.norm(expected.weight))
    np.testing.assert_allclose(layer.weight.detach(), scale * expected.weight, rtol=1e-4, atol=1e-6)

    rows = torch.from_numpy(features)
    with torch.no_grad():
        outputs, random = layer(rows), initial_model(settings).head(rows)
    torch.testing.assert_close(outputs.square().mean(), random.square().mean(), rtol=1e-4, atol=0)
    if head == "normalized":
        np.testing.assert_allclose(outputs, scale * expected(features), rtol=1e-3, atol=1e-4)
    else:
        np.testing.assert_allclose(outputs.mean(dim=0), np.zeros(12), atol=1e-5)

    tuned = started("tuned", frozen=False, **KEYS)
    state = torch.load(tuned / "state.pt", weights_only=True)
    torch.testing.assert_close(state["network"]["model.head.weight"], layer.weight.detach(), rtol=1e-3, atol=1e-5)
    for name in ("weight", "bias"):  # keys start as the network does
        torch.testing.assert_close(state["keys"][f"encoder.model.head.{name}"], state["network"][f"model.head.{name}"])


def test_features_for_the_layer_are_those_of_evaluation_of_images_that_are_trained_on(monkeypatch):
    monkeypatch.setattr(head_init, "MAX_IMAGES", 20)
    settings = run_config(Path(), model={"backbone": "mlp_bn:6-8", "n_bits": 4, "head_init": "pca"})
    model, seen = HashModel(backbone="mlp_bn:6-8", n_bits=4), []

    def features(model, rows):
        seen.append((model.training, len(rows), rows.min() >= 30))
        yield model.features(torch.randn(len(rows), 6))

    data = TrainingData(Source(lambda *_: iter(()), features), None, None, np.arange(30, 60), np.arange(30))
    fit_head(Fabric(accelerator="cpu", devices=1), settings, model, data, progress=Progress(quiet=True))
    assert seen == [(False, 20, True)]


def test_heads_and_sizes_that_cannot_be_fitted_are_refused(pictures, tmp_path):
    for head in ("mlp", "linear_bn"):
        with pytest.raises(BadConfig, match="head_init"):
            run_config(pictures, model={"head": head, "head_init": "itq"})
    for n_bits in (54, 600):  # 54 images are trained on; features have 512 numbers
        settings = run_config(pictures, model={"head_init": "pca", "n_bits": n_bits, "size": 48}, loss={"name": "dpsh"})
        with pytest.raises(BadConfig, match="54 images and 512 features"):
            fit(settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "start"),
    [
        ({}, "random"),
        ({"freeze_backbone": True}, "itq"),
        ({"freeze_backbone": True, "head": "mlp"}, "random"),
        ({"freeze_backbone": True, "head_init": "random"}, "random"),
        ({"head_init": "none", "freeze_backbone": True}, "itq"),
        ({"head_init": "pca"}, "pca"),
    ],
)
def test_a_frozen_backbone_starts_from_itq_by_default(pictures, model, start):
    assert run_config(pictures, model=model).model.start_of_head == start
