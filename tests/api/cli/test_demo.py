"""The lines at the end of the demo."""

import json
import os
import sys

import pytest

from hashseek.api.cli import demo
from hashseek.api.cli.demo import gain
from hashseek.retrieval.errors import HashseekError


def test_the_demo_ends_with_what_labels_gain(tmp_path):
    def scores(*values):
        parts = zip((100, 1000), values, strict=True)
        return {"scores": [{"n": n, "mean_average_precision": {"expected": value}} for n, value in parts]}

    report = {"main_n": 1000, "models": [scores(0.9, 0.8512), scores(0.8, 0.7381)]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    lines = gain(tmp_path / "report.json")
    assert [line.split()[-2:] for line in lines] == [["mAP@1000", "0.851"], ["mAP@1000", "0.738"]]
    assert ["no labels" in line for line in lines] == [False, True]


def test_the_service_takes_the_place_of_the_demo(tmp_path, monkeypatch):
    report = tmp_path / "run" / "evaluation" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"models": []}))
    report.with_name("report.md").touch()
    (tmp_path / "shapes").mkdir()
    rows = ("a.jpg,sky,query", "b.jpg,sky,database", "c.jpg,sky,train")
    (tmp_path / "shapes" / "labels.csv").write_text("\n".join(("file,labels,split", *rows)))
    started, steps = [], []
    monkeypatch.setattr(demo, "_step", lambda *words: steps.append(words))
    monkeypatch.setattr(demo, "gain", lambda _: ["", ""])
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append((program, arguments)))
    demo.demo(folder=tmp_path, port=8001)
    command = ["-m", "hashseek", "serve", str(tmp_path / "collection"), "--port", "8001"]
    assert (tmp_path / "pictures.txt").read_text().splitlines() == [str(tmp_path / "shapes" / "b.jpg")]
    assert ("search", tmp_path / "without-labels", tmp_path / "shapes" / "a.jpg", "-k", 5) in steps
    assert started == [(sys.executable, [sys.executable, *command])]
    # A demo that was interrupted continues; one that had ended trains and evaluates nothing again.
    assert [step[0] for step in steps] == ["train", "index", "index", "search"]
    assert steps[0][-1] == "--resume"
    trained, fitted = tmp_path / "run" / "best.safetensors", tmp_path / "without-labels" / "checkpoint.safetensors"
    assert steps[1][3:] == (tmp_path / "shapes" / "labels.csv", "--split", "database", "--checkpoint", trained)
    (tmp_path / "run" / "last.safetensors").touch()
    report.unlink()
    demo.demo(folder=tmp_path, serve=False)
    assert [step[0] for step in steps[4:]] == ["index", "index", "search", "evaluate"]
    assert steps[-1][1:3] == (trained, fitted)  # in the order of `gain`
    assert len(started) == 1


def test_a_step_that_fails_ends_the_demo():
    demo._step("--version")
    with pytest.raises(HashseekError):
        demo._step("trian")
