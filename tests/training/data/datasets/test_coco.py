"""MS-COCO on a miniature of its files: labels are the categories of objects, whatever form their outlines have."""

import json
from pathlib import Path

import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.coco import _OUTLINE
from support.dataset_files import damage_file, labels_of, names, picture, sizes

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
    assert f"{82081 if year == 2014 else 117266:,}" in str(splits.problems)  # published
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
    in_database = build_splits("coco", train_in_database=True, **options)
    assert sizes(in_database) == (2, 3, 5)
    assert "107,218" in str(splits.problems)  # published
    assert "117,218" in str(in_database.problems)
    assert build_splits("coco", on_error="skip", **options).on_error == "skip"


def test_options_of_a_random_split_are_refused_where_none_is_drawn(coco):
    with pytest.raises(BadConfig, match="n_train is 3"):
        build_splits("coco", root=str(coco), protocol="official", n_train=3)


@pytest.mark.parametrize(
    ("place", "damage", "named"),
    [
        ("annotations/instances_val2014.json", lambda text: text[:-300], "instances_val2014.json"),
        ("annotations/instances_train2014.json", lambda _: "{}", "instances_train2014.json"),
        ("annotations/instances_train2014.json", lambda text: text + "\udcff", "instances_train2014.json"),
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


@pytest.mark.parametrize(
    ("options", "named"), [({"year": 2015}, "2015"), ({"lists": "x"}, "lists"), ({}, "5000 .* 10000")]
)
def test_impossible_options_are_refused(coco, options, named):
    with pytest.raises(BadConfig, match=named):
        build_splits("coco", root=str(coco), **options)
