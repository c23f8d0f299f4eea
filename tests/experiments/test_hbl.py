"""HBL's Table II in miniature: the whole command on small files of the true layout, its resumption and refusals."""

import itertools
import json
from dataclasses import replace

import numpy as np
import optuna
import pytest
import torch

from experiments import __main__ as experiments_main
from experiments import hbl
from experiments.hbl_report import FIGURES, as_markdown
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import vectors
from hashseek.training.runs.run_folder import in_use
from hashseek.training.sweep import open_study


def write_set(folder, name, *, seed=0, test_seed=0):
    """Two blobs a label, so that a line cannot part them; the test part is drawn by a seed of its own."""
    parts = []
    for part_seed, n in ((seed, 60), (100 + test_seed, 30)):
        rng = np.random.default_rng(part_seed)
        y = rng.integers(0, 2, (n, 3))
        y[np.arange(n), rng.integers(0, 3, n)] = 1
        x = np.repeat(y, 2, axis=1) * rng.choice((-2, 2), (n, 6)) + 0.5 * rng.normal(size=(n, 6))
        parts.append((x, y))
    folder.mkdir(exist_ok=True)
    np.savez(
        folder / f"{name}.npz",
        X=np.concatenate([x for x, _ in parts]).astype(np.float32),
        Y=np.concatenate([y for _, y in parts]).astype(np.uint8),
        split=np.array(["train"] * 60 + ["test"] * 30),
        label_names=np.array(["a", "b", "c"]),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    for name in ("scene", "yeast"):
        write_set(folder, name)
    return folder


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch):
    monkeypatch.setattr(hbl, "CYCLES", (2,))
    monkeypatch.setattr(hbl, "DECAYS", (0.1,))


def arguments(root, out, *more):
    return ["hbl-table-2", "--root", str(root), "--out", str(out), "--folds", "2", *more]


def call(capsys, *args):
    experiments_main.reproduce(args=arguments(*args), standalone_mode=False)
    return capsys.readouterr()


def rows_of(out, data):
    return [json.loads(line) for line in (out / data / "rows.jsonl").read_text().splitlines()]


def trials_of(out, data, method):
    study = open_study(out / data / "trials.sqlite3", method, optuna.pruners.NopPruner())
    return [
        (trial.params, trial.value, trial.intermediate_values)
        for trial in study.trials
        if trial.state != optuna.trial.TrialState.FAIL
    ]


def test_the_whole_command_in_miniature(root, tmp_path, capsys):
    more = ("--data", "scene", "--method", "any", "--method", "any+hbl", "--trials", "1", "--seeds", "2")
    printed = call(capsys, root, tmp_path, *more)
    rows = rows_of(tmp_path, "scene")
    kinds = [(row["method"], row["variant"], row["seed"]) for row in rows]
    assert sorted(kinds) == sorted(
        [("any", "", 0), ("any", "", 1)]
        + [("any+hbl", variant, seed) for variant in ("", "margins off") for seed in (0, 1)]
    )
    off = [row for row in rows if row["variant"]]
    assert {row["settings"]["lam"] for row in off} == {0}
    plain = [row for row in rows if row["method"] == "any"]
    mean = np.mean([row["figures"]["folds"]["mAP"] for row in plain])
    assert f"{mean:.4f} ± " in printed.out
    assert min(row["figures"]["folds"]["mAP"] for row in plain) > 0.9  # blobs that a line cannot part
    for row in rows:
        figures = row["figures"]
        assert figures["folds"]["mAP"] == figures["oracle"]["mAP"]
        assert all(figures["oracle"][name] >= figures["folds"][name] for name in FIGURES)
    assert "At or above the paper, mean over seeds: mAP in 2 of 2 rows" in printed.out
    assert "scene | MulSupCon | paper | 0.7935 | 0.8401" in printed.out
    assert "Any-Loss + HBL - the same settings with lam = 0" in printed.out

    again = call(capsys, root, tmp_path, *more)
    assert (again.out, again.err) == (printed.out, "")  # nothing is repeated


