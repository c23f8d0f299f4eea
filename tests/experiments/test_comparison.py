"""The comparison of methods: same budget, chosen on validation, resumable, and scored as `evaluate` scores."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import filelock
import numpy as np
import pytest
import torch

from experiments import comparison, finetuned, unsupervised, unsupervised_settings
from experiments.comparison import Experiment, load_inputs, rows_of, run, run_method, settings_of
from experiments.comparison_report import as_markdown, mean_ranks, paired_tests, write_plots
from experiments.critical_difference import groups
from experiments.inputs import DATA, Inputs
from experiments.methods import METHODS, space_at
from experiments.processes import in_processes
from experiments.scoring import cosine_scores, gallery_scores, split_scores
from hashseek.retrieval.errors import BadConfig, BadDataset, HashseekError
from hashseek.retrieval.hash_layers import POWER, fit_hash_layer
from hashseek.retrieval.metrics import queries_and_seeds
from hashseek.training.config import load_config, parse_config, read_config
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.splits import Split, Splits
from hashseek.training.losses import loss_class
from hashseek.training.runs.run_folder import read_records, write_records
from support.commands import wait_until

RESULTS = Path(comparison.__file__).parent / "results"


def test_every_method_is_a_valid_configuration_with_a_space_that_it_knows():
    from hashseek.training.loop.network import is_unsupervised
    from hashseek.training.sweep_space import check_space, parse_space

    for (name, method), data in product(METHODS.items(), DATA):
        if method.fitted is None:
            settings = settings_of(name, Experiment(data).config())
            content = read_config(DATA[data].config, (*Experiment(data).settings, *settings))
            if is_unsupervised(parse_config(content, source=method.title)):
                assert not method.space, "a search would choose its settings by labels"
            else:
                check_space(content, parse_space(method.space), source=method.title)
                assert {"model.dropout", "optimizer.lr"} <= set(method.space)
    starts = {data: "model.head=linear_bn" in settings_of("orthohash", Experiment(data).config()) for data in DATA}
    assert starts == {data: data in ("scene", "yeast") for data in DATA}


def test_an_interrupted_comparison_continues_into_one_table(base, own, tmp_path, monkeypatch, own_cache):
    out = tmp_path / "out"
    assert as_markdown(out) == "no run is finished yet\n"
    experiment = Experiment(own, bits=(12,), n_seeds=1, n_trials=1, epochs=2, base=base)
    run_method("hyp2", experiment, out)
    before = rows_of(out, "hyp2")
    assert [(row["n_bits"], row["seed"]) for row in before] == [(12, 0)]
    table = as_markdown(out)
    assert f"| HyP2 | {before[0]['mAP']:.4f} |" in table
    [choice] = read_records(out / "hyp2" / "chosen.jsonl")
    assert set(choice["settings"]) < set(before[0]["settings"]), "the table has what the run used"
    assert f"| HyP2 | 12 | 0 | `{', '.join(choice['settings'])}` |" in table

    def broken(*arguments):
        raise KeyboardInterrupt

    longer = replace(experiment, bits=(12, 16))
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "trained", broken)
        with pytest.raises(KeyboardInterrupt):
            run_method("hyp2", longer, out)
    run_method("hyp2", longer, out)
    rows = rows_of(out, "hyp2")
    assert rows[:1] == before
    assert [(row["n_bits"], row["seed"]) for row in rows] == [(12, 0), (16, 0)]
    for row in rows:
        assert 0 < row["worst"] <= row["mAP"] <= row["best"] <= 1
    assert {path.name for path in (out / "hyp2").iterdir()} == {"chosen.jsonl", "rows.jsonl"}


def test_every_seed_has_its_own_search_and_more_seeds_extend_a_comparison(base, own, tmp_path, monkeypatch, own_cache):
    out, methods = tmp_path / "out", ("dhn", "itq")
    once = Experiment(own, bits=(12,), n_seeds=1, n_trials=1, epochs=1, base=base)
    fit = MagicMock(wraps=comparison.fit)
    monkeypatch.setattr(comparison, "fit", fit)
    run_method("dhn", once, out)
    [first] = rows_of(out, "dhn")
    for method in methods:
        run_method(method, replace(once, n_seeds=2), out)
    assert [call.args[0].train.seed for call in fit.call_args_list] == [0, 1]
    for method in methods:
        assert [row["seed"] for row in rows_of(out, method)] == [0, 1]
    kept, other = rows_of(out, "dhn")
    assert kept == first
    assert len({setting for row in (first, other) for setting in row["settings"] if "optimizer.lr" in setting}) == 2
    choices = read_records(out / "dhn" / "chosen.jsonl")
    assert [choice["seed"] for choice in choices] == [0, 1]
    assert set(choices[1]["settings"]) < set(other["settings"])
    table = as_markdown(out)
    assert 0 < table.find("| DHN | 12 | 0 |") < table.find("| DHN | 12 | 1 |")


@pytest.mark.parametrize(("data", "n", "database"), [("mirflickr", 61, "held-out"), ("scene", 700, "training")])
def test_a_search_scores_three_tenths_of_the_training_images(data, n, database, tmp_path, monkeypatch):
    searched = MagicMock(return_value=(MagicMock(settings=["optimizer.lr=0.01"], score=0.5),))
    monkeypatch.setattr(comparison, "sweep", searched)
    monkeypatch.setattr(comparison.shutil, "rmtree", MagicMock())
    comparison.tune("hashnet", 12, 3, Experiment(data), tmp_path)
    train = parse_config(searched.call_args.args[0], source="test").train
    assert (train.val_fraction, train.val_n, train.val_database, train.seed) == (0.3, n, database, 3)


def test_searches_on_other_data_draw_other_settings(base, own, tmp_path, own_cache):
    copy = tmp_path / "copy.toml"
    copy.write_bytes(Path(own).read_bytes())
    chosen = set()
    for data in (own, str(copy)):
        experiment = Experiment(data, bits=(12,), n_seeds=1, n_trials=1, epochs=1, base=base)
        comparison.tune("dpsh", 12, 0, experiment, tmp_path / Path(data).stem)
        chosen.update(comparison.chosen_settings(tmp_path / Path(data).stem, "dpsh", 12, 0))
    assert sum("optimizer.lr" in setting for setting in chosen) == 2


def test_a_run_whose_process_is_killed_ends_with_a_message():
    with pytest.raises(HashseekError, match="--jobs"):
        list(in_processes(os._exit, [(1,)], jobs=1))


def test_runs_end_with_the_process_that_started_them(tmp_path):
    lock = tmp_path / "lock"
    run = tmp_path / "run.py"
    run.write_text(
        "import filelock, time\n"
        f"with filelock.FileLock({str(lock)!r}):\n"
        f"    open({str(tmp_path / 'started')!r}, 'x')\n"
        "    time.sleep(600)\n"
    )
    code = f"import runpy, experiments.processes as p; list(p.in_processes(runpy.run_path, [({str(run)!r},)], jobs=1))"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "started").exists)
        process.kill()
    with filelock.FileLock(lock, timeout=60):
        pass


def test_a_run_that_fails_does_not_lose_the_results_of_the_others():
    finished = []

    def collect() -> None:
        for _, result in in_processes(int, [("a",), ("1",), ("2",)], jobs=1):
            finished.append(result)

    with pytest.raises(ValueError, match="'a'"):
        collect()
    assert sorted(finished) == [1, 2]


def _choose(folder: Path, method: str, n_bits: int, *settings: str) -> None:
    (folder / method).mkdir(parents=True)
    choices = [{"n_bits": n_bits, "seed": seed, "settings": settings} for seed in range(2)]
    write_records(folder / method / "chosen.jsonl", choices)


def test_chosen_settings_are_fine_tuned_once(base, tmp_path, monkeypatch, own_cache):
    out = tmp_path / "out"
    _choose(out, "hashnet", 12, "optimizer.lr=0.02", 'loss.continuation="iteration"')
    seed = 1

    def stopped(*arguments, **settings):
        raise KeyboardInterrupt

    tiny = (*base, "model.freeze_batch_norm=false", "train.epochs=2")
    place = out / finetuned.FOLDER / "hashnet"
    with monkeypatch.context() as patched:
        patched.setattr(finetuned, "split_scores", stopped)
        with pytest.raises(KeyboardInterrupt):
            finetuned.fine_tune(out, "hashnet", 12, seed, base=tiny)
    config = json.loads((place / "12-1" / "config.json").read_text())
    assert (config["loss"]["continuation"], config["optimizer"]["lr"]) == ("iteration", 0.001)
    assert config["train"]["seed"] == seed
    fit = MagicMock(wraps=comparison.fit)
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "fit", fit)
        row = finetuned.fine_tune(out, "hashnet", 12, seed, base=tiny)
    assert fit.call_args.kwargs["resume"]
    finetuned.run_finetuned(out, ["hashnet"], lengths=[12], seeds=2, jobs=1, base=tiny)
    rows = sorted(rows_of(place.parent, "hashnet"), key=lambda row: row["seed"])  # in the order in which they finished
    assert rows[seed] == row
    assert [path.name for path in place.iterdir()] == ["rows.jsonl"]
    monkeypatch.setattr(finetuned, "fine_tune", None)  # everything is finished
    finetuned.run_finetuned(out, ["hashnet"], lengths=[12], seeds=2, base=tiny)
    assert [(row["method"], row["n_bits"], row["seed"]) for row in rows] == [("hashnet", 12, 0), ("hashnet", 12, 1)]
    assert all(0 < row["worst"] <= row["mAP"] <= row["best"] <= 1 for row in rows)
    both = np.array([row["mAP"] for row in rows])
    cell = f"{both.mean():.4f} ± {both.std(ddof=1):.4f}"
    assert f"| {METHODS['hashnet'].title} | {cell} |" in as_markdown(place.parent)


@pytest.mark.parametrize("folder", [finetuned.FOLDER, "finetuned-later-searches"])
def test_the_published_tables_of_fine_tuning_are_those_of_their_rows(folder):
    rows, table = RESULTS / "mirflickr" / folder, RESULTS / "mirflickr-finetuned.md"
    methods = [method for method in METHODS if rows_of(rows, method)]
    published = set(table.read_text(encoding="utf-8").splitlines())
    cells = [line for line in as_markdown(rows).splitlines() if line.startswith("|")]
    assert len(cells) > len(methods)
    assert {line for line in cells if "%" not in line} <= published  # without tests: processors round differently
    for method in methods:
        for row in rows_of(rows, method):
            assert row["mAP"] == pytest.approx(np.mean(row["AP"]), abs=1e-5)


def test_both_rankings_of_rows_follow_from_the_outputs():
    # Distances of 2 bits from (1, 1): 0, 1, 1, 2; the query's outputs put the second before the third.
    labels = np.array([[1, 0], [0, 1], [1, 0], [1, 0]], np.uint8)
    database = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], np.float32)
    query = Split((), labels[:1], ())
    splits = Splits(query, query, Split((), labels, ()), ("a", "b"), "")
    found = split_scores(np.array([[3, 1]], np.float32), database, splits)
    assert found["asymmetric"] == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert found["mAP"] == pytest.approx((found["worst"] + found["best"]) / 2)
    assert found["worst"] == pytest.approx(found["asymmetric"])
    assert found["AP"] == pytest.approx([found["mAP"]], abs=1e-5)
    assert found["asymmetric_AP"] == pytest.approx([found["asymmetric"]], abs=1e-5)
    assert (found["d_intra"], found["d_inter"]) == (1, 1)


def test_scores_are_those_of_the_first_1000():
    rng = np.random.default_rng(0)
    database = rng.choice((-1, 1), (1200, 12)).astype(np.float32)
    query = rng.random((1, 12)).astype(np.float32)
    distances = (database < 0).sum(axis=1)
    relevant = distances % 3 == 0  # alike for equal distances, so that their order makes no difference
    splits = Splits(*(Split((), np.eye(2, dtype=np.uint8)[of], ()) for of in ([1], [1], 1 * relevant)), ("a", "b"), "")

    def by_hand(order: Any) -> float:
        found = relevant[order[:1000]]
        return float(np.mean([found[: place + 1].mean() for place in np.flatnonzero(found)]))

    found = split_scores(query, database, splits)
    assert [found["mAP"], found["best"]] == pytest.approx([by_hand(np.argsort(distances))] * 2)
    assert found["asymmetric"] == pytest.approx(by_hand(np.argsort(-(database.astype(float) @ query[0].astype(float)))))
    assert found["mAP"] != pytest.approx(found["asymmetric"], abs=0.001)
    assert (found["d_intra"], found["d_inter"]) == pytest.approx(
        (distances[relevant].mean(), distances[~relevant].mean())
    )


def _rows(seeds: int, **of_methods: tuple[float, float]) -> list[dict[str, Any]]:
    """Rows of 60 queries; each method has a shift and a standard deviation of noise."""
    rng = np.random.default_rng(0)
    base = rng.random(60)
    return [
        {"method": method, "n_bits": 12, "seed": seed, "AP": (base + shift + noise * rng.normal(size=60)).tolist()}
        for seed in range(seeds)
        for method, (shift, noise) in of_methods.items()
    ]


def test_the_control_is_compared_with_every_method_whether_it_is_ahead_or_behind():
    rows = _rows(3, tie_aware=(0.2, 0.01), hyp2=(0.2, 0.05), dsh=(0.25, 0.01), csq=(0.0, 0.01))
    unfinished = [{"method": "csq", "n_bits": 12, "seed": 3, "AP": np.ones(60).tolist()}]
    found = paired_tests(rows + unfinished, 12, of_query="AP")
    assert found == paired_tests(rows, 12, of_query="AP")
    assert paired_tests(rows[:3] + unfinished, 12, of_query="AP") == {}, "no seed that every method has"
    assert list(found) == ["hyp2", "dsh", "csq"]
    assert found["csq"].difference == pytest.approx(0.2, abs=0.01)
    assert found["dsh"].difference == pytest.approx(-0.05, abs=0.01)
    for method in ("csq", "dsh"):
        assert found[method].over_queries == pytest.approx(3e-4), "the smallest, times the number of methods"
        assert found[method].over_both < 1e-4
    of_method = {method: np.array([row["AP"] for row in rows if row["method"] == method]) for method in METHODS}
    own = of_method["tie_aware"]
    raw = [(float(queries_and_seeds(own - of_method[method])), method) for method in found]
    least = 0.0
    for n_left, (p, method) in zip((3, 2, 1), sorted(raw), strict=True):  # Holm's steps
        least = max(least, min(1.0, n_left * p))
        assert found[method].over_both == pytest.approx(least)
    assert found["hyp2"].over_queries > 0.05
    assert (found["csq"].better, found["dsh"].better) == (0, 1)
    others = [row for row in rows if row["method"] != "tie_aware"]
    assert list(paired_tests(others, 12, of_query="AP")) == ["dsh", "csq"], "the first one is compared with the others"


def test_a_method_ahead_for_a_few_queries_has_a_worse_mean_rank(tmp_path):
    rows = _rows(2, hyp2=(0.2, 0.01), dsh=(0.2, 0.01))
    base = np.random.default_rng(0).random(60)
    base[:6] += 5  # better in the mean for the sake of a tenth of the queries
    rows += [{"method": "tie_aware", "n_bits": 12, "seed": seed, "AP": base.tolist()} for seed in range(2)]
    for row in rows:
        row["mAP"] = float(np.mean(row["AP"]))
    for method in ("tie_aware", "hyp2", "dsh"):
        (tmp_path / method).mkdir()
        write_records(tmp_path / method / "rows.jsonl", [row for row in rows if row["method"] == method])
    table = as_markdown(tmp_path)
    tested = paired_tests(rows, 12, of_query="AP")
    assert tested["dsh"].better == pytest.approx(0.9)
    assert f"| DSH | {tested['dsh']} |" in table
    [line] = [line for line in table.splitlines() if line.startswith("- 12 bits: ")]
    assert line.startswith("- 12 bits: Tie-aware (ours) is number 1 of 3, and the first for 2 of 2 seeds.")
    assert line.rpartition(" Significantly better: ")[2].startswith("HyP2; DSH.")


def test_mean_ranks_and_bars_are_those_of_demsar(tmp_path):
    # Demšar (2006), Section 3.2.2: four classifiers on 14 data sets; at 0.05 nothing differs, at 0.10 two groups do.
    published = {"C4.5": 3.143, "C4.5+m": 2.0, "C4.5+cf": 2.893, "C4.5+m+cf": 1.964}
    assert groups(published, 1.25) == [(1.964, 3.143)]
    assert groups(published, 1.06) == [(1.964, 2.893), (2.893, 3.143)]
    values = np.tile([[0.9], [0.5], [0.5], [0.1]], 14)
    values[:2, :7] = values[1::-1, :7]
    ranks, critical = mean_ranks(dict(zip("abcd", values, strict=True)))
    assert ranks == {"a": 1.75, "b": 1.75, "c": 2.5, "d": 4.0}
    assert critical == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 14)), abs=1e-3)

    rows = [
        {"method": method, "n_bits": n_bits, "seed": 0, "AP": of_query.tolist(), "asymmetric_AP": of_query.tolist()}
        for n_bits in (12, 48)
        for method, of_query in zip(("hyp2", "dsh", "csq", "itq"), values, strict=True)
    ]
    for row in rows:
        (tmp_path / row["method"]).mkdir(exist_ok=True)
    for method in ("hyp2", "dsh", "csq", "itq"):
        write_records(tmp_path / method / "rows.jsonl", [row for row in rows if row["method"] == method])
    files = write_plots(tmp_path)
    assert {file.name for file in files} == {
        f"critical-difference-{key}.{kind}" for key in ("mAP", "asymmetric") for kind in ("svg", "png")
    }
    svg = files[0].read_text()
    for words in ("12 bits", "48 bits", "HyP2  1.75", "4.00  ITQ, no labels"):
        assert words in svg


def test_a_foreign_gallery_is_searched_by_each_of_its_images_among_the_others():
    labels = np.array([[1, 0]] * 13 + [[0, 1]] * 11, np.uint8)
    parts = np.split(labels, [3, 9])
    gallery = Inputs(Splits(*(Split((), part, ()) for part in parts), ("a", "b"), ""), *parts)
    apart = gallery_scores(lambda rows: np.where(rows == 1, 1.0, -1.0).astype(np.float32), gallery)
    assert apart == {"gallery": 1, "gallery_rare": 1}
    alike = gallery_scores(lambda rows: np.ones((len(rows), 8), np.float32), gallery)
    assert alike["gallery"] == pytest.approx((13 * 12 + 11 * 10) / 24 / 23)
    assert alike["gallery_rare"] == pytest.approx(10 / 23)


def test_references_are_scored_without_codes_of_the_training_split():
    """The cosine ranks features; ITQ is fitted to the gallery that it searches. Training features are of no use."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.eye(2, dtype=np.uint8), [16, 14], axis=0)
    parts = np.split(rng.permutation(30), [10, 20])
    near = (labels @ np.eye(2, 5) + rng.normal(scale=0.1, size=(30, 5))).astype(np.float32)
    splits = Splits(*(Split((), labels[part], ()) for part in parts), ("a", "b"), "")
    gallery = Inputs(splits, *(near[part] for part in parts))
    inputs, rows = replace(gallery, train=np.zeros_like(gallery.train), gallery=gallery), np.arange(10)
    cosine = comparison.fitted("cosine", inputs, rows, n_bits=2, seed=0)
    assert cosine == {"mAP": 1, "gallery": 1, "gallery_rare": 1}
    itq = comparison.fitted("gallery_itq", inputs, rows, n_bits=2, seed=0)
    assert set(itq) == {"gallery", "gallery_rare"}, "its codes of the splits are not scored"
    assert itq == gallery_scores(fit_hash_layer(gallery.all[0], n_bits=2), gallery)
    worse = gallery_scores(lambda rows: rng.normal(size=(len(rows), 2)).astype(np.float32), gallery)
    assert itq["gallery"] > worse["gallery"]
    shuffled = replace(gallery, database=gallery.database[::-1])
    assert cosine_scores(shuffled)["mAP"] < 1


