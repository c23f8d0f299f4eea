"""Several checkpoints in one evaluation: each has the scores it has alone, and what cannot be compared is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection

from hashseek.retrieval.checkpoint import Header, load_checkpoint, save_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.hash_layers import fit_hash_layer
from hashseek.retrieval.label_files import Problem
from hashseek.retrieval.metrics import evaluate_codes
from hashseek.retrieval.scores import stored_features
from hashseek.retrieval.truncation import truncate
from hashseek.training.evaluation.assembly import EvaluationOptions
from hashseek.training.evaluation.candidates import load_candidates, method_names, method_of, settings_hash
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.report.markdown import as_markdown
from hashseek.training.evaluation.report.plots import draw_all
from hashseek.training.evaluation.report.schema import load_report
from support.vector_models import NAMES, VECTOR_SPLITS, save_vector_model

OPTIONS = EvaluationOptions("v", ns=(5, 20))


def save(path: Path, n_bits: int, *, seed: int = 0, backbone=None, loss: str = "hyp2", nested=None, **training) -> Path:
    described = {"loss": {"name": loss, "nested": nested}, "data": {"name": "vectors", "root": "here"}, **training}
    return save_vector_model(path, n_bits, seed=seed, backbone=backbone, training=described)


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


def test_each_has_the_scores_that_it_has_alone_and_the_folder_shows_them_all(checkpoints, tmp_path):
    names = ("first", "longer", "alone", "dpsh")
    first, *others = (checkpoints[name] for name in names)
    made = evaluate(first, VECTOR_SPLITS, OPTIONS, others=others, baseline=True, n_points=0)
    report = made.report
    assert [model.n_bits for model in report.models] == [8, 12, 16, 12]
    assert [model.checkpoint for model in report.models] == [str(checkpoints[name]) for name in names]
    for name, model in zip(names, report.models, strict=True):
        alone = evaluate(checkpoints[name], VECTOR_SPLITS, OPTIONS, baseline=name == "first", n_points=0).report
        assert (model.scores, model.fingerprint) == (alone.scores, alone.fingerprint)
        assert alone.models == []
        if name == "first":
            assert report.scores == alone.scores
            assert report.baseline == alone.baseline != alone.scores
    assert len({model.scores[0].mean_average_precision.expected for model in report.models}) == 4
    page, markdown, _ = (path.read_text() for path in made.write(tmp_path)[:3])
    assert load_report(tmp_path / "report.json") == report
    assert "code length in bits" in (tmp_path / "figures" / "lengths.svg").read_text()
    for model in report.models:
        value = f"{report.at_main_n(model.scores).mean_average_precision.expected:.4f}"
        assert value in page
        assert f"| {model.n_bits} | **{value}** |" in markdown


def test_a_nested_checkpoint_shows_each_of_its_lengths(checkpoints, tmp_path):
    others = [checkpoints["alone"]]
    report = evaluate(checkpoints["nested"], VECTOR_SPLITS, OPTIONS, others=others, lengths=True, n_points=0).report
    assert [(model.n_bits, model.cut_from) for model in report.models] == [(12, None), (8, 12), (4, 12), (16, None)]
    for model in report.models[1:3]:
        short = truncate(load_checkpoint(checkpoints["nested"]), model.n_bits)
        save_checkpoint(tmp_path / str(model.n_bits), short.model, None, label_names=NAMES)
        alone = evaluate(tmp_path / str(model.n_bits), VECTOR_SPLITS, OPTIONS, n_points=0).report
        assert (model.scores, model.fingerprint) == (alone.scores, alone.fingerprint)
    assert report.models[1].method == "dpsh, mlp:6-16, nested"
    assert f"{checkpoints['nested']}, first 8 of 12 bits" in as_markdown(report)
    alone = report.at_main_n(report.models[3].scores).mean_average_precision  # of a method with one length: a bar
    [bar] = [part for part in draw_all(report, {})["lengths"].axes[0].collections if isinstance(part, LineCollection)]
    np.testing.assert_allclose(bar.get_segments(), [[[16, alone.worst], [16, alone.best]]])


def test_a_method_is_what_trained_the_model(checkpoints, tmp_path):
    frozen = save(tmp_path / "frozen", 8, seed=9, model={"freeze_backbone": True})
    unknown = save_vector_model(tmp_path / "unknown", 8, seed=10)
    partner = save(tmp_path / "partner", 8, seed=11, partner={"name": "asl"})
    names = [method_of(each.header) for each in load_candidates([checkpoints["first"], frozen, unknown, partner])]
    assert names == ["hyp2, mlp:6-16", "hyp2, mlp:6-16, frozen", "unknown loss, mlp:6-16", "hyp2 + asl, mlp:6-16"]


def test_a_line_over_code_lengths_has_one_group_of_settings_at_each_length(tmp_path):
    paths = []
    for n_bits, seed, epochs in ((8, 1, 20), (12, 1, 20), (8, 1, 30), (8, 2, 20), (12, 3, 30), (16, 4, 40)):
        train = {"seed": seed, "epochs": epochs}
        path = tmp_path / f"{n_bits}-{seed}-{epochs}"
        paths.append(save(path, n_bits, seed=seed + epochs, train=train, model={"n_bits": n_bits}))
    report = evaluate(paths[0], VECTOR_SPLITS, OPTIONS, others=paths[1:], n_points=0).report
    methods = [model.method for model in report.models]
    assert [methods.index(method) for method in methods] == [0, 0, 2, 0, 2, 0]
    figure = draw_all(report, {})["lengths"]
    assert {methods[0], methods[2]} <= {label.get_text() for label in figure.legends[0].get_texts()}
    scores = [(model.n_bits, report.at_main_n(model.scores).mean_average_precision) for model in report.models]
    of_first = [[scores[place][1] for place in places] for places in ((0, 3), (1,), (5,))]
    line, band = figure.axes[0].lines[0], figure.axes[0].collections[0]
    means = [np.mean([value.expected for value in values]) for values in of_first]
    np.testing.assert_allclose(line.get_xydata(), np.transpose([(8, 12, 16), means]))
    bounds = [(min(value.worst for value in values), max(value.best for value in values)) for values in of_first]
    assert {*band.get_paths()[0].vertices[:, 1]} == {*np.ravel(bounds)}


def test_seeds_of_one_length_are_one_method_whatever_comes_between_them():
    headers = [
        Header("mlp:6-16", n_bits, None, (), fingerprint="", training={"train": {"epochs": epochs}})
        for n_bits, epochs in ((8, 20), (12, 30), (8, 30), (12, 30))
    ]
    first, *others = method_names(headers)
    assert others == [first, f"{first} (2)", first]


def test_settings_keep_their_number_at_another_length_and_from_another_folder():
    headers = [
        Header(
            "mlp:6-16",
            n_bits,
            None,
            (),
            fingerprint="",
            training={"train": {"epochs": epochs}, "model": {"n_bits": n_bits}, "data": {"root": root}},
        )
        for n_bits, epochs, root in ((8, 20, "a"), (8, 30, "a"), (12, 30, "a"), (12, 20, "a"), (8, 20, "b"))
    ]
    first, *others = method_names(headers)
    assert others == [f"{first} (2)", f"{first} (2)", first, first]
    assert settings_hash(headers[0]) == settings_hash(headers[4]) != settings_hash(headers[3])


def test_what_cannot_be_compared_is_refused(checkpoints, checkpoint, tmp_path):
    first = checkpoints["first"]
    held_out = save(tmp_path / "other", 8, seed=5, held_out=["a"])
    for others, lengths in (([checkpoint], False), ([held_out], False), ([], True)):
        with pytest.raises(BadConfig):
            evaluate(first, VECTOR_SPLITS, OPTIONS, others=others, lengths=lengths)


def test_without_data_all_must_be_of_one_data_set(checkpoints, tmp_path):
    other = save(tmp_path / "other", 8, seed=7, splits_sha256="e" * 64)
    for first, others in ((other, []), (checkpoints["first"], [other])):
        with pytest.raises(BadConfig, match=str(other)):
            evaluate(first, VECTOR_SPLITS, replace(OPTIONS, as_trained=True), others=others)
    notes = evaluate(checkpoints["first"], VECTOR_SPLITS, OPTIONS, others=[other], n_points=0).report.notes
    assert any(str(other) in note for note in notes)
    data = evaluate(other, VECTOR_SPLITS, OPTIONS, n_points=0).report.data
    assert not data["same_splits_as_in_training"]


def test_the_notes_name_the_first_skipped_lines_and_count_the_rest(checkpoints):
    skipped = [Problem(f"line {n}", "gone") for n in range(25)]
    splits = replace(VECTOR_SPLITS, problems=(*skipped, Problem("list", "odd", skipped=False)))
    notes = evaluate(checkpoints["first"], splits, OPTIONS, n_points=0).report.notes
    assert notes[:20] == ["note: list: odd", *(f"skipped: line {n}: gone" for n in range(19))]
    assert "6 more" in notes[20]


def test_itq_is_fitted_to_the_training_features_without_labels(checkpoints):
    report = evaluate(checkpoints["first"], VECTOR_SPLITS, replace(OPTIONS, seed=1), baseline=True, n_points=0).report
    backbone = load_checkpoint(checkpoints["first"]).model.backbone.eval()
    train, *searched = VECTOR_SPLITS.train, VECTOR_SPLITS.query, VECTOR_SPLITS.database
    features = [backbone(torch.from_numpy(split.vectors)).detach().numpy() for split in (train, *searched)]
    layer = fit_hash_layer(stored_features(features[0]).astype(np.float32), n_bits=8, seed=1)
    codes = [pack(layer(part)) for part in features[1:]]
    expected = evaluate_codes(*codes, *(split.labels for split in searched), n_bits=8, ns=(5, 20))
    for score in report.baseline:
        assert score.mean_average_precision.expected == pytest.approx(expected[f"AP@{score.n}"].expected.mean())
    assert report.baseline_recall[-1] == pytest.approx(report.curves.recall[-1])


def test_where_itq_is_not_possible_the_report_says_so(tmp_path):
    longer = save(tmp_path / "longer", 17)  # than the features are wide
    made = evaluate(longer, VECTOR_SPLITS, OPTIONS, baseline=True, n_points=0).report
    assert made.baseline == []
    assert any("ITQ" in note for note in made.notes)
