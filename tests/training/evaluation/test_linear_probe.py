"""Contrastive training, then a linear probe on the frozen encoder: the second stage reads what the first one learnt."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.retrieval.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import parse_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.hidden_labels import hide_labels
from hashseek.training.evaluation import linear_probe
from hashseek.training.evaluation.linear_probe import probe_checkpoint
from hashseek.training.evaluation.logistic_regression import fit_probe
from hashseek.training.loop.fit import fit
from hashseek.training.loop.validation import validation_part
from support.in_process import run_command
from support.models import untrained_checkpoint

pytestmark = pytest.mark.xdist_group("linear probe")  # one process trains for all tests


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature in the layout of the real vector sets, whose labels are not linear in the vectors."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(500, 4))
    labels = np.stack([latent[:, i] * latent[:, (i + 1) % 4] > 0 for i in range(4)], axis=1).astype(np.uint8)
    vectors = (latent @ rng.normal(size=(4, 8))).astype(np.float32)
    split = np.where(np.arange(500) < 400, "train", "test")
    np.savez(folder / "scene.npz", X=vectors, Y=labels, split=split, label_names=np.array(list("abcd")))
    return folder


@pytest.fixture(scope="session")
def contrastive(scene, tmp_path_factory) -> tuple[Checkpoint, Checkpoint]:
    """Checkpoints of the same encoder after contrastive training on a projection, and before it."""
    out = tmp_path_factory.mktemp("run")

    def run(name: str, epochs: int, lr: float) -> Checkpoint:
        content = {
            "data": {"name": "scene", "root": str(scene)},
            "model": {"backbone": "mlp:8-64-64", "n_bits": 16},
            "loss": {"name": "mulsupcon", "on": "projection"},
            "projection": {"width": 32},
            "memory": {"size": 512, "momentum": 0.99},
            "optimizer": {"name": "adamw", "lr": lr},
            "train": {"epochs": epochs, "batch_size": 50, "device": "cpu", "precision": "fp32"},
        }
        return load_checkpoint(fit(parse_config(content, source="test"), out=out / name).run.last)

    return run("after", 40, 3e-3), run("before", 1, 1e-12)


def test_contrastive_training_makes_labels_linear(scene, contrastive):
    splits = build_splits("scene", root=str(scene))
    after, before = (probe_checkpoint(checkpoint, splits) for checkpoint in contrastive)
    assert 1 - after["mAP"] < 0.6 * (1 - before["mAP"])
    assert after["Hamming loss"] == pytest.approx(1 - after["HA"])
    assert after["OF1"] == pytest.approx(after["miF1"])
    outputs = probe_checkpoint(contrastive[0], splits, layer="outputs")
    assert outputs == probe_checkpoint(contrastive[0], splits, layer="outputs") != after


def test_the_command_prints_and_writes_the_figures_of_an_image_checkpoint(tmp_path, own_cache, capsys):
    pictures = tmp_path / "pictures"
    render_shapes(pictures, n_query=20, n_train=60, n_database=6, size=32, seed=1)
    made = untrained_checkpoint(tmp_path / "made.safetensors", n_bits=8, root=pictures)
    options = ("--layer", "outputs", "--precision", "fp32", "--out", tmp_path / "probe.json")
    code, printed, _ = run_command(capsys, "probe", made, *options)
    assert code == 0
    written = json.loads((tmp_path / "probe.json").read_text())
    splits = build_splits("folder", root=str(pictures))
    expected = probe_checkpoint(load_checkpoint(made), splits, layer="outputs", precision="fp32")
    assert written == pytest.approx(expected, abs=0.05)  # threads add in another order
    assert f"mAP           {written['mAP']:.4f}" in printed
    assert run_command(capsys, "probe", made, "--device", "cuda:99")[0] == 2


def test_what_cannot_be_probed_is_refused(scene, contrastive, tmp_path):
    splits = build_splits("scene", root=str(scene))
    with pytest.raises(BadDataset, match="of 2 training images"):
        probe_checkpoint(contrastive[0], replace(splits, train=splits.train.take([0, 1])))
    render_shapes(tmp_path, n_query=4, n_train=10, n_database=4, size=32, seed=1)
    with pytest.raises(BadConfig):
        probe_checkpoint(contrastive[0], build_splits("folder", root=str(tmp_path)))
    preprocessing = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    of_images = HashModel(backbone="squeezenet1_1", n_bits=8)
    save_checkpoint(tmp_path / "images.safetensors", of_images, preprocessing, label_names=("a",))
    with pytest.raises(BadConfig):
        probe_checkpoint(load_checkpoint(tmp_path / "images.safetensors"), splits)
    training = {**contrastive[0].header.training, "held_out": ["a", "b"]}
    with pytest.raises(BadConfig, match="a, b"):
        probe_checkpoint(replace(contrastive[0], header=replace(contrastive[0].header, training=training)), splits)
    assert torch.is_grad_enabled()


def test_without_data_the_splits_must_be_those_of_the_training(scene, contrastive, tmp_path, capsys):
    shutil.copy(scene / "scene.npz", tmp_path)
    splits = build_splits("scene", root=str(tmp_path))
    training = {**contrastive[0].header.training, "data": {"name": "scene", "root": str(tmp_path)}}
    checkpoint = tmp_path / "a.safetensors"
    save_checkpoint(checkpoint, contrastive[0].model, None, label_names=splits.label_names, training=training)
    assert run_command(capsys, "probe", checkpoint)[0] == 0
    with np.load(scene / "scene.npz") as arrays:
        np.savez(tmp_path / "scene.npz", **{**arrays, "split": np.roll(arrays["split"], 100)})
    assert run_command(capsys, "probe", checkpoint)[:2] == (2, "")
    config = tmp_path / "data.toml"
    config.write_text(f'[data]\nname = "scene"\nroot = "{tmp_path}"\n[model]\nbackbone = "mlp:8-9"\nn_bits = 8\n')
    code, _, err = run_command(capsys, "probe", checkpoint, "--data", config)
    assert code == 0
    assert "note: " in err


def test_the_weight_decay_is_chosen_on_rows_and_labels_that_the_encoder_was_not_trained_on(
    scene, contrastive, monkeypatch
):
    splits, checkpoint = build_splits("scene", root=str(scene)), contrastive[0]
    training = {key: value for key, value in checkpoint.header.training.items() if key != "splits_sha256"}
    training["train"] = {**training["train"], "seed": 5, "val_fraction": 0.25, "keep_labels": 0.5}
    rows, held_out = validation_part(len(splits.train), parse_config(training, source="test"))
    seen = hide_labels(splits.train.labels, share=0.5, single=False, seed=5)
    fitted, scored, scores = [], [], iter([0.2, 0.3, 0.7, 0.6, 0.1])

    def fitting(features, labels, **options):
        fitted.append((labels, options["weight_decay"]))
        return fit_probe(features, labels, **options)

    def scoring(_, labels):
        scored.append(labels)
        return next(scores)

    monkeypatch.setattr(linear_probe, "fit_probe", fitting)
    monkeypatch.setattr(linear_probe, "mean_average_precision", scoring)
    found = probe_checkpoint(replace(checkpoint, header=replace(checkpoint.header, training=training)), splits)
    assert (found["weight_decay"], found["val_mAP"]) == (linear_probe.DECAYS[2], 0.7)
    assert [decay for _, decay in fitted] == [*linear_probe.DECAYS, linear_probe.DECAYS[2]]
    for labels, _ in fitted[:-1]:
        assert np.array_equal(labels, seen[rows])
    assert np.array_equal(fitted[-1][0], seen)
    for labels in scored:
        assert np.array_equal(labels, splits.train.labels[held_out])


def test_labels_hidden_from_training_are_hidden_from_the_probe(scene, contrastive):
    splits = build_splits("scene", root=str(scene))
    whole = contrastive[0]
    few = {**whole.header.training, "train": {"single_label": True, "seed": 0}}
    hidden = replace(whole, header=replace(whole.header, training=few))
    seen, unseen = probe_checkpoint(whole, splits), probe_checkpoint(hidden, splits)
    assert unseen["OR"] < seen["OR"] - 0.1  # it learnt that most labels are absent
