"""Data set `folder`: splits are seeded and disjoint, and every bad line is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.splits import never_in_training
from hashseek.training.data.training_images import without_broken


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
    lines = (root / "labels.csv").read_text().splitlines()
    write(root, lines[:0:-1])
    assert files(build_splits("folder", root=str(root), split_seed=3)) == parts, "the order of the list does not matter"


def test_a_seeded_split_is_written_out_and_can_be_used_in_place_of_the_list(root, tmp_path):
    written = tmp_path / "elsewhere" / "split.csv"
    first = build_splits("folder", root=str(root), split_file=str(written))
    second = build_splits("folder", root=str(written))
    assert files(first) == files(second)
    np.testing.assert_array_equal(first.train.labels, second.train.labels)


def test_a_split_column_is_followed_and_retrieval_means_database(root):
    rows = [f"{n:02}.png,a;b,{('query', 'train', 'retrieval', 'database')[n % 4]}" for n in range(20)]
    write(root, rows, "file,labels,split")
    parts = files(build_splits("folder", root=str(root)))
    assert [len(parts[name]) for name in ("query", "train", "database")] == [5, 5, 10]


def test_jsonl_says_the_same_as_csv(root):
    csv = build_splits("folder", root=str(root))
    rows = [{"file": f"{n:02}.png", "labels": ["a", "b"] if n % 3 else ["c"]} for n in range(20)]
    (root / "labels.csv").unlink()
    (root / "labels.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    jsonl = build_splits("folder", root=str(root))
    assert csv.fingerprint == jsonl.fingerprint
    np.testing.assert_array_equal(csv.query.labels, jsonl.query.labels)


BAD_LINES = {
    "the file gone.png does not exist": "gone.png,a",
    "does not exist": "x" * 300 + ".png,a",
    "00.png was listed before, in line 2": "00.png,a",
    "05.png has no label": "05.png,",
    "stray spaces around labels": "06.png, a ; b",
    "names no file": ",a",
    "has not the 2 fields": "07.png,a,extra",
}


@pytest.mark.parametrize("sentence", BAD_LINES)
def test_a_bad_line_is_refused_or_skipped_by_number(root, sentence):
    rows = [f"{n:02}.png,a" if n % 2 else f"{n:02}.png,b" for n in range(20) if n not in (5, 6, 7)]
    write(root, [*rows, BAD_LINES[sentence]])
    with pytest.raises(BadDataset, match=f"labels.csv has 1 problem: labels.csv line 19: .*{sentence}"):
        build_splits("folder", root=str(root))
    splits = build_splits("folder", root=str(root), on_error="skip")
    assert len(splits.problems) == 1
    assert sentence in str(splits.problems[0])
    repaired = sentence.startswith("stray")
    assert sum(len(part) for part in (splits.train, splits.query, splits.database)) == 17 + repaired
    assert set(splits.label_names) == {"a", "b"}


def test_an_unknown_column_is_refused_ignored_by_name_or_skipped(root):
    write(root, [f"{n:02}.png,{'ab'[n % 2]},x" for n in range(20)], "file,labels,colour")
    with pytest.raises(BadDataset, match="unknown column 'colour'"):
        build_splits("folder", root=str(root))
    assert build_splits("folder", root=str(root), ignore_columns=["colour"]).problems == ()
    assert "colour" in str(build_splits("folder", root=str(root), on_error="skip").problems[0])


def test_broken_images_are_refused_or_skipped_by_line(root):
    (root / "03.png").write_bytes((root / "03.png").read_bytes()[:100])
    (root / "04.png").write_text("text")
    splits = build_splits("folder", root=str(root), query_fraction=0.05, train_fraction=0.9)
    broken = [i for i, path in enumerate(splits.train.paths) if path.name in ("03.png", "04.png")]
    with pytest.raises(BadDataset, match=r"has \d problems?: line \d+ \(0[34].png\): .*(damaged|not an image)"):
        without_broken(splits.train, on_error="stop", source="here")
    kept, problems = without_broken(splits.train, on_error="skip", source="here")
    assert len(kept) == len(splits.train) - len(broken)
    assert len(problems) == len(broken) > 0


@pytest.mark.parametrize(
    ("rows", "header", "options", "error", "sentence"),
    [
        (["00.png,a", "01.png,a", "02.png,a"], "file,labels", {}, BadDataset, "1 label .'a'.: with fewer than two"),
        (["00.png,a,test"], "file,labels,split", {}, BadDataset, "split is 'test', not query"),
        (["00.png,a,query", "01.png,b,"], "file,labels,split", {}, BadDataset, "line 3 has no split"),
        (["00.png,a,query", "01.png,b,train"], "file,labels,split", {}, BadDataset, "no image in its database split"),
        (["00.png,a", "01.png,b"], "file,labels", {}, BadConfig, "leave a split empty"),
        (["a.png"], "picture", {}, BadDataset, "no column `file`"),
        (["00.png,a", "01.png,b"], "file,labels", {"labels": ["a", "zebra"]}, BadDataset, "'zebra' never occurs"),
        (["00.png,a", "01.png,b"], "file,labels", {"drop_labels": ["z*"]}, BadDataset, "matches drop_labels = 'z"),
        (["00.png,a", "01.png,b"], "file,labels", {"on_error": "ignore"}, BadConfig, "skip or stop, not 'ignore'"),
        (["00.png,a", "01.png,b"], "file,labels", {"drop_label": ["z*"]}, BadConfig, "did you mean 'drop_labels'"),
    ],
)
def test_unusable_lists_are_one_sentence(root, rows, header, options, error, sentence):
    write(root, rows, header)
    with pytest.raises(error, match=sentence):
        build_splits("folder", root=str(root), **options)


def test_places_without_a_list(tmp_path):
    with pytest.raises(BadDataset, match="no folder or list"):
        build_splits("folder", root=str(tmp_path / "nowhere"))
    with pytest.raises(BadDataset, match=r"has neither labels\.csv nor"):
        build_splits("folder", root=str(tmp_path))
    with pytest.raises(BadConfig, match="environment variable HASHSEEK_NOT_SET"):
        build_splits("folder", root="$HASHSEEK_NOT_SET/x")
    with pytest.raises(BadConfig, match="needs the option 'root'"):
        build_splits("folder")
    with pytest.raises(BadConfig, match="no data set 'folders'"):
        build_splits("folders")
    (tmp_path / "labels.csv").write_bytes(b"file,labels\n\xff\xfe,a\n")
    with pytest.raises(BadDataset, match="not UTF-8"):
        build_splits("folder", root=str(tmp_path))


def test_labels_can_be_chosen_dropped_and_are_reported_when_they_cannot_be_learnt(root):
    rows = [f"{n:02}.png,a;b;a_r1,{('query', 'train', 'database')[n % 3]}" for n in range(18)]
    write(root, [*rows, "18.png,c,query"], "file,labels,split")
    assert build_splits("folder", root=str(root)).label_names == ("a", "a_r1", "b", "c")
    assert build_splits("folder", root=str(root), drop_labels=["*_r1"]).label_names == ("a", "b", "c")
    chosen = build_splits("folder", root=str(root), labels=["b", "a"])
    assert chosen.label_names == ("b", "a")
    assert len(chosen.query) == 6, "an image with none of the chosen labels is left out"
    assert never_in_training(build_splits("folder", root=str(root))) == ["c"]


def test_a_query_image_in_the_database_is_refused(root):
    write(root, ["00.png,a,query", "./00.png,a,database", "01.png,b,train"], "file,labels,split")
    with pytest.raises(BadDataset, match="1 images .* in the query and in the database split"):
        build_splits("folder", root=str(root))
