"""`hashseek data` as a person calls it, and the facts that it prints: hand-worked, and true of real photographs."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.label_files import Problem
from hashseek.training.data.datasets import DATASETS, build_splits, data_set
from hashseek.training.data.inspection import inspect_splits
from support.dataset_files import DATA, needs_data, write_tar
from support.in_process import run_command
from support.paths import ROOT
from support.pictures import draw, encoded


@pytest.fixture
def run(capsys):
    """Run `hashseek data ...` or `train` in this process: (exit code, standard output, standard error)."""
    return lambda *arguments: run_command(capsys, *([] if arguments[0] == "train" else ["data"]), *arguments)


@pytest.fixture
def worked(tmp_path) -> Path:
    """Eight pictures whose facts can be counted on fingers; two files are copies of others."""
    root = tmp_path / "worked"
    root.mkdir()
    for number in range(6):
        draw(number).save(root / f"{number}.jpg")
    shutil.copy(root / "0.jpg", root / "6.jpg")
    shutil.copy(root / "4.jpg", root / "7.jpg")
    rows = ["0.jpg,a;b,query", "1.jpg,b,query", "2.jpg,a;b,train", "3.jpg,a,train", "4.jpg,a;b;c,database"]
    rows += ["5.jpg,c,database", "6.jpg,a,database", "7.jpg,d,database", "8.jpg,a,database"]
    (root / "labels.csv").write_text("\n".join(["file,labels,split", *rows]))
    return root


def test_broken_images_are_found_without_loading_torch(run, worked):
    (worked / "3.jpg").write_bytes(b"not an image")
    program = "import sys; sys.modules['torch'] = None; from hashseek.api.cli import main; main()"
    words = [sys.executable, "-c", program, "data", "inspect", str(worked)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run("inspect", worked)[1]
    assert "3.jpg" in done.stdout
    assert "3.jpg" not in run("inspect", worked, "--no-files")[1]


@pytest.mark.parametrize("of_classes", [False, True])
def test_the_labels_of_a_folder_are_written_to_a_list_that_can_be_used_in_its_place(
    run, tmp_path, of_classes, monkeypatch
):
    root = tmp_path / "photos"
    for number in range(20):
        folder = root / ("train" if number < 12 else "test") / "ab"[number % 2] if of_classes else root
        folder.mkdir(parents=True, exist_ok=True)
        draw(number).save(folder / f"café {number}.jpg")
    if not of_classes:
        rows = [f"café {number}.jpg,{'a;b' if number % 3 else 'c'}" for number in range(20)]
        (root / "labels.csv").write_text("\n".join(["file,labels", *rows]))
    written = tmp_path / "lists" / "list.csv"
    monkeypatch.chdir(tmp_path)
    assert run("inspect", "photos", "--write-labels", written)[0] == 0
    first, second = build_splits("folder", root=str(root)), build_splits("folder", root=str(written))
    assert first.label_names == second.label_names
    for name in ("train", "query", "database"):
        one, other = getattr(first, name), getattr(second, name)
        assert dict(zip(one.paths, one.labels.tolist(), strict=True)) == dict(
            zip(other.paths, other.labels.tolist(), strict=True)
        )
    before = written.read_bytes()
    assert run("inspect", root, "--write-labels", written)[0] == 2, "no file is replaced"
    assert written.read_bytes() == before
    assert run("inspect", "shapes", "--write-labels", tmp_path / "new.csv")[0] == 2
    assert run("inspect", root, "--write-labels", tmp_path / "new.jsonl")[0] == 2, "it is read by its suffix"
    assert not list(tmp_path.glob("new.*"))


def test_labels_in_a_written_list_may_have_any_characters(run, tmp_path):
    names = ["x;y", "[z", "a,b", 'say "c"']
    rows = []
    for number in range(20):
        draw(number).save(tmp_path / f"{number}.jpg")
        rows.append(json.dumps({"file": f"{number}.jpg", "labels": [names[number % 4], "d"][: 1 + number % 2]}))
    (tmp_path / "labels.jsonl").write_text("\n".join(rows))
    assert run("inspect", tmp_path, "--write-labels", tmp_path / "list.csv")[0] == 0
    assert set(build_splits("folder", root=str(tmp_path / "list.csv")).label_names) == {*names, "d"}


def test_file_names_in_a_written_list_may_be_any_bytes(run, tmp_path):
    for number in range(6):
        folder = tmp_path / "photos" / ("train" if number < 4 else "test") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        draw(number).save(folder / os.fsdecode(b"caf\xe9 %d.jpg" % number))
    assert run("inspect", tmp_path / "photos", "--write-labels", tmp_path / "list.csv")[0] == 0
    assert b"caf\xe9 5.jpg,b,query\n" in (tmp_path / "list.csv").read_bytes()


def test_hand_worked_facts(worked):
    facts = inspect_splits(build_splits("folder", root=str(worked), on_error="skip"))
    assert facts["images"] == {"train": 2, "query": 2, "database": 4, "distinct": 8}
    assert facts["labels"][0] == {"name": "a", "train": 2, "query": 1, "database": 2, "distinct": 5, "share": 0.625}
    assert facts["never_in_training"] == ["c", "d"]
    assert facts["labels_per_image"] == {"mean": 1.5, "images": {"1": 5, "2": 2, "3": 1}}
    # a is on 5 of 8, b on 4, c on 2: by chance a and b would come together 2.5 times, and do 3 times.
    assert facts["pairs"] == [
        {"labels": ["a", "b"], "images": 3, "lift": 1.2},
        {"labels": ["a", "c"], "images": 1, "lift": 0.8},
        {"labels": ["b", "c"], "images": 1, "lift": 1.0},
    ]
    assert facts["missing"] == {"count": 1, "examples": ["labels.csv line 10: the file 8.jpg does not exist"]}
    copies = [[str(worked / "0.jpg"), str(worked / "6.jpg")], [str(worked / "4.jpg"), str(worked / "7.jpg")]]
    assert facts["duplicates"] == {"groups": 2, "files": 4, "across": 1, "examples": copies}
    assert facts["vectors"] is None
    assert json.loads(json.dumps(facts)) == facts
    shutil.copy(worked / "0.jpg", worked / "1.jpg")
    shutil.copy(worked / "5.jpg", worked / "6.jpg")  # the copies of queries are queries
    found = inspect_splits(build_splits("folder", root=str(worked), on_error="skip"))["duplicates"]
    assert (found["groups"], found["across"]) == (3, 0)


def test_missing_files_are_counted_and_the_first_are_named(worked):
    problems = (*(Problem("list", f"{n} is missing", missing=True) for n in range(12)), Problem("list", "odd"))
    splits = build_splits("folder", root=str(worked), on_error="skip")
    facts = inspect_splits(replace(splits, problems=problems), duplicates=False)
    assert (facts["missing"]["count"], len(facts["missing"]["examples"])) == (12, 10)
    assert facts["problems"] == ["skipped: list: odd"]


@pytest.mark.usefixtures("own_cache")
def test_members_of_shards_are_compared_like_files(tmp_path):
    for split, numbers in (("train", (1, 2)), ("query", (3, 4)), ("database", (5, 3))):
        members = {}
        for number in numbers:
            members[f"{split}{number}.jpg"] = encoded(draw(number), "JPEG")
            members[f"{split}{number}.txt"] = b"x;y" if number % 2 else b"x"
        write_tar(tmp_path / f"{split}.tar", members)
    options = {split: str(tmp_path / f"{split}.tar") for split in ("train", "query", "database")}
    splits = build_splits("shards", **options)
    found = inspect_splits(splits)["duplicates"]
    assert (found["groups"], found["across"]) == (1, 1)
    assert [Path(path).name for path in found["examples"][0]] == ["database3.jpg", "query3.jpg"]


def test_inspect_prints_the_facts_as_text_or_json(run, shapes, tmp_path):
    code, out, _ = run("inspect", shapes)
    assert code == 0
    assert out.startswith("images: train 40, query 8, database 20\nsplits: ")
    for part in ("circle", "missing files: 0", "duplicate files: 0"):
        assert part in out
    code, out, _ = run("inspect", "folder", f"root={shapes}", "data.drop_labels=['st*']", "--json", "--no-files")
    assert code == 0
    facts = json.loads(out)
    assert facts["name"] == "folder"
    assert facts["options"] == {"on_error": "skip", "root": str(shapes), "drop_labels": ["st*"]}
    assert facts["duplicates"] is None
    assert "circle" in {label["name"] for label in facts["labels"]}
    together = [pair["images"] for pair in facts["pairs"]]
    assert together == sorted(together, reverse=True)
    assert "star" not in {label["name"] for label in facts["labels"]}
    vectors, labels = np.eye(40, 9), np.eye(2)[np.arange(40) % 2]
    np.savez(tmp_path / "a.npz", X=vectors, Y=labels, label_names=["a", "b"])
    code, out, _ = run("inspect", "vectors", f"path={tmp_path}/a.npz")
    assert (code, out.startswith("rows: "), "vectors of 9 " in out, "duplicate" in out) == (0, True, True, False)


def test_missing_files_are_reported_and_not_refused(run, worked):
    code, out, _ = run("inspect", worked)
    assert code == 0
    assert "missing files: 1\n  labels.csv line 10: the file 8.jpg does not exist" in out
    assert "2 images in 4 files; 1 of them" in out
    assert out.count("c, d\n") == 1  # never used in training
    assert "a + b: 3; 1.2" in out
    assert re.findall("^([a-d]) ", out, re.MULTILINE) == ["a", "b", "c", "d"]
    code, _, err = run("inspect", worked, "on_error=stop")
    assert code == 2
    assert "line 10" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["voc"],
        ["voc2007"],
        ["voc2007", "root=/nowhere"],
        ["voc2007", "rot=/nowhere"],
        ["voc2007", "/nowhere"],
        ["coco", "root=/nowhere", "year=2016"],
        ["coco", "root=/nowhere", "n_query=many"],
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments):
    code, out, err = run("inspect", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_list_names_every_data_set_with_its_options(run):
    code, out, _ = run("list")
    assert code == 0
    for name in DATASETS:
        assert f"\n{name}: " in f"\n{out}"
    assert "    year = 2014\n" in out
    assert "\n    root\n" in out


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_and_its_options_are_documented(name):
    text = (ROOT / "docs" / "reference" / "datasets.md").read_text()
    assert name in {title for line in text.splitlines() if line.startswith("## ") for title in line[3:].split(", ")}
    text = inspect.getdoc(data_set(name)) or ""
    assert text.partition("\n")[0].endswith((".", ")"))
    for option in inspect.signature(data_set(name)).parameters:
        assert f"\n    {option}: " in text, option


def small_training(root: Path) -> list[object]:
    """Arguments of `train` for one epoch on the folder `root`."""
    config = root / "small.toml"
    config.write_text(
        f'[data]\nname = "folder"\nroot = "{root}"\n[model]\nbackbone = "squeezenet1_1"\nn_bits = 8\nsize = 48\n'
        '[train]\nepochs = 1\nval_fraction = 0.5\nbatch_size = 2\ndevice = "cpu"\n'
    )
    return [config, "--out", root / "run"]


def labelled(root: Path, rows: list[str], header: str = "file,labels,split") -> Path:
    """Twelve pictures and a label file with `rows` before valid lines."""
    for number in range(12):
        draw(number).save(root / f"{number}.jpg")
    good = [f"{n}.jpg,{'ab'[n % 2]},{('train', 'query', 'database')[n // 4]}" for n in range(12)]
    (root / "labels.csv").write_text("\n".join([header, *rows, *good]))
    return root


@pytest.mark.parametrize(
    ("rows", "header", "named"),
    [
        (["gone.jpg,a,train"], "file,labels,split", "gone.jpg"),
        (["broken.jpg,a,train"], "file,labels,split", "broken.jpg"),
        (["extra.jpg,,train"], "file,labels,split", "extra.jpg"),
        (['extra.jpg,"a, b",train'], "file,labels,split", "a, b"),
        (["extra.jpg,a,gallery"], "file,labels,split", "gallery"),
        ([], "file,labels,colour", "colour"),
    ],
)
def test_inspect_reports_and_on_demand_refuses_what_train_refuses(run, tmp_path, rows, header, named):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    draw(99).save(tmp_path / "extra.jpg")
    root = labelled(tmp_path, rows, header)
    code, _, err = run("inspect", root, "on_error=stop")
    assert code == 2
    assert named in err
    code, out, _ = run("inspect", root)
    assert code == 0
    assert named in out
    # `train` refuses it for the same reason, before it creates a run folder.
    code, _, err = run("train", *small_training(root))
    assert code == 2
    assert named in err
    assert not (root / "run").exists()


def test_training_images_that_are_the_database_are_counted_once(run, tmp_path):
    for number in range(12):
        draw(number).save(tmp_path / f"{number}.jpg")
    rows = [f"{n}.jpg,{'ab'[n % 2]},{'query' if n < 4 else 'train'}" for n in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,labels,split", *rows]))
    (tmp_path / "5.jpg").write_bytes(b"no picture")
    code, out, _ = run("inspect", tmp_path)
    assert code == 0
    assert "train 7, query 4, database 7 (11 different ones)" in out
    assert out.count("5.jpg") == 2, "its line and its path, once"


def test_a_refused_run_can_be_repeated_with_on_error_skip(run, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    root = labelled(tmp_path, ["broken.jpg,a,train"])
    assert run("train", *small_training(root))[0] == 2
    command = ("train", *small_training(root), "--on-error", "skip")
    code, out, err = run(*command, "--resume")
    assert (code, "note: " in err) == (0, True), err
    assert Path(out.strip()).is_file()
    code, again, err = run(*command, "--resume")
    assert (code, again, "note: " in err) == (0, out, False), err
    assert run(*command)[0] == 2


@needs_data
def test_what_is_known_of_the_real_photographs():
    root = f"{DATA}/mirflickr25k_128"
    facts = inspect_splits(build_splits("folder", root=root, ignore_columns=["deephash_split"]))
    counts = {label["name"]: label["distinct"] for label in facts["labels"]}
    # From the SOURCE.md beside the data: labels as published, and the one picture that is there twice.
    assert (counts["people"], counts["baby_r1"], counts["water"]) == (8490, 95, 2572)
    assert facts["labels_per_image"]["mean"] == pytest.approx(4.81, abs=0.005)
    assert [[Path(file).name for file in group] for group in facts["duplicates"]["examples"]] == [
        ["im6602.jpg", "im6921.jpg"]
    ]
