"""Evaluation through the searcher: figures equal those of the oracle, and the report says what it measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from api.cli import main
from retrieval import hamming
from retrieval.checkpoint import load_checkpoint, save_checkpoint
from retrieval.encoder import Encoder
from retrieval.errors import BadConfig, BadDataset
from retrieval.images import Preprocessing, decode_for, read_bytes
from retrieval.model import HashModel
from training.datasets import build_splits
from training.datasets.shapes import render_shapes
from training.evaluate import evaluate


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(data set, checkpoint with random weights)."""
    root = tmp_path_factory.mktemp("evaluate")
    render_shapes(root / "data", n_query=12, n_train=2, n_database=60, size=48, seed=2)
    torch.manual_seed(0)
    model = HashModel(backbone="squeezenet1_1", n_bits=10)
    preprocessing = Preprocessing(size=48, mean=(0.5,) * 3, std=(0.25,) * 3, crop_fraction=1.0)
    training = {"data": {"name": "folder", "root": str(root / "data")}}
    save_checkpoint(root / "model.safetensors", model, preprocessing, label_names=("a",), training=training)
    return root / "data", root / "model.safetensors"


def test_figures_equal_those_of_the_oracle(world):
    data, checkpoint = world
    splits = build_splits("folder", root=str(data))
    report = evaluate(checkpoint, splits, data_name="shapes", ns=(5, 1000), device="cpu", precision="fp32")
    encoder = Encoder(load_checkpoint(checkpoint), device="cpu", precision="fp32")

    def encode(split):
        loaded = [decode_for(read_bytes(path), encoder.header.preprocessing)[1] for path in split.paths]
        return encoder.encode_pixels(np.stack(loaded))

    _, ids = hamming.search(encode(splits.query), encode(splits.database), 60)
    relevant = splits.query.labels @ splits.database.labels.T > 0
    for score, n in zip(report.scores, (5, 60), strict=True):
        assert score.n == n
        found = np.take_along_axis(relevant, ids, axis=1)[:, :n]
        hits = np.cumsum(found, axis=1)
        ap = (found * hits / np.arange(1, n + 1)).sum(axis=1) / np.maximum(hits[:, -1], 1)
        assert score.as_served == pytest.approx(ap.mean())
        bounds = score.mean_average_precision
        assert bounds.worst - 1e-12 <= score.as_served <= bounds.best + 1e-12
        assert bounds.worst <= bounds.expected <= bounds.best
        assert score.precision.worst <= found.mean() <= score.precision.best
    assert any("N = 1000 exceeds the database of 60" in note for note in report.notes)
    assert report.data["chance_(share_of_relevant_pairs)"] == pytest.approx(relevant.mean())


def test_random_directions_are_seeded_and_share_the_backbone(world):
    data, checkpoint = world
    splits = build_splits("folder", root=str(data))
    options = {"data_name": "x", "ns": (10,), "baseline": "random-directions", "device": "cpu", "precision": "fp32"}
    first, second = (evaluate(checkpoint, splits, seed=1, **options) for _ in range(2))
    assert first.baseline == second.baseline
    assert first.baseline != first.scores
    assert evaluate(checkpoint, splits, seed=2, **options).baseline != first.baseline


def test_the_command_prints_and_writes_json_and_markdown(world, tmp_path, capsys):
    data, checkpoint = world
    arguments = ["evaluate", str(checkpoint), "--data", str(data), "-n", "5", "-n", "20", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--precision", "fp32", "--device", "cpu"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "| 5 | **0." in printed
    assert (tmp_path / "report.md").read_text().strip() == printed.strip()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [score["n"] for score in report["scores"]] == [5, 20]
    assert report["data"]["queries"] == 12
    assert report["data"]["database"] == 60
    assert report["n_bits"] == 10
    assert report["fingerprint"] == load_checkpoint(checkpoint).header.fingerprint
    for key in ("seed", "versions", "command", "created", "normalizer", "schema_version"):
        assert key in report


def test_without_data_the_set_of_the_training_configuration_is_used(world, tmp_path, capsys):
    _, checkpoint = world
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(checkpoint), "-n", "5", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert "| database | 60 |" in capsys.readouterr().out


def test_bad_input(world, tmp_path):
    data, checkpoint = world
    splits = build_splits("folder", root=str(data))
    with pytest.raises(BadConfig, match="N >= 1, not 0"):
        evaluate(checkpoint, splits, data_name="x", ns=(0,))
    for path in splits.database.paths:
        target = tmp_path / path.relative_to(data)
        target.parent.mkdir(exist_ok=True)
    for path in (*splits.query.paths, *splits.train.paths, *splits.database.paths):
        (tmp_path / path.relative_to(data)).write_bytes(path.read_bytes())
    (tmp_path / "labels.csv").write_text((data / "labels.csv").read_text())
    broken = tmp_path / splits.database.paths[0].relative_to(data)
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(BadDataset, match="has 1 problem: line .* damaged"):
        evaluate(checkpoint, build_splits("folder", root=str(tmp_path)), data_name="x", ns=(5,))
    skipping = build_splits("folder", root=str(tmp_path), on_error="skip")
    report = evaluate(checkpoint, skipping, data_name="x", ns=(5,))
    assert report.data["database"] == 59
    assert any("damaged" in note for note in report.notes)
