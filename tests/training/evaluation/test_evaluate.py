"""Evaluation through the searcher: figures equal those of the oracle, and the report says what it measured."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.api.cli import main
from hashseek.indexing.calibration import stored_calibration
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.collection import CATALOG, open_or_create
from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.images import Preprocessing, decode_for, read_bytes
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.report import load_report
from hashseek.training.evaluation.split_overlaps import overlaps
from support import hamming_oracle as hamming


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(data set, checkpoint with random weights)."""
    root = tmp_path_factory.mktemp("evaluate")
    render_shapes(root / "data", n_query=12, n_train=2, n_database=60, size=48, seed=2)
    torch.manual_seed(0)
    model = HashModel(backbone="squeezenet1_1", n_bits=10)
    preprocessing = Preprocessing(size=48, mean=(0.5,) * 3, std=(0.25,) * 3, crop_fraction=1.0)
    training = {"data": {"name": "folder", "root": str(root / "data")}}
    save_checkpoint(root / "model.safetensors", model, preprocessing, label_names=("a",), training=training)
    return root / "data", root / "model.safetensors"


def test_figures_equal_those_of_the_oracle(world):
    data, checkpoint = world
    splits = build_splits("folder", root=str(data))
    made = evaluate(
        checkpoint, splits, data_name="shapes", ns=(5, None, 1000), device="cpu", precision="fp32", n_points=0
    )
    report = made.report
    encoder = Encoder(load_checkpoint(checkpoint), device="cpu", precision="fp32")

    def encode(split):
        loaded = [decode_for(read_bytes(path), encoder.header.preprocessing)[1] for path in split.paths]
        return encoder.encode_pixels(np.stack(loaded))

    distances, ids = hamming.search(encode(splits.query), encode(splits.database), 60)
    relevant = splits.query.labels @ splits.database.labels.T > 0
    assert made.points == {}
    for score, n in zip(report.scores, (5, 60), strict=True):
        assert score.n == n
        found = np.take_along_axis(relevant, ids, axis=1)[:, :n]
        hits = np.cumsum(found, axis=1)
        ap = (found * hits / np.arange(1, n + 1)).sum(axis=1) / np.maximum(hits[:, -1], 1)
        assert score.as_served == pytest.approx(ap.mean())
        np.testing.assert_allclose(made.per_query[f"AP@{n}_as_served"], ap)
        bounds = score.mean_average_precision
        assert bounds.worst - 1e-12 <= score.as_served <= bounds.best + 1e-12
        assert bounds.worst <= bounds.expected <= bounds.best
        assert score.precision.worst <= found.mean() <= score.precision.best
    assert any("N = 1000 exceeds the database of 60" in note for note in report.notes)
    assert report.data["chance_(share_of_relevant_pairs)"] == pytest.approx(relevant.mean())
    for example in (*report.examples, *report.worst):
        assert example.name == splits.query.paths[example.row].name
        assert [hit.row for hit in example.hits] == ids[example.row, :10].tolist()
        assert [hit.distance for hit in example.hits] == distances[example.row, :10].tolist()
        for hit in example.hits:
            shared = splits.query.labels[example.row] & splits.database.labels[hit.row]
            assert hit.matched == [splits.label_names[i] for i in np.flatnonzero(shared)]
            assert hit.share == pytest.approx(shared.sum() / splits.query.labels[example.row].sum())


def test_random_directions_are_seeded_and_share_the_backbone(world):
    data, checkpoint = world
    splits = build_splits("folder", root=str(data))
    options = {"data_name": "x", "ns": (10,), "baseline": "random-directions", "device": "cpu", "precision": "fp32"}
    first, second, other = (evaluate(checkpoint, splits, seed=seed, n_points=0, **options).report for seed in (1, 1, 2))
    assert first.baseline == second.baseline
    assert first.baseline != first.scores
    assert other.baseline != first.baseline


def test_the_command_prints_the_summary_and_writes_the_folder(world, tmp_path, capsys):
    data, checkpoint = world
    arguments = [
        "evaluate",
        str(checkpoint),
        "--data",
        str(data),
        "-n",
        "20",
        "-n",
        "5",
        "-n",
        "all",
        "--out",
        str(tmp_path),
    ]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--precision", "fp32", "--device", "cpu"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "| 5 | **0." in printed
    assert printed.strip() in (tmp_path / "report.md").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [score["n"] for score in report["scores"]] == [5, 20, 60]
    for name in ("report.html", "per_query.csv", "figures/precision_curve.svg", "figures/tsne_codes.png"):
        assert (tmp_path / name).stat().st_size > 300
    assert report["data"]["overlaps"]["query_and_database"] == 0
    assert report["data"]["queries"] == 12
    assert report["data"]["database"] == 60
    assert report["n_bits"] == 10
    assert report["fingerprint"] == load_checkpoint(checkpoint).header.fingerprint
    for key in ("seed", "versions", "command", "created", "normalizer", "schema_version"):
        assert key in report


def test_without_data_the_set_of_the_training_configuration_is_used(world, tmp_path, capsys):
    _, checkpoint = world
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(checkpoint), "-n", "5", "--points", "0", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert "| database | 60 |" in capsys.readouterr().out