def test_layers_without_labels_are_scored_as_in_a_comparison():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (60, 3)).astype(np.uint8)
    features = rng.normal(size=(60, 5)).astype(np.float32)
    splits = Splits(*(Split((), part, ()) for part in np.split(labels, [20, 30])), ("a", "b", "c"), "")
    inputs = Inputs(splits, *np.split(features, [20, 30]))
    cosines = (features[20:30] @ features[30:].T).astype(np.float32)
    of_ranking, of_nearest = unsupervised.cells_of("pca", 4, inputs, cosines).values()
    expected = comparison.fitted("pca", inputs, np.arange(20), n_bits=4, seed=0)
    assert of_ranking == f"{expected['mAP']:.3f} / {expected['asymmetric']:.3f}"
    assert of_nearest == "1.00", "there are fewer than 100 pictures"
    assert unsupervised.cells_of("itq_cca", 4, inputs, cosines) == {}, "3 labels"


def test_settings_without_labels_are_scored_on_training_pictures_only():
    rng = np.random.default_rng(0)
    labels, features = np.eye(60, dtype=np.uint8), rng.normal(size=(60, 5)).astype(np.float32)
    each = [Split((Path(),) * len(part), part, ("",) * len(part)) for part in np.split(labels, [45, 50])]
    splits = Splits(*each, ("a", "b", "c"), "")
    parts = list(unsupervised_settings.thirds(Inputs(splits, *np.split(features, [45, 50]))))
    assert len({part.train.tobytes() for part in parts}) == unsupervised_settings.DRAWS
    for part in parts:
        (found, rows), sizes = part.all, (len(part.train), len(part.query), len(part.database))
        assert sizes == (15, 15, 15)
        assert sorted(rows.argmax(axis=1)) == list(range(45)), "each training picture once"
        assert np.array_equal(found, features[rows.argmax(axis=1)]), "with its label"
    for power, method in ((0, "itq"), (POWER, "weighted_itq")):
        of_setting = unsupervised_settings.weighted(parts[0], 4, power)
        assert np.array_equal(of_setting.weight, fit_hash_layer(parts[0].train, n_bits=4, method=method).weight)
    assert not np.array_equal(of_setting.weight, unsupervised_settings.weighted(parts[0], 4, 1).weight)


