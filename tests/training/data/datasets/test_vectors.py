"""Data sets of feature vectors: the splits of a file, and the refusal of wrong files."""

import os

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import vectors as sets
from hashseek.training.data.datasets.vectors import vectors


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "X": rng.normal(size=(30, 4)).astype(np.float32),
        "Y": rng.integers(0, 2, (30, 3)).astype(np.uint8),
        "label_names": np.array(["a", "b", "c"]),
        "split": np.array(["test"] * 10 + ["train"] * 20),
    }


@pytest.fixture
def write(tmp_path, arrays):
    def write(**changes):
        kept = {name: array for name, array in (arrays | changes).items() if array is not None}
        np.savez(tmp_path / "set.npz", **kept)
        return str(tmp_path / "set.npz")

    return write


def test_the_official_test_part_is_the_query_and_the_training_part_is_train_and_database(write, arrays):
    splits = vectors(path=write())
    assert np.array_equal(splits.query.vectors, arrays["X"][:10])
    assert np.array_equal(splits.train.vectors, arrays["X"][10:])
    assert np.array_equal(splits.database.labels, arrays["Y"][10:])
    assert splits.label_names == ("a", "b", "c")
    assert splits.query.where[3] == "row 3 of set.npz"
    assert splits.train.paths[0].name == "set.npz#10"
    assert not set(splits.query.paths) & set(splits.train.paths)
    with pytest.raises(BadConfig, match="split_seed is 1"):
        vectors(path=write(), split_seed=1)


@pytest.mark.parametrize("split", [None, np.array(["none"] * 30)])
def test_without_a_split_one_is_drawn_by_its_seed(write, split):
    path = write(split=split)
    first, again = vectors(path=path), vectors(path=path)
    other = vectors(path=path, split_seed=1)
    assert (len(first.query), len(first.train)) == (9, 21)
    assert first.query.paths == again.query.paths != other.query.paths
    assert len({*first.query.paths, *first.train.paths}) == 30
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert len(vectors(path=path, query_fraction=0.5).query) == 15


def test_the_fingerprint_follows_values_and_labels(write, arrays):
    before = vectors(path=write()).fingerprint
    changed = arrays["X"].copy()
    changed[3, 2] += 1
    assert vectors(path=write(X=changed)).fingerprint != before
    assert vectors(path=write(Y=1 - arrays["Y"])).fingerprint != before
    assert vectors(path=write()).fingerprint == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"Y": None}, "Y"),
        ({"label_names": None}, "label_names"),
        ({"X": np.zeros((29, 4), np.float32)}, r"\(29, 4\), Y is \(30, 3\)"),
        ({"X": np.zeros(30, np.float32)}, r"\(30,\)"),
        ({"label_names": np.array(["a", "b"])}, "2"),
        ({"X": np.full((30, 4), np.nan, np.float32)}, "NaN"),
        ({"X": np.full((30, 4), "1")}, "<U1"),
        ({"Y": np.full((30, 3), 2, np.uint8)}, "Y of .* 2"),
        ({"split": np.array(["valid"] * 30)}, "valid"),
        ({"split": np.array(["train"] * 30)}, "train"),
        ({"split": np.array(["train"] * 12)}, r"\(12,\)"),
        ({"Y": np.zeros((30, 1), np.uint8), "label_names": np.array(["a"])}, "'a'"),
        ({"Y": np.array([[{}] * 3] * 30)}, "npz"),
    ],
)
def test_wrong_arrays_are_refused(write, changes, named):
    with pytest.raises(BadDataset, match=named):
        vectors(path=write(**changes))


@pytest.mark.parametrize("content", [None, b"", b"text", b"PK\x03\x04 torn"])
def test_a_missing_or_damaged_file_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "scene.npz").write_bytes(content)
    with pytest.raises(BadDataset, match=r"scene\.npz"):
        sets.scene(root=str(tmp_path))


def test_a_missing_variable_is_named(monkeypatch):
    monkeypatch.delenv("HASHSEEK_DATA", raising=False)
    with pytest.raises(BadConfig, match="HASHSEEK_DATA"):
        sets.yeast()


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.01])
def test_a_fraction_that_leaves_a_split_empty_is_refused(write, fraction):
    with pytest.raises(BadConfig, match=f"query_fraction {fraction}"):
        vectors(path=write(split=None), query_fraction=fraction)


@pytest.mark.skipif("HASHSEEK_DATA" not in os.environ, reason="HASHSEEK_DATA is not set")
@pytest.mark.parametrize(
    ("name", "n_train", "n_query", "width", "n_labels", "cardinality"),
    [
        ("scene", 1211, 1196, 294, 6, 1.074),
        ("yeast", 1500, 917, 103, 14, 4.237),
        ("emotions", 415, 178, 72, 6, 1.868),
        ("cal500", 351, 151, 68, 174, 26.044),
    ],
)
def test_the_real_sets_have_their_published_sizes(name, n_train, n_query, width, n_labels, cardinality):
    splits = getattr(sets, name)()
    assert splits.train.vectors.shape == (n_train, width)
    assert splits.query.vectors.shape == (n_query, width)
    labels = np.concatenate([splits.train.labels, splits.query.labels])
    assert labels.shape == (n_train + n_query, n_labels)
    assert labels.sum() / len(labels) == pytest.approx(cardinality, abs=5e-4)
