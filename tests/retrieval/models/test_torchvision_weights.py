"""Published weights: the table agrees with torchvision, and files arrive whole or not at all."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.models import torchvision_weights
from hashseek.retrieval.models.torchvision_weights import FILES, cached, fetch_weights
from hashseek.retrieval.models.weight_loading import load_backbone_weights
from support.web import serving


def test_the_table_has_the_networks_and_files_of_torchvision(monkeypatch, tmp_path):
    names = models.list_models(module=models)
    urls = {name: models.get_model_weights(name).DEFAULT.url for name in names}
    assert {name: torchvision_weights._SOURCE + file for name, file in FILES.items()} == urls
    for name in names:  # the URL and the checksum of every other set follow from its file name, too
        for weights in models.get_model_weights(name):
            file = weights.url.removeprefix(torchvision_weights._SOURCE)
            assert re.fullmatch(r"[^/]+-[0-9a-f]{8,64}\.pth", file), weights.url
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    for variables in ({}, {"XDG_CACHE_HOME": str(tmp_path)}, {"TORCH_HOME": str(tmp_path / "torch home")}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert cached(FILES["resnet18"]).parent == Path(torch.hub.get_dir()) / "checkpoints"


def test_weights_arrive_whole_or_not_at_all(monkeypatch, tmp_path):
    content = bytes(range(256)) * 4000
    published = tmp_path / "published"
    published.mkdir()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    with serving(published) as url:
        monkeypatch.setattr(torchvision_weights, "_SOURCE", f"{url}/")
        monkeypatch.setitem(FILES, "resnet18", f"resnet18-{hashlib.sha256(content).hexdigest()[:8]}.pth")
        path = cached(FILES["resnet18"])
        with pytest.raises(BadCheckpoint) as error:
            fetch_weights(path.name)
        assert path.name in str(error.value)
        assert str(path.parent) in str(error.value)
        (published / path.name).write_bytes(content[:-1])
        with pytest.raises(BadCheckpoint):
            fetch_weights(path.name)
        assert not path.exists()
        (published / path.name).write_bytes(content)
        assert fetch_weights(path.name) == path
    assert path.read_bytes() == content
    assert fetch_weights(path.name) == path  # without a server
    with pytest.raises(BadCheckpoint, match=str(path)):  # training reads the same file, and it is no network
        load_backbone_weights(nn.Identity(), name="resnet18", weights="default")
    path.unlink()
    with pytest.raises(BadCheckpoint):
        fetch_weights(path.name)
