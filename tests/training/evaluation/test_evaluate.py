"""Evaluation through the searcher: metrics equal those of the oracle, and the report says what it measured."""

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.indexing.calibration import stored_calibration
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.collection import CATALOG, open_or_create
from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.devices import fast_bf16
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.images import load_file, read_bytes
from hashseek.retrieval.metrics import bootstrap
from hashseek.training.data import cached_features
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.evaluation import evaluate as evaluate_module
from hashseek.training.evaluation import split_encoder
from hashseek.training.evaluation.assembly import EvaluationOptions, overlaps
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.report.compare import read_per_query
from hashseek.training.evaluation.report.examples import random_queries
from hashseek.training.evaluation.report.markdown import summary
from hashseek.training.evaluation.report.schema import load_report
from hashseek.training.evaluation.split_encoder import SplitEncoder
from hashseek.training.loop.fit import fit
from hashseek.training.progress import Progress
from support import hamming_oracle as hamming
from support.in_process import run_command
from support.models import run_config, untrained_checkpoint
from support.vector_models import VECTOR_SPLITS, save_vector_model

CPU = {"device": "cpu", "precision": "fp32"}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(data set, checkpoint with random weights)."""
    root = tmp_path_factory.mktemp("evaluate")
    render_shapes(root / "data", n_query=12, n_train=4, n_database=60, size=48, seed=2)
    untrained_checkpoint(root / "model.safetensors", n_bits=10, root=root / "data")
    return root / "data", root / "model.safetensors"


def test_all_three_rankings_equal_loops_over_the_database(world, monkeypatch):
    data, checkpoint = world
    monkeypatch.setattr(evaluate_module, "SCORES_PER_BLOCK", 5 * 60)  # five queries at a time
    monkeypatch.setattr(split_encoder, "_ROWS", 7)
    splits = build_splits("folder", root=str(data))
    report = evaluate(checkpoint, splits, EvaluationOptions("shapes", ns=(5, None), **CPU), n_points=0).report
    encoder = Encoder(load_checkpoint(checkpoint), device="cpu", precision="fp32")

    def encode(split):
        pixels = np.stack([load_file(read_bytes(path), encoder.header.preprocessing).pixels for path in split.paths])
        features, outputs = encoder.features_and_outputs(pixels)
        stored = (features / np.linalg.norm(features, axis=1)[:, None]).astype(np.float16).astype(float)
        return outputs.astype(float), stored / np.linalg.norm(stored, axis=1)[:, None]

    (outputs, features), (stored_outputs, stored) = encode(splits.query), encode(splits.database)
    scores = {
        "asymmetric": outputs @ np.where(stored_outputs > 0, 1, -1).T,
        "float": features @ stored.T,
    }
    relevant = splits.query.labels @ splits.database.labels.T > 0
    found = {(score.rank, score.n): score for score in report.rankings}
    assert list(found) == [(rank, n) for n in (5, 60) for rank in ("hamming", "asymmetric", "float")]
    for rank, of_pairs in scores.items():
        for n in (5, 60):
            ap, precision = [], []
            for row, relevance in zip(of_pairs.round(9), relevant, strict=True):
                order = sorted(range(60), key=lambda at, row=row: (-row[at], at))[:n]
                hits = [bool(relevance[at]) for at in order]
                at_hits = [sum(hits[: i + 1]) / (i + 1) for i in range(n) if hits[i]]
                ap.append(sum(at_hits) / len(at_hits) if at_hits else 0)
                precision.append(sum(hits) / n)
            assert found[rank, n].mean_average_precision == pytest.approx(np.mean(ap))
            assert found[rank, n].precision == pytest.approx(np.mean(precision))
    for score in report.scores:
        assert found["hamming", score.n].mean_average_precision == score.mean_average_precision.expected
        assert found["hamming", score.n].precision == score.precision.expected
    assert "asymmetric" in summary(report)


def test_training_and_every_evaluation_share_features_and_their_codes_are_those_of_the_service(
    world, tmp_path, own_cache, monkeypatch
):
    model = {"freeze_backbone": True, "head_init": "random"}  # there are two training images
    settings = run_config(world[0], model=model, train={"val_fraction": 0.5})
    splits = build_splits("folder", root=str(world[0]))
    folder = own_cache / "features"
    run = fit(settings, out=tmp_path / "run").run
    [of_training] = folder.iterdir()

    def report_of(checkpoint: Path, **options):
        options = EvaluationOptions("shapes", ns=(5,), **{**CPU, **options})
        report = evaluate(checkpoint, splits, options, baseline=True, n_points=0).report
        return report, {file: file.stat().st_ino for file in folder.iterdir()}

    first, files = report_of(run.best)
    assert len(files) == 3
    encoder = SplitEncoder(load_checkpoint(run.best), **CPU)
    encoded = encoder.encode(splits.train, Progress(quiet=True), "train")
    pixels = [load_file(read_bytes(path), encoder.encoder.preprocessing).pixels for path in splits.train.paths]
    np.testing.assert_array_equal(encoded.codes, encoder.encoder.encode_pixels(np.stack(pixels)))
    assert {file: file.stat().st_ino for file in folder.iterdir()} == files
    assert json.loads(run.environment.read_text())[0]["features_computed_in"] == first.model["computed_in"]

    again, same = report_of(run.last)
    assert same == files  # neither written again nor added to
    assert again.baseline == first.baseline
    changed = splits.query.paths[0]
    os.utime(changed, ns=(1, 1))
    assert len(report_of(run.best)[1]) == 4
    if fast_bf16():
        assert len(report_of(run.best, precision="bf16")[1]) == 7
    assert of_training in files
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    used = {file for file in report_of(run.best)[1] if file.stat().st_mtime > 1}
    assert len(used) == 3
    most = 1.2 * sum(file.stat().st_size for file in used)
    monkeypatch.setattr(cached_features, "_KEPT_BYTES", most)
    os.utime(changed, ns=(2, 2))
    kept = report_of(run.best)[1]
    assert (used < kept.keys(), sum(file.stat().st_size for file in kept) <= most) == (True, True)


def test_metrics_equal_those_of_the_oracle(world, monkeypatch):
    data, checkpoint = world
    monkeypatch.setattr(evaluate_module, "RANKS_PER_BLOCK", 5 * 60)  # five queries at a time
    splits = build_splits("folder", root=str(data))
    made = evaluate(checkpoint, splits, EvaluationOptions("shapes", ns=(5, None, 1000), **CPU), n_points=0)
    report = made.report
    encoder = Encoder(load_checkpoint(checkpoint), device="cpu", precision="fp32")

    def encode(split):
        loaded = [load_file(read_bytes(path), encoder.header.preprocessing).pixels for path in split.paths]
        return encoder.encode_pixels(np.stack(loaded))

    distances, ids = hamming.search(encode(splits.query), encode(splits.database), 60)
    relevant = splits.query.labels @ splits.database.labels.T > 0
    for score, n in zip(report.scores, (5, 60), strict=True):
        assert score.n == n
        found = np.take_along_axis(relevant, ids, axis=1)[:, :n]
        hits = np.cumsum(found, axis=1)
        ap = (found * hits / np.arange(1, n + 1)).sum(axis=1) / np.maximum(hits[:, -1], 1)
        assert score.as_served == pytest.approx(ap.mean())
        np.testing.assert_allclose(made.per_query[f"AP@{n}_as_served"], ap)
        bounds = score.mean_average_precision
        for bound in ("worst", "best"):
            assert np.mean(made.per_query[f"AP@{n}_{bound}"]) == pytest.approx(getattr(bounds, bound))
        assert bounds.worst - 1e-12 <= score.as_served <= bounds.best + 1e-12
        assert bounds.worst <= bounds.expected <= bounds.best
        assert score.precision.worst - 1e-12 <= found.mean() <= score.precision.best + 1e-12
    assert report.main_n == 5  # at N = 60, the whole database, recall is always 1
    assert any("N = 1000" in note for note in report.notes)
    assert report.data["chance_(share_of_relevant_pairs)"] == pytest.approx(relevant.mean())
    for example in (*report.examples, *report.worst):
        assert example.name == splits.query.paths[example.row].name
        assert [hit.row for hit in example.hits] == ids[example.row, :10].tolist()
        assert [hit.distance for hit in example.hits] == distances[example.row, :10].tolist()
        for hit in example.hits:
            shared = splits.query.labels[example.row] & splits.database.labels[hit.row]
            assert hit.matched == [splits.label_names[i] for i in np.flatnonzero(shared)]
            assert hit.share == pytest.approx(shared.sum() / splits.query.labels[example.row].sum())


def test_the_command_prints_the_summary_and_writes_the_folder(world, tmp_path, capsys):
    other = untrained_checkpoint(tmp_path / "other.safetensors", n_bits=8, root=world[0])
    options = ("-n", 20, "-n", 5, "-n", "all", "--out", tmp_path, "--precision", "fp32", "--device", "cpu")
    more = ("--normalizer", "possible", "--seed", 3, "--protocol", "hyp2")
    code, printed, _ = run_command(capsys, "evaluate", world[1], other, *options, *more)  # on what it was trained on
    assert code == 0
    report = load_report(tmp_path / "report.json")
    assert [model.n_bits for model in report.models] == [10, 8]
    assert report.model["computed_in"].split()[1:] == ["cpu", "float32"]
    assert (report.data["data_set"], bool(report.command)) == (str(world[0]), True)
    assert [score.n for score in report.scores] == [5, 20, 60]
    assert (report.normalizer, report.seed) == ("possible", 3)
    assert [example.row for example in report.examples] == random_queries(12, seed=3)
    interval, found = bootstrap(read_per_query(tmp_path / "per_query.csv")[1]["AP@5"], seed=3), report.scores[0]
    assert (found.mean_average_precision.low, found.mean_average_precision.high) == (interval.low, interval.high)
    assert "hyp2" in {score.rank for score in report.rankings}
    assert f"| 5 | **{report.scores[0].mean_average_precision.expected:.4f}** |" in printed
    assert printed.splitlines()[2] in (tmp_path / "report.md").read_text()
    for name in ("report.html", "per_query.csv", "figures/precision_curve.svg", "figures/tsne_codes.png"):
        assert (tmp_path / name).stat().st_size > 300
    assert (report.data["queries"], report.data["database"]) == (12, 60)
    assert report.fingerprint == load_checkpoint(world[1]).header.fingerprint


@pytest.mark.parametrize(
    "arguments",
    [
        ("-n", "many"),
        ("-n", "0"),
        ("--points", "-1"),
        ("--lengths",),
        ("--calibrate", "nowhere"),
        ("--baseline", "untrained"),
        ("--device", "cuda:99"),
        ("nowhere.safetensors",),
    ],
)
def test_a_command_that_cannot_work_is_refused_in_one_line(world, arguments, capsys):
    code, printed, said = run_command(capsys, "evaluate", world[1], *arguments)
    assert (code, printed, len(said.splitlines())) == (2, "", 1)


def test_bad_input_is_refused_and_broken_images_are_left_out_on_demand(world, tmp_path, capsys):
    data, checkpoint = world
    splits = build_splits("folder", root=str(data))
    own = shutil.copytree(data, tmp_path / "data")
    broken = own / splits.database.paths[0].relative_to(data)
    broken.write_bytes(broken.read_bytes()[:200])
    options = EvaluationOptions("x", ns=(5,), **CPU)
    with pytest.raises(BadDataset):
        evaluate(checkpoint, build_splits("folder", root=str(own)), options)
    out = tmp_path / "new" / "report"
    command = ("-n", 5, "--points", 0, "--baseline", "none", "--device", "cpu", "--out", out)
    assert run_command(capsys, "evaluate", checkpoint, *command, "--data", own, "--on-error", "skip")[0] == 0
    report = load_report(out / "report.json")
    assert not any("ITQ" in note for note in report.notes)  # neither fitted nor tried
    assert not list(out.glob("figures/tsne*"))
    assert report.data["database"] == 59
    assert any(broken.name in note for note in report.notes)
    model = load_checkpoint(checkpoint)
    training = {**model.header.training, "splits_sha256": "0" * 64}
    save_checkpoint(tmp_path / "other", model.model, model.header.preprocessing, label_names=("a",), training=training)
    assert run_command(capsys, "evaluate", tmp_path / "other", *command)[0] == 2  # of its training as they are now
    assert run_command(capsys, "evaluate", tmp_path / "other", *command, "--on-error", "skip")[0] == 0


def test_copies_of_queries_in_other_splits_are_counted(world, tmp_path):
    splits = build_splits("folder", root=str(world[0]))
    assert set(overlaps(splits).values()) == {0}
    own = shutil.copytree(world[0], tmp_path / "data")
    queries, copies = splits.query.paths, [*splits.database.paths[:2], splits.train.paths[0]]
    for original, copy in zip((queries[0], queries[0], queries[1]), copies, strict=True):
        (own / copy.relative_to(world[0])).write_bytes(original.read_bytes())
    found = overlaps(build_splits("folder", root=str(own)))
    assert (found.pop("copies_of_queries_in_train"), found.pop("copies_of_queries_in_database")) == (1, 2)
    assert set(found.values()) == {0}


def test_a_model_of_vectors_is_evaluated_on_vectors_and_on_nothing_else(world, tmp_path):
    data, of_images = world
    checkpoint = save_vector_model(tmp_path / "vectors", 8)
    options = EvaluationOptions("v", ns=(5,))
    made = evaluate(checkpoint, VECTOR_SPLITS, options, n_points=20)
    assert not made.report.data["same_splits_as_in_training"]
    model = load_checkpoint(checkpoint).model.eval()
    with torch.inference_mode():
        query, database = (
            pack(model(torch.from_numpy(part.vectors))) for part in (VECTOR_SPLITS.query, VECTOR_SPLITS.database)
        )
    _, ids = hamming.search(query, database, 10)
    for example in made.report.examples:
        assert [hit.row for hit in example.hits] == ids[example.row].tolist()
    made.write(tmp_path / "report")
    assert "<img" not in (tmp_path / "report" / "report.html").read_text()
    for path, splits in ((checkpoint, build_splits("folder", root=str(data))), (of_images, VECTOR_SPLITS)):
        with pytest.raises(BadConfig):
            evaluate(path, splits, options)


def test_the_calibration_of_a_report_is_stored_in_a_collection_of_its_checkpoint(world, indexed, tmp_path, capsys):
    open_or_create(tmp_path / "collection", checkpoint=world[1]).close()
    arguments = ("evaluate", world[1], "-n", "5", "--points", "0", "--device", "cpu")
    out = tmp_path / "report"
    assert run_command(capsys, *arguments, "--out", out, "--calibrate", tmp_path / "collection")[0] == 0
    report = load_report(out / "report.json")
    with closing(Catalog(tmp_path / "collection" / CATALOG)) as catalog:
        kept = stored_calibration(catalog.spaces)
    assert kept.calibration == report.calibration
    assert (kept.n_images, kept.labels) == (60, tuple(label.name for label in report.labels))
    assert report.data["query_sha256"][:12] in kept.source
    code, _, said = run_command(capsys, *arguments, "--out", tmp_path / "none", "--calibrate", indexed)
    assert (code, len(said.splitlines())) == (2, 1)  # codes of another checkpoint


def test_a_calibration_or_a_service_needs_the_whole_database_where_labels_were_held_out(world, tmp_path, capsys):
    model = load_checkpoint(world[1])
    checkpoint = tmp_path / "held-out.safetensors"
    data = {"name": "folder", "root": str(world[0])}
    training = {"data": data, "held_out": [build_splits(**data).label_names[0]]}
    save_checkpoint(checkpoint, model.model, model.header.preprocessing, label_names=("a",), training=training)
    open_or_create(tmp_path / "collection", checkpoint=checkpoint).close()
    common = ("evaluate", checkpoint, "-n", "5", "--points", "0", "--device", "cpu", "--baseline", "none")
    calibrate = ("--calibrate", tmp_path / "collection")
    for option in (calibrate, ("--url", "http://127.0.0.1:1")):
        for labels in ((), ("--labels", "seen"), ("--labels", "held-out")):
            code, _, said = run_command(capsys, *common, *option, *labels)
            assert (code, len(said.splitlines())) == (2, 1)
            assert "--labels all" in said
    with closing(Catalog(tmp_path / "collection" / CATALOG)) as catalog:
        assert stored_calibration(catalog.spaces) is None
    assert run_command(capsys, *common, *calibrate, "--labels", "all")[0] == 0
    assert (tmp_path / "evaluation-held-out-all" / "report.json").is_file()
    with closing(Catalog(tmp_path / "collection" / CATALOG)) as catalog:
        assert stored_calibration(catalog.spaces).n_images == 60
