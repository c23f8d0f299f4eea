"""MIRFLICKR-25000 on miniatures of its layouts: official archives, a copy with a list, every form of its splits."""

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.image_table import Incomplete
from support.dataset_files import (
    DATA,
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
ALL = [
    *("animals", "baby", "baby_r1", "bird", "bird_r1", "car", "car_r1", "clouds", "clouds_r1", "dog", "dog_r1"),
    *("female", "female_r1", "flower", "flower_r1", "food", "indoor", "lake", "male", "male_r1", "night", "night_r1"),
    *("people", "people_r1", "plant_life", "portrait", "portrait_r1", "river", "river_r1", "sea", "sea_r1", "sky"),
    *("structures", "sunset", "transport", "tree", "tree_r1", "water"),
]
N = 12  # pictures of the miniature; number 7 has no label


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", str(tmp_path / "cache"))


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


def write_csv(file: Path, *, column: str = "split", change: dict[str, str] | None = None, prefix: str = "") -> Path:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["file", "labels", "split", "deephash_split"])
        for split, numbers in PARTS.items():
            for number in numbers:
                labels = (change or {}).get(f"im{number}.jpg", ";".join(sorted(has(number))))
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
    assert any(
        "images without a label are kept, but are relevant to no query: 1 of train" in str(p) for p in kept.problems
    )

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
    write_csv(root / "labels.csv", prefix="images/")
    with pytest.raises(BadDataset, match="has no image in its query split"):
        build_splits("mirflickr", root=str(root), protocol="deephash")


def test_labels_can_be_dropped_by_pattern(official, tmp_path):
    options = {"root": str(official), "lists": str(write_csv(tmp_path / "list.csv"))}
    splits = build_splits("mirflickr", drop_labels=["*_r1"], **options)
    assert len(splits.label_names) == 24
    assert labels_of(splits, "im5.jpg") == {"animals", "sky", "sea"}
    with pytest.raises(BadDataset, match="matches drop_labels = 'z"):
        build_splits("mirflickr", drop_labels=["z*"], **options)


def test_lists_that_contradict_the_annotations_are_refused(official, tmp_path):
    file = write_csv(tmp_path / "list.csv", change={"im4.jpg": "sky", "im9.jpg": "food"})
    with pytest.raises(BadDataset, match=r"2 images have other labels in .*list.csv than in .*, for example im4.jpg"):
        build_splits("mirflickr", root=str(official), lists=str(file))


def test_missing_pictures_are_refused_or_left_out(official, tmp_path):
    (official / "mirflickr" / "im2.jpg").unlink()
    options = {"root": str(official), "lists": str(write_csv(tmp_path / "list.csv"))}
    with pytest.raises(Incomplete, match=r"1 of the 11 images that MIRFLICKR lists are not in .*im2.jpg: unpack mirfl"):
        build_splits("mirflickr", **options)
    splits = build_splits("mirflickr", on_error="skip", **options)
    assert names(splits.train) == ["im3.jpg", "im8.jpg", "im6.jpg"]


def break_list(text: str):
    return lambda root, tmp: (tmp / "list.csv").write_text(text)


FAULTS = {
    r"does not hold the annotations of MIRFLICKR": lambda root, tmp: shutil.rmtree(root / ANNOTATIONS),
    r"has not the annotations sea.txt, tree.txt .2 of 38.: unpack": lambda root, tmp: [
        (root / ANNOTATIONS / name).unlink() for name in ("sea.txt", "tree.txt")
    ],
    r"sky.txt has the line '25001', no image number from 1": lambda root, tmp: (
        root / ANNOTATIONS / "sky.txt"
    ).write_text("3\n25001\n"),
    r"sky.txt has the line 'im3', no image number": lambda root, tmp: (root / ANNOTATIONS / "sky.txt").write_text(
        "im3"
    ),
    r"does not hold the pictures im1.jpg": lambda root, tmp: shutil.rmtree(root / "mirflickr"),
    r"list.csv has no column 'split': it needs file, labels and split": break_list("file,labels\nim1.jpg,sky\n"),
    r"list.csv line 3 has the split 'val', not query": break_list(
        "file,labels,split\nim1.jpg,sky,query\nim2.jpg,sky,val\n"
    ),
    r"gives im1.jpg the label 'cat', none of the 38": break_list("file,labels,split\nim1.jpg,cat,query\n"),
    r"list.csv cannot be read as CSV": lambda root, tmp: (tmp / "list.csv").write_bytes(b"file,labels,split\n\xff,,\n"),
    r"1 images of the lists have no labels in .*im25001.jpg": lambda root, tmp: (tmp / "list.csv").write_text(
        (tmp / "list.csv").read_text() + "im25001.jpg,,train,train\n"
    ),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_a_half_unpacked_set_or_a_bad_list_is_one_sentence(official, tmp_path, sentence):
    file = write_csv(tmp_path / "list.csv")
    FAULTS[sentence](official, tmp_path)
    with pytest.raises(BadDataset, match=sentence) as caught:
        build_splits("mirflickr", root=str(official), lists=str(file))
    assert "\n" not in str(caught.value)


def test_other_mistakes(official, tmp_path):
    with pytest.raises(BadConfig, match="n_query 1000 and n_train 4000 of 11 images leave a split empty"):
        build_splits("mirflickr", root=str(official))
    with pytest.raises(BadConfig, match="protocol must be hyp2 or deephash, not 'csq'"):
        build_splits("mirflickr", root=str(official), protocol="csq")
    with pytest.raises(BadDataset, match=r"there is no list .*train.txt"):
        build_splits("mirflickr", root=str(official), lists=str(tmp_path / "nowhere"))
    (tmp_path / "repository" / "data" / "flickr25k").mkdir(parents=True)
    (tmp_path / "repository" / "data" / "flickr25k" / "img.txt").write_text("im1.jpg\nim2.jpg\n")
    for text in ("[0, 0]", "[0", '{"a": 1}'):
        (tmp_path / "repository" / "flickr.txt").write_text(text)
        with pytest.raises(BadDataset, match="is no permutation of"):
            build_splits("mirflickr", root=str(official), lists=str(tmp_path / "repository"))


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
