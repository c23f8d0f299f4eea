"""CIFAR-10 on a miniature of the official batches: DeepHash-pytorch's splits, pixels, and pickles that run code."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.images import Preprocessing, load_file, read_bytes
from hashseek.training.data.datasets import build_splits
from support.dataset_files import N_IN_BATCH, sizes, write_cifar

EXACT = Preprocessing(size=32, mean=(0.5,) * 3, std=(0.5,) * 3, crop_fraction=1.0)


@pytest.fixture
def root(tmp_path, own_cache) -> Path:
    write_cifar(tmp_path)
    return tmp_path


def files(split) -> set[str]:
    return set(split.where)


@pytest.mark.parametrize(
    ("protocol", "n", "n_train", "n_database"),
    [("cifar10", 20, 60, 160), ("cifar10-1", 20, 60, 220), ("cifar10-2", 40, 200, 200)],
)
def test_each_protocol_draws_equally_many_of_each_label(root, protocol, n, n_train, n_database):
    options = {"root": str(root), "protocol": protocol, "n_query": n} | ({"n_train": 60} if n == 20 else {})
    splits = build_splits("cifar10", **options)
    assert sizes(splits) == (n, n_train, n_database)
    assert splits.query.labels.sum(axis=0).tolist() == [n // 10] * 10
    assert splits.train.labels.sum(axis=0).tolist() == [n_train // 10] * 10
    query, train, database = (files(split) for split in (splits.query, splits.train, splits.database))
    assert not query & (train | database)
    assert len(query | train | database) == 6 * N_IN_BATCH
    assert (train <= database, train & database == set()) == (protocol != "cifar10", protocol == "cifar10")
    assert build_splits("cifar10", split_seed=1, **options).fingerprint != splits.fingerprint
    assert splits.problems  # sizes other than the published ones


def test_the_number_of_training_images_is_refused_where_it_has_no_effect(root):
    with pytest.raises(BadConfig, match="n_train is 60"):
        build_splits("cifar10", root=str(root), protocol="cifar10-2", n_query=40, n_train=60)


def test_every_picture_has_its_pixels_and_its_label(tmp_path, own_cache):
    pixels = write_cifar(tmp_path)
    splits = build_splits("cifar10", root=str(tmp_path), n_query=20, n_train=60)
    for split in (splits.query, splits.database):
        for path, labels, name in zip(split.paths, split.labels, split.where, strict=True):
            np.testing.assert_array_equal(load_file(read_bytes(path), EXACT).pixels, pixels[name])
            assert splits.label_names[int(labels.argmax())] == name.partition("/")[0]
    [tar] = (own_cache / "datasets").glob("*.tar")
    written = tar.stat().st_ino
    assert build_splits("cifar10", root=str(tmp_path), n_query=20, n_train=60).fingerprint == splits.fingerprint
    assert tar.stat().st_ino == written


def test_batches_pickled_again_by_numpy_2_are_read(root):
    splits = build_splits("cifar10", root=str(root), n_query=20, n_train=60)
    for batch in (root / "cifar-10-batches-py").iterdir():
        batch.write_bytes(batch.read_bytes().replace(b"numpy.core", b"numpy._core"))
    assert build_splits("cifar10", root=str(root), n_query=20, n_train=60).fingerprint == splits.fingerprint


class Runs:
    def __reduce__(self):
        return print, ("code of a pickle ran",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Runs()),
        b"not a pickle",
        pickle.dumps({b"labels": [3]}),
        pickle.dumps({b"data": b"", b"labels": [11]}),
    ],
)
def test_a_damaged_or_foreign_batch_is_refused_and_runs_no_code(root, content, capsys):
    (root / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(BadDataset, match="data_batch_3"):
        build_splits("cifar10", root=str(root))
    assert capsys.readouterr().out == ""


def test_what_is_missing_is_named(root, tmp_path):
    with pytest.raises(BadConfig, match="'cifar10-1' or"):
        build_splits("cifar10", root=str(root), protocol="cifar")
    for protocol, named in (("cifar10", "1000 .* 5000"), ("cifar10-1", "1000 .* 5000"), ("cifar10-2", "10000")):
        with pytest.raises(BadConfig, match=named):
            build_splits("cifar10", root=str(root), protocol=protocol)  # too few pictures for the published sizes
    (root / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(BadDataset, match="test_batch"):
        build_splits("cifar10", root=str(root))
