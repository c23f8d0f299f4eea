"""MS-COCO on a miniature of its files: labels are the categories of objects, whatever form their outlines have."""

import json
import zlib
from pathlib import Path

import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.coco import _OUTLINE
from support.dataset_files import (
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

# Not in the order of their ids, and with holes, as in the real files.
CATEGORIES = {18: "dog", 1: "person", 44: "bottle", 90: "toothbrush"}
OUTLINES = [
    [[239.97, 260.24, 222.04, 1e-05], [1.0, -2.5, 3.0]],
    {"counts": [272, 2, 4, 4], "size": [240, 320]},
    {"counts": "Vj`0]b]1N2O1O0O2^OnR", "size": [240, 320]},
    [],
    [[]],
]
OBJECTS = {  # image -> categories of its objects; 5 has none
    "train": {9: [18, 18, 1], 25: [1], 30: [44], 5: [], 34: [90, 1, 44, 18]},
    "val": {139: [1, 44], 285: [18], 632: [90], 724: []},
}


def file_name(part: str, year: int, number: int) -> str:
    return f"COCO_{part}2014_{number:012}.jpg" if year == 2014 else f"{number:012}.jpg"


def write_coco(root: Path, year: int) -> Path:
    (root / "annotations").mkdir(parents=True)
    for part, images in OBJECTS.items():
        for number in images:
            picture(root / f"{part}{year}" / file_name(part, year, number), number)
        found = [(number, category) for number, categories in images.items() for category in categories]
        annotations = [
            {"id": i, "segmentation": OUTLINES[i % len(OUTLINES)], "image_id": number, "category_id": category}
            for i, (number, category) in enumerate(found)
        ]
        content = {
            "info": {"description": 'a "segmentation" : [ in a text'},
            "licenses": [],
            "images": [{"id": n, "file_name": file_name(part, year, n), "width": 24, "height": 20} for n in images],
            "annotations": annotations[::-1],
            "categories": [{"supercategory": "x", "id": key, "name": name} for key, name in CATEGORIES.items()],
        }
        (root / "annotations" / f"instances_{part}{year}.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def coco(tmp_path) -> Path:
    return write_coco(tmp_path / "coco", 2014)


@pytest.mark.parametrize("year", [2014, 2017])
def test_official_sets_and_labels(tmp_path, year):
    root = write_coco(tmp_path / "coco", year)
    splits = build_splits("coco", root=str(root), year=year, protocol="official")
    assert splits.label_names == ("person", "dog", "bottle", "toothbrush"), "in the order of the ids"
    assert names(splits.train) == names(splits.database) == [file_name("train", year, n) for n in (9, 25, 30, 34)]
    assert names(splits.query) == [file_name("val", year, n) for n in (139, 285, 632)]
    for part, images in OBJECTS.items():
        for number, categories in images.items():
            if categories:
                wanted = {CATEGORIES[category] for category in categories}
                assert labels_of(splits, file_name(part, year, number)) == wanted


@pytest.mark.parametrize("indent", [None, 1])
def test_taking_outlines_out_changes_nothing_else(coco, indent):
    content = json.loads((coco / "annotations" / "instances_train2014.json").read_text())
    short = json.loads(_OUTLINE.sub(rb"\g<1>0", json.dumps(content, indent=indent).encode()))
    assert all(found.pop("segmentation") == 0 for found in short["annotations"])
    for found in content["annotations"]:
        found.pop("segmentation")
    assert short == content


def test_the_hashing_split_is_seeded_over_all_images_with_objects(coco):
    options = {"root": str(coco), "n_query": 2, "n_train": 3}
    splits = build_splits("coco", **options)
    assert sizes(splits) == (2, 3, 2)
    assert build_splits("coco", **options).fingerprint == splits.fingerprint
    assert build_splits("coco", split_seed=1, **options).fingerprint != splits.fingerprint
    assert sizes(build_splits("coco", train_in_database=True, **options)) == (2, 3, 5)


def write_hashnet(folder: Path) -> Path:
    parts = {"train": [("train", 9), ("train", 30)], "test": [("val", 139)], "database": [("train", 34), ("val", 285)]}
    folder.mkdir()
    for split, images in parts.items():
        # Another order of labels than the official one: only who is in which split counts.
        lines = [f"./data/coco/{part}2014/{file_name(part, 2014, n)} 0 1 1 0\n" for part, n in images]
        (folder / f"{split}.txt").write_text("".join(lines))
    return folder


def test_lists_say_the_split_and_the_annotations_the_labels(coco, tmp_path):
    lists = write_hashnet(tmp_path / "lists")
    splits = build_splits("coco", root=str(coco), lists=str(lists))
    assert sizes(splits) == (1, 2, 2)
    assert labels_of(splits, file_name("train", 2014, 9)) == {"dog", "person"}


def test_options_of_a_random_split_are_refused_where_none_is_drawn(coco, tmp_path):
    lists = write_hashnet(tmp_path / "lists")
    for given in ({"lists": str(lists), "split_seed": 1}, {"protocol": "official", "n_train": 3}):
        with pytest.raises(BadConfig, match="split_seed is 1|n_train is 3"):
            build_splits("coco", root=str(coco), **given)


def test_lists_with_images_that_have_no_object(coco, tmp_path):
    lists = write_hashnet(tmp_path / "lists")
    with (lists / "train.txt").open("a") as file:
        file.write("./data/coco/train2014/COCO_train2014_000000000005.jpg 0 0 0 1\n")
    with pytest.raises(BadDataset, match=r"000000000005.jpg"):
        build_splits("coco", root=str(coco), lists=str(lists))
    assert sizes(build_splits("coco", root=str(coco), lists=str(lists), on_error="skip")) == (1, 2, 2)


def test_bad_lines_of_lists_are_refused_or_reported(coco, tmp_path):
    lists = write_hashnet(tmp_path / "lists")
    with (lists / "train.txt").open("a") as file:
        file.write("./data/coco/train2014/COCO_train2014_000000000025.jpg 0 1\n")
    with pytest.raises(BadDataset, match=r"train\.txt"):
        build_splits("coco", root=str(coco), lists=str(lists))
    splits = build_splits("coco", root=str(coco), lists=str(lists), on_error="skip")
    assert sizes(splits) == (1, 2, 2)
    assert [problem.where for problem in splits.problems if problem.skipped] == ["train.txt line 3"]


@pytest.mark.parametrize(
    ("place", "damage", "named"),
    [
        ("annotations/instances_val2014.json", lambda text: text[:-300], "instances_val2014.json"),
        ("annotations/instances_train2014.json", lambda _: "{}", "instances_train2014.json"),
        ("annotations/instances_val2014.json", lambda text: text.replace('"dog"', '"hound"'), "annotations"),
        ("annotations", None, "instances_train2014.json"),
        ("val2014", None, "COCO_val2014_000000000139.jpg"),
        ("", None, "coco"),
    ],
)
def test_an_incomplete_set_is_refused(coco, place, damage, named):
    damage_file(coco / place, damage)
    with pytest.raises(BadDataset, match=named):
        build_splits("coco", root=str(coco), n_query=2, n_train=3)


@pytest.mark.parametrize("options", [{"year": 2015}, {"protocol": "official", "lists": "x"}, {}])
def test_impossible_options_are_refused(coco, options):
    with pytest.raises(BadConfig):
        build_splits("coco", root=str(coco), **options)


@needs_data
def test_the_published_list_of_hashnet_repeats_its_queries(tmp_path):
    rows = published_list("coco80_hashnet_full")
    parts = {split: {row["file"] for row in rows if row["split"] == split} for split in ("train", "test", "database")}
    assert {split: len(files) for split, files in parts.items()} == {"train": 10000, "test": 5000, "database": 112218}
    assert parts["test"] < parts["database"]
    assert len(parts["train"] | parts["database"]) == 122218, "the number of images of COCO that have an object"

    some = [row for row in rows if zlib.crc32(row["file"].encode()) % 16 == 0]  # all of them would take a while
    write_lists(tmp_path / "lists", some, 80)
    prefix = "./data/coco/"
    touch_all(tmp_path, [row["file"].removeprefix(prefix) for row in some])
    options = {"root": str(tmp_path), "lists": str(tmp_path / "lists"), "strip_prefix": prefix}
    kept = {split: sum(row["split"] == split for row in some) for split in parts}
    with pytest.raises(BadDataset, match=f"{kept['test']} images"):
        build_splits("lists", **options)
    splits = build_splits("lists", drop_queries=True, **options)
    assert sizes(splits) == (kept["test"], kept["train"], kept["database"] - kept["test"])
