"""Data set `folder`: splits are seeded and disjoint, and every bad line is named."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.splits import never_in_training


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(20):
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(tmp_path / f"{number:02}.png")
    write(tmp_path, [f"{n:02}.png,{'a;b' if n % 3 else 'c'}" for n in range(20)])
    return tmp_path


def write(root: Path, rows: list[str], header: str = "file,labels") -> None:
    (root / "labels.csv").write_text("\n".join([header, *rows]) + "\n")


def files(splits) -> dict[str, set[str]]:
    return {name: {path.name for path in getattr(splits, name).paths} for name in ("train", "query", "database")}


def test_without_a_split_column_the_split_is_seeded_disjoint_and_complete(root):
    splits = build_splits("folder", root=str(root), split_seed=3)
    parts = files(splits)
    assert [len(parts[name]) for name in ("query", "train", "database")] == [2, 10, 8]
    assert set().union(*parts.values()) == {f"{n:02}.png" for n in range(20)}
    assert files(build_splits("folder", root=str(root), split_seed=3)) == parts
    assert files(build_splits("folder", root=str(root), split_seed=4)) != parts
    with pytest.raises(BadConfig):  # a misspelt column must not lead to a random split
        build_splits("folder", root=str(root), split_column="spilt")
    lines = (root / "labels.csv").read_text().splitlines()
    write(root, lines[:0:-1])
    assert files(build_splits("folder", root=str(root), split_seed=3)) == parts, "the order of the list does not matter"


def test_labels_are_utf_8(root):
    sort_into_folders(root, lambda number: f"{'train' if number < 12 else 'test'}/{'ab'[number % 2]}")
    (root / "train" / "a").rename(root / "train" / os.fsdecode(b"caf\xe9"))
    with pytest.raises(BadDataset, match="caf"):
        build_splits("folder", root=str(root))


def test_a_split_column_is_followed_and_retrieval_means_database(root):
    rows = [f"{n:02}.png,a;b,{('query', 'train', 'retrieval', 'database')[n % 4]}" for n in range(20)]
    write(root, rows, "file,labels,split")
    splits = build_splits("folder", root=str(root))
    parts = files(splits)
    assert [len(parts[name]) for name in ("query", "train", "database")] == [5, 5, 10]
    write(root, ["", *rows], "file,labels,split")
    assert build_splits("folder", root=str(root)).fingerprint == splits.fingerprint
    write(root, rows, "File,Labels,Split")
    assert files(build_splits("folder", root=str(root), split_column="Split")) == parts
    for option in ({"query_fraction": 0.2}, {"train_fraction": 0.2}, {"split_seed": 1}):
        with pytest.raises(BadConfig, match=f"{next(iter(option))} is .*labels.csv has a split"):
            build_splits("folder", root=str(root), **option)


def test_a_bad_line_is_refused_or_skipped(root):
    write(root, [*(f"{n:02}.png,{'ab'[n % 2]},x" for n in range(19)), "gone.png,a,x"], "file,labels,colour")
    with pytest.raises(BadDataset, match="2 problems"):
        build_splits("folder", root=str(root))
    splits = build_splits("folder", root=str(root), on_error="skip")
    assert ["colour" in problem.reason for problem in splits.problems] == [True, False]
    assert sum(len(part) for part in (splits.train, splits.query, splits.database)) == 19
    skipped = build_splits("folder", root=str(root), on_error="skip", ignore_columns="colour")
    assert [problem.missing for problem in skipped.problems] == [True]


def test_the_first_problem_is_named_if_no_line_can_be_used(root):
    write(root, [f"{n:02}.png,{'ab'[n % 2]},train2017" for n in range(20)], "file,labels,split")
    with pytest.raises(BadDataset, match="train2017"):
        build_splits("folder", root=str(root), on_error="skip")
    assert not build_splits("folder", root=str(root), ignore_columns=["split"]).problems
    write(root, [f"{n:02}.png,{'ab'[n % 2]},train2017" for n in range(20)], "File,Labels,Split")
    assert not build_splits("folder", root=str(root), ignore_columns=["Split"]).problems


def sort_into_folders(root: Path, place) -> None:
    """Move the pictures of `root` to `place(number)`, one class each."""
    (root / "labels.csv").unlink()
    for number in range(20):
        target = root / place(number) / f"{number:02}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        (root / f"{number:02}.png").rename(target)


def test_one_folder_per_class_needs_no_list(root):
    sort_into_folders(root, lambda n: "cats/young" if n % 2 else "dogs")
    splits = build_splits("folder", root=str(root))
    assert splits.label_names == ("cats", "dogs")
    assert [len(part) for part in (splits.query, splits.train, splits.database)] == [2, 10, 8]
    for path, labels in zip(splits.train.paths, splits.train.labels, strict=True):
        assert splits.label_names[labels.argmax()] in path.as_posix()
    assert splits.problems == ()
    for hidden in (root / ".thumbnails", root / "dogs" / ".cache"):
        hidden.mkdir()
        Image.new("RGB", (9, 9)).save(hidden / "x.png")
    assert build_splits("folder", root=str(root)).fingerprint == splits.fingerprint
    Image.new("RGB", (9, 9)).save(root / "stray.png")
    with pytest.raises(BadDataset, match=r"stray\.png"):
        build_splits("folder", root=str(root))
    assert len(build_splits("folder", root=str(root), on_error="skip").problems) == 1


def test_classes_can_be_left_out_and_columns_need_a_list(root):
    sort_into_folders(root, lambda n: ("cats", "dogs", "dogs_r1", "birds_r1")[n % 4])
    splits = build_splits("folder", root=str(root), drop_labels=["*_r1"])
    assert splits.label_names == ("cats", "dogs")
    assert sum(map(len, files(splits).values())) == 10
    for drop in (["*_r1", "fish"], ["*"]):
        with pytest.raises(BadDataset):
            build_splits("folder", root=str(root), drop_labels=drop)
    for options in ({"split_column": "part"}, {"ignore_columns": ["colour"]}):
        with pytest.raises(BadConfig):
            build_splits("folder", root=str(root), **options)


def test_a_class_may_have_the_name_of_a_split_but_splits_stand_alone(root):
    sort_into_folders(root, lambda n: "train" if n % 2 else "bus")
    assert build_splits("folder", root=str(root)).label_names == ("bus", "train")
    (root / "test").mkdir()
    (root / "train").rename(root / "test" / "train")
    with pytest.raises(BadDataset, match="bus"):
        build_splits("folder", root=str(root))


@pytest.mark.parametrize("names", [("train", "test"), ("train", "val", "test"), ("train", "test", "database")])
def test_one_folder_per_split_and_class(root, names):
    sort_into_folders(root, lambda n: f"{names[n % len(names)]}/{'cats' if n % 4 < 2 else 'dogs'}")
    (root / "annotations").mkdir()  # without images, so it is no split and no class
    (root / "annotations" / "notes.json").touch()
    splits = build_splits("folder", root=str(root))
    assert splits.label_names == ("cats", "dogs")
    assert {path.parent.parent.name for path in splits.query.paths} == set(names) - {"train", "database"}
    if "database" in names:
        assert splits.problems == ()
    else:  # the training images become the database, and a note says so
        assert splits.database.paths == splits.train.paths
        assert not splits.problems[0].skipped
    (root / "loose.jpg").touch()
    with pytest.raises(BadDataset, match=r"loose\.jpg"):
        build_splits("folder", root=str(root))


@pytest.mark.parametrize("option", [{"split_seed": -1}, {"query_fraction": math.nan}, {"train_fraction": 1}])
def test_a_seed_or_share_outside_its_limits_is_refused(root, option):
    with pytest.raises(BadConfig):
        build_splits("folder", root=str(root), **option)


def test_a_label_for_each_image_is_warned_about(root):
    write(root, [f"{n:02}.png,label {n}" for n in range(20)])
    [problem] = build_splits("folder", root=str(root)).problems
    assert "no two training images share a label" in problem.reason
    write(root, [f"{n:02}.png,label {n % 5}" for n in range(20)])
    assert build_splits("folder", root=str(root)).problems == ()


@pytest.mark.parametrize(
    ("rows", "header", "options", "error"),
    [
        (["00.png,a", "01.png,a", "02.png,a"], "file,labels", {}, BadDataset),  # one label
        (["00.png,a,train", "01.png,b,query", "02.png,b,database", "03.png,a,"], "file,labels,split", {}, BadDataset),
        (["00.png,a,query", "01.png,b,database"], "file,labels,split", {}, BadDataset),  # no training images
        (["00.png,a", "01.png,b"], "file,labels", {}, BadConfig),  # too few to split
        (["00.png,a", "01.png,b"], "file,labels", {"labels": ["a", "zebra"]}, BadDataset),
        (["00.png,a", "01.png,b"], "file,labels", {"drop_labels": ["z*"]}, BadDataset),
        (["00.png,a", "01.png,b"], "file,labels", {"on_error": "ignore"}, BadConfig),
        (["00.png,a,query", "./00.png,a,database", "01.png,b,train"], "file,labels,split", {}, BadDataset),  # overlap
    ],
)
def test_unusable_lists_are_refused(root, rows, header, options, error):
    write(root, rows, header)
    with pytest.raises(error):
        build_splits("folder", root=str(root), **options)


def test_places_without_a_list_and_unknown_options(tmp_path):
    for place in ("nowhere", ""):
        with pytest.raises(BadDataset):
            build_splits("folder", root=str(tmp_path / place))
    with pytest.raises(BadConfig, match="HASHSEEK_NOT_SET"):
        build_splits("folder", root="$HASHSEEK_NOT_SET/x")
    for name, options in (("folder", {}), ("folders", {}), ("folder", {"root": "x", "drop_label": []})):
        with pytest.raises(BadConfig):
            build_splits(name, **options)


def test_a_root_may_begin_with_a_variable_or_at_home(root, monkeypatch):
    monkeypatch.setenv("HASHSEEK_PHOTOS", str(root))
    monkeypatch.setenv("HOME", str(root.parent))
    paths = build_splits("folder", root=str(root)).train.paths
    for place in ("$HASHSEEK_PHOTOS", f"~/{root.name}"):
        assert build_splits("folder", root=place).train.paths == paths


def test_a_data_set_from_outside_is_named_by_its_module(root, tmp_path, monkeypatch):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "my_data.py").write_text(
        "from hashseek.training.data.datasets import build_splits\n"
        "def halves(*, root, size=1):\n"
        "    return build_splits('folder', root=root, train_fraction=0.5 * size)\n"
    )
    monkeypatch.chdir(tmp_path / "outside")
    assert len(build_splits("my_data:halves", root=str(root)).train) == 10
    with pytest.raises(BadConfig, match="siz"):
        build_splits("my_data:halves", root=str(root), siz=1)
    with pytest.raises(BadConfig):
        build_splits("my_data:quarters", root=str(root))


def test_labels_can_be_chosen_dropped_and_are_reported_when_they_cannot_be_learnt(root):
    rows = [f"{n:02}.png,a;b;a_r1,{('query', 'train', 'database')[n % 3]}" for n in range(18)]
    write(root, [*rows, "18.png,c,query"], "file,labels,split")
    assert build_splits("folder", root=str(root)).label_names == ("a", "a_r1", "b", "c")
    assert build_splits("folder", root=str(root), drop_labels=["*_r1"]).label_names == ("a", "b", "c")
    assert build_splits("folder", root=str(root), drop_labels=["c"]).label_names == ("a", "a_r1", "b")
    chosen = build_splits("folder", root=str(root), labels=["b", "a"])
    assert chosen.label_names == ("b", "a")
    assert chosen.fingerprint == build_splits("folder", root=str(root), labels=["a", "b"]).fingerprint
    assert len(chosen.query) == 6, "an image with none of the chosen labels is left out"
    assert never_in_training(build_splits("folder", root=str(root))) == ["c"]
