"""List files of the hashing papers: every spacing is read alike, every bad line is named, splits may not overlap."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@given(
    st.lists(
        st.tuples(
            st.text(alphabet="abz09_./-é ", min_size=1).map(lambda text: f"x{text.strip()}y.jpg"),
            st.lists(st.integers(0, 1), min_size=4, max_size=4),
            st.sampled_from([" ", "  ", "\t", " \t "]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["\n", "\r\n", " \n", "\n\n"]),
)
@settings(deadline=None, max_examples=60)
def test_reading_all_lines_at_once_is_reading_them_one_by_one(tmp_path_factory, rows, ending):
    file = tmp_path_factory.mktemp("list") / "list.txt"
    file.write_bytes(
        "".join(f"{name}{space}{space.join(map(str, labels))}{ending}" for name, labels, space in rows).encode()
    )
    table, problems = read_list(file)
    assert problems == []
    assert list(table.files) == [name for name, _, _ in rows]
    np.testing.assert_array_equal(table.labels, [labels for _, labels, _ in rows])


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
    with pytest.raises(
        BadDataset, match=r"database.txt has 1 problem: database.txt line 5: it is not a path and 3 labels"
    ):
        build_splits("lists", root=str(root))
    splits = build_splits("lists", root=str(root), on_error="skip")
    assert sizes(splits) == (2, 4, 6)
    assert len(splits.problems) == 1


def test_a_prefix_is_taken_off(root):
    for name in ("train", "test", "database"):
        text = (root / f"{name}.txt").read_text()
        (root / f"{name}.txt").write_text(text.replace("images/", "./data/set/images/"))
    with pytest.raises(
        BadDataset, match=r"none of the 12 images that .* lists is in .*: correct root and strip_prefix"
    ):
        build_splits("lists", root=str(root))
    assert sizes(build_splits("lists", root=str(root), strip_prefix="./data/set/")) == (2, 4, 6)
    with pytest.raises(BadConfig, match=r"no path in .*train.txt starts with strip_prefix = './dta"):
        build_splits("lists", root=str(root), strip_prefix="./dta")


def test_missing_images_are_refused_or_left_out(root):
    (root / "images" / "07.jpg").unlink()
    with pytest.raises(BadDataset, match=r"1 of the 12 images .* for example images/07.jpg"):
        build_splits("lists", root=str(root))
    splits = build_splits("lists", root=str(root), on_error="skip")
    assert sizes(splits) == (2, 4, 5)
    assert [problem.reason for problem in splits.problems] == ["the file images/07.jpg does not exist"]


def test_training_images_in_the_database_must_be_said_and_queries_may_not_be_there(root):
    write(root, "database", [line(i) for i in range(12) if i not in (4, 5)])
    with pytest.raises(
        BadDataset, match=r"4 images of .* are in the train and in the database split.*train_in_database"
    ):
        build_splits("lists", root=str(root))
    assert sizes(build_splits("lists", root=str(root), train_in_database=True)) == (2, 4, 10)

    write(root, "database", [line(i) for i in range(12)])
    with pytest.raises(BadDataset, match="2 images of .* are in the query and in the database split"):
        build_splits("lists", root=str(root), train_in_database=True)
    splits = build_splits("lists", root=str(root), train_in_database=True, drop_queries=True)
    assert sizes(splits) == (2, 4, 10)
    assert "2 queries that the database repeats were left out" in str(splits.problems[0])

    write(root, "train", [line(i) for i in range(5)])
    with pytest.raises(BadDataset, match="1 images of .* are in the query and in the train split"):
        build_splits("lists", root=str(root), train_in_database=True, drop_queries=True)


@pytest.mark.parametrize(
    ("name", "lines", "sentence"),
    [
        ("train", [], "train.txt is no list of lines"),
        ("train", ["images/00.jpg", "images/01.jpg"], "train.txt is no list of lines `path 0 1 0 ...`"),
        ("train", ["images/00.jpg 1 0", "images/01.jpg 0 1"], r"other numbers of labels .train.txt 2, test.txt 3"),
        ("train", [line(0), line(1), line(0)], "the train split of .* lists the image images/00.jpg more than once"),
        ("database", [line(6), line(7), line(0, "0 0 1")], "give images/00.jpg two different sets of labels"),
    ],
)
def test_unusable_lists_are_one_sentence(root, name, lines, sentence):
    write(root, name, lines)
    with pytest.raises(BadDataset, match=sentence):
        build_splits("lists", root=str(root), train_in_database=True)


def test_lists_that_are_not_there(root):
    with pytest.raises(BadDataset, match="other numbers of labels .* than 2, as many as the set has label names"):
        build_splits("lists", root=str(root), label_names=["cat", "dog"])
    with pytest.raises(BadDataset, match="the file of label names is missing"):
        build_splits("lists", root=str(root), label_names=str(root / "nowhere.txt"))
    (root / "test.txt").unlink()
    with pytest.raises(BadDataset, match=r"there is no list .*test.txt: put it there"):
        build_splits("lists", root=str(root))


def test_names_that_are_no_text_come_through(tmp_path):
    name = b"\xff\xfe.jpg"
    (tmp_path / "list.txt").write_bytes(name + b" 1 0\n")
    table, _ = read_list(tmp_path / "list.txt")
    assert table.files[0].encode(errors="surrogateescape") == name
