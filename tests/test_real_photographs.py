"""Real photographs, trained on, indexed, served and found. Needs the folder `$HASHSEEK_DATA`."""

import csv
import json
import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from hashseek.retrieval.checkpoint import save_checkpoint
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.weight_loading import load_backbone_weights
from hashseek.training.config import load_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.loop.fit import fit
from support.commands import wait_until
from support.service import url_in

DATA = Path(os.environ.get("HASHSEEK_DATA", "."))
pytestmark = pytest.mark.skipif(
    "HASHSEEK_DATA" not in os.environ, reason="HASHSEEK_DATA does not name the folder of real photographs"
)
WEIGHTS = {"mobilenet_v2": "mobilenet_v2_qat", "squeezenet1_1": "squeezenet1_1_features"}


@pytest.mark.parametrize("backbone", WEIGHTS)
def test_pretrained_weights_load_strictly(backbone):
    model = HashModel(backbone=backbone, n_bits=8)
    # Batch norm is folded into the convolutions of one of them, and stays the identity that it starts as.
    convolutions = [p for p in model.backbone.parameters() if p.ndim == 4]
    before = [p.clone() for p in convolutions]
    load_backbone_weights(
        model.backbone, name=backbone, weights=str(DATA / "backbones" / f"{WEIGHTS[backbone]}.safetensors")
    )
    assert all(not (a == b).all() for a, b in zip(before, convolutions, strict=True))


def test_mirflickr_has_the_splits_of_its_readme():
    config = load_config(Path("mirflickr25k_mobilenet_v2_hyp2_48"))
    splits = build_splits(config.data.name, **config.data.options())
    assert [len(part) for part in (splits.query, splits.train, splits.database)] == [793, 3205, 15667]
    assert len(splits.label_names) == 38
    columns = {"split_column": "deephash_split", "ignore_columns": ["split"]}
    deephash = build_splits("folder", root=str(DATA / "mirflickr25k_128"), **columns)
    assert [len(part) for part in (deephash.query, deephash.train, deephash.database)] == [782, 3134, 15749]


def test_a_frozen_backbone_learns_on_photographs(tmp_path, own_cache):
    """A miniature of the published run: 300 photographs, a small network, seconds."""
    source = DATA / "mirflickr25k_128"
    with (source / "labels.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"][:300]
    lines = [
        f"{source / row['file']},{row['labels']},{('query', 'database', 'train', 'train')[i % 4]}"
        for i, row in enumerate(rows)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["file,labels,split", *lines]))
    config = load_config(
        Path("mirflickr25k_mobilenet_v2_hyp2_48"),
        [
            f"data.root={tmp_path}",
            "model.backbone=squeezenet1_1",
            f"model.weights={DATA}/backbones/squeezenet1_1_features.safetensors",
            "model.size=96",
            "train.epochs=10",
            "train.val_n=50",
            "train.device=cpu",
        ],
    )
    log = fit(config, out=tmp_path / "run")
    records = [json.loads(line) for line in log.run.log.read_text().splitlines()]
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    assert log.best_score > 0.6


def test_photographs_are_indexed_served_and_found_over_http(hashseek, start, tmp_path):
    model = HashModel(backbone="squeezenet1_1", n_bits=48)
    load_backbone_weights(
        model.backbone, name="squeezenet1_1", weights=str(DATA / "backbones" / "squeezenet1_1_features.safetensors")
    )
    preprocessing = Preprocessing(size=96, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), crop_fraction=1.0)
    save_checkpoint(tmp_path / "model.safetensors", model, preprocessing, label_names=())
    images = DATA / "coco256" / "images"
    add = ("index", "add", tmp_path / "c", images, "--checkpoint", tmp_path / "model.safetensors", "--device", "cpu")
    code, out, err = hashseek(*add)
    assert (code, "added 256" in out) == (0, True), err
    server = start("serve", tmp_path / "c", "--port", 0, "--device", "cpu")
    wait_until(lambda: url_in(server.err) or server.ended)
    with httpx.Client(base_url=url_in(server.err), timeout=60) as client:
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        pictures = sorted(images.rglob("*.jpg"))
        for picture in map(Path, np.random.default_rng(0).choice(np.array(pictures), 10, replace=False)):
            answer = client.post("/v1/search", files={"image": picture.read_bytes()}, data={"k": 5})
            hits = answer.json()["hits"]
            assert picture.name in [hit["path"] for hit in hits if hit["distance"] == 0]
            assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)
    server.send(signal.SIGTERM)
    assert server.wait() == 0
