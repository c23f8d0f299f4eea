"""The training loop: it learns, it resumes to the same state, and it never looks at the query split."""

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from unittest.mock import DEFAULT, MagicMock

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig, BadDataset, HashseekError
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.hidden_labels import hide_labels
from hashseek.training.loop import epoch
from hashseek.training.loop.epoch import Diverged
from hashseek.training.loop.fit import fit, initial_model
from hashseek.training.loop.validation import validation_part
from hashseek.training.runs.run_folder import Run, in_use, read_records, saved_state, started
from support.commands import wait_until
from support.models import EVERYTHING, run_config

config = partial(run_config, train__epochs=3)
pytestmark = pytest.mark.usefixtures("own_cache")

# Warm-up, averaged weights, two views and hidden labels beside every part of the network.
EVERYTHING_ELSE = {
    "optimizer": {"warmup_epochs": 1},
    "model": {"head_init": "itq", "dropout": 0.3},
    "train": {"ema": 0.9, "views": 2, "keep_labels": 0.7},
}
FROZEN = {"model": {"freeze_backbone": True, "head_init": "itq", "dropout": 0.3}}
OWN_LAYERS = {"model": {"backbone": "support.models:noisy_backbone"}}


@pytest.fixture
def own_pictures(pictures, tmp_path) -> Path:
    return shutil.copytree(pictures, tmp_path / "data")


def test_a_run_leaves_config_log_and_checkpoints_and_the_loss_falls(pictures, tmp_path):
    result = fit(config(pictures, train__epochs=6, tracking__keep_every=4), out=tmp_path / "run")
    log = read_records(result.run.log)
    assert [record["epoch"] for record in log] == list(range(1, 7))
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[0]["loss"] == pytest.approx(log[0]["loss_proxy"] + log[0]["loss_irrelevant"])
    scores = [record["val_mAP@1000"] for record in log]
    assert result.best_epoch == int(np.argmax(scores)) + 1
    assert load_header(result.run.best).scores == {"epoch": result.best_epoch, "val_mAP@1000": max(scores)}
    assert load_header(result.run.last).scores["epoch"] == 6
    assert load_header(result.run.epoch(4)).scores == {"epoch": 4, "val_mAP@1000": scores[3]}
    names = {path.name for path in result.run.folder.glob("*.safetensors")}
    assert names == {"best.safetensors", "last.safetensors", "epoch-4.safetensors"}
    assert json.loads(result.run.config.read_text())["model"]["n_bits"] == 12


def without_times(run: Run) -> list[dict]:
    times = ("seconds", "images_per_s", "seconds_waiting_for_data")
    return [{k: v for k, v in row.items() if k not in times} for row in read_records(run.log)]


@pytest.mark.parametrize(
    ("how", "sections"),
    [("kill -9", EVERYTHING | EVERYTHING_ELSE), ("exception", FROZEN), ("exception", OWN_LAYERS)],
    ids=["everything", "frozen", "own layers"],
)
def test_an_interrupted_run_resumes_to_the_state_of_an_uninterrupted_one(pictures, tmp_path, start, how, sections):
    settings = config(pictures, **sections)
    uninterrupted = fit(settings, out=tmp_path / "uninterrupted").run
    broken = Run(tmp_path / "broken")
    if how == "kill -9":
        (tmp_path / "config.toml").write_text(tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True)))
        slow = (
            "import time; from hashseek.training.loop import fit\n"
            "save = fit.save_state; fit.save_state = lambda *given: (save(*given), time.sleep(1))\n"
        )
        command = start("train", tmp_path / "config.toml", "--out", broken.folder, before=slow)
        wait_until(lambda: len(read_records(broken.log)) >= 1 or command.ended)
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL, command.err
    else:

        def interrupt(record):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(settings, out=broken.folder, on_epoch=interrupt)
    assert 1 <= len(read_records(broken.log)) < 3
    resumed = fit(settings, out=broken.folder, resume=True).run
    for name in ("best", "last"):
        ours, theirs = load_file(getattr(resumed, name)), load_file(getattr(uninterrupted, name))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    assert without_times(resumed) == without_times(uninterrupted)


