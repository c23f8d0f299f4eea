"""Sweeps: ranges are checked, trials are the same however often a sweep is broken off, queries are not looked at."""

import csv
import json
import re
import signal
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import optuna
import pytest
from support.commands import wait_until

from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.runs import sweep as sweep_module
from hashseek.training.config import load_config, parse_config, read_config
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.loop.fit import fit
from hashseek.training.runs.run_folder import read_log
from hashseek.training.runs.sweep import sweep
from hashseek.training.runs.sweep_space import parse_space
from hashseek.training.runs.toml_text import as_toml

SPACE = {
    "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "loss.beta": [0.5, 1.0],
    "train.batch_size": {"low": 8, "high": 24, "step": 8},
}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("swept")
    render_shapes(root, n_query=6, n_train=60, n_database=8, size=32, seed=5)
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", str(tmp_path_factory.getbasetemp() / "sweep cache"))


def content(pictures: Path, **sections) -> dict:
    made = {
        "data": {"name": "folder", "root": str(pictures)},
        "model": {"backbone": "squeezenet1_1", "n_bits": 12, "size": 32, "crop_fraction": 1.0, "freeze_backbone": True},
        "loss": {"name": "hyp2"},
        "optimizer": {"name": "adamw", "proxy_lr": 1e-2},
        "train": {"epochs": 4, "batch_size": 16, "device": "cpu", "precision": "fp32"},
        "tracking": {"tensorboard": False},
    }
    for name, section in sections.items():
        made[name] = made.get(name, {}) | section
    return made


