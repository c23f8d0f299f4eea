"""The training loop: it learns, it resumes to the same state, it never looks at the query split."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig, BadDataset, HashseekError
from hashseek.training.config import OptimizerSection
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.loop.epoch import Diverged
from hashseek.training.loop.fit import fit
from hashseek.training.loop.optimizers import rate_factor
from hashseek.training.runs.run_folder import Run, read_log
from support.models import run_config

config = partial(run_config, train__epochs=3)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    render_shapes(root, n_query=10, n_train=60, n_database=20, size=48, seed=1)
    return root


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def test_a_run_leaves_config_log_and_two_checkpoints_and_the_loss_falls(pictures, tmp_path):
    result = fit(config(pictures, train__epochs=6), out=tmp_path / "run")
    log = read_log(result.run)
    assert [record["epoch"] for record in log] == list(range(6))
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[0]["loss"] == pytest.approx(log[0]["loss_proxy"] + log[0]["loss_irrelevant"])
    scores = [record["val_mAP@1000"] for record in log]
    assert result.best_epoch == int(np.argmax(scores))
    assert load_header(result.run.best).scores == {"epoch": result.best_epoch, "val_mAP@1000": max(scores)}
    assert load_header(result.run.last).scores["epoch"] == 5
    assert json.loads(result.run.config.read_text())["model"]["n_bits"] == 12


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_killed_with_kill_9_resumes_to_the_state_of_an_unbroken_one(pictures, tmp_path, frozen):
    settings = config(pictures, train__epochs=5, model__freeze_backbone=frozen)
    unbroken = fit(settings, out=tmp_path / "unbroken").run
    (tmp_path / "config.json").write_text(settings.model_dump_json())
    program = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path; from hashseek.training.config import parse_config\n"
        "from hashseek.training.loop.fit import fit\n"
        "fit(parse_config(json.loads(Path(sys.argv[1]).read_text()), source='x'), out=Path(sys.argv[2]), resume=True)\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "config.json"), str(tmp_path / "broken")]
    broken = Run(tmp_path / "broken")
    for epochs in (1, 3):  # killed in the second epoch or later, resumed, killed again
        process = subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while len(read_log(broken)) < epochs and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not broken.last.exists() or len(read_log(broken)) == 5
    resumed = fit(settings, out=tmp_path / "broken", resume=True).run
    for name in ("best", "last"):
        ours, theirs = weights(getattr(resumed, name)), weights(getattr(unbroken, name))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    timing = ("seconds", "images_per_s")
    strip = [{k: v for k, v in record.items() if k not in timing} for record in read_log(resumed)]
    assert strip == [{k: v for k, v in record.items() if k not in timing} for record in read_log(unbroken)]


def test_the_query_and_database_splits_are_never_opened(pictures, tmp_path):
    rows = (pictures / "labels.csv").read_text().splitlines()
    copy = tmp_path / "data"
    copy.mkdir()
    for row in rows[1:]:
        file, _, split = row.split(",")
        target = copy / file
        target.parent.mkdir(exist_ok=True)
        # Anything that reads one of these as an image fails.
        target.write_bytes((pictures / file).read_bytes() if split == "train" else b"not an image")
    (copy / "labels.csv").write_text("\n".join(rows))
    first = fit(config(copy), out=tmp_path / "a")
    second = fit(config(pictures), out=tmp_path / "b")
    assert first.best_score == second.best_score


def test_frozen_features_are_computed_once_and_the_backbone_stays_as_it_was(pictures, tmp_path):
    settings = config(pictures, model__freeze_backbone=True)
    fit(settings, out=tmp_path / "a")
    [cached] = (tmp_path / "cache" / "features").glob("*.npy")
    stamp = cached.stat().st_mtime_ns
    fit(config(pictures, model__freeze_backbone=True, optimizer__lr=0.1), out=tmp_path / "b")
    assert cached.stat().st_mtime_ns == stamp
    assert len(list(cached.parent.iterdir())) == 1
    first, second = weights(tmp_path / "a" / "last.safetensors"), weights(tmp_path / "b" / "last.safetensors")
    assert torch.equal(first["backbone.features.0.weight"], second["backbone.features.0.weight"])
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_a_torn_file_of_features_is_computed_again(pictures, tmp_path):
    settings = config(pictures, model__freeze_backbone=True)
    first = fit(settings, out=tmp_path / "a")
    [cached] = (tmp_path / "cache" / "features").glob("*.npy")
    whole = cached.read_bytes()
    for torn in (b"", whole[:40], whole[: len(whole) // 2]):
        cached.write_bytes(torn)
        again = fit(settings, out=tmp_path / f"b{len(torn)}")
        assert cached.read_bytes() == whole
        assert again.best_score == first.best_score


def test_a_damaged_configuration_of_a_run_is_named(pictures, tmp_path):
    fit(config(pictures, train__epochs=1), out=tmp_path / "run")
    for damaged in ("{", "3", ""):
        (tmp_path / "run" / "config.json").write_text(damaged)
        with pytest.raises(BadConfig, match=r"config\.json is damaged .*delete the folder and train again"):
            fit(config(pictures, train__epochs=1), out=tmp_path / "run", resume=True)


def test_an_occupied_run_folder_is_never_overwritten(pictures, tmp_path):
    fit(config(pictures), out=tmp_path / "run")
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    with pytest.raises(BadConfig, match="already holds a run: go on with --resume"):
        fit(config(pictures), out=tmp_path / "run")
    with pytest.raises(BadConfig, match=r"another configuration \(model\.n_bits was 12 and is 24; train\.seed was 0"):
        fit(config(pictures, model__n_bits=24, train__seed=1), out=tmp_path / "run", resume=True)
    (tmp_path / "run" / "state.pt").write_bytes(b"torn")
    with pytest.raises(BadConfig, match=r"state\.pt is damaged"):
        fit(config(pictures), out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


def test_a_run_of_an_older_hashseek_goes_on_though_it_knew_fewer_settings(pictures, tmp_path):
    run = fit(config(pictures, train__epochs=1), out=tmp_path / "run").run
    content = json.loads(run.config.read_text())
    del content["train"]["val_database"], content["model"]["interpolation"]
    run.config.write_text(json.dumps(content))
    assert fit(config(pictures, train__epochs=1), out=run.folder, resume=True).best_epoch == 0
    with pytest.raises(BadConfig, match="train.val_database was 'training' and is 'held-out'"):
        fit(config(pictures, train__epochs=1, train__val_database="held-out"), out=run.folder, resume=True)


def test_a_loss_that_is_no_number_stops_the_run_and_names_term_and_batch(pictures, tmp_path):
    wild = config(pictures, optimizer__name="sgd", optimizer__lr=1e30, optimizer__schedule="constant")
    with pytest.raises(HashseekError, match=r"epoch 1, batch \d+: ") as caught:
        fit(wild, out=tmp_path / "run")
    assert "lower the rate" in str(caught.value)
    assert isinstance(caught.value, (Diverged, HashseekError))


def test_bad_images_and_too_small_splits_are_refused(pictures, tmp_path):
    with pytest.raises(BadDataset, match="nothing to validate on"):
        fit(config(pictures, train__val_fraction=0.001), out=tmp_path / "a")
    with pytest.raises(HashseekError, match="20 bits|bits cannot tell"):
        fit(config(pictures, model__n_bits=3), out=tmp_path / "b")


def test_rates_follow_their_schedules():
    cosine = OptimizerSection(schedule="cosine", warmup_epochs=2)
    assert rate_factor(cosine, 1.0, 10) == pytest.approx(0.5, abs=1e-3)
    assert rate_factor(cosine, 2.0, 10) == pytest.approx(1.0)
    assert rate_factor(cosine, 6.0, 10) == pytest.approx(0.5)
    assert rate_factor(cosine, 10.0, 10) == pytest.approx(0.0)
    step = OptimizerSection(schedule="step", step_epochs=3, step_factor=0.1)
    assert [round(rate_factor(step, e, 9), 6) for e in (0, 2.9, 3, 8)] == [1, 1, 0.1, 0.01]
    assert rate_factor(OptimizerSection(schedule="constant"), 7, 10) == 1
