"""HyP2's Tables 5 and 6: distances worked by hand, variants trained once, and paper and ours side by side."""

import json

import numpy as np
import pytest

from experiments import __main__ as program
from experiments import hyp2_tables as tables
from experiments.comparison import Experiment, rows_of
from experiments.finetuned import CHOSEN
from experiments.methods import METHODS
from hashseek.retrieval.errors import BadConfig
from hashseek.training.runs.run_folder import read_records, write_records


def test_distances_to_centres_are_those_worked_by_hand():
    # Codes of label a: (1, 1) and (1, -1), so its centre is (1, 0). Label b: (-1, -1). Label c shares an image with a,
    # and its centre is (1, 1). Label d has no image.
    outputs = np.array([[3, 2], [1, 0], [-1, -5]], np.float32)
    labels = np.array([[1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]], np.uint8)
    found = tables.centre_distances(outputs, labels)
    assert found["centre_intra"] == pytest.approx((1 + 1 + 0 + 0) / 4)
    # a to b: (2, 1); b to a: the same, nearer than c; c to b: (2, 2).
    assert found["centre_inter"] == pytest.approx((2 * 5**0.5 + 8**0.5) / 3)
    together = tables.centre_distances(outputs, np.ones((3, 2), np.uint8))
    assert np.isnan(together["centre_inter"])


def test_a_variant_is_trained_once_with_the_settings_of_hyp2(base, own, tmp_path, monkeypatch, own_cache):
    (tmp_path / "hyp2").mkdir()
    settings = ["optimizer.lr=0.02", "loss.beta=0.5", "optimizer.proxy_lr=0.01"]
    choices = [{"n_bits": 12, "seed": seed, "settings": settings} for seed in range(2)]
    write_records(tmp_path / "hyp2" / "chosen.jsonl", choices)
    experiment = Experiment(own, bits=(12,), n_seeds=2, epochs=1, base=base)
    tables.run_variant("HyP2, beta 1.00", experiment, tmp_path)
    place = tmp_path / tables.FOLDER
    rows = rows_of(place, "HyP2, beta 1.00")
    assert [(row["n_bits"], row["seed"]) for row in rows] == [(12, 0), (12, 1)]
    assert all(0 < row["mAP"] <= 1 and row["centre_intra"] > 0 for row in rows)
    monkeypatch.setattr(tables, "trained", None)  # everything is finished
    tables.run_variant("HyP2, beta 1.00", experiment, tmp_path)
    printed = tables.as_markdown(tmp_path)
    mean = np.mean([row["mAP"] for row in rows])
    assert f"| HyP2, beta 1.00 | ours | {mean:.4f} ± " in printed
    assert "| HyP2, beta 1.00 | paper | 0.845 | 0.881 | 0.893 | 0.901 |" in printed


def test_an_ablation_has_a_search_of_its_own(base, own, tmp_path, own_cache):
    experiment = Experiment(own, bits=(12,), n_seeds=1, n_trials=1, epochs=1, base=base)
    tables.run_variant("proxy + pair", experiment, tmp_path)
    [choice] = read_records(tmp_path / "hyp2_proxy_pair" / "chosen.jsonl")
    assert {setting.split("=")[0] for setting in choice["settings"]} == set(METHODS["hyp2_proxy_pair"].space)
    [row] = rows_of(tmp_path / tables.FOLDER, "proxy + pair")
    # HyP2 with the same AP: no difference, and all queries are equal.
    write_records(tmp_path / tables.FOLDER / "HyP2, beta 1.00" / "rows.jsonl", [row | {"method": "HyP2, beta 1.00"}])
    assert "| proxy + pair | +0.0000 (1; 1) 50% |" in tables.as_markdown(tmp_path)


@pytest.mark.parametrize("command", [program.finetuned, program.hyp2_tables])
def test_settings_of_other_data_are_refused(command, tmp_path):
    with pytest.raises(BadConfig):  # no settings at all
        command(out=tmp_path)
    for method in CHOSEN:
        (tmp_path / method).mkdir()
        choices = [{"n_bits": n_bits, "seed": seed, "settings": []} for n_bits in (12, 48) for seed in range(5)]
        write_records(tmp_path / method / "chosen.jsonl", choices)
    (tmp_path / "experiment.json").write_text(json.dumps({"data": "scene"}))
    with pytest.raises(BadConfig, match="scene"):
        command(out=tmp_path)