def test_averaged_weights_are_the_ones_that_are_saved(pictures, tmp_path):
    run = fit(config(pictures, train={"ema": 0.9, "epochs": 1}), out=tmp_path / "run").run
    saved, state = load_file(run.last), torch.load(run.state, weights_only=True)
    for name in ("head.weight", "head.bias"):
        assert torch.equal(saved[name], state["ema"][name])
        assert not torch.equal(saved[name], state["network"][f"model.{name}"])


def test_losses_are_told_the_epoch(pictures, tmp_path):
    logs = []
    for start_epoch in (1, 9):
        loss = {"name": "splc", "tau": 0.01, "start_epoch": start_epoch}
        settings = config(pictures, model={"freeze_backbone": True}, loss=loss, train__epochs=2)
        logs.append(read_records(fit(settings, out=tmp_path / str(start_epoch)).run.log))
    assert [one["loss"] == other["loss"] for one, other in zip(*logs, strict=True)] == [True, False]


def test_keys_start_with_the_fitted_head(pictures, tmp_path):
    still = {"optimizer": {"lr": 1e-30}, "model": {"freeze_backbone": True, "head_init": "itq"}}
    settings = config(pictures, loss={"name": "supcon"}, memory={"size": 40, "momentum": 0.9}, **still)
    state = torch.load(fit(settings, out=tmp_path / "run").run.state, weights_only=True)
    torch.testing.assert_close(state["keys"]["encoder.model.head.weight"], state["network"]["model.head.weight"])


def test_hidden_labels_are_not_trained_on(pictures, own_pictures, tmp_path):
    """A run that hides labels has the loss of a run on a list that lacks them."""

    def loss_of(root, **hidden):
        settings = config(root, model__freeze_backbone=True, train={"epochs": 1, "seed": 1, **hidden})
        return read_records(fit(settings, out=tmp_path / f"{root.name} {hidden}").run.log)[0]["loss"]

    splits = build_splits("folder", root=str(pictures))
    left = hide_labels(splits.train.labels, share=1, single=True, seed=1)
    names = [splits.label_names[row.argmax()] for row in left]
    header, *rows = (own_pictures / "labels.csv").read_text().splitlines()
    kept = [row for row in rows if not row.endswith(",train")]
    kept += [f"images/{path.name},{name},train" for path, name in zip(splits.train.paths, names, strict=True)]
    (own_pictures / "labels.csv").write_text("\n".join([header, *kept]))
    single = loss_of(pictures, single_label=True)
    assert single == loss_of(own_pictures)
    assert len({loss_of(pictures), loss_of(pictures, keep_labels=0.5), single}) == 3
    scores = []
    for n, hidden in enumerate(({}, {"single_label": True})):  # all labels are validated with
        settings = config(pictures, model={"freeze_backbone": True}, optimizer__lr=1e-30, train={"epochs": 1, **hidden})
        scores.append(fit(settings, out=tmp_path / str(n)).best_score)
    assert scores[0] == scores[1]


def test_a_run_is_not_resumed_with_another_number_of_labels(own_pictures, tmp_path):
    settings = config(own_pictures, model__freeze_backbone=True, train__epochs=1)
    fit(settings, out=tmp_path / "run")
    labels = own_pictures / "labels.csv"
    labels.write_text(labels.read_text().replace(",train", ";new,train", 1))
    with pytest.raises(BadConfig, match="splits_sha256"):  # before its proxies are loaded, which do not fit
        fit(settings, out=tmp_path / "run", resume=True)


