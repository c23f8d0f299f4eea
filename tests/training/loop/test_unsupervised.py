"""Training without labels: on a folder of pictures, and beside labels that must change nothing."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.evaluation.assembly import EvaluationOptions
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.loop.fit import fit
from hashseek.training.runs.run_folder import read_records
from hashseek.training.sweep import sweep
from support.models import run_config

config = partial(run_config, train__epochs=4)
pytestmark = pytest.mark.usefixtures("own_cache")

FROZEN = {"freeze_backbone": True, "dropout": 0.2, "head": "normalized"}
BIHALF: dict[str, Any] = {"loss": {"name": "bihalf"}}


@pytest.mark.parametrize(
    "sections",
    [BIHALF, BIHALF | {"model": FROZEN}],
    ids=["trained backbone", "frozen backbone"],
)
def test_a_folder_of_pictures_is_enough(pictures, tmp_path, sections):
    data = {"name": "pictures", "root": str(pictures)}
    result = fit(config(pictures, **sections, data=data), out=tmp_path / "run")
    log = read_records(result.run.log)
    assert len(log) == 4
    assert not any(key.startswith("val_") for record in log for key in record)
    best, last = load_file(result.run.best), load_file(result.run.last)
    assert all(torch.equal(best[key], last[key]) for key in last)
    assert result.best_epoch == 4
    header = load_header(result.run.best)
    assert header.label_names == ()
    assert header.scores == {"epoch": 4}
    assert "4 of 4" in result.run.report.read_text()
    assert "90 for training, 0 for validation" in result.run.report.read_text()
    with pytest.raises(BadDataset, match="no labels"):
        evaluate(result.run.best, build_splits(**data), EvaluationOptions("pictures"))


def test_labels_change_nothing(pictures, tmp_path):
    (tmp_path / "shuffled").mkdir()
    header, *rows = (pictures / "labels.csv").read_text().splitlines()
    files, labels, splits = zip(*(row.split(",") for row in rows), strict=True)
    mixed = np.random.default_rng(0).permutation(labels)
    lines = [",".join((str(pictures / file), *rest)) for file, *rest in zip(files, mixed, splits, strict=True)]
    (tmp_path / "shuffled" / "labels.csv").write_text("\n".join([header, *lines]) + "\n")
    weights = []
    for root in (pictures, tmp_path / "shuffled"):
        run = fit(config(root, **BIHALF, model=FROZEN), out=tmp_path / f"run-{root.name}").run
        weights.append(load_file(run.last)["head.weight"])
    assert torch.equal(*weights)


def test_what_needs_labels_is_refused(pictures, tmp_path):
    data = {"name": "pictures", "root": str(pictures)}
    for sections in ({}, {**BIHALF, "partner": {"name": "bce"}}):
        with pytest.raises(BadConfig, match="bihalf"):
            fit(config(pictures, data=data, **sections), out=tmp_path / "run")
    content = config(pictures, **BIHALF).model_dump(mode="json")
    with pytest.raises(BadConfig, match="bihalf"):
        sweep({**content, "sweep": {"space": {"optimizer.lr": [1e-4, 1e-3]}}}, folder=tmp_path / "sweep")
    assert not list(tmp_path.iterdir())
    (tmp_path / "._one.jpg").write_bytes(b"of a Mac")  # hidden files are left out
    with pytest.raises(BadDataset, match="no images"):
        build_splits("pictures", root=str(tmp_path))
    with pytest.raises(BadDataset, match="no folder"):
        build_splits("pictures", root=str(tmp_path / "none"))
