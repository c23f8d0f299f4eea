"""Sweeps: ranges are checked, an interrupted sweep runs the same trials, and the query split is never read."""

import csv
import json
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import optuna
import pytest
import tomli_w

from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadCodes, BadConfig, BadDataset
from hashseek.training import sweep as sweep_module
from hashseek.training.config import load_config
from hashseek.training.loop import fit as fit_module
from hashseek.training.loop.epoch import OutOfMemory
from hashseek.training.loop.fit import fit
from hashseek.training.runs.run_folder import in_use
from hashseek.training.sweep import Scored, open_study, run_trials
from hashseek.training.sweep_space import check_space, parse_space
from support.commands import wait_until

SPACE = {  # the list first, as TOML writes it: what is drawn depends on the order
    "loss.beta": [0.5, 1.0],
    "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "train.batch_size": {"low": 8, "high": 24, "step": 8},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small set of vectors."""
    root = tmp_path_factory.mktemp("swept")
    rng = np.random.default_rng(0)
    labels = (rng.random((150, 5)) < 0.3).astype(np.uint8)
    vectors = (labels @ rng.normal(size=(5, 9)) + 0.1 * rng.normal(size=(150, 9))).astype(np.float32)
    split = np.where(np.arange(150) < 130, "train", "test")
    np.savez(root / "scene.npz", X=vectors, Y=labels, split=split, label_names=np.array(list("abcde")))
    return root


def content(data: Path, **sections) -> dict:
    made = {
        "data": {"name": "scene", "root": str(data)},
        "model": {"backbone": "mlp:9-16", "n_bits": 16},
        "loss": {"name": "hyp2"},
        "optimizer": {"name": "adamw", "proxy_lr": 1e-2},
        "train": {"epochs": 3, "batch_size": 16, "device": "cpu", "precision": "fp32"},
        "tracking": {"tensorboard": False},
    }
    for name, section in sections.items():
        made[name] = made.get(name, {}) | section
    return made


def sweep(content: dict, space: dict, *, folder: Path, **settings) -> list[Scored]:
    return sweep_module.sweep({**content, "sweep": {"space": space, **settings}}, folder=folder)


def table_of(folder: Path) -> list[dict[str, str]]:
    """What every trial tried and came to, without its time."""
    with (folder / "trials.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def test_a_sweep_leaves_a_table_and_a_configuration_that_trains_to_its_score(data, tmp_path):
    given = content(data, tracking={"keep_every": 1})
    best, *others = sweep(given, SPACE, trials=3, folder=tmp_path / "sweep")
    rows = table_of(tmp_path / "sweep")
    assert [row["trial"] for row in rows] == list("012")
    scored = [row for row in rows if row["outcome"] == "scored"]
    scores = [trial.score for trial in (best, *others)]
    assert scores == sorted((float(row["validation_mAP@1000"]) for row in scored), reverse=True)
    assert rows[best.trial]["outcome"] == "scored"
    for row in rows:
        assert 1e-4 <= float(row["optimizer.lr"]) <= 1e-1
        assert row["loss.beta"] in ("0.5", "1.0")
        assert row["train.batch_size"] in ("8", "16", "24")
    assert len({row["optimizer.lr"] for row in rows}) == 3
    assert given == content(data, tracking={"keep_every": 1})  # left as it was

    config = load_config(tmp_path / "sweep" / "best.toml")
    assert config.optimizer.lr == best.overrides["optimizer.lr"] == float(rows[best.trial]["optimizer.lr"])
    again = fit(config, out=tmp_path / "again")
    assert again.best_score == best.score
    kept = tmp_path / "sweep" / "trials" / f"{best.trial:04}" / "best.safetensors"
    assert load_header(kept).scores["val_mAP@1000"] == best.score
    assert load_config(tmp_path / "sweep" / "best.toml", best.settings) == config
    header = (tmp_path / "sweep" / "best.toml").read_text()
    assert f"{best.score:.4f} in trial {best.trial}." in header
    assert list(tmp_path.glob("sweep/trials/*/*.safetensors")) == [kept]
    assert not list(tmp_path.glob("sweep/trials/*/state.pt"))
    sweep(given, SPACE, trials=4, folder=tmp_path / "sweep")  # more trials continue it, and fewer change nothing
    assert table_of(tmp_path / "sweep")[:3] == rows
    left = kept.with_name("last.safetensors")
    left.touch()  # by a process that was killed just after its last trial
    sweep(given, SPACE, trials=1, folder=tmp_path / "sweep")
    assert len(table_of(tmp_path / "sweep")) == 4
    assert not left.exists()


def test_a_sweep_that_is_killed_runs_the_trials_of_an_uninterrupted_one(data, tmp_path, start, monkeypatch):
    file = tmp_path / "a.toml"
    given = content(data, sweep={"seed": 3})
    longer = {"sweep": given["sweep"] | {"space": SPACE}, "train": given["train"] | {"epochs": 9}}
    file.write_text(tomli_w.dumps(given | longer))
    monkeypatch.setattr(sweep_module, "RANDOM_TRIALS", 2)
    uninterrupted, *_ = sweep(given, SPACE, trials=4, folder=tmp_path / "uninterrupted", seed=3)

    folder = tmp_path / "runs" / "a-sweep"
    patch = f"import os; os.chdir({str(tmp_path)!r})\nfrom hashseek.training import sweep; sweep.RANDOM_TRIALS = 2\n"
    slow = (
        "import time; from hashseek.training.loop import fit\n"
        "save = fit.save_state; fit.save_state = lambda *given: (save(*given), time.sleep(0.3))\n"
    )
    command = start("sweep", file, "train.epochs=3", "--trials", 4, before=patch + slow)
    state = folder / "trials" / "0003" / "state.pt"  # where the sampler has learnt, and before the epoch is reported
    wait_until(lambda: state.is_file() or command.ended)
    command.send(signal.SIGKILL)
    command.wait()
    assert not (folder / "best.toml").exists()
    assert len([*folder.glob("trials/000[012]/*.safetensors")]) == 1  # a hundred would fill a disk
    command = start("sweep", file, "train.epochs=3", "--trials", 4, before=patch)
    assert command.wait() == 0, command.err
    assert command.out.strip() == "runs/a-sweep/best.toml"
    assert table_of(folder) == table_of(tmp_path / "uninterrupted")
    headers = [(place / "best.toml").read_text().partition("\n")[0] for place in (folder, tmp_path / "uninterrupted")]
    assert headers[0] == headers[1]
    assert f"best: trial {uninterrupted.trial} with validation mAP {uninterrupted.score:.4f}: loss.beta=" in command.err


def test_a_trial_that_falls_behind_ends_early_and_keeps_its_log(data, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "UNPRUNED_TRIALS", 2)
    given = content(data, train={"epochs": 4, "val_fraction": 0.3, "val_n": 20})
    # A rate of 1e-30 learns nothing, so that such a trial is behind the median of those that do.
    space = {"optimizer.lr": [1e-30, 1e-2, 2e-2], "train.noise": {"low": 0.0, "high": 0.1}}
    best, *_ = sweep(given, space, trials=4, folder=tmp_path / "b", seed=1)
    assert list(tmp_path.glob("b/trials/*/*.safetensors")) == [tmp_path / f"b/trials/{best.trial:04}/best.safetensors"]
    assert not list(tmp_path.glob("b/trials/*/state.pt"))
    rows = table_of(tmp_path / "b")
    pruned = [row for row in rows if row["outcome"] == "pruned"]
    assert pruned
    for row in pruned:
        assert row["optimizer.lr"] == "1e-30"
        trial = tmp_path / "b" / "trials" / f"{int(row['trial']):04}"
        assert int(row["epochs"]) == 3  # not before 30 % of the epochs
        assert len((trial / "log.jsonl").read_text().splitlines()) == int(row["epochs"])
        assert (trial / "report.md").is_file()
    up_to_pruned = int(pruned[0]["trial"]) + 1
    sweep(given, space, trials=up_to_pruned, folder=tmp_path / "c", seed=1, prune=False)
    assert {row["outcome"] for row in table_of(tmp_path / "c")} == {"scored"}


def test_a_trial_that_diverges_counts_as_the_worst_and_does_not_stop_the_sweep(data, tmp_path):
    given = content(data, optimizer={"name": "sgd", "schedule": "constant"})
    space = {"optimizer.lr": [1e30, 0.05], "train.batch_size": {"low": 8, "high": 16}}
    best, *_ = sweep(given, space, trials=3, folder=tmp_path / "a", seed=1)
    outcomes = [(row["optimizer.lr"], row["outcome"]) for row in table_of(tmp_path / "a")]
    assert outcomes == [("0.05", "scored"), ("1e+30", "failed"), ("0.05", "scored")]
    assert best.overrides["optimizer.lr"] == 0.05
    assert "lower optimizer.lr" in next(row["reason"] for row in table_of(tmp_path / "a") if row["outcome"] == "failed")
    with pytest.raises(BadConfig, match="none of the 2 trials"):
        sweep(given, {"optimizer.lr": [1e30, 2e30]}, trials=2, folder=tmp_path / "b")
    assert [row["outcome"] for row in table_of(tmp_path / "b")] == ["failed", "failed"]


def test_divergence_in_the_last_step_of_an_epoch_does_not_stop_the_sweep_either(data, tmp_path):
    given = content(
        data,
        loss={"quantization": {"kind": "l1", "weight": 1e6}},
        optimizer={"name": "sgd", "schedule": "constant"},
        train={"batch_size": 130, "epochs": 1},
    )
    best, *_ = sweep(given, {"optimizer.lr": [1e38, 0.05]}, trials=3, folder=tmp_path, seed=1)
    assert [row["outcome"] for row in table_of(tmp_path)] == ["scored", "failed", "scored"]
    assert best.overrides["optimizer.lr"] == 0.05


def test_missing_or_changed_data_are_refused(data, tmp_path):
    moved = tmp_path / "moved"
    given = content(moved)
    with pytest.raises(BadDataset):
        sweep(given, SPACE, trials=1, folder=tmp_path / "sweep")
    shutil.copytree(data, moved)
    sweep(given, SPACE, trials=1, folder=tmp_path / "sweep")
    with np.load(moved / "scene.npz") as arrays:
        changed = dict(arrays) | {"Y": 1 - arrays["Y"]}
    np.savez(moved / "scene.npz", **changed)
    with pytest.raises(BadConfig, match="splits_sha256"):
        sweep(given, SPACE, trials=2, folder=tmp_path / "sweep")


def test_a_folder_is_for_one_sweep_and_one_process(data, tmp_path):
    sweep(content(data), SPACE, trials=1, folder=tmp_path / "a")
    with pytest.raises(BadConfig, match=r"config\.train\.epochs was 3 and is 5; seed was 0 and is 1"):
        sweep(content(data, train={"epochs": 5}), SPACE, trials=1, folder=tmp_path / "a", seed=1)
    for space, prune in ((SPACE | {"loss.beta": [0.5, 2.0]}, True), (SPACE, False)):
        with pytest.raises(BadConfig):
            sweep(content(data), space, trials=1, folder=tmp_path / "a", prune=prune)
    written = tmp_path / "a" / "sweep.json"
    started = json.loads(written.read_text())
    started["config"]["model"]["head_init"] = "random"  # as if the default had been another one
    written.write_text(json.dumps(started))
    with pytest.raises(BadConfig, match=r"config\.model\.head_init"):
        sweep(content(data), SPACE, trials=2, folder=tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(BadConfig, match=str(tmp_path / "b")):
        sweep(content(data), SPACE, trials=1, folder=tmp_path / "b")
    with pytest.raises(BadConfig, match="train.devices is 2"):
        sweep(content(data, train={"devices": 2}), SPACE, trials=1, folder=tmp_path / "c")
    with in_use(tmp_path / "a"), pytest.raises(BadConfig, match=str(tmp_path / "a")):
        sweep(content(data), SPACE, trials=1, folder=tmp_path / "a")


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({}, "sweep.space"),
        ({"optimizer.lrr": [1, 2]}, "did you mean 'lr'"),
        ({"optimiser.lr": [1, 2]}, "optimiser.lr"),
        ({"lr": [1, 2]}, "'lr'"),
        ({"loss.betta": [1, 2]}, "did you mean 'beta'"),
        ({"loss.beta": [1, 2], "loss.name": ["hyp2", "dsh"]}, "'dsh' .* 'beta'"),
        ({"loss.beta": [1, 2], "loss.name": ["hyp2", "hyp3"]}, "hyp3"),
        ({"loss.name": ["hyp2", "dpsh", "hyp3"]}, "hyp3"),
        ({"loss.name": ["hyp2", "bihalf"]}, "bihalf"),
        ({"loss.beta": {"low": -1.0, "high": 1.0}}, "'loss.beta' .* -1.0"),
        ({"loss.beta": [0.5, "half"]}, "'half'"),
        ({"optimizer.lr": {"low": -1.0, "high": 1.0}}, "-1.0"),
        ({"model.n_bits": {"low": 8, "high": 2000}}, "2000"),
        ({"optimizer.lr": {"low": 1, "hihg": 2}}, "hihg"),
        ({"optimizer.lr": {"lwo": 1, "hihg": 2}}, "lwo"),
        ({"optimizer.lr": {"low": 2, "high": 1}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 0, "high": 1, "log": True}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 1, "high": 4.5, "step": 0.5, "log": True}}, "step"),
        ({"optimizer.lr": {"low": "a", "high": 4}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 1, "high": float("inf")}}, "finite"),
        ({"optimizer.lr": {}, "loss.beta": [0.5, 1.0]}, "optimizer.lr"),
        ({"optimizer.lr": 0.1}, "0.1"),
        ({"optimizer.lr": [0.1]}, "at least two"),
        ({"loss.beta": [[1], [2]]}, "at least two"),
        ({"loss.on": ["outputs", "projection"]}, r"section \[projection\]"),
        ({"train.val_n": [10, 20]}, "train.val_n"),
        ({"train.val_fraction": [0.1, 0.2]}, "train.val_fraction"),
        ({"train.val_database": ["training", "held-out"]}, "train.val_database"),
        ({"train.seed": [1, 2]}, "train.seed"),
        ({"data.root": ["a", "b"]}, "data.root"),
    ],
)
def test_a_mistake_in_the_ranges_is_named_before_anything_is_run(data, tmp_path, space, named):
    with pytest.raises(BadConfig, match=named):
        sweep(content(data), space, trials=1, folder=tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_settings_that_contradict_each_other_are_refused_before_anything_is_run(data):
    own, space = content(data), parse_space({"train.batch_size": [16, 64], "memory.size": [32, 64]})
    with pytest.raises(BadConfig, match=r"'hyp2' does not use a memory"):
        check_space(own, space, source="sweep")
    with pytest.raises(BadConfig, match=r"memory\.size is 32"):
        check_space({**own, "loss": {"name": "mulsupcon"}}, space, source="sweep")
    with pytest.raises(BadConfig, match="gama"):
        check_space({**own, "partner": {"name": "asl"}}, parse_space({"partner.gama": [1, 2]}), source="sweep")


def test_a_choice_may_unset_a_hyperparameter_that_is_optional(data):
    own = {**content(data), "loss": {"name": "hashnet", "quantization": {"kind": "l1"}}}
    check_space(own, parse_space({"loss.a": ["none", 0.1], "loss.quantization.weight": [0.1, 1]}), source="sweep")
    with pytest.raises(BadConfig, match="'none'"):
        check_space({**own, "loss": {"name": "tie_aware"}}, parse_space({"loss.weight": ["none", 1]}), source="sweep")


def test_a_hyperparameter_may_be_one_that_only_the_searched_losses_have(data):
    space = parse_space({"loss.name": ["hyp2", "hyp2_pair"], "loss.zeta": [0.1, 0.2]})
    check_space({**content(data), "loss": {"name": "dpsh"}}, space, source="sweep")


def test_partners_and_projections_can_be_searched_too(data):
    own = content(data, partner={"name": "asl"}, projection={"width": 8})
    own["loss"] = {"name": "mulsupcon", "on": "projection"}
    check_space(own, parse_space({"projection.width": [8, 16], "partner.gamma_neg": [1.0, 2.0]}), source="sweep")


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


def test_every_trial_and_every_seed_draws_anew_and_the_fifth_has_learnt(tmp_path):
    distributions = parse_space({"optimizer.lr": {"low": 0.0, "high": 1.0}, "model.dropout": [0.0, 0.3, 0.6]})

    def drawn(seed: int, score: int, n_trials: int) -> list[tuple]:
        study = open_study(tmp_path / "studies.db", f"{seed} {score}", optuna.pruners.NopPruner())

        def objective(trial, _):
            rate, *_ = [trial._suggest(name, one) for name, one in distributions.items()]
            return rate * score

        assert len(list(run_trials(study, n_trials, objective, seed=seed))) == n_trials
        return [tuple(trial.params.values()) for trial in study.trials]

    seeds = [drawn(seed, 1, n_trials) for seed, n_trials in ((0, 5), (1, 3), (1_000_003, 3), (2**40, 3))]
    rates = [values[0] for trials in seeds for values in trials]
    assert len(set(rates)) == len(rates) == 14
    other = drawn(0, -1, 5)
    assert other[:4] == seeds[0][:4]  # at random, whatever the scores were
    assert other[4] != seeds[0][4]


def test_a_trial_that_has_finished_is_not_pruned_when_it_is_scored_by_the_next_process(tmp_path):
    def run(name: str, *, killed: int | None) -> list[tuple]:
        study = open_study(tmp_path / "studies.db", name, optuna.pruners.MedianPruner(1, 2))

        def objective(trial, report):
            for step in (1, 2, 3):
                score = step if trial.number == 0 else (1, 2.5, 2.5)[step - 1]  # behind only at the end
                report(step, score, 3)
            if trial.number == killed and not stopped:
                stopped.append(True)
                raise KeyboardInterrupt
            return score

        stopped: list[bool] = []
        with suppress(KeyboardInterrupt):
            list(run_trials(study, 2, objective, seed=0))
        list(run_trials(study, 2, objective, seed=0))
        return [(trial.state.name, trial.value) for trial in study.trials]

    assert run("killed", killed=1) == run("whole", killed=None) == [("COMPLETE", 3), ("COMPLETE", 2.5)]


def test_a_trial_of_fewer_epochs_is_not_pruned_at_its_end(tmp_path):
    study = open_study(tmp_path / "studies.db", "s", optuna.pruners.MedianPruner(1, 0))

    def objective(trial, report):
        for step in range(n_steps := (4, 4, 1)[trial.number]):
            report(step + 1, -trial.number, n_steps)
        return 0

    list(run_trials(study, 3, objective, seed=0))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]


@pytest.mark.parametrize("error", [BadCodes, OutOfMemory])
def test_a_trial_that_runs_out_of_memory_or_gives_no_codes_counts_as_the_worst_too(error, tmp_path):
    study = open_study(tmp_path / "studies.db", "s", optuna.pruners.NopPruner())

    def objective(trial, _):
        if trial.number == 0:
            raise error("why")
        return -1.0

    list(run_trials(study, 2, objective, seed=0))
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]


def test_trials_share_the_data(data, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_module, "build_splits", None)  # it may take minutes
    assert len(sweep(content(data), SPACE, trials=2, folder=tmp_path)) == 2