def test_validation_images_are_never_trained_on_and_seed_and_epoch_decide_the_rest(pictures, tmp_path, monkeypatch):
    settings = config(pictures, train={"val_fraction": 0.25, "seed": 4})
    trained_on, dropped = MagicMock(wraps=epoch.own_part), MagicMock(wraps=epoch.row_seeds)
    of_own_layers = set()
    trained_on.side_effect = lambda *_, **__: of_own_layers.add(torch.initial_seed()) or DEFAULT
    monkeypatch.setattr(epoch, "own_part", trained_on)
    monkeypatch.setattr(epoch, "row_seeds", dropped)
    fit(settings, out=tmp_path / "run")
    fit_rows, val_rows = validation_part(60, settings)
    assert len(val_rows) == 15
    assert sorted([*fit_rows, *val_rows]) == [*range(60)]
    assert not np.array_equal(val_rows, validation_part(60, config(pictures, train__val_fraction=0.25))[1])
    for number, call in enumerate(trained_on.call_args_list):  # each seed and epoch has its order
        assert np.array_equal(call.args[0], np.random.default_rng((4, number)).permutation(fit_rows))
    assert {(call.kwargs["seed"], call.kwargs["epoch"]) for call in dropped.call_args_list} == {(4, 0), (4, 1), (4, 2)}
    assert of_own_layers == {4 * 1_000_003 + number for number in range(3)}


def test_the_query_and_database_splits_are_never_opened(pictures, own_pictures, tmp_path):
    for row in (own_pictures / "labels.csv").read_text().splitlines()[1:]:
        file, _, split = row.split(",")
        if split != "train":
            (own_pictures / file).write_bytes(b"not an image")
    torn, whole = (
        fit(config(root, train__epochs=1), out=tmp_path / name)
        for name, root in (("torn", own_pictures), ("whole", pictures))
    )
    assert torn.best_score == whole.best_score