def table_of(folder: Path) -> list[dict[str, str]]:
    """What every trial tried and came to, without its time."""
    with (folder / "trials.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def test_a_sweep_leaves_a_table_a_plot_and_a_configuration_that_trains_to_its_score(pictures, tmp_path):
    given = content(pictures)
    best = sweep(given, SPACE, n_trials=6, folder=tmp_path / "sweep")
    rows = table_of(tmp_path / "sweep")
    assert [row["trial"] for row in rows] == list("012345")
    scored = [row for row in rows if row["outcome"] == "scored"]
    assert best.score == max(float(row["validation_mAP@1000"]) for row in scored)
    assert rows[best.trial]["outcome"] == "scored"
    for row in rows:
        assert 1e-4 <= float(row["optimizer.lr"]) <= 1e-1
        assert row["loss.beta"] in ("0.5", "1.0")
        assert row["train.batch_size"] in ("8", "16", "24")
    assert len({row["optimizer.lr"] for row in rows}) == 6
    assert given == content(pictures)  # left as it was

    config = load_config(tmp_path / "sweep" / "best.toml")
    assert config.optimizer.lr == best.overrides["optimizer.lr"] == float(rows[best.trial]["optimizer.lr"])
    again = fit(config, out=tmp_path / "again")
    assert again.best_score == best.score
    assert load_header(best.run.best).scores["val_mAP@1000"] == best.score
    assert load_config(tmp_path / "sweep" / "best.toml", best.settings) == config
    assert re.search(
        rf"^# Best of 6 trials .* {best.score:.4f} in trial {best.trial}\.$",
        (tmp_path / "sweep" / "best.toml").read_text(),
        re.M,
    )
    panels = [e for e in ElementTree.parse(tmp_path / "sweep" / "sweep.svg").getroot() if e.tag.endswith("}g")]
    assert len(panels) == 1 + len(SPACE)


def test_a_sweep_that_is_killed_again_and_again_makes_the_trials_of_an_unbroken_one(pictures, tmp_path, start):
    file = tmp_path / "a.toml"
    given = content(pictures, sweep={"trials": 11, "seed": 3})
    file.write_text(as_toml(given) + "\n[sweep.space]\n" + as_toml({"s": SPACE}).partition("\n")[2])
    assert read_config(file)["sweep"]["space"] == SPACE
    unbroken = sweep(given, SPACE, n_trials=11, folder=tmp_path / "unbroken", seed=3)

    folder = tmp_path / "broken"
    for trial, epochs in ((1, 1), (4, 2), (9, 1)):  # in the random part, after it, and where the sampler has learnt
        command = start("sweep", file, "--out", folder)
        log = folder / "trials" / f"{trial:04}" / "log.jsonl"
        wait_until(lambda log=log, epochs=epochs: log.is_file() and len(log.read_text().splitlines()) >= epochs)
        command.send(signal.SIGKILL)
        command.wait()
        assert not (folder / "best.toml").exists()
    command = start("sweep", file, "--out", folder)
    assert command.wait() == 0, command.err
    assert command.out.strip() == str(folder / "best.toml")
    assert table_of(folder) == table_of(tmp_path / "unbroken")
    assert (folder / "best.toml").read_text().partition("\n")[0] == (
        tmp_path / "unbroken" / "best.toml"
    ).read_text().partition("\n")[0]
    assert f"best: trial {unbroken.trial} with validation mAP {unbroken.score:.4f}: optimizer.lr=" in command.err
    assert "11 trials, best first" in command.err


def test_more_trials_continue_a_sweep_and_fewer_change_nothing(pictures, tmp_path):
    sweep(content(pictures), SPACE, n_trials=2, folder=tmp_path)
    two = table_of(tmp_path)
    sweep(content(pictures), SPACE, n_trials=4, folder=tmp_path)
    assert len(table_of(tmp_path)) == 4
    assert table_of(tmp_path)[:2] == two
    sweep(content(pictures), SPACE, n_trials=1, folder=tmp_path)
    assert len(table_of(tmp_path)) == 4


def test_a_trial_that_falls_behind_ends_early_and_keeps_its_log(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "UNPRUNED_TRIALS", 2)
    rng = np.random.default_rng(0)
    labels = (rng.random((150, 5)) < 0.3).astype(np.uint8)
    vectors = (labels @ rng.normal(size=(5, 9)) + 0.1 * rng.normal(size=(150, 9))).astype(np.float32)
    split = np.where(np.arange(150) < 130, "train", "test")
    np.savez(tmp_path / "scene.npz", X=vectors, Y=labels, split=split, label_names=np.array(list("abcde")))
    given = content(tmp_path, train={"epochs": 8, "val_fraction": 0.3, "val_n": 20})
    given["data"] = {"name": "scene", "root": str(tmp_path)}
    given["model"] = {"backbone": "mlp:9-16", "n_bits": 16}
    # A rate of 1e-30 learns nothing, so that such a trial is behind the median of those that do.
    space = {"optimizer.lr": [1e-30, 1e-2, 2e-2], "train.noise": {"low": 0.0, "high": 0.1}}
    sweep(given, space, n_trials=6, folder=tmp_path / "b", seed=2)
    rows = table_of(tmp_path / "b")
    pruned = [row for row in rows if row["outcome"] == "pruned"]
    assert pruned
    for row in pruned:
        assert row["optimizer.lr"] == "1e-30"
        trial = tmp_path / "b" / "trials" / f"{int(row['trial']):04}"
        assert 3 <= int(row["epochs"]) < 8  # not before 30 % of the epochs
        assert len((trial / "log.jsonl").read_text().splitlines()) == int(row["epochs"])
        assert (trial / "report.md").is_file()
    sweep(given, space, n_trials=6, folder=tmp_path / "c", seed=2, prune=False)
    assert {row["outcome"] for row in table_of(tmp_path / "c")} == {"scored"}


def test_only_the_best_trial_keeps_its_weights(pictures, tmp_path):
    best = sweep(content(pictures), SPACE, n_trials=4, folder=tmp_path)
    assert [path.parent.name for path in tmp_path.glob("trials/*/*.safetensors")] == [f"{best.trial:04}"]
    assert not list(tmp_path.glob("trials/*/state.pt"))
    assert len(list(tmp_path.glob("trials/*/log.jsonl"))) == 4


def test_trials_are_scored_on_the_validation_part_and_the_query_split_is_not_opened(pictures, tmp_path):
    rows = (pictures / "labels.csv").read_text().splitlines()
    copy = tmp_path / "data"
    for row in rows[1:]:
        name, _, split = row.split(",")
        (copy / name).parent.mkdir(exist_ok=True, parents=True)
        (copy / name).write_bytes((pictures / name).read_bytes() if split == "train" else b"not an image")
    (copy / "labels.csv").write_text("\n".join(rows))
    best = sweep(content(copy), SPACE, n_trials=2, folder=tmp_path / "sweep")
    assert best.score == max(record["val_mAP@1000"] for record in read_log(best.run))


def test_a_trial_whose_loss_is_no_number_counts_as_the_worst_and_does_not_stop_the_sweep(pictures, tmp_path):
    given = content(pictures, optimizer={"name": "sgd", "schedule": "constant"})
    space = {"optimizer.lr": [1e30, 0.05], "train.batch_size": {"low": 8, "high": 16}}
    best = sweep(given, space, n_trials=5, folder=tmp_path / "a")
    outcomes = {row["optimizer.lr"]: row["outcome"] for row in table_of(tmp_path / "a")}
    assert outcomes == {"1e+30": "failed", "0.05": "scored"}
    assert best.overrides["optimizer.lr"] == 0.05
    assert "lower the rate" in next(row["reason"] for row in table_of(tmp_path / "a") if row["outcome"] == "failed")
    with pytest.raises(
        BadConfig, match=r"none of the 2 trials came to a score: change the ranges; of the first, epoch 1"
    ):
        sweep(given, {"optimizer.lr": [1e30, 2e30]}, n_trials=2, folder=tmp_path / "b")


def test_data_that_are_gone_stop_the_sweep_in_its_trial_and_it_goes_on_when_they_are_back(pictures, tmp_path):
    moved = tmp_path / "moved"
    given = content(moved)
    with pytest.raises(BadDataset, match=r"trial 0 of the sweep \(optimizer\.lr = .*\): there is no folder") as caught:
        sweep(given, SPACE, n_trials=2, folder=tmp_path / "sweep")
    values = re.search(r"optimizer\.lr = ([^,]+),", str(caught.value)).group(1)
    moved.symlink_to(pictures)
    sweep(given, SPACE, n_trials=2, folder=tmp_path / "sweep")
    rows = table_of(tmp_path / "sweep")
    assert len(rows) == 2
    assert f"{float(rows[0]['optimizer.lr']):.4g}" == values


def test_other_settings_do_not_go_into_the_same_folder_nor_two_processes_at_once(pictures, tmp_path):
    sweep(content(pictures), SPACE, n_trials=1, folder=tmp_path / "a")
    with pytest.raises(
        BadConfig, match=r"begun with other settings \(config\.train\.epochs was 4 and is 5; seed was 0 and is 1\)"
    ):
        sweep(content(pictures, train={"epochs": 5}), SPACE, n_trials=1, folder=tmp_path / "a", seed=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(BadConfig, match="holds something else than a sweep"):
        sweep(content(pictures), SPACE, n_trials=1, folder=tmp_path / "b")
    with (
        sweep_module._locked(tmp_path / "a"),
        pytest.raises(BadConfig, match="another process is working on the sweep"),
    ):
        sweep(content(pictures), SPACE, n_trials=1, folder=tmp_path / "a")


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ({}, r"no range to search: give settings under \[sweep\.space\]"),
        (
            {"optimizer.lrr": [1, 2]},
            r"sweep of optimizer\.lrr: there is no setting 'optimizer\.lrr': did you mean 'lr'\?",
        ),
        ({"optimiser.lr": [1, 2]}, "'optimiser.lr' is not written section.key with a section of model, loss"),
        ({"lr": [1, 2]}, "'lr' is not written section.key"),
        ({"loss.betta": [1, 2]}, "the loss 'hyp2' has no hyperparameter 'betta': did you mean 'beta'"),
        ({"loss.beta": [1, 2], "loss.name": ["hyp2", "dsh"]}, "the loss 'dsh' has no hyperparameter 'beta'"),
        ({"loss.beta": [1, 2], "loss.name": ["hyp2", "hyp3"]}, "no loss 'hyp3'"),
        (
            {"optimizer.lr": {"low": -1.0, "high": 1.0}},
            r"the setting 'optimizer\.lr' is -1\.0: input should be greater than 0",
        ),
        ({"model.n_bits": {"low": 8, "high": 2000}}, "'model.n_bits' is 2000"),
        ({"optimizer.lr": {"low": 1, "hihg": 2}}, "the range of 'optimizer.lr' has no 'hihg': did you mean 'high'"),
        ({"optimizer.lr": {"lo": 1, "hi": 2}}, "the range of 'optimizer.lr' has no 'lo'"),
        ({"optimizer.lr": {"low": 1}}, "the range of 'optimizer.lr' has no 'high'"),
        ({"optimizer.lr": {"low": 2, "high": 1}}, "goes from 2 to 1: high must be greater than low"),
        ({"optimizer.lr": {"low": 0, "high": 1, "log": True}}, "on a logarithmic scale it must start above 0"),
        ({"optimizer.lr": {"low": 1, "high": 4, "step": 2}}, "has the step 2, but it from 1 to 4 is no multiple of it"),
        (
            {"optimizer.lr": {"low": 1, "high": 4, "step": 1, "log": True}},
            "has the step 1, but it has a logarithmic scale",
        ),
        ({"optimizer.lr": {"low": 1, "high": 4, "log": 3}}, "has log = 3: it is true or false"),
        ({"optimizer.lr": {"low": "a", "high": 4}}, "has low = 'a', which is no number"),
        ({"optimizer.lr": {"low": 1, "high": float("inf")}}, "has high = inf, which is no number"),
        ({"optimizer.lr": 0.1}, "the range of 'optimizer.lr' is 0.1: write {low"),
        ({"optimizer.lr": [0.1]}, r"the choices of 'optimizer\.lr' are \[0\.1\]: give at least two"),
        ({"loss.beta": [[1], [2]]}, "give at least two numbers, words, or true and false"),
        ({"train.val_n": [10, 20]}, "'train.val_n' decides how trials are scored"),
        ({"data.root": ["a", "b"]}, "'data.root' is not written section.key with a section of"),
    ],
)
def test_a_mistake_in_the_ranges_is_one_sentence_before_anything_is_run(pictures, tmp_path, space, sentence):
    with pytest.raises(BadConfig, match=sentence) as caught:
        sweep(content(pictures), space, n_trials=1, folder=tmp_path / "sweep")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sweep").exists()