def test_an_interrupted_run_resumes_as_if_uninterrupted(root, tmp_path, capsys, monkeypatch):
    more = ("--data", "yeast", "--method", "mulsupcon", "--trials", "2", "--seeds", "1")
    call(capsys, root, tmp_path / "uninterrupted", *more)

    def interrupt(line):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(experiments_main, "_say", interrupt)  # after the first trial
        with pytest.raises(InterruptedError):
            call(capsys, root, tmp_path / "broken", *more)
    assert not (tmp_path / "broken" / "yeast" / "rows.jsonl").exists()
    resumed = call(capsys, root, tmp_path / "broken", *more)
    assert "trial 1 of 2" not in resumed.err  # what was finished is not done again
    assert "trial 2 of 2" in resumed.err
    broken, whole = tmp_path / "broken", tmp_path / "uninterrupted"
    assert trials_of(broken, "yeast", "mulsupcon") == trials_of(whole, "yeast", "mulsupcon")
    assert rows_of(broken, "yeast") == rows_of(whole, "yeast")


def test_the_test_part_has_no_say_in_what_is_chosen(tmp_path, capsys):
    found = []
    for test_seed in (0, 1):
        write_set(tmp_path / f"data{test_seed}", "scene", test_seed=test_seed)
        out = tmp_path / f"out{test_seed}"
        more = ("--data", "scene", "--method", "any", "--trials", "1", "--seeds", "1")
        call(capsys, tmp_path / f"data{test_seed}", out, *more)
        found.append((trials_of(out, "scene", "any"), rows_of(out, "scene")[0]))
    (trials, row), (other_trials, other_row) = found
    assert trials == other_trials
    assert row["choice"] == other_row["choice"]
    assert row["figures"] != other_row["figures"]


def test_other_data_folds_and_processes_are_refused(root, tmp_path, capsys):
    with pytest.raises(BadDataset, match="yeast.npz"):
        call(capsys, tmp_path, tmp_path / "out", "--data", "yeast")
    more = ("--data", "scene", "--method", "any", "--trials", "1", "--seeds", "1")
    call(capsys, root, tmp_path / "out", *more)
    with pytest.raises(BadConfig, match="folds was 2 and is 3"):
        call(capsys, root, tmp_path / "out", *more, "--folds", "3")
    write_set(tmp_path / "other", "scene", seed=5)
    with pytest.raises(BadConfig, match="data was "):
        call(capsys, tmp_path / "other", tmp_path / "out", *more)
    with in_use(tmp_path / "out" / "scene"), pytest.raises(BadConfig, match=str(tmp_path / "out")):
        call(capsys, root, tmp_path / "out", *more)


def test_training_depends_on_its_seed_and_on_nothing_else_random(root):
    train = vectors.scene(root=str(root)).train
    x, _ = hbl.standardized(train.vectors, train.vectors)
    y = torch.from_numpy(train.labels.astype(np.float32))

    def weights(seed, method="any+hbl", **changes):
        torch.manual_seed(weights.calls)
        weights.calls += 1
        settings = {**hbl.defaults(method), "k_min": 8, "lam": 1.0, **changes}
        first = next(hbl.train_encoder(x, y, method=method, settings=settings, seed=seed))
        return first.head.weight.detach().clone()

    weights.calls = 0
    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    assert not torch.equal(weights(0), weights(0, lam=0.0))  # the gate opens: the margins take part


def test_thresholds_are_chosen_on_the_folds_and_folds_score_what_they_did_not_train_on(root):
    splits = vectors.scene(root=str(root))
    bad = dict.fromkeys(FIGURES, 0.999)
    choice = hbl.CrossValidation(2, "features", 0.1, 0.0, 0.0, 0.0, bad)
    found = hbl.query_scores(splits, method="any", settings=hbl.defaults("any"), choice=choice, seed=0)
    assert found["folds"]["mAP"] == found["half"]["mAP"] == found["oracle"]["mAP"]
    thresholded = [name for name in FIGURES if found["half"][name] != found["oracle"][name]]
    assert thresholded
    assert all(found["folds"][name] < found["oracle"][name] for name in thresholded)

    labels = np.random.default_rng(0).integers(0, 2, splits.train.labels.shape).astype(np.uint8)
    unrelated = replace(splits.train, labels=labels)
    nothing = hbl.cross_validate(unrelated, method="any", settings=hbl.defaults("any"), n_folds=2)
    assert nothing.mean_ap < 0.9, "labels that do not depend on the vectors cannot be predicted"