def test_layers_are_fitted_to_the_chosen_rows_with_the_seed():
    rng = np.random.default_rng(0)
    labels, features = rng.integers(0, 2, (60, 3)).astype(np.uint8), rng.normal(size=(60, 5)).astype(np.float32)
    splits = Splits(*(Split((), part, ()) for part in np.split(labels, [20, 30])), ("a", "b", "c"), "")
    inputs, rows = Inputs(splits, *np.split(features, [20, 30])), np.arange(10)
    changed = inputs.train.copy()
    changed[10:] = 7
    for method in ("random", "itq"):
        once, again, other = (comparison.fitted(method, inputs, rows, n_bits=4, seed=seed)["AP"] for seed in (0, 0, 1))
        assert once == again != other
        assert comparison.fitted(method, replace(inputs, train=changed), rows, n_bits=4, seed=0)["AP"] == once
        assert comparison.fitted(method, inputs, np.arange(20), n_bits=4, seed=0)["AP"] != once


def test_what_a_search_chose_is_scaled_to_other_lengths(tmp_path):
    _choose(tmp_path, "hashnet", 12, "loss.a=1.0", 'loss.continuation="none"')
    assert comparison.chosen_settings(tmp_path, "hashnet", 24, 1) == ("loss.a=0.5", 'loss.continuation="none"')
    _choose(tmp_path, "orthohash", 48, "loss.m=0.2")
    assert comparison.chosen_settings(tmp_path, "orthohash", 36, 0) == ("loss.m=0.2",), "a margin of cosines"
    with pytest.raises(BadConfig):
        comparison.chosen_settings(tmp_path, "orthohash", 36, 2)


