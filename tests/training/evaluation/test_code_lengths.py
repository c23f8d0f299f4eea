"""Several checkpoints in one evaluation: each has the figures it has alone, and what does not compare is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_compare import NAMES, SPLITS

from hashseek.api.cli import main
from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.truncation import truncate
from hashseek.training.evaluation.code_lengths import load_candidates, method_of, on_one_backbone
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.report import as_markdown, load_report

OPTIONS = {"data_name": "v", "ns": (5, 20), "n_points": 0}


def save(path: Path, n_bits: int, *, seed: int = 0, backbone=None, loss: str = "hyp2", nested=None, **training) -> Path:
    torch.manual_seed(seed)
    model = HashModel(backbone="mlp:6-16", n_bits=n_bits)
    if backbone is not None:
        model.backbone.load_state_dict(backbone.state_dict())
    described = {"loss": {"name": loss, "nested": nested}, "data": {"name": "vectors", "root": "here"}, **training}
    save_checkpoint(path, model, None, label_names=NAMES, training=described)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Three on one backbone, one on its own, and one whose first 4 and 8 bits are codes too."""
    folder = tmp_path_factory.mktemp("lengths")
    first = save(folder / "hyp2-8", 8)
    backbone = load_checkpoint(first).model.backbone
    return {
        "first": first,
        "longer": save(folder / "hyp2-12", 12, seed=1, backbone=backbone),
        "dpsh": save(folder / "dpsh-12", 12, seed=2, backbone=backbone, loss="dpsh"),
        "alone": save(folder / "dpsh-16", 16, seed=3, loss="dpsh"),
        "nested": save(folder / "nested-12", 12, seed=4, loss="dpsh", nested={"lengths": [4, 8, 12]}),
    }


def test_each_has_the_figures_that_it_has_alone(checkpoints):
    names = ("first", "longer", "alone", "dpsh")
    first, *others = (checkpoints[name] for name in names)
    report = evaluate(first, SPLITS, others=others, baseline="random-directions", **OPTIONS).report
    assert [model.n_bits for model in report.models] == [8, 12, 16, 12]
    assert [model.checkpoint for model in report.models] == [str(checkpoints[name]) for name in names]
    for name, model in zip(names, report.models, strict=True):
        alone = evaluate(checkpoints[name], SPLITS, baseline="random-directions", **OPTIONS).report
        assert (model.scores, model.fingerprint) == (alone.scores, alone.fingerprint)
        assert alone.models == []
        if name == "first":
            assert report.scores == alone.scores
            assert report.baseline == alone.baseline != alone.scores
    assert len({model.scores[0].mean_average_precision.expected for model in report.models}) == 4


def test_one_backbone_sees_the_images_once(checkpoints):
    found = load_candidates([checkpoints[name] for name in ("first", "alone", "longer", "dpsh")])
    assert on_one_backbone(found) == [[0, 2, 3], [1]]


def test_a_nested_checkpoint_shows_each_of_its_lengths(checkpoints, tmp_path):
    report = evaluate(checkpoints["nested"], SPLITS, others=[checkpoints["alone"]], lengths=True, **OPTIONS).report
    assert [(model.n_bits, model.cut_from) for model in report.models] == [(12, None), (8, 12), (4, 12), (16, None)]
    for model in report.models[1:3]:
        short = truncate(load_checkpoint(checkpoints["nested"]), model.n_bits)
        file = tmp_path / str(model.n_bits)
        save_checkpoint(file, short.model, None, label_names=NAMES)
        alone = evaluate(file, SPLITS, **OPTIONS).report
        assert (model.scores, model.fingerprint) == (alone.scores, alone.fingerprint)
    assert report.models[1].method == "dpsh, mlp:6-16, nested"
    assert f"{checkpoints['nested']}, first 8 of 12 bits" in as_markdown(report)
    with pytest.raises(BadConfig, match="--lengths shows the lengths of a nested code, but .*hyp2-8 was not"):
        evaluate(checkpoints["first"], SPLITS, lengths=True, **OPTIONS)


def test_lines_go_by_what_trained_the_models(checkpoints, tmp_path):
    frozen = save(tmp_path / "frozen", 8, seed=9, model={"freeze_backbone": True})
    none = tmp_path / "none"
    torch.manual_seed(10)
    save_checkpoint(none, HashModel(backbone="mlp:6-16", n_bits=8), None, label_names=NAMES)
    names = [method_of(each) for each in load_candidates([checkpoints["first"], frozen, none])]
    assert names == ["hyp2, mlp:6-16", "hyp2, mlp:6-16, frozen", "unknown loss, mlp:6-16"]


def test_the_folder_shows_them_all(checkpoints, tmp_path):
    others = [checkpoints[name] for name in ("longer", "alone", "dpsh")]
    made = evaluate(checkpoints["first"], SPLITS, others=others, **OPTIONS)
    made.write(tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert load_report(tmp_path / "report" / "report.json") == made.report
    figure = (tmp_path / "report" / "figures" / "lengths.svg").read_text()
    assert "code length in bits" in figure
    for name in ("hyp2, mlp:6-16", "dpsh, mlp:6-16"):
        assert name in figure
    for model in made.report.models:
        value = next(score for score in model.scores if score.n == made.report.main_n).mean_average_precision
        assert f"<b>{value.expected:.4f}</b>" in page
        bounds = f"{value.low:.4f} to {value.high:.4f} | {value.worst:.4f} to {value.best:.4f}"
        assert f"| {model.method} | {model.n_bits} | **{value.expected:.4f}** | {bounds} |" in markdown
    assert 'id="lengths"' in page
    alone = evaluate(checkpoints["first"], SPLITS, **OPTIONS)
    alone.write(tmp_path / "alone")
    assert 'id="lengths"' not in (tmp_path / "alone" / "report.html").read_text()


def test_what_does_not_compare_is_refused_before_the_work(checkpoints, checkpoint, tmp_path):
    first = checkpoints["first"]
    for others, reason in (
        ([first], "give the same codes of 8 bits: name one"),
        ([checkpoint], "tiny.safetensors encodes images, but the data set has vectors"),
        ([save(tmp_path / "other", 8, seed=5, held_out=["a"])], "trained without nothing and .*other without a: their"),
    ):
        with pytest.raises(BadConfig, match=reason):
            evaluate(first, SPLITS, others=others, **OPTIONS)
    vectors = np.zeros((50, 7), np.float32)
    wider = replace(SPLITS, query=replace(SPLITS.query, vectors=vectors[:15]))
    with pytest.raises(
        BadConfig, match="this checkpoint encodes vectors of 6 numbers, but the data set has vectors of 7"
    ):
        evaluate(first, wider, others=[checkpoints["alone"]], **OPTIONS)


def test_without_data_they_must_be_of_one_data_set(checkpoints, tmp_path, capsys):
    elsewhere = save(tmp_path / "elsewhere", 8, seed=6, data={"name": "vectors", "root": "there"})
    other = save(tmp_path / "other", 8, seed=7, splits_sha256="e" * 64)
    for path in (elsewhere, other):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", str(checkpoints["first"]), str(path)])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"{checkpoints['first']} and {path} were not trained on the same splits: name the data set" in said
    report = evaluate(checkpoints["first"], SPLITS, others=[other], **OPTIONS).report
    assert (
        f"{other} was trained on other splits than these: query images may have been seen in training" in report.notes
    )
