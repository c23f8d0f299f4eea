"""Labels held out of training: no image with one and no column of one is trained on, and figures use only them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.images import load_file, read_bytes
from hashseek.training.config import Config, load_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.held_out_labels import choose_held_out, label_part, training_splits
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.assembly import EvaluationOptions
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.report.compare import load_entries
from hashseek.training.evaluation.report.markdown import as_markdown
from hashseek.training.loop.fit import fit
from hashseek.training.runs.run_folder import Run
from support import hamming_oracle as hamming
from support.models import run_config

pytestmark = pytest.mark.xdist_group("held-out labels")  # one process trains the run for all tests
HELD_OUT = ("circle", "grass")
DRAWN = {"held_out": 0.1, "held_out_seed": 3}  # draws HELD_OUT
OPTIONS = {"data_name": "shapes", "ns": (5, 20), "device": "cpu", "precision": "fp32"}


def config(root: Path, **held_out) -> Config:
    return run_config(root, data=held_out, train__epochs=1)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("held-out") / "shapes"
    render_shapes(root, n_query=16, n_train=90, n_database=60, size=48, seed=1)
    return root


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory) -> Run:
    """A run without `HELD_OUT` on a copy in which every image that it must not see is no image."""
    root = tmp_path_factory.mktemp("held-out-run")
    copy = shutil.copytree(pictures, root / "shapes")
    splits = build_splits("folder", root=str(copy))
    columns = [splits.label_names.index(name) for name in HELD_OUT]
    for split in (splits.train, splits.query, splits.database):
        for path, row in zip(split.paths, split.labels, strict=True):
            if split is not splits.train or row[columns].any():
                path.write_bytes(b"not an image")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASHSEEK_CACHE", str(root / "cache"))
        return fit(config(copy, **DRAWN), out=root / "run").run


@pytest.fixture(scope="module")
def whole(pictures) -> Splits:
    return build_splits("folder", root=str(pictures))


@pytest.fixture(scope="module")
def by_hand(whole) -> dict[str, tuple[list[int], list[int]]]:
    """Rows of queries and database of each part, from the names of the labels of each image."""

    def rows(split: Split, part: str) -> list[int]:
        names = [{whole.label_names[i] for i in np.flatnonzero(row)} for row in split.labels]
        wanted = {"all": (True, False), "seen": (False,), "held-out": (True,)}[part]
        return [i for i, found in enumerate(names) if bool(found & set(HELD_OUT)) in wanted]

    return {part: (rows(whole.query, part), rows(whole.database, part)) for part in ("all", "seen", "held-out")}


def test_no_held_out_label_reaches_training(run, whole):
    header = load_checkpoint(run.best).header
    assert header.label_names == tuple(name for name in whole.label_names if name not in HELD_OUT)
    assert header.training["held_out"] == list(HELD_OUT)
    assert header.training["splits_sha256"] == whole.fingerprint
    described = json.loads(run.splits.read_text())
    assert not set(HELD_OUT) & set(described["label_names"])
    of_train = described["of_train"]
    columns = [whole.label_names.index(name) for name in HELD_OUT]
    n_without = int((whole.train.labels[:, columns].sum(axis=1) == 0).sum())
    assert of_train["learnt_from"] + of_train["validated_on"] == n_without < len(whole.train)
    assert len(label_part(whole, HELD_OUT, "all").train) == n_without
    seen = whole.train.labels[whole.train.labels[:, columns].sum(axis=1) == 0].sum(axis=0)
    assert described["train_images_per_label"] == np.delete(seen, columns).tolist()


@pytest.mark.parametrize("part", [None, "seen"])
def test_figures_are_those_of_the_part_by_hand(run, whole, by_hand, part):
    report = evaluate(run.best, whole, EvaluationOptions(labels=part, **OPTIONS), n_points=0).report
    q, db = by_hand[part or "held-out"]
    columns = [whole.label_names.index(name) for name in HELD_OUT]
    of_part = {"held-out": columns, "seen": [i for i in range(18) if i not in columns], "all": list(range(18))}
    chosen = of_part[part or "held-out"]
    encoder = Encoder(load_checkpoint(run.best), device="cpu", precision="fp32")

    def encode(split: Split, rows: list[int]):
        loaded = [load_file(read_bytes(split.paths[i]), encoder.preprocessing).pixels for i in rows]
        return encoder.encode_pixels(np.stack(loaded))

    ids = hamming.search(encode(whole.query, q), encode(whole.database, db), len(db))[1]
    gains = whole.query.labels[q][:, chosen].astype(int) @ whole.database.labels[db][:, chosen].T
    for score in report.scores:
        found = np.take_along_axis(gains > 0, ids, axis=1)[:, : score.n]
        hits = np.cumsum(found, axis=1)
        ap = (found * hits / np.arange(1, score.n + 1)).sum(axis=1) / np.maximum(hits[:, -1], 1)
        assert score.as_served == pytest.approx(ap.mean())
    assert (report.data["queries"], report.data["database"]) == (len(q), len(db))
    assert [label.name for label in report.labels] == [whole.label_names[i] for i in chosen]
    assert (report.labels_used, report.held_out) == (part or "held-out", list(HELD_OUT))
    assert report.data["same_splits_as_in_training"]
    assert "circle, grass" in as_markdown(report).split("## Protocol")[1]


def test_reports_of_different_parts_do_not_compare(run, whole, tmp_path):
    own, *others = (
        evaluate(run.best, whole, EvaluationOptions(labels=part, **OPTIONS), n_points=0).report
        for part in ("held-out", "seen", "all")
    )
    (tmp_path / "own.json").write_text(own.as_json())
    for other in others:
        (tmp_path / "other.json").write_text(other.as_json())
        with pytest.raises(BadConfig, match="labels used"):
            load_entries([tmp_path / "own.json", tmp_path / "other.json"])
    assert "Not the usual protocol" in as_markdown(own)
    assert "relevance by these labels only (circle, grass)" in as_markdown(own)


def test_a_share_is_drawn_by_its_seed(whole):
    names = whole.label_names
    drawn = choose_held_out(names, 0.25, seed=0)
    assert len(drawn) == 4
    assert len(choose_held_out(names, 0.2)) == 4  # 3.6 of 18
    assert drawn == choose_held_out(names, 0.25, seed=0) == tuple(name for name in names if name in drawn)
    assert len({choose_held_out(names, 0.25, seed=seed) for seed in range(20)}) > 15
    times = np.zeros(18)
    for seed in range(300):
        times[[names.index(name) for name in choose_held_out(names, 0.25, seed=seed)]] += 1
    assert times.sum() == 4 * 300
    assert times.min() > 35, "every label has its turn"
    assert choose_held_out(names, None) == ()


@pytest.mark.parametrize(
    ("held_out", "named"),
    [
        (("nigth", "red"), "did you mean 'night'"),
        (("elephant", "red"), "'elephant'.* choose from blue, "),
        (("red",), "1 held out and 17"),
        (0.02, "0 held out"),
    ],
)
def test_labels_that_cannot_be_held_out_are_refused(whole, held_out, named):
    with pytest.raises(BadConfig, match=named):
        choose_held_out(whole.label_names, held_out)
    with pytest.raises(BadConfig):
        choose_held_out(whole.label_names, whole.label_names[1:])


def test_a_part_without_images_or_labels_is_refused(whole):
    with pytest.raises(BadDataset, match="elephant"):
        label_part(whole, ("elephant", "red"), "held-out")
    assert label_part(whole, ("elephant", "rhino"), "all").label_names == whole.label_names
    everywhere = replace(whole, train=replace(whole.train, labels=np.ones_like(whole.train.labels)))
    nowhere = replace(whole, query=replace(whole.query, labels=np.zeros_like(whole.query.labels)))
    for splits, named in ((everywhere, "90 training"), (nowhere, "16 query")):
        with pytest.raises(BadDataset, match=named):
            training_splits(splits, HELD_OUT)


def test_the_setting_is_checked(pictures):
    for bad in ("red", 0, 1.5, [], [1, 2]):
        with pytest.raises(BadConfig, match="data.held_out"):
            config(pictures, held_out=bad)
    with pytest.raises(BadConfig, match="data.held_out_seed"):
        load_config(Path("shapes_shufflenet_v2_hyp2_48"), ["data.held_out_seed=3"])
    made = load_config(Path("shapes_shufflenet_v2_hyp2_48"), ["data.held_out=0.25", "data.held_out_seed=3"]).data
    assert (made.held_out, made.held_out_seed) == (0.25, 3)
    assert "held_out" not in made.options()


def test_a_part_is_refused_where_nothing_was_held_out(pictures, whole, checkpoint):
    with pytest.raises(BadConfig, match="--labels seen"):
        evaluate(checkpoint, whole, EvaluationOptions(labels="seen", **OPTIONS))