def test_bad_input(world, tmp_path):
    data, checkpoint = world
    splits = build_splits("folder", root=str(data))
    with pytest.raises(BadConfig, match="N >= 1, not 0"):
        evaluate(checkpoint, splits, data_name="x", ns=(0,))
    with pytest.raises(BadConfig, match=r"at least 0 \(none\), not -1"):
        evaluate(checkpoint, splits, data_name="x", n_points=-1)
    for path in splits.database.paths:
        target = tmp_path / path.relative_to(data)
        target.parent.mkdir(exist_ok=True)
    for path in (*splits.query.paths, *splits.train.paths, *splits.database.paths):
        (tmp_path / path.relative_to(data)).write_bytes(path.read_bytes())
    (tmp_path / "labels.csv").write_text((data / "labels.csv").read_text())
    broken = tmp_path / splits.database.paths[0].relative_to(data)
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(BadDataset, match="has 1 problem: line .* damaged"):
        evaluate(checkpoint, build_splits("folder", root=str(tmp_path)), data_name="x", ns=(5,))
    skipping = build_splits("folder", root=str(tmp_path), on_error="skip")
    report = evaluate(checkpoint, skipping, data_name="x", ns=(5,), n_points=0).report
    assert report.data["database"] == 59
    assert any("damaged" in note for note in report.notes)


def test_copies_of_queries_in_other_splits_are_counted(world, tmp_path):
    data, _ = world
    splits = build_splits("folder", root=str(data))
    assert set(overlaps(splits).values()) == {0}
    for path in (*splits.query.paths, *splits.train.paths, *splits.database.paths):
        target = tmp_path / path.relative_to(data)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    (tmp_path / "labels.csv").write_text((data / "labels.csv").read_text())
    for original, copies in (
        (splits.query.paths[0], splits.database.paths[:2]),
        (splits.query.paths[1], splits.train.paths[:1]),
    ):
        for copy in copies:
            (tmp_path / copy.relative_to(data)).write_bytes(original.read_bytes())
    found = overlaps(build_splits("folder", root=str(tmp_path)))
    assert found == {
        "query_and_train": 0,
        "query_and_database": 0,
        "train_and_database": 0,
        "copies_of_queries_in_train": 1,
        "copies_of_queries_in_database": 2,
    }


def test_a_model_of_vectors_is_evaluated_on_vectors_and_on_nothing_else(world, tmp_path):
    data, of_images = world
    rng = np.random.default_rng(0)

    def split(n: int) -> Split:
        vectors = rng.standard_normal((n, 6)).astype(np.float32)
        labels = (vectors[:, :3] > 0.3).astype(np.uint8)
        return Split(
            tuple(Path(f"set.npz#{i}") for i in range(n)), labels, tuple(f"row {i}" for i in range(n)), vectors
        )

    splits = Splits(split(20), split(15), split(50), ("a", "b", "c"), "f" * 64)
    torch.manual_seed(0)
    model = HashModel(backbone="mlp:6-16", n_bits=8)
    checkpoint = tmp_path / "vectors.safetensors"
    save_checkpoint(checkpoint, model, None, label_names=("a", "b", "c"))
    made = evaluate(checkpoint, splits, data_name="v", ns=(5,), baseline="random-directions", n_points=20)
    with torch.inference_mode():
        codes = [pack(model.eval()(torch.from_numpy(part.vectors))) for part in (splits.query, splits.database)]
    _, ids = hamming.search(*codes, 10)
    for example in made.report.examples:
        assert [hit.row for hit in example.hits] == ids[example.row].tolist()
    made.write(tmp_path / "report")
    assert "<img" not in (tmp_path / "report" / "report.html").read_text()
    with pytest.raises(BadConfig, match="encodes vectors of 6 numbers, but the data set has images"):
        evaluate(checkpoint, build_splits("folder", root=str(data)), data_name="x", ns=(5,))
    with pytest.raises(BadConfig, match="encodes images, but the data set has vectors"):
        evaluate(of_images, splits, data_name="x", ns=(5,))


def test_a_number_of_ranks_that_is_none_is_one_sentence(world, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(world[1]), "-n", "many"])
    assert ended.value.code == 2
    assert "N is a number of ranks or all, not 'many'" in capsys.readouterr().err


def test_the_calibration_of_a_report_is_kept_with_a_collection_of_its_checkpoint(world, indexed, tmp_path, capsys):
    data, checkpoint = world
    open_or_create(tmp_path / "collection", checkpoint=checkpoint).close()
    arguments = ["evaluate", str(checkpoint), "--data", str(data), "-n", "5", "--points", "0", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(tmp_path / "report"), "--calibrate", str(tmp_path / "collection")])
    assert ended.value.code == 0
    report = load_report(tmp_path / "report" / "report.json")
    with closing(Catalog(tmp_path / "collection" / CATALOG)) as catalog:
        kept = stored_calibration(catalog)
    assert kept.calibration == report.calibration
    assert (kept.n_images, kept.labels) == (60, tuple(label.name for label in report.labels))
    assert report.data["query_sha256"][:12] in kept.source
    capsys.readouterr()
    for place, reason in ((indexed, "has codes of checkpoint"), (tmp_path / "nowhere", "nowhere")):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--out", str(tmp_path / "none"), "--calibrate", str(place)])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert reason in said
        assert len(said.splitlines()) == 1
        assert not (tmp_path / "none").exists()
