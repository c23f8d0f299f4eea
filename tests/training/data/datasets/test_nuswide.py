"""NUS-WIDE on a miniature of the official files: the 21 most frequent labels or all, seeded splits."""

from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.image_table import draw_per_label
from support.dataset_files import damage_file, labels_of, names, sizes, touch_all

CONCEPTS = [f"concept{i:02}" for i in range(81)]
N = 600


def draw_labels() -> np.ndarray:
    """Labels (600, 81): those of even number are the more frequent ones, and some images have none."""
    rng = np.random.default_rng(0)
    odds = np.where(np.arange(81) % 2 == 0, 0.10, 0.01) * np.linspace(1.2, 0.8, 81)
    return (rng.random((N, 81)) < odds).astype(np.uint8)


LABELS = draw_labels()
# As published: a folder a category, backslashes, and the same number twice in two categories.
FILES = [f"{('actor', 'zebra', 'night_scene')[i % 3]}\\{i % 3:04}_{1000 + i}.jpg" for i in range(N)]


def in_folders(file: str) -> str:
    return file.replace("\\", "/")


def write_nuswide(root: Path, *, flat: bool = False) -> Path:
    place = in_folders if not flat else lambda file: file.rpartition("\\")[2]
    touch_all(root / ("images" if flat else "Flickr"), [place(file) for file in FILES])
    (root / "ImageList").mkdir()
    (root / "ConceptsList").mkdir()
    (root / "ConceptsList" / "Concepts81.txt").write_text("".join(f"{name}\r\n" for name in CONCEPTS))
    folder = root / "Groundtruth" / "AllLabels"
    folder.mkdir(parents=True)
    (root / "ImageList" / "Imagelist.txt").write_text("".join(f"{file}\r\n" for file in FILES))
    for column, name in enumerate(CONCEPTS):
        text = "".join(f"{label}\r\n" for label in LABELS[:, column])
        (folder / f"Labels_{name}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def nus(tmp_path_factory) -> Path:
    """Not to be written to."""
    return write_nuswide(tmp_path_factory.mktemp("nuswide") / "nus")


SMALL = {"n_query": 42, "n_train": 105}  # 2 and 5 a label


def test_the_21_most_frequent_labels_and_the_images_that_have_one(nus):
    splits = build_splits("nuswide", root=str(nus), **SMALL)
    by_count = sorted(range(81), key=lambda column: -int(LABELS[:, column].sum()))[:21]
    assert splits.label_names == tuple(CONCEPTS[column] for column in sorted(by_count))
    labelled = [i for i in range(N) if LABELS[i, by_count].any()]
    assert 0 < len(labelled) < N
    for published, options in (("183,234", {}), ("193,734", {"train_in_database": True})):
        assert published in str(build_splits("nuswide", root=str(nus), **SMALL, **options).problems)
    assert sizes(splits) == (42, 105, len(labelled) - 147)
    everything = [*splits.query.paths, *splits.train.paths, *splits.database.paths]
    assert {path.relative_to(nus / "Flickr").as_posix() for path in everything} == {
        in_folders(FILES[i]) for i in labelled
    }
    for i in labelled[::50]:
        wanted = {CONCEPTS[column] for column in by_count if LABELS[i, column]}
        assert labels_of(splits, in_folders(FILES[i]).rpartition("/")[2]) == wanted


def test_every_label_has_its_queries_and_training_images(nus):
    splits = build_splits("nuswide", root=str(nus), **SMALL)
    assert splits.query.labels.sum(axis=0).min() >= 2
    assert splits.train.labels.sum(axis=0).min() >= 5
    assert build_splits("nuswide", root=str(nus), **SMALL).fingerprint == splits.fingerprint
    other = build_splits("nuswide", root=str(nus), split_seed=1, **SMALL)
    assert set(names(other.query)) != set(names(splits.query))
    assert set(names(other.train)) != set(names(splits.train))
    assert build_splits("nuswide", root=str(nus), on_error="skip", **SMALL).on_error == "skip"


def test_the_rarest_label_chooses_its_images_first():
    labels = np.array([[1, 0], [1, 1], [1, 1], [1, 0], [1, 0], [1, 0]], np.uint8)
    for seed in range(10):  # the first label would often take one of the two images that the second one needs
        rows = draw_per_label(labels, n_query=2, n_train=2, seed=seed)
        assert [labels[rows[split], 1].sum() for split in ("query", "train", "database")] == [1, 1, 0]
    with pytest.raises(BadConfig):  # 1 and 2 of each label, but the second one has only two
        draw_per_label(labels, n_query=2, n_train=4, seed=0)


def test_all_81_labels_are_split_at_random(nus):
    splits = build_splits("nuswide", root=str(nus), n_labels=81, n_query=50, n_train=100)
    assert splits.label_names == tuple(CONCEPTS)
    assert sizes(splits) == (50, 100, int(LABELS.any(axis=1).sum()) - 150)
    again = build_splits("nuswide", root=str(nus), n_labels=81, n_query=50, n_train=100, train_in_database=True)
    assert sizes(again) == (50, 100, int(LABELS.any(axis=1).sum()) - 50)
    assert set(again.train.paths) < set(again.database.paths)


def test_a_flat_folder_holds_the_same_set(nus, tmp_path):
    first = build_splits("nuswide", root=str(nus), **SMALL)
    flat = build_splits("nuswide", root=str(write_nuswide(tmp_path / "flat", flat=True)), **SMALL)
    assert names(flat.train) == names(first.train)
    np.testing.assert_array_equal(flat.query.labels, first.query.labels)


LABELS_5 = "Groundtruth/AllLabels/Labels_concept05.txt"


@pytest.mark.parametrize(
    ("place", "damage", "named"),
    [
        ("Groundtruth", None, "Groundtruth"),
        ("Groundtruth/AllLabels", None, "AllLabels"),
        ("Flickr", None, "Flickr"),
        ("ConceptsList", None, "Concepts81.txt"),
        (LABELS_5, None, "Labels_concept05.txt"),
        (LABELS_5, lambda _: "0\n1\n0\n0\n1\n", "Labels_concept05.txt .* 5 .* 600"),
        (LABELS_5, lambda _: "2\n" * N, "Labels_concept05.txt"),
    ],
)
def test_an_incomplete_set_is_refused(tmp_path, place, damage, named):
    nus = write_nuswide(tmp_path / "nus")
    damage_file(nus / place, damage)
    with pytest.raises(BadDataset, match=named):
        build_splits("nuswide", root=str(nus), **SMALL)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_labels": 82}, "82"),
        ({"n_labels": 1}, "got 1"),
        ({"n_query": 43}, "n_query 43"),
        ({}, "n_query 2100 .* 10500"),
        ({"n_labels": 81}, "n_query 5000 .* 10000"),
        ({"lists": "here"}, "no option 'lists'"),
    ],
)
def test_impossible_splits_are_refused(nus, options, named):
    with pytest.raises(BadConfig, match=named):
        build_splits("nuswide", root=str(nus), **options)
