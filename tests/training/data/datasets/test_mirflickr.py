"""MIRFLICKR-25000 on miniatures of its layouts: official archives, a copy with a list, every form of its splits."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.mirflickr import LABELS
from support.dataset_files import (
    DATA,
    damage_file,
    labels_of,
    names,
    needs_data,
    picture,
    published_list,
    sizes,
    touch_all,
    write_lists,
)

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


ORDER = [5, 1, 12, 7, 3, 8, 2, 6, 4, 10, 9, 11]
PARTS = {"query": ORDER[:3], "train": ORDER[3:8], "database": ORDER[8:]}  # number 7 would be a training image


def write_csv(file: Path, *, column: str = "split", prefix: str = "") -> Path:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["file", "labels", "split", "deephash_split"])
        for split, numbers in PARTS.items():
            for number in numbers:
                labels = ";".join(sorted(has(number)))
                word = {"query": "test", "database": "database", "train": "train"}[split]
                own = {"query": "query", "database": "retrieval", "train": "train"}[split]
                other = word if column == "deephash_split" else "train"
                writer.writerow([f"{prefix}im{number}.jpg", labels, own, other])
    return file


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


def test_every_form_of_the_same_split_gives_the_same_split(official, tmp_path):
    csv_file = write_csv(tmp_path / "list.csv")

    repository = tmp_path / "HyP2-Loss"
    (repository / "data" / "flickr25k").mkdir(parents=True)
    many = [1000, 4000]  # HyP2's code cuts its permutation there, so the miniature needs as many
    listed = [f"im{number}.jpg" for number in range(1, 5101)]
    (repository / "data" / "flickr25k" / "img.txt").write_text("".join(f"{name}\n" for name in listed))
    (repository / "flickr.txt").write_text(json.dumps(list(range(5099, -1, -1))))

    lists = tmp_path / "DeepHash"
    rows = [
        {
            "file": f"im{number}.jpg",
            "labels": ";".join(str(ALL.index(label)) for label in has(number)),
            "split": "test" if split == "query" else split,
        }
        for split, numbers in PARTS.items()
        for number in numbers
    ]
    write_lists(lists, rows, 38)

    first = build_splits("mirflickr", root=str(official), lists=str(csv_file))
    assert names(first.query) == ["im5.jpg", "im1.jpg", "im12.jpg"]
    assert names(first.train) == ["im3.jpg", "im8.jpg", "im2.jpg", "im6.jpg"]
    assert names(first.database) == ["im4.jpg", "im10.jpg", "im9.jpg", "im11.jpg"]
    assert build_splits("mirflickr", root=str(official), lists=str(lists)).fingerprint == first.fingerprint

    kept = build_splits("mirflickr", root=str(official), lists=str(lists), protocol="deephash")
    assert names(kept.train) == ["im7.jpg", "im3.jpg", "im8.jpg", "im2.jpg", "im6.jpg"]
    assert any("1 of train" in problem.reason for problem in kept.problems)

    everything = tmp_path / "many"
    touch_all(everything / "mirflickr", listed)
    write_annotations(everything, {number: {"sky", "sea"} for number in range(1, 5101)})
    permuted = build_splits("mirflickr", root=str(everything), lists=str(repository))
    assert sizes(permuted) == (many[0], many[1], 100)
    assert names(permuted.query)[:2] == ["im5100.jpg", "im5099.jpg"]
    assert names(permuted.database)[-1] == "im1.jpg"


def test_a_folder_with_a_list_of_its_own_is_read_by_column(tmp_path):
    root = tmp_path / "copy"
    for number in range(1, N + 1):
        picture(root / "images" / f"im{number}.jpg", number)
    write_csv(root / "labels.csv", column="deephash_split", prefix="images/")
    assert sizes(build_splits("mirflickr", root=str(root))) == (3, 4, 4)
    assert sizes(build_splits("mirflickr", root=str(root), protocol="deephash")) == (3, 5, 4)
    with pytest.raises(BadConfig, match="n_query is 2"):
        build_splits("mirflickr", root=str(root), n_query=2)
    write_csv(root / "labels.csv", prefix="images/")
    with pytest.raises(BadDataset, match="query"):
        build_splits("mirflickr", root=str(root), protocol="deephash")


def test_labels_can_be_dropped_by_pattern(official, tmp_path):
    options = {"root": str(official), "lists": str(write_csv(tmp_path / "list.csv"))}
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
        ("list.csv", lambda _: "file,labels\nim1.jpg,sky\n", "list.csv line 2 .*split"),
        ("list.csv", lambda _: "file,labels,split\nim1.jpg,sky,query\nim2.jpg,sky,gallery\n", "list.csv line 3"),
        ("list.csv", lambda _: "file,labels,split\n,sky,query\n", "list.csv line 2"),
        ("list.csv", lambda _: "file,labels,split\nim1.jpg,cat,query\n", "line 2 .*'cat'"),
        ("list.csv", lambda text: f"{text}im25001.jpg,,train,train\n", "im25001.jpg"),
        ("list.csv", lambda text: f"{text}x\n", "list.csv line 14"),
        ("list.csv", None, "train.txt"),
    ],
)
def test_an_incomplete_set_or_a_bad_list_is_refused(official, tmp_path, place, damage, named):
    file = write_csv(tmp_path / "list.csv")
    damage_file(tmp_path / place, damage)
    with pytest.raises(BadDataset, match=named):
        build_splits("mirflickr", root=str(official), lists=str(file))


@pytest.mark.parametrize("text", ["[0, 0]", "[0", '{"a": 1}'])
def test_a_damaged_permutation_of_hyp2_is_refused(official, tmp_path, text):
    (tmp_path / "data" / "flickr25k").mkdir(parents=True)
    (tmp_path / "data" / "flickr25k" / "img.txt").write_text("im1.jpg\nim2.jpg\n")
    (tmp_path / "flickr.txt").write_text(text)
    with pytest.raises(BadDataset, match="permutation"):
        build_splits("mirflickr", root=str(official), lists=str(tmp_path))


@pytest.mark.parametrize("options", [{}, {"protocol": "csq"}])
def test_impossible_options_are_refused(official, options):
    with pytest.raises(BadConfig):
        build_splits("mirflickr", root=str(official), **options)


@needs_data
def test_the_permutation_of_hyp2_and_the_lists_of_deephash_on_all_names(tmp_path):
    with (Path(DATA) / "mirflickr25k_128" / "all24581_labels.csv").open() as lines:
        rows = {row["file"]: row for row in csv.DictReader(lines)}
    touch_all(tmp_path / "mirflickr", [f"im{number}.jpg" for number in range(1, 25001)])
    write_annotations(tmp_path, {int(name[2:-4]): set(row["labels"].split(";")) for name, row in rows.items()})
    published = Path(DATA) / "mirflickr25k_128" / "all24581_labels.csv"
    splits = build_splits("mirflickr", root=str(tmp_path), lists=str(published))
    assert sizes(splits) == (1000, 4000, 19581)
    assert splits.problems == ()
    labels = np.concatenate([splits.query.labels, splits.train.labels, splits.database.labels])
    counts = dict(zip(splits.label_names, labels.sum(axis=0, dtype=int).tolist(), strict=True))
    # Numbers of the set's own annotations; they are also in the SOURCE.md beside the data.
    assert (counts["people"], counts["baby_r1"], counts["sky"], counts["water"]) == (10373, 116, 7912, 3331)
    assert labels.sum() / len(labels) == pytest.approx(4.7, abs=0.1)

    write_lists(tmp_path / "lists", published_list("mirflickr25k_deephash"), 38)
    deephash = build_splits("mirflickr", root=str(tmp_path), lists=str(tmp_path / "lists"), protocol="deephash")
    assert sizes(deephash) == (1000, 4000, 20000)
    found = Counter(rows[name]["deephash_split"] for name in names(deephash.query) if name in rows)
    assert found == {"test": 981}
    assert sizes(build_splits("mirflickr", root=str(tmp_path))) == (1000, 4000, 19581), "seeded"


@needs_data
def test_the_copy_of_128_pixels():
    root = str(Path(DATA) / "mirflickr25k_128")
    splits = build_splits("mirflickr", root=root)
    assert sizes(splits) == (793, 3205, 15667)
    as_folder = build_splits("folder", root=root, ignore_columns=["deephash_split"])
    assert as_folder.fingerprint == splits.fingerprint
    np.testing.assert_array_equal(as_folder.database.labels, splits.database.labels)
    assert sizes(build_splits("mirflickr", root=root, protocol="deephash")) == (782, 3134, 15749)