def test_a_run_refused_for_its_data_leaves_no_folder_so_that_the_corrected_command_works(own_pictures, tmp_path):
    rows = (own_pictures / "labels.csv").read_text().splitlines()[1:]
    broken = next(row.split(",")[0] for row in rows if row.endswith("train"))
    (own_pictures / broken).write_bytes(b"not an image")
    out = tmp_path / "run"
    with pytest.raises(BadDataset, match=broken):
        fit(config(own_pictures), out=out)
    with pytest.raises(BadDataset):
        fit(config(own_pictures, train__val_fraction=0.001), out=out)
    with pytest.raises(HashseekError):
        fit(config(own_pictures, model__n_bits=3), out=out)
    assert not out.exists()
    settings = config(own_pictures, data={"on_error": "skip"}, train__epochs=1)
    assert fit(settings, out=out, resume=True).run.last.is_file()
    other = next(row.split(",")[0] for row in rows if row.endswith("train") and not row.startswith(broken))
    (own_pictures / other).write_bytes(b"not an image either")
    with pytest.raises(BadConfig, match="of_train"):  # images to validate on would have been trained on
        fit(settings, out=out, resume=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_is_frozen_on_request(frozen):
    settings = config(Path(), model={"backbone": "mlp_bn:6-8", "freeze_batch_norm": frozen})
    assert initial_model(settings).train().backbone.layers[1].training != frozen


def test_frozen_features_are_computed_once_and_the_backbone_stays_as_it_was(pictures, tmp_path):
    settings = config(pictures, model__freeze_backbone=True)
    first = fit(settings, out=tmp_path / "a")
    [cached] = (tmp_path / "cache" / "features").glob("*.npy")
    whole, file = cached.read_bytes(), cached.stat().st_ino
    other = fit(config(pictures, model__freeze_backbone=True, optimizer__lr=0.1), out=tmp_path / "b")
    assert cached.stat().st_ino == file  # it was not written again
    assert len(list(cached.parent.iterdir())) == 1
    ours, theirs = load_file(first.run.last), load_file(other.run.last)
    assert torch.equal(ours["backbone.features.0.weight"], theirs["backbone.features.0.weight"])
    assert not torch.equal(ours["head.weight"], theirs["head.weight"])
    cached.write_bytes(whole[: len(whole) // 2])  # a torn file is computed again
    assert fit(settings, out=tmp_path / "c").best_score == first.best_score
    assert cached.read_bytes() == whole
    copied = {"data": {"name": "folder", "root": str(shutil.copytree(pictures, tmp_path / "copied"))}}
    for n, changes in enumerate(({"train__seed": 1}, {"model__size": 40}, copied), start=2):
        fit(config(pictures, model__freeze_backbone=True, **changes), out=tmp_path / str(n))
        assert len(list(cached.parent.iterdir())) == n, "other weights, pixels and files have other features"


def test_a_run_folder_is_never_overwritten_and_its_damage_is_named(pictures, tmp_path):
    settings = config(pictures, train__epochs=1)
    run = fit(settings, out=tmp_path / "run").run
    before = run.log.read_bytes()

    def refused(message: str, settings=settings, resume=True):
        with pytest.raises(BadConfig, match=message):
            fit(settings, out=run.folder, resume=resume)

    refused("--resume", resume=False)
    with in_use(run.folder):
        refused(str(run.folder))
    refused(
        "model.n_bits was 12 and is 24; train.seed was 0",
        config(pictures, train__epochs=1, model__n_bits=24, train__seed=1),
    )
    for file, damages in ((run.state, (b"torn",)), (run.config, (b"{", b"3"))):
        whole = file.read_bytes()
        for damage in damages:
            file.write_bytes(damage)
            refused(file.name)
        file.write_bytes(whole)
    followed = config(pictures, train__epochs=1, tracking__tensorboard=False)  # changes no result
    assert fit(followed, out=run.folder, resume=True).best_epoch == 1
    assert run.log.read_bytes() == before


def test_of_two_runs_that_start_in_one_folder_the_second_is_refused(pictures, tmp_path):
    settings, run = config(pictures, train__epochs=1), Run(tmp_path / "run")
    assert saved_state(run, settings, resume=False) is None
    fit(settings, out=run.folder)  # while the other one prepares its data
    before = {file.name: file.read_bytes() for file in run.folder.iterdir() if file.is_file()}
    with pytest.raises(BadConfig, match="--resume"), started(run, settings, resume=False):
        pass
    assert {file.name: file.read_bytes() for file in run.folder.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("sections", "error", "named"),
    [
        ({"loss": {"n_bits": 24}}, BadConfig, "model.n_bits"),
        ({"optimizer": {"name": "sgd", "lr": 1e30, "schedule": "constant"}}, Diverged, r"epoch 1, batch \d+"),
        ({"train": {"batch_size": 1}}, BadConfig, "batch_size"),  # pair losses have no pair, batch norm no variance
        ({"train": {"noise": 0.5}}, BadConfig, "train.noise is 0.5"),  # for vectors only
    ],
)
def test_what_cannot_be_trained_is_refused(pictures, tmp_path, sections, error, named):
    with pytest.raises(error, match=named):
        fit(config(pictures, **sections), out=tmp_path / "run")


def test_an_error_in_any_process_is_raised_as_in_one_process(pictures, tmp_path):
    with pytest.raises(BadConfig, match="4096 devices"):
        fit(config(pictures, train={"devices": 4096, "batch_size": 4096}), out=tmp_path / "many")
    with pytest.raises(BadDataset, match="train.devices = 2"):
        validation_part(10, config(pictures, train={"devices": 2, "val_fraction": 0.9}))
    data = {"name": "support.models:folder_of_this_process"}
    with pytest.raises(BadConfig, match="process 1 .*splits_sha256"):
        fit(config(pictures, data=data, train={"devices": 2}), out=tmp_path / "hosts")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):  # only the first process writes, while the other waits
        fit(config(pictures, train={"devices": 2}), out=tmp_path / "file" / "run")


def test_patience_stops_a_run_that_does_not_get_better(pictures, tmp_path):
    still = config(pictures, optimizer={"lr": 1e-30, "proxy_lr": 1e-30}, train={"epochs": 9, "patience": 2})
    for resume in (False, True):
        result = fit(still, out=tmp_path / "run", resume=resume)
        assert len(read_records(result.run.log)) == result.best_epoch + 2 == 3


def test_vectors_train_and_their_mistakes_are_named(tmp_path):
    rng = np.random.default_rng(0)
    labels = (rng.random((80, 4)) < 0.4).astype(np.uint8)
    vectors = (labels @ rng.normal(size=(4, 9)) + 0.1 * rng.normal(size=(80, 9))).astype(np.float32)
    split = np.where(np.arange(80) < 60, "train", "test")

    def save() -> None:
        np.savez(tmp_path / "scene.npz", X=vectors, Y=labels, split=split, label_names=np.array(list("abcd")))

    def settings(backbone: str, **sections: dict):
        given = {
            "optimizer": {"lr": 1e-2, "schedule": "restarts", "restart_epochs": 2},
            "train": {"epochs": 6, "batch_size": 20, "views": 2, "noise": 0.1},
        } | sections
        model = {"backbone": backbone, "size": None, "crop_fraction": None}
        return run_config(tmp_path, data={"name": "scene"}, model=model, **given)

    save()
    run = fit(settings("mlp:9-16"), out=tmp_path / "run").run
    log = read_records(run.log)
    assert log[-1]["loss"] < log[0]["loss"]
    scores = [row["val_mAP@1000"] for row in log]
    rates = [100 * row["lr"] for row in log]  # at the end of each epoch: a period of two epochs, then one of four
    assert rates == pytest.approx([0.5, 1, 0.853553, 0.5, 0.146447, 1], rel=1e-3)
    fit_rows, _ = validation_part(60, settings("mlp:9-16"))
    saved = load_file(run.last)
    np.testing.assert_allclose(saved["backbone.mean"], vectors[fit_rows].mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(saved["backbone.std"], vectors[fit_rows].std(axis=0, ddof=1), rtol=1e-4)
    slow = {"epochs": 6, "batch_size": 20, "ema": 1 - 1e-12}  # averaged weights stay where they were at the start
    averaged = read_records(fit(settings("mlp:9-16", train=slow), out=tmp_path / "averaged").run.log)
    assert len({row["val_mAP@1000"] for row in averaged}) == 1 < len(set(scores)), "they are validated"
    stop = next(n for n in range(2, 7) if scores[n - 1] < max(scores[: n - 1]))  # where the last is not the best
    shorter = {"epochs": stop, "batch_size": 20, "views": 2, "noise": 0.1}
    result = fit(settings("mlp:9-16", train=shorter), out=tmp_path / "shorter")
    assert result.best_score == max(scores[:stop]) == scores[result.best_epoch - 1]
    assert load_header(result.run.best).scores["epoch"] == result.best_epoch < stop
    still = {"optimizer": {"lr": 1e-30}, "loss": {"name": "bce"}}  # a mean over images
    means = []
    for n_rows in (20, 60):  # the last batch is smaller, or the only one
        sections = {**still, "train": {"epochs": 1, "batch_size": n_rows}}
        run = fit(settings("mlp:9-16", **sections), out=tmp_path / str(n_rows)).run
        means.append(read_records(run.log)[0]["loss"])
    assert means[0] == pytest.approx(means[1], rel=1e-5)
    with pytest.raises(BadConfig, match="vectors of 8"):
        fit(settings("mlp:8-16"), out=tmp_path / "b")
    with pytest.raises(BadConfig, match="mlp:9-512-512"):
        fit(settings("resnet18"), out=tmp_path / "c")
    vectors[3, 2] = np.nan
    save()
    with pytest.raises(BadDataset, match="NaN"):
        fit(settings("mlp:9-16"), out=tmp_path / "d")
    vectors[3, 2] = 1e30  # whose square is no float32
    save()
    with pytest.raises(BadDataset, match="row 3"):
        fit(settings("mlp:9-16"), out=tmp_path / "d")