def test_scaled_settings_are_searched_in_the_same_space_at_every_length():
    assert METHODS["dsh"].space["loss.m"]["low"] * 48 == pytest.approx(space_at("dsh", 48)["loss.m"]["low"])
    assert METHODS["dhn"].space["loss.inner"]["high"] / 48 == pytest.approx(space_at("dhn", 48)["loss.inner"]["high"])
    assert space_at("dpsh", 48) == METHODS["dpsh"].space


@pytest.mark.parametrize(
    ("method", "setting", "factor"),
    [
        ("hashnet", "a", 1),
        ("dhn", "inner", 1),
        ("dsh", "m", 2),  # both terms are sums
        ("tie_aware", "a", 1),
        ("tie_aware_pairs", "a", 1),
    ],
)
def test_scaled_settings_mean_the_same_at_other_lengths(method, setting, factor, tmp_path):
    """With every bit doubled, inner products and distances double, but nothing else changes."""
    rng = np.random.default_rng(0)
    outputs, labels = torch.from_numpy(rng.normal(size=(8, 12))), torch.from_numpy(rng.integers(0, 2, (8, 3)))
    name = method.removesuffix("_pairs")
    _choose(tmp_path, method, 12, f"loss.{setting}=3")
    values = []
    for n_bits in (12, 24):
        [chosen] = comparison.chosen_settings(tmp_path, method, n_bits, 0)
        loss = loss_class(name)(n_bits=n_bits, n_classes=3, **{setting: float(chosen.split("=")[1])})
        terms = loss(outputs.repeat(1, n_bits // 12), labels)
        # The ranking term sees only whole distances, which doubled bits make even.
        values.append(terms["pairs"].item() if name == "tie_aware" else sum(terms.values()).item())
    assert values[1] == pytest.approx(factor * values[0])


def test_bihalf_has_the_settings_of_its_configuration():
    shipped, ours = (
        load_config(Path("mirflickr25k_mobilenet_v2_bihalf_64"), ["train.device=cpu"]),
        Experiment().config(*METHODS["bihalf"].settings),
    )
    assert (ours.loss, ours.optimizer, ours.train) == (shipped.loss, shipped.optimizer, shipped.train)
    assert ours.model.dropout == shipped.model.dropout


def test_a_loss_without_labels_is_trained_without_a_search(base, own, tmp_path, own_cache):
    run_method("bihalf", Experiment(own, bits=(12, 16), n_seeds=1, n_trials=1, base=base), tmp_path / "out")
    rows = rows_of(tmp_path / "out", "bihalf")
    assert [row["n_bits"] for row in rows] == [12, 16]
    assert {path.name for path in (tmp_path / "out" / "bihalf").iterdir()} == {"rows.jsonl"}
    for row in rows:
        assert set(METHODS["bihalf"].settings) < set(row["settings"])
        assert 0 < row["worst"] <= row["mAP"] <= row["best"] <= 1


def test_broken_images_are_left_out_of_the_scores_as_of_training(own, tmp_path, own_cache):
    root = tmp_path / "pictures"
    render_shapes(root, n_query=8, n_train=40, n_database=20, size=32, seed=0)
    for number in (0, 10, 60):  # one of each split
        (root / "images" / f"{number:06d}.jpg").write_bytes(b"torn")
    network = ("model.backbone=squeezenet1_1", "model.weights=none", "model.size=32", "train.precision=fp32")
    base = ("data.name=folder", f"data.root={json.dumps(str(root))}", *network)
    with pytest.raises(BadDataset, match="on-error skip"):
        load_inputs(Experiment(own, base=base))
    inputs = load_inputs(Experiment(own, base=(*base, "data.on_error=skip")))
    assert (len(inputs.train), len(inputs.query), len(inputs.database)) == (39, 7, 19)
    assert len(inputs.splits.query.labels) == 7


def test_itq_cca_searches_its_ridge_on_validation_images(base, own, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (400, 2)).astype(np.uint8)
    loud, quiet = 5 + 2 * rng.normal(size=(400, 6)), labels + 0.05 * rng.normal(size=(400, 2))
    features = np.concatenate([loud, quiet], axis=1).astype(np.float32)
    splits = Splits(*(Split((), part, ()) for part in (labels, labels[:0], labels)), ("a", "b"), "")
    for ridges in ((0.3, 30.0), (30.0, 0.3)):
        monkeypatch.setattr(comparison, "RIDGES", ridges)
        for database in (features, 0 * features):
            inputs = Inputs(splits, features, features[:0], database)
            found = comparison.tune_ridge(inputs, 2, 0, Experiment(own, base=base), tmp_path)
            assert found == 0.3, "only a small one finds directions of little variance"
    (kept,) = read_records(tmp_path / "itq_cca" / "chosen.jsonl")
    assert (kept["n_bits"], kept["seed"], kept["settings"]) == (2, 0, ["ridge=0.3"])


def test_layers_that_are_not_trained_stand_beside_the_others_in_one_budget(base, own, tmp_path, own_cache):
    experiment = Experiment(own, bits=(2, 30), n_seeds=2, n_trials=1, epochs=1, base=base)
    methods, out = [method for method in METHODS if METHODS[method].fitted], tmp_path / "out"
    said: list[str] = []
    run(out, experiment, methods=methods, jobs=1, say=said.append)
    assert any("N = 1000 " in line for line in said), "the database is smaller"
    for method in methods:
        rows = rows_of(out, method)
        lengths = {"itq_cca": [2, 2], "gallery_itq": []}  # 10 labels; no gallery
        assert [row["n_bits"] for row in rows] == lengths.get(method, [2, 2, 30, 30])
        if method == "itq_cca":
            assert [choice["seed"] for choice in read_records(out / method / "chosen.jsonl")] == [0, 1]
        if method != "cosine":
            assert all(len(row["AP"]) == len(row["asymmetric_AP"]) == 8 for row in rows)
    table = as_markdown(out)
    assert table.count("| ITQ, no labels |") == 5, "two rankings and their tests, and distances"
    assert table.count("Cosine of the features") == 1, "it has no codes: neither outputs, nor distances, nor tests"
    assert "30 bits: " in table
    assert "Friedman" in table
    with pytest.raises(BadConfig, match="freeze_backbone"):
        run(tmp_path / "b", replace(experiment, base=(*base, "model.freeze_backbone=false")), methods=["itq"], jobs=1)
    with pytest.raises(BadConfig, match="model.n_bits"):
        run(tmp_path / "c", replace(experiment, bits=(12, 2000)), methods=["itq"], jobs=1)
    with pytest.raises(BadConfig, match="epochs was 1 and is 3"):
        run(out, replace(experiment, epochs=3), methods=["itq"], jobs=1)
    budget = json.loads((out / "experiment.json").read_text()) | {"splits_sha256": "of other data"}
    (out / "experiment.json").write_text(json.dumps(budget))
    with pytest.raises(BadConfig, match="of other data"):
        run(out, experiment, methods=["itq"], jobs=1)
