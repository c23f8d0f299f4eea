"""VOC 2007 and 2012 on a miniature of the official folders: every object counts, the database is the training set."""

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from support.dataset_files import damage_file, labels_of, names, picture, sizes

OBJECT = """    <object>
        <name>{name}</name>
        <pose>Left</pose>
        <truncated>1</truncated>
        <difficult>{difficult}</difficult>
        <bndbox><xmin>48</xmin><ymin>240</ymin><xmax>195</xmax><ymax>371</ymax></bndbox>{part}
    </object>
"""
HEAD = """
        <part><name>head</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox></part>"""
IMAGES = {  # * marks a difficult object
    "000001": ("dog", "person"),
    "000002": ("train",),
    "000003": ("sofa", "chair*"),
    "000004": ("car", "car", "car*"),
    "000005": ("person*",),
    "000006": ("pottedplant", "bottle"),
}


def write_voc(root: Path, year: str, sets: dict[str, list[str]]) -> Path:
    folder = root / "VOCdevkit" / f"VOC{year}"
    for place in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / place).mkdir(parents=True)
    for number, (name, objects) in enumerate(IMAGES.items()):
        picture(folder / "JPEGImages" / f"{name}.jpg", number)
        parts = "".join(
            OBJECT.format(name=word.rstrip("*"), difficult=int("*" in word), part=HEAD if word == "person" else "")
            for word in objects
        )
        (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>\n{parts}</annotation>\n")
    for name, ids in sets.items():
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{i}\n" for i in ids))
        # The lists of single labels lie beside them and must not be taken for the sets.
        (folder / "ImageSets" / "Main" / f"dog_{name}.txt").write_text("".join(f"{i} -1\n" for i in ids))
    return folder


@pytest.fixture
def voc(tmp_path) -> Path:
    return write_voc(tmp_path, "2007", {"trainval": list(IMAGES)[:4], "test": list(IMAGES)[4:]})


def test_2007_has_trainval_as_training_set_and_database_and_test_as_queries(voc, tmp_path):
    splits = build_splits("voc2007", root=str(tmp_path))
    assert names(splits.train) == names(splits.database) == ["000001.jpg", "000002.jpg", "000003.jpg", "000004.jpg"]
    assert names(splits.query) == ["000005.jpg", "000006.jpg"]
    assert len(splits.label_names) == 20
    assert splits.label_names[:3] == ("aeroplane", "bicycle", "bird")
    assert all(path.is_file() for path in splits.train.paths + splits.query.paths)
    assert any("4,952" in problem.reason for problem in splits.problems)
    assert build_splits("voc2007", root=str(tmp_path), on_error="skip").on_error == "skip"


def test_2012_has_train_as_training_set_and_val_as_queries(tmp_path):
    write_voc(tmp_path, "2012", {"train": ["000001", "000003"], "val": ["000002"], "trainval": list(IMAGES)})
    splits = build_splits("voc2012", root=str(tmp_path))
    assert sizes(splits) == (1, 2, 2)
    assert names(splits.query) == ["000002.jpg"]
    assert build_splits("voc2012", root=str(tmp_path), on_error="skip").on_error == "skip"


def test_difficult_objects_count_and_parts_of_objects_are_no_labels(voc, tmp_path):
    splits = build_splits("voc2007", root=str(tmp_path))
    for name, objects in IMAGES.items():
        assert labels_of(splits, f"{name}.jpg") == {word.rstrip("*") for word in objects}, name


def test_annotations_are_parsed_once_until_one_changes_or_the_cache_breaks(voc, tmp_path, monkeypatch, caplog):
    first = build_splits("voc2007", root=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(ET, "parse", lambda file: pytest.fail(f"{file} was parsed again"))
        again = build_splits("voc2007", root=str(tmp_path))
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(again.train.labels, first.train.labels)

    file = next((tmp_path / "cache" / "datasets").iterdir())
    for damage in (file.read_bytes()[:-40], b"", b"no array"):
        file.write_bytes(damage)
        assert build_splits("voc2007", root=str(tmp_path)).fingerprint == first.fingerprint
        assert file.name in caplog.text
        caplog.clear()
    assert build_splits("voc2007", root=str(tmp_path)).fingerprint == first.fingerprint
    assert not caplog.text, "the damaged one was replaced"

    annotation = voc / "Annotations" / "000002.xml"
    annotation.write_text(annotation.read_text().replace("<name>train<", "<name>bus<"))
    changed = build_splits("voc2007", root=str(tmp_path))
    assert labels_of(changed, "000002.jpg") == {"bus"}
    assert changed.fingerprint != first.fingerprint


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(voc, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HASHSEEK_CACHE", str(tmp_path / "file" / "cache"))
    assert sizes(build_splits("voc2007", root=str(tmp_path))) == (2, 4, 4)
    assert str(tmp_path / "file") in caplog.text


def test_the_fingerprint_is_that_of_the_set_and_not_of_its_place(voc, tmp_path):
    first = build_splits("voc2007", root=str(tmp_path))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(tmp_path / "VOCdevkit", moved)
    assert build_splits("voc2007", root=str(moved)).fingerprint == first.fingerprint
    assert build_splits("voc2007", root=str(moved / "VOCdevkit")).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    ("place", "damage", "named"),
    [
        ("", None, "VOCdevkit/VOC2007"),
        ("Annotations/000002.xml", None, "000002.xml"),
        ("Annotations", None, "000001.xml"),
        ("JPEGImages", None, "000001.jpg"),
        ("ImageSets/Main/test.txt", None, "test.txt"),
        ("ImageSets/Main/trainval.txt", lambda text: "\n", "train split"),
        ("Annotations/000004.xml", lambda text: text[:200], "000004.xml"),
        ("Annotations/000001.xml", lambda text: text.replace("<name>dog", "<name>unicorn"), "unicorn"),
        ("Annotations/000001.xml", lambda text: text.replace("<name>dog</name>", ""), "000001.xml"),
        ("ImageSets/Main/test.txt", lambda text: f"{text}000001\n", "000001.jpg"),
        ("ImageSets/Main/test.txt", lambda text: f"{text}000006\n", "000006.jpg"),
    ],
)
def test_an_incomplete_or_changed_set_is_refused(voc, tmp_path, place, damage, named):
    damage_file(voc / place, damage)
    with pytest.raises(BadDataset, match=named):
        build_splits("voc2007", root=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("voc2012", {"protocol": "deephash"}),
        ("voc2012", {"lists": "x"}),
        ("voc2007", {"on_error": "ignore"}),
    ],
)
def test_impossible_options_are_refused(tmp_path, name, options):
    with pytest.raises(BadConfig):
        build_splits(name, root=str(tmp_path), **options)
