"""What a run leaves behind to be followed by: every epoch once, whatever happened on the way."""

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hashseek.retrieval.errors import BadConfig
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.loop.fit import fit
from hashseek.training.runs import tracking
from hashseek.training.runs.environment import git_state
from hashseek.training.runs.run_folder import Run, read_records
from hashseek.training.runs.run_report import curves_of
from hashseek.training.runs.tracking import scalars
from support.models import run_config

config = partial(run_config, model__size=32, model__freeze_backbone=True, train__epochs=4)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tracked")
    render_shapes(root, n_query=6, n_train=60, n_database=8, size=32, seed=4)
    return root


def points(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Everything that TensorBoard would show, by curve."""
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def of_log(run: Run) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(run.log):
        for name, value in scalars(record).items():
            found.setdefault(name, []).append((record["epoch"], pytest.approx(value, rel=1e-6)))
    return found


def stop_after(n: int):
    def on_epoch(record):
        if record["epoch"] == n:
            raise KeyboardInterrupt

    return on_epoch


def test_tensorboard_has_every_epoch_of_the_log_once_also_after_a_resume(pictures, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hashseek.training.loop.fit.save_state", killed)  # the epoch is repeated
        with pytest.raises(KeyboardInterrupt):
            fit(config(pictures), out=run.folder)
    assert len(points(run)["lr"]) == 1
    with pytest.raises(KeyboardInterrupt):
        fit(config(pictures), out=run.folder, resume=True, on_epoch=stop_after(2))
    assert len(points(run)["lr"]) == 2
    described = json.loads(run.splits.read_text())
    run.splits.write_text(json.dumps(described | {"splits_sha256": "0" * 64}))
    with pytest.raises(BadConfig, match="splits_sha256 was .0000"):
        fit(config(pictures), out=run.folder, resume=True)
    run.splits.write_text(json.dumps(described))
    for _ in range(2):  # the second time nothing is left to do
        fit(config(pictures), out=run.folder, resume=True)
        assert points(run) == of_log(run)
    terms = {"loss/sum", "loss/proxy", "loss/irrelevant"}
    times = {"images_per_s", "seconds", "seconds_waiting_for_data"}
    assert set(points(run)) == {*terms, "lr", "validation/mAP@1000", *times}
    assert [step for step, _ in points(run)["validation/mAP@1000"]] == [1, 2, 3, 4]
    starts = json.loads(run.environment.read_text())
    assert [start["first_epoch"] for start in starts] == [1, 1, 3, 5]
    fit(config(pictures, train__epochs=1, tracking={"tensorboard": False}), out=tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_state_names_the_commit_and_whether_files_changed(tmp_path):
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ("git", "-C", str(tmp_path), *who, *arguments), check=True, capture_output=True, text=True
        ).stdout

    assert git_state(tmp_path / "nowhere") is None
    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "first", "--no-verify")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    git_state.cache_clear()
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["dirty"]
    git_state.cache_clear()


def test_on_epoch_sees_saved_epochs_and_may_end_the_run(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_REPORTS", 0.0)
    run = Run(tmp_path / "run")

    def on_epoch(record):
        assert read_records(run.log)[-1] == record
        assert f"| epochs | {record['epoch']} of 4 |" in run.report.read_text()
        if record["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(config(pictures), out=run.folder, on_epoch=on_epoch)
    assert [record["epoch"] for record in read_records(run.log)] == [1, 2, 3]
    with pytest.raises(BadConfig, match="train.devices is 2"):
        fit(config(pictures, train={"devices": 2}), out=tmp_path / "other", on_epoch=on_epoch)


def test_the_folder_and_the_report_describe_the_run(pictures, tmp_path):
    result = fit(config(pictures, loss={"beta": 0.7}), out=tmp_path / "run")
    run, log = result.run, read_records(result.run.log)
    splits = json.loads(run.splits.read_text())
    assert splits["sizes"] == {"train": 60, "query": 6, "database": 8}
    assert splits["of_train"] == {"learnt_from": 54, "validated_on": 6}
    assert len(splits["label_names"]) == len(splits["train_images_per_label"])
    [start] = json.loads(run.environment.read_text())
    assert start["torch"]
    assert start["numpy"] == np.__version__
    assert os.uname().nodename not in run.environment.read_text()
    text = run.report.read_text()
    best = f"{result.best_score:.4f}, epoch {result.best_epoch} (best.safetensors)"
    last = f"{log[-1]['val_mAP@1000']:.4f}, epoch 4"
    for row in (f"best validation mAP@1000 | {best}", f"last validation mAP@1000 | {last}", "loss.beta | 0.7"):
        assert f"| {row} |" in text
    assert "train.val_n" not in text  # at its default
    assert splits["splits_sha256"] in text
    curves = run.curves.read_text()
    assert "Validation mAP@1000" in curves
    html = (run.folder / "report.html").read_text()
    assert curves in html
    assert "src=" not in html
    without_validation = [{key: value for key, value in log[0].items() if not key.startswith("val_")}]
    for drawn in (curves, curves_of(log[:1]), curves_of(without_validation)):
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
