"""MIRFLICKR-25000 on a miniature of its official archives: seeded splits, and HyP2's permutation."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.mirflickr import LABELS
from support.dataset_files import DATA, damage_file, labels_of, names, needs_data, picture, sizes, touch_all

ANNOTATIONS = "mirflickr25k_annotations_v080"
ALL = list(LABELS)
N = 12  # pictures of the miniature; number 7 has no label


def has(number: int) -> set[str]:
    if number == 7:
        return set()
    return {ALL[number % 5 * 2], "sky", *(("sea", "sea_r1") if number % 2 else ("tree",))}


def write_annotations(root: Path, labels_of_number: dict[int, set[str]]) -> None:
    (root / ANNOTATIONS).mkdir()
    (root / ANNOTATIONS / "README.txt").write_text("Annotations of the MIRFLICKR-25000 images\n")
    for label in ALL:
        numbers = [number for number, found in labels_of_number.items() if label in found]
        (root / ANNOTATIONS / f"{label}.txt").write_text("".join(f"{number}\r\n" for number in sorted(numbers)))


@pytest.fixture
def official(tmp_path) -> Path:
    root = tmp_path / "official"
    for number in range(1, N + 1):
        picture(root / "mirflickr" / f"im{number}.jpg", number)
    (root / "mirflickr" / "doc").mkdir()
    write_annotations(root, {number: has(number) for number in range(1, N + 1)})
    return root


def write_hyp2(root: Path, files: list[str], order: list[int]) -> Path:
    """HyP2's repository."""
    (root / "data" / "flickr25k").mkdir(parents=True)
    (root / "data" / "flickr25k" / "img.txt").write_text("".join(f"{name}\n" for name in files))
    (root / "flickr.txt").write_text(json.dumps(order))
    return root


def test_a_seeded_split_of_the_official_archives_leaves_unlabelled_images_out(official):
    options = {"root": str(official), "n_query": 2, "n_train": 4}
    splits = build_splits("mirflickr", **options)
    assert sizes(splits) == (2, 4, N - 1 - 6)
    assert splits.label_names == tuple(ALL)
    assert {*names(splits.query), *names(splits.train), *names(splits.database)} == {
        f"im{number}.jpg" for number in range(1, N + 1) if number != 7
    }
    for number in (1, 6, 12):
        assert labels_of(splits, f"im{number}.jpg") == has(number)
    assert build_splits("mirflickr", **options).fingerprint == splits.fingerprint
    assert build_splits("mirflickr", split_seed=1, **options).fingerprint != splits.fingerprint
    assert build_splits("mirflickr", on_error="skip", **options).on_error == "skip"


def test_the_deephash_protocol_keeps_unlabelled_images(official, monkeypatch):
    monkeypatch.setattr("hashseek.training.data.datasets.mirflickr.N_IMAGES", N)
    splits = build_splits("mirflickr", root=str(official), protocol="deephash", n_query=2, n_train=4)
    assert sizes(splits) == (2, 4, N - 6)
    assert "20,000" in str(splits.problems)  # published


def test_the_permutation_of_hyp2_defines_the_splits(tmp_path):
    files = [f"im{number}.jpg" for number in range(1, 5101)]  # it is cut at 1,000 and 5,000
    repository = write_hyp2(tmp_path / "HyP2-Loss", files, list(range(5099, -1, -1)))
    touch_all(tmp_path / "mirflickr", files)
    write_annotations(tmp_path, {number: {"sky", "sea"} if number > 1 else {"sea"} for number in range(1, 5101)})
    options = {"root": str(tmp_path), "lists": str(repository)}
    splits = build_splits("mirflickr", **options)
    assert sizes(splits) == (1000, 4000, 100)
    assert names(splits.query)[:2] == ["im5100.jpg", "im5099.jpg"]
    assert names(splits.database)[-1] == "im1.jpg"
    fewer = build_splits("mirflickr", drop_labels=["sea"], **options)
    assert names(fewer.database) == names(splits.database)[:-1], "without the one that lost its only label"
    with pytest.raises(BadConfig, match="n_query is 2"):
        build_splits("mirflickr", n_query=2, **options)


