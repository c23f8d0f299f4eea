"""List files of the hashing papers: every spacing is read alike, every bad line is named, splits may not overlap."""

from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.lists import read_list
from support.dataset_files import names, sizes, touch_all


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
    (tmp_path / "names.txt").write_text("cat\n dog\nemu\n\n")
    assert (
        build_splits("lists", root=str(root), label_names=str(tmp_path / "names.txt")).fingerprint == named.fingerprint
    )


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


def test_training_images_that_the_database_lacks_are_added_to_it(root):
    plain = build_splits("lists", root=str(root))
    splits = build_splits("lists", root=str(root), train_in_database=True)
    assert splits.database.paths == plain.train.paths + plain.database.paths
    np.testing.assert_array_equal(splits.database.labels, np.concatenate([plain.train.labels, plain.database.labels]))
    assert splits.fingerprint != plain.fingerprint


def test_training_images_in_the_database_must_be_said_and_queries_may_not_be_there(root):
    write(root, "database", [line(i) for i in range(12) if i not in (4, 5)])
    with pytest.raises(BadDataset, match=r"4 .*images/00.jpg"):
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
