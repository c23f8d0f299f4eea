"""The comparison of methods: same budget, chosen on validation, resumable, and scored as `evaluate` scores."""

import json

import pytest

from retrieval.errors import BadConfig
from training.config import read_config
from training.datasets.shapes import render_shapes
from training.reproduce import mirflickr
from training.reproduce.mirflickr import METHODS, as_markdown, read_rows, run, run_method


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> tuple[str, ...]:
    root = tmp_path_factory.mktemp("shapes")
    render_shapes(root, n_query=12, n_train=50, n_database=40, size=32, seed=0)
    return (
        "data.name=folder",
        f"data.root={json.dumps(str(root))}",
        "model.backbone=squeezenet1_1",
        "model.weights=none",
        "model.size=32",
        "train.batch_size=15",
        "train.precision=fp32",
    )


def test_every_method_is_a_valid_configuration_with_a_space_that_it_knows():
    from training.sweep_space import check_space, parse_space

    for method in METHODS.values():
        settings = (*mirflickr.common_settings(3), *method.settings)
        content = read_config(mirflickr.BASE, settings)
        check_space(content, parse_space(method.space), source=method.title)


def test_rows_come_once_and_an_interrupted_comparison_goes_on(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    options = {"n_seeds": 2, "n_trials": 2, "epochs": 2, "base": base}

    def broken(*arguments):
        raise KeyboardInterrupt

    run_method("hyp2", out, bits=(12,), **options)
    before = read_rows(out, "hyp2")
    assert [(row["n_bits"], row["seed"]) for row in before] == [(12, 0), (12, 1)]
    with monkeypatch.context() as patched:
        patched.setattr(mirflickr, "measure", broken)
        with pytest.raises(KeyboardInterrupt):
            run_method("hyp2", out, bits=(12, 16), **options)
    run_method("hyp2", out, bits=(12, 16), **options)
    rows = read_rows(out, "hyp2")
    assert rows[:2] == before
    assert [(row["n_bits"], row["seed"]) for row in rows] == [(12, 0), (12, 1), (16, 0), (16, 1)]
    for row in rows:
        assert 0 < row["worst"] <= row["mAP"] <= row["best"] <= 1
    assert {path.name for path in (out / "hyp2").iterdir()} == {"chosen.json", "rows.jsonl"}


def test_methods_run_side_by_side_into_one_table(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", str(tmp_path / "cache"))
    methods = ("hyp2", "mulsupcon")
    options = {"methods": methods, "bits": (12,), "n_seeds": 2, "n_trials": 1, "jobs": 2, "base": base}
    assert as_markdown(tmp_path, methods=methods) == "no run is finished yet\n"
    run(tmp_path / "out", epochs=1, **options)
    table = as_markdown(tmp_path / "out", methods=methods)
    rows = read_rows(tmp_path / "out", "hyp2")
    mean = sum(row["mAP"] for row in rows) / 2
    assert f"| HyP2 | {mean:.4f} ± " in table
    assert "| MulSupCon + quantisation | " in table
    assert "of 2" in table
    with pytest.raises(BadConfig, match="model.n_bits"):
        run(tmp_path / "never", epochs=1, **(options | {"bits": (12, 2000)}))
    with pytest.raises(BadConfig, match="which do not compare with"):
        run(tmp_path / "out", epochs=2, **options)