def test_labels_can_be_dropped_by_pattern(official):
    options = {"root": str(official), "n_query": 2, "n_train": 4}
    splits = build_splits("mirflickr", drop_labels=["*_r1"], **options)
    assert len(splits.label_names) == 24
    assert labels_of(splits, "im5.jpg") == {"animals", "sky", "sea"}
    with pytest.raises(BadDataset, match=r"'z\*'"):
        build_splits("mirflickr", drop_labels=["z*"], **options)


@pytest.mark.parametrize(
    ("place", "damage", "named"),
    [
        (f"official/{ANNOTATIONS}", None, "official"),
        (f"official/{ANNOTATIONS}/sea.txt", None, "sea.txt"),
        (f"official/{ANNOTATIONS}/sky.txt", lambda _: "3\n25001\n", "sky.txt .*'25001'"),
        (f"official/{ANNOTATIONS}/sky.txt", lambda _: "im3", "sky.txt .*'im3'"),
        ("official/mirflickr", None, "im1.jpg"),
        ("official/mirflickr/im2.jpg", None, "im2.jpg"),
    ],
)
def test_an_incomplete_set_is_refused(official, tmp_path, place, damage, named):
    damage_file(tmp_path / place, damage)
    with pytest.raises(BadDataset, match=named):
        build_splits("mirflickr", root=str(official), n_query=2, n_train=4)


@pytest.mark.parametrize(
    ("place", "damage", "named"),
    [
        ("flickr.txt", lambda _: "[0, 0]", "permutation"),
        ("flickr.txt", lambda _: "[0", "permutation"),
        ("flickr.txt", lambda _: '{"a": 1}', "permutation"),
        ("flickr.txt", None, "flickr.txt"),
        ("data", None, "whole repository of HyP2"),
        ("data/flickr25k/img.txt", lambda _: "im1.jpg\nim25001.jpg\n", "'im25001.jpg'"),
    ],
)
def test_a_damaged_repository_of_hyp2_is_refused(official, tmp_path, place, damage, named):
    repository = write_hyp2(tmp_path / "HyP2-Loss", ["im1.jpg", "im2.jpg"], [1, 0])
    damage_file(repository / place, damage)
    with pytest.raises(BadDataset, match=named):
        build_splits("mirflickr", root=str(official), lists=str(repository))


@pytest.mark.parametrize(("options", "named"), [({}, "1000 .* 4000"), ({"protocol": "csq"}, "csq")])
def test_impossible_options_are_refused(official, options, named):
    with pytest.raises(BadConfig, match=named):
        build_splits("mirflickr", root=str(official), **options)


@needs_data
def test_the_split_of_hyp2_on_all_names(tmp_path):
    with (Path(DATA) / "mirflickr25k_128" / "all24581_labels.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    touch_all(tmp_path / "mirflickr", [f"im{number}.jpg" for number in range(1, 25001)])
    write_annotations(tmp_path, {int(row["file"][2:-4]): set(row["labels"].split(";")) for row in rows})
    order = [i for split in ("query", "train", "retrieval") for i, row in enumerate(rows) if row["split"] == split]
    repository = write_hyp2(tmp_path / "HyP2-Loss", [row["file"] for row in rows], order)
    splits = build_splits("mirflickr", root=str(tmp_path), lists=str(repository))
    assert sizes(splits) == (1000, 4000, 19581)
    assert splits.problems == ()
    labels = np.concatenate([splits.query.labels, splits.train.labels, splits.database.labels])
    counts = dict(zip(splits.label_names, labels.sum(axis=0, dtype=int).tolist(), strict=True))
    # Numbers of the set's own annotations; they are also in the SOURCE.md beside the data.
    assert (counts["people"], counts["baby_r1"], counts["sky"], counts["water"]) == (10373, 116, 7912, 3331)
    assert labels.sum() / len(labels) == pytest.approx(4.7, abs=0.1)
    assert sizes(build_splits("mirflickr", root=str(tmp_path))) == (1000, 4000, 19581), "seeded"
