"""Every configuration that Hashseek ships: its header says what it is for, and it builds, as does each variant."""

import inspect
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path

import pytest
import torch

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import Config, load_config
from hashseek.training.data.datasets import build_splits, data_set
from hashseek.training.evaluation.linear_probe import probe_checkpoint
from hashseek.training.loop.fit import fit
from hashseek.training.loop.network import Network, build_network
from support.dataset_files import needs_data, picture, write_cifar, write_lists
from support.paths import ROOT

SHIPPED = sorted(Path(str(resources.files("hashseek.training.configs"))).glob("*.toml"))
N_LABELS = {"scene": 6, "yeast": 14, "voc2007": 20, "voc2012": 20, "mirflickr": 38, "coco": 80, "cifar10": 10}
OVERRIDE = re.compile(
    r"(?:^|(?<=[\s`(]))((?:data|model|loss|partner|projection|memory|optimizer|train)\.[\w.]+=(?:'[^']*'|[^\s'`)]+))"
)


def header(file: Path) -> list[str]:
    """The lines of comments that the file begins with, without their mark."""
    lines = file.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return [line[1:] for line in lines]


def variants(file: Path) -> list[list[str]]:
    """The overrides of each line of the header that has some, as a shell would pass them."""
    found = [[text.replace("'", "") for text in OVERRIDE.findall(line)] for line in header(file)]
    return [overrides for overrides in found if overrides]


@lru_cache
def model_of(backbone: str, n_bits: int, head: str) -> HashModel:
    """A model without storage: shapes and names only."""
    with torch.device("meta"):
        return HashModel(backbone=backbone, n_bits=n_bits, head=head)


def build(config: Config) -> Network:
    """Network, losses and memory of a configuration; its data set takes the options it is given."""
    parameters = inspect.signature(data_set(config.data.name)).parameters
    options = config.data.options()
    assert set(options) <= set(parameters)
    assert {name for name, p in parameters.items() if p.default is inspect.Parameter.empty} <= set(options)
    n_classes = options.get("n_labels", N_LABELS.get(config.data.name, 18))
    model = model_of(config.model.backbone, config.model.n_bits, config.model.head)
    network, objective, keys = build_network(config, model, n_classes=n_classes)
    assert objective.on in network.reads
    assert (keys is None) == (config.memory is None)
    return network


def test_overrides_are_found_in_a_header():
    text = "x: loss.name=dsh (train.chunk_size=25) `loss.lam=0` data.drop_labels='[\"*_r1\"]'"
    found = ["loss.name=dsh", "train.chunk_size=25", "loss.lam=0", "data.drop_labels='[\"*_r1\"]'"]
    assert OVERRIDE.findall(text) == found
    assert {file.stem for file in SHIPPED} >= {"scene_mlp_hbl", "mirflickr_alexnet_hyp2_48", "coco_resnet101_clml"}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_header_gives_command_expectation_and_source(file):
    text = "\n".join(header(file))
    for word in ("command:", "expect:", "source:"):
        assert len(re.findall(rf"^ {word} +\S", text, re.M)) == 1, word
    assert re.search(rf"hashseek train {file.stem}\b", text)
    named = re.findall(r"runs/(\w+)/", text)
    assert set(named) <= {file.stem, "mine"}
    for other in re.findall(r"\b\w+_(?:resnet\d+|mlp|alexnet|inception_v3)_\w+", text):
        assert other in {shipped.stem for shipped in SHIPPED}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_it_builds_as_it_is_and_in_every_variant_of_its_header(file):
    plain = load_config(Path(file.stem))
    assert load_config(file) == plain
    build(plain)
    for overrides in variants(file):
        config = load_config(file, overrides)
        assert config != plain or overrides[0].startswith("data."), f"{overrides} changes nothing"
        build(config)


def test_a_setting_that_the_loss_does_not_read_is_refused():
    with pytest.raises(BadConfig, match="'beat'"):
        build(load_config(Path("voc2007_inception_v3_hyp2_48"), ["loss.beat=1"]))
    with pytest.raises(BadConfig, match="projection"):
        build(load_config(Path("coco_resnet50_reg"), ["loss.name=mulsupcon"]))


SMALL = ("model.backbone=squeezenet1_1", "model.weights=none", "model.size=32", "train.epochs=1", "train.device=cpu")


@pytest.mark.parametrize("name", ["cifar10_alexnet_hashnet_48", "imagenet100_alexnet_hashnet_48"])
def test_a_configuration_with_one_label_per_image_trains_on_files_as_they_are_published(name, tmp_path, own_cache):
    more = ("data.n_query=20", "data.n_train=60") if name.startswith("cifar10") else ()
    if more:
        write_cifar(tmp_path)
    else:
        train = [{"file": f"image/n{i}.JPEG", "labels": str(i % 5), "split": "train"} for i in range(20)]
        query = [{"file": f"val_image/{i}.JPEG", "labels": str(i), "split": "test"} for i in range(5)]
        for row in (*train, *query):
            picture(tmp_path / row["file"], seed=int(row["labels"]))
        write_lists(tmp_path, [*train, *query, *(row | {"split": "database"} for row in train)], n_labels=5)
    found = fit(load_config(Path(name), (f"data.root={tmp_path}", *SMALL, *more)), out=tmp_path / "run")
    assert 0 < found.best_score <= 1


@needs_data
def test_an_epoch_on_the_real_vectors_leaves_features_that_a_probe_can_read(tmp_path):
    config = load_config(Path("scene_mlp_hbl"), ["train.epochs=1", "train.device=cpu"])
    run = fit(config, out=tmp_path / "run").run
    splits = build_splits(config.data.name, **config.data.options())
    found = probe_checkpoint(load_checkpoint(run.last), splits, precision="fp32")
    chance = splits.query.labels.mean()  # mAP of a random order, averaged over labels
    assert found["mAP"] > chance + 0.1
    assert found["p@1"] > splits.query.labels.mean(axis=0).max()


def test_the_page_of_configurations_lists_every_one():
    page = (ROOT / "docs" / "reference" / "shipped-configurations.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\w+)`\]\(\.\./\.\./training/configs/(\w+)\.toml\)", page, re.M)
    assert sorted(name for name, _ in listed) == [file.stem for file in SHIPPED]
    assert all(name == file for name, file in listed)