def test_every_point_of_the_search_space_can_be_trained(root):
    train = vectors.scene(root=str(root)).train
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    x, _ = hbl.standardized(train.vectors, train.vectors)
    y = torch.from_numpy(train.labels.astype(np.float32))
    for method in hbl.METHODS:
        study.enqueue_trial(hbl.defaults(method))
        for _ in range(3):
            settings = hbl.suggest(study.ask(), method)
            assert set(settings) == set(hbl.defaults(method))
            (encoder,) = itertools.islice(
                hbl.train_encoder(x, y, method=method, settings={**settings, "first_cycle": 1}, seed=0), 1
            )
            assert encoder.probed(x)["embedding"].isfinite().all()


def row(method, seed, mean_ap, p_at_1, *, data="scene", variant="", trial=0):
    figures = dict.fromkeys(FIGURES, 0.5) | {"mAP": mean_ap, "p@1": p_at_1}
    return {
        "data": data,
        "method": method,
        "variant": variant,
        "seed": seed,
        "trial": trial,
        "settings": {"lr": 0.001, "hidden": "512"},
        "choice": {"mean_ap": 0.8, "p_at_1": 0.7, "layer": "features", "cycles": 2, "decay": 1.0},
        "figures": dict.fromkeys(("folds", "half", "oracle"), figures),
    }


def test_the_table_counts_rows_of_the_latest_choice_and_pairs_seeds():
    rows = [row("any", 0, 0.1, 0.1, trial=-1)]
    rows += [row("any", seed, 0.85 + 0.01 * seed, 0.79) for seed in range(3)]
    rows += [row("any+hbl", seed, 0.87 + 0.01 * seed + 0.001 * (seed == 1), 0.79) for seed in (2, 1, 0)]
    text = as_markdown(rows)
    # Means 0.86 and 0.8803 are above 0.8440 and 0.8478; p@1 of 0.79 is below 0.7993 and 0.8094.
    assert "mAP in 2 of 2 rows, p@1 in 0, both in 0." in text
    assert "| 0.7900 ± 0.0000 | 0.8600 ± 0.0100 |" in text
    # Differences 0.02, 0.021, 0.02: mean 0.0203, std 0.00058; equal p@1 gives no difference.
    assert "each as searched | mAP | +0.0203 | 0.0006 | 3 of 3 | < 0.001 | yes |" in text
    assert "each as searched | p@1 | +0.0000 | 0.0000 | 0 of 3 | 1.000 | not beyond the spread |" in text
    # t = 0.0203 / (0.00058 / sqrt(3)) = 61, p = 0.00027; of two, the smaller counts twice.
    rows += [row("mulsupcon", seed, 0.85 + 0.01 * seed, 0.79) for seed in range(3)]
    rows += [row("mulsupcon+hbl", seed, 0.86 + 0.01 * seed + 0.01 * (seed == 1), 0.79) for seed in range(3)]
    # Differences 0.01, 0.02, 0.01: t = 4, p = 0.0572, times 3 of the 4 tests.
    assert "each as searched | mAP | +0.0133 | 0.0058 | 3 of 3 | 0.172 | not beyond the spread |" in as_markdown(rows)
    assert "0.1000" not in text  # a row of an earlier choice
    assert "lam = 0" not in text  # was not run
    assert "lr 0.001, hidden 512" in text


def test_a_method_that_is_named_twice_runs_once():
    assert experiments_main._known(["a", "b", "a"], ("a", "b", "c")) == ["a", "b"]
    with pytest.raises(BadConfig):
        experiments_main._known(["d"], ("a",))
