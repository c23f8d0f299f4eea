"""List files of the hashing papers: every spacing is read alike, every bad line is named, splits may not overlap."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits, mirflickr, voc
from hashseek.training.data.datasets.lists import read_list
from support.dataset_files import names, needs_data, published_list, sizes, touch_all, write_lists


@pytest.fixture
def root(tmp_path) -> Path:
    """12 images: 4 to train with, 2 queries, 6 in the database; 3 labels."""
    touch_all(tmp_path, [f"images/{i:02}.jpg" for i in range(12)])
    for name, rows in (("train", range(4)), ("test", range(4, 6)), ("database", range(6, 12))):
        write(tmp_path, name, [line(i) for i in rows])
    return tmp_path


def line(i: int, labels: str | None = None) -> str:
    return f"images/{i:02}.jpg {labels or ['1 0 0', '0 1 1', '1 1 1'][i % 3]}"


def write(root: Path, name: str, lines: list[str]) -> None:
    (root / f"{name}.txt").write_text("".join(f"{text}\n" for text in lines))


def test_three_lists_are_three_splits(root, tmp_path):
    splits = build_splits("lists", root=str(root))
    assert sizes(splits) == (2, 4, 6)
    assert names(splits.query) == ["04.jpg", "05.jpg"]
    np.testing.assert_array_equal(splits.query.labels, [[0, 1, 1], [1, 1, 1]])
    assert splits.label_names == ("0", "1", "2")
    assert splits.problems == ()
    named = build_splits("lists", root=str(root), label_names=["cat", "dog", "emu"])
    assert named.label_names == ("cat", "dog", "emu")
    (tmp_path / "names.txt").write_text("cat\n dog\nemu\n\n", encoding="utf-8-sig")
    assert (
        build_splits("lists", root=str(root), label_names=str(tmp_path / "names.txt")).fingerprint == named.fingerprint
    )


def test_a_byte_order_mark_is_not_part_of_a_name(root):
    before = build_splits("lists", root=str(root)).fingerprint
    for name in ("train", "test", "database"):
        file = root / f"{name}.txt"
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert build_splits("lists", root=str(root)).fingerprint == before


def test_lists_may_have_other_names_and_another_folder(root, tmp_path):
    (root / "lists").mkdir()
    for old, new in (("train", "a"), ("test", "b"), ("database", "c")):
        (root / f"{old}.txt").rename(root / "lists" / f"{new}.txt")
    options = {"train": "a.txt", "query": "b.txt", "database": "c.txt"}
    assert sizes(build_splits("lists", root=str(root), lists=str(root / "lists"), **options)) == (2, 4, 6)


@pytest.mark.parametrize("space", [" ", "  ", "\t", " \t "])
@pytest.mark.parametrize("ending", ["\n", "\r\n", " \n", "\n\n"])
def test_every_spacing_is_read_alike(tmp_path, space, ending):
    rows = {"a.jpg": "0110", "b 1/x y.jpg": "1111", "é.jpg": "0000", "./z-1.jpg": "1000"}
    text = "".join(f"{name}{space}{space.join(labels)}{ending}" for name, labels in rows.items())
    (tmp_path / "list.txt").write_bytes(text.encode())
    table, problems = read_list(tmp_path / "list.txt")
    assert problems == []
    assert list(table.files) == [name.removeprefix("./") for name in rows]
    np.testing.assert_array_equal(table.labels, [list(map(int, labels)) for labels in rows.values()])


BAD_LINES = {
    "images/x.jpg 0 1": "fewer labels",
    "images/x.jpg 0 1 2": "another number",
    "images/x.jpg 0 1 x": "a word",
    "0 1 0": "no path",
    "images/x.jpg": "no labels",
    "images/x.jpg0 1 0": "no space",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=BAD_LINES.values())
def test_a_bad_line_is_refused_or_skipped_by_number(root, bad):
    lines = (root / "database.txt").read_text().splitlines()
    write(root, "database", [*lines[:3], "", bad, *lines[3:]])
    with pytest.raises(BadDataset, match=r"database.txt line 5"):
        build_splits("lists", root=str(root))
    splits = build_splits("lists", root=str(root), on_error="skip")
    assert sizes(splits) == (2, 4, 6)
    assert len(splits.problems) == 1


def test_a_prefix_is_taken_off(root):
    for name in ("train", "test", "database"):
        text = (root / f"{name}.txt").read_text()
        (root / f"{name}.txt").write_text(text.replace("images/", "./data/set/images/"))
    with pytest.raises(BadDataset, match="data/set/images"):
        build_splits("lists", root=str(root))
    assert sizes(build_splits("lists", root=str(root), strip_prefix="./data/set/")) == (2, 4, 6)
    with pytest.raises(BadConfig, match="'./dta'"):
        build_splits("lists", root=str(root), strip_prefix="./dta")


def test_missing_images_are_refused_or_left_out(root):
    (root / "images" / "07.jpg").unlink()
    with pytest.raises(BadDataset, match="images/07.jpg"):
        build_splits("lists", root=str(root))
    splits = build_splits("lists", root=str(root), on_error="skip")
    assert sizes(splits) == (2, 4, 5)
    [problem] = splits.problems
    assert problem.missing
    assert splits.on_error == "skip"  # also for images that turn out to be broken


def test_training_images_that_the_database_lacks_are_added_to_it(root):
    plain = build_splits("lists", root=str(root))
    splits = build_splits("lists", root=str(root), train_in_database=True)
    assert splits.database.paths == plain.train.paths + plain.database.paths
    np.testing.assert_array_equal(splits.database.labels, np.concatenate([plain.train.labels, plain.database.labels]))
    assert splits.fingerprint != plain.fingerprint


def test_training_images_in_the_database_must_be_said_and_queries_may_not_be_there(root):
    write(root, "database", [line(i) for i in range(12) if i not in (4, 5)])
    with pytest.raises(BadDataset, match=r"4 .*images/00.jpg.* train_in_database = true"):
        build_splits("lists", root=str(root))
    assert sizes(build_splits("lists", root=str(root), train_in_database=True)) == (2, 4, 10)

    write(root, "database", [line(i) for i in range(12)])
    with pytest.raises(BadDataset, match=r"2 .*images/04.jpg"):
        build_splits("lists", root=str(root), train_in_database=True)
    splits = build_splits("lists", root=str(root), train_in_database=True, drop_queries=True)
    assert sizes(splits) == (2, 4, 10)
    assert "2 queries" in splits.problems[0].reason

    write(root, "train", [line(i) for i in range(5)])
    with pytest.raises(BadDataset, match=r"1 .*images/04.jpg"):
        build_splits("lists", root=str(root), train_in_database=True, drop_queries=True)


@pytest.mark.parametrize(
    ("name", "lines", "named"),
    [
        ("train", [], "train.txt"),
        ("train", ["images/00.jpg", "images/01.jpg"], "train.txt"),
        ("train", ["images/00.jpg 1 0", "images/01.jpg 0 1"], "train.txt 2, test.txt 3"),
        ("train", [line(0), line(1), line(0)], "images/00.jpg"),
        ("database", [line(6), line(7), line(0, "0 0 1")], "images/00.jpg"),
        ("database", [line(6), line(7), line(6)], "database split .*images/06.jpg 2 times"),
    ],
)
def test_unusable_lists_are_refused(root, name, lines, named):
    write(root, name, lines)
    with pytest.raises(BadDataset, match=named):
        build_splits("lists", root=str(root), train_in_database=True)


def test_missing_lists_and_wrong_label_names_are_refused(root):
    for label_names in (["cat", "dog"], str(root / "nowhere.txt")):
        with pytest.raises(BadDataset):
            build_splits("lists", root=str(root), label_names=label_names)
    (root / "test.txt").unlink()
    with pytest.raises(BadDataset, match=r"test.txt"):
        build_splits("lists", root=str(root))


def test_names_that_are_no_text_come_through(tmp_path):
    name = b"\xff\xfe.jpg"
    (tmp_path / "list.txt").write_bytes(name + b" 1 0\n")
    table, _ = read_list(tmp_path / "list.txt")
    assert table.files[0].encode(errors="surrogateescape") == name


def published(root: Path, rows: list[dict[str, str]], n_labels: int) -> dict[str, str]:
    """The options that read the rows of a published list."""
    write_lists(root / "lists", rows, n_labels)
    touch_all(root, [row["file"] for row in rows])
    return {"root": str(root), "lists": str(root / "lists")}


def counts(*splits) -> np.ndarray:
    return np.concatenate([split.labels for split in splits]).sum(axis=0, dtype=int)


@needs_data
@pytest.mark.parametrize(
    ("name", "n_labels", "n_query", "n_train", "most"),
    [
        ("nuswide21_hyp2_train_test", 21, 2100, 10500, 6222),
        ("nuswide21m_train_test", 21, 2100, 10500, 6199),
        ("nuswide81m_train_test", 81, 5000, 10000, 5432),
    ],
)
def test_the_published_lists_of_nuswide(tmp_path, name, n_labels, n_query, n_train, most):
    rows = published_list(name)
    # The database's list is too large to be here: as in DeepHash-pytorch the training images are part of it.
    rows += [{**row, "split": "database"} for row in rows if row["split"] == "train"]
    options = published(tmp_path, rows, n_labels)
    splits = build_splits("lists", train_in_database=True, **options)
    assert sizes(splits) == (n_query, n_train, n_train)
    assert counts(splits.query, splits.train).max() == most
    if n_labels == 21:
        assert counts(splits.train).min() >= 500, "500 training images were drawn for each label"


@needs_data
@pytest.mark.parametrize(
    ("name", "label_names", "n_database", "known"),
    [
        # The numbers of images that VOC 2012's own page gives for its trainval.
        (
            "voc2012",
            voc.LABELS,
            6540,
            {"aeroplane": 670, "bicycle": 552, "person": 4087, "tvmonitor": 575},
        ),
        # Those of the set's own annotations.
        ("mirflickr25k", mirflickr.LABELS, 20000, {"people": 10373, "baby_r1": 116, "sky": 7912, "water": 3331}),
    ],
)
def test_the_published_lists_of_deephash(tmp_path, name, label_names, n_database, known):
    options = published(tmp_path, published_list(f"{name}_deephash"), len(label_names))
    (tmp_path / "names.txt").write_text("\n".join(label_names))
    splits = build_splits("lists", label_names=str(tmp_path / "names.txt"), **options)
    assert sizes(splits) == (1000, 4000, n_database)
    found = dict(zip(label_names, counts(splits.query, splits.train, splits.database).tolist(), strict=True))
    assert {label: found[label] for label in known} == known


@needs_data
def test_the_published_list_of_hashnet_repeats_its_queries(tmp_path):
    rows = published_list("coco80_hashnet_full")
    parts = {split: {row["file"] for row in rows if row["split"] == split} for split in ("train", "test", "database")}
    assert {split: len(files) for split, files in parts.items()} == {"train": 10000, "test": 5000, "database": 112218}
    assert parts["test"] < parts["database"]
    assert len(parts["train"] | parts["database"]) == 122218, "the number of images of COCO that have an object"

    some = [row for row in rows if zlib.crc32(row["file"].encode()) % 16 == 0]  # all of them would take a while
    kept = {split: sum(row["split"] == split for row in some) for split in parts}
    options = published(tmp_path, some, 80) | {"root": str(tmp_path / "data" / "coco"), "strip_prefix": "./data/coco/"}
    with pytest.raises(BadDataset, match=f"{kept['test']} queries"):
        build_splits("lists", **options)
    splits = build_splits("lists", drop_queries=True, **options)
    assert sizes(splits) == (kept["test"], kept["train"], kept["database"] - kept["test"])