def test_ranges_are_whole_numbers_only_where_all_their_numbers_are():
    space = parse_space(
        {
            "a.b": {"low": 1, "high": 9, "step": 2},
            "a.c": {"low": 1, "high": 9.0},
            "a.d": {"low": 0, "high": 1, "step": 0.25},
            "e": {"f": {"low": 1, "high": 2}, "g": [True, False]},  # TOML's reading of e.f without quotes
        }
    )
    assert space == {
        "a.b": optuna.distributions.IntDistribution(1, 9, step=2),
        "a.c": optuna.distributions.FloatDistribution(1, 9),
        "a.d": optuna.distributions.FloatDistribution(0, 1, step=0.25),
        "e.f": optuna.distributions.IntDistribution(1, 2),
        "e.g": optuna.distributions.CategoricalDistribution([True, False]),
    }


def test_train_reads_the_plain_values_of_a_file_with_a_sweep_and_names_its_mistakes(pictures, tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(as_toml(content(pictures)) + '\n[sweep.space]\n"optimizer.lr" = [1e-3, 1e-2]\n')
    config = load_config(file)
    assert config.optimizer.lr == 0.01
    assert "sweep" not in config.model_dump()
    assert config.sweep.space == {"optimizer.lr": [1e-3, 1e-2]}
    with pytest.raises(BadConfig, match=r"no setting 'sweep\.trails': did you mean 'trials'\?"):
        load_config(file, ["sweep.trails=3"])
    with pytest.raises(BadConfig, match=r"'sweep\.trials' is 0"):
        load_config(file, ["sweep.trials=0"])


def test_toml_is_what_it_was_written_from():
    made = {
        "a": {"n": 1, "x": 1e-30, "big": 1e30, "t": True, "w": 'quo"te \\ ü \n\x7f', "none": None},
        "b": {"list": [1, 2.5, "x"], "table": {"kind": "l2", "a key": [0.1]}, "dotted.key": -0.5, "inf": float("inf")},
    }
    made["a"].pop("none")
    assert tomllib.loads(as_toml({**made, "c": {"left": None}}, header="one\n\ntwo")) == {**made, "c": {}}
    with pytest.raises(TypeError, match="TOML has no set"):
        as_toml({"a": {"b": {1}}})


def test_a_sweep_in_two_processes_a_trial_is_scored_without_pruning(pictures, tmp_path):
    given = content(pictures, train={"devices": 2, "epochs": 2})
    best = sweep(given, {"optimizer.lr": [1e-3, 1e-2]}, n_trials=1, folder=tmp_path)
    assert best.score == max(record["val_mAP@1000"] for record in read_log(best.run))
    assert parse_config(given, source="x").train.devices == 2
    assert json.loads((tmp_path / "sweep.json").read_text())["config"]["train"]["devices"] == 2
