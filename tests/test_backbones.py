"""Backbones: each gives the features it promises, and takes exactly the weights that fit."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from retrieval.backbones import BACKBONES, HEAD_PREFIXES, build_backbone, default_preprocessing
from retrieval.errors import BadCheckpoint, BadConfig
from retrieval.model import HashModel
from retrieval.weights import load_backbone_weights


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_gives_features_of_its_width(name):
    torch.manual_seed(0)
    backbone, width = build_backbone(name)
    size = 80 if name == "inception_v3" else 64
    with torch.no_grad():
        features = backbone.eval()(torch.randn(2, 3, size, size))
    assert features.flatten(1).shape == (2, width)
    assert default_preprocessing(name).size >= 224


@pytest.mark.parametrize("name", BACKBONES)
def test_torchvisions_own_state_dict_loads_whatever_the_width_of_its_classifier(name, tmp_path):
    torch.manual_seed(1)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    network = getattr(models, name)(weights=None, num_classes=7, **options)
    torch.save({"state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}, tmp_path / "w.pth")
    backbone, _ = build_backbone(name)
    load_backbone_weights(backbone, name=name, weights=str(tmp_path / "w.pth"))
    theirs = network.state_dict()
    ours = backbone.state_dict()
    assert ours
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key])
    left_out = [key for key in theirs if key not in ours]
    assert left_out
    assert all(key.startswith(HEAD_PREFIXES[name]) for key in left_out)


def test_weights_of_another_architecture_are_refused_with_their_keys(tmp_path):
    torch.save(models.resnet18(weights=None).state_dict(), tmp_path / "r18.pth")
    with pytest.raises(BadCheckpoint, match=r"do not fit the backbone resnet50: missing .*and \d+ more"):
        load_backbone_weights(build_backbone("resnet50")[0], name="resnet50", weights=str(tmp_path / "r18.pth"))


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, ("touch /tmp/hashseek-evil",))

    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(BadCheckpoint, match="damaged or holds more than tensors"):
        load_backbone_weights(build_backbone("resnet18")[0], name="resnet18", weights=str(tmp_path / "evil.pth"))
    assert not Path("/tmp/hashseek-evil").exists()


@pytest.mark.parametrize("name", ["none.pth", "cut.safetensors", "cut.pth", "notes.txt"])
def test_unusable_weights_files(tmp_path, name):
    file = tmp_path / name
    if name != "none.pth":
        save_file({"a": torch.zeros(100)}, file)
        file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(BadCheckpoint) as caught:
        load_backbone_weights(build_backbone("resnet18")[0], name="resnet18", weights=str(file))
    assert str(file.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_default_weights_without_a_network_are_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(BadCheckpoint, match=r"could not be downloaded .*give a local file"):
        load_backbone_weights(build_backbone("resnet18")[0], name="resnet18", weights="default")


def test_an_unknown_backbone():
    with pytest.raises(BadConfig, match="no backbone 'resnet19': choose one of alexnet"):
        build_backbone("resnet19")


def test_frozen_batch_norm_stays_in_evaluation_mode_and_the_rest_trains():
    model = HashModel(backbone="resnet18", n_bits=8, freeze_batch_norm=True).train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert not any(m.training for m in norms)
    assert model.training
    assert model.backbone.training
    before = norms[0].running_mean.clone()
    model(torch.randn(4, 3, 64, 64))
    assert torch.equal(norms[0].running_mean, before)
    assert all(m.training for m in HashModel(backbone="resnet18", n_bits=8).train().modules())
