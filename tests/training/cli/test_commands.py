"""`hashseek train` and `evaluate`: results on stdout, one line per error."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.checkpoint import load_header, save_checkpoint
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.cli.evaluate import data_options, name_in_report
from hashseek.training.data.datasets import build_splits
from support.in_process import run_command
from support.models import PREPROCESSING


@pytest.fixture
def toml(tmp_path: Path, shapes: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(
        f'[data]\nname = "folder"\nroot = "{shapes}"\n'
        '[model]\nbackbone = "squeezenet1_1"\nn_bits = 12\nsize = 48\n'
        '[loss]\nname = "hyp2"\n'
        '[train]\nepochs = 2\nbatch_size = 16\ndevice = "cpu"\n'
    )
    return file


def test_train_then_evaluate(toml, tmp_path, shapes, capsys):
    code, out, err = run_command(capsys, "train", toml, "model.n_bits=8", "--out", tmp_path / "run")
    assert code == 0, err
    checkpoint = Path(out.strip())
    assert checkpoint == tmp_path / "run" / "best.safetensors"
    assert load_header(checkpoint).n_bits == 8
    assert len(re.findall("^epoch ", err, re.M)) == 2
    for part in ("loss_proxy", "loss_irrelevant", "val_mAP@1000", "images/s"):
        assert part in err
    options = ("-n", 5, "--points", 0, "--data", shapes, "--normalizer", "possible")
    code, out, err = run_command(capsys, "evaluate", checkpoint, *options)
    assert code == 0, err
    assert "ITQ on the same features" in out
    of_data = f"evaluation-best-{Path(shapes).name}-{build_splits('folder', root=str(shapes)).fingerprint[:8]}"
    assert (tmp_path / "run" / f"{of_data}-possible" / "report.json").is_file()
    assert len([*(tmp_path / "run").glob("evaluation-*")]) == 1  # not where those of other options would be


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["loss.name=hyp3"], "'hyp3'"),
        (["loss.betta=1"], "'betta'"),
        (["model.backbone=resnet19"], "'resnet19'"),
        (["model.weights=none.pth"], "none.pth"),
        (["train.device=quantum"], "'quantum'"),
        (["model.size=8"], "got 8"),
        (["--devices", "3"], "train.devices, 3"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(toml, tmp_path, capsys, changes, named):
    code, _, error = run_command(capsys, "train", toml, *changes, "--out", tmp_path / "run")
    assert code == 2, error
    assert error.startswith("hashseek: ")
    assert named in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_mistakes_in_settings_and_data_are_found_before_torch_is_loaded(toml, checkpoint, tmp_path):
    run, missing = ["--out", str(tmp_path / "run")], [str(tmp_path / name) for name in ("missing.toml", "missing")]
    named = {
        "'model.nbits'": ["train", str(toml), "model.nbits=3", *run],
        "/nowhere": ["train", str(toml), "data.root=/nowhere", *run],
        "'rot'": ["train", str(toml), "data.rot=/nowhere", *run],
        "'unicorn'": ["train", str(toml), "data.labels=['circle','unicorn']", *run],
        **{place: ["evaluate", str(checkpoint), "--data", place] for place in missing},
        "--data": ["evaluate", str(checkpoint)],  # which records no data
    }
    program = f"""
import sys; sys.modules["torch"] = None
from hashseek.api.cli import main
for arguments in {[*named.values()]}:
    try:
        main(arguments)
    except SystemExit as ended:
        print(ended.code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"] * len(named)
    for word, line in zip(named, done.stderr.splitlines(), strict=True):
        assert line.startswith("hashseek: ")
        assert word in line
    assert not (tmp_path / "run").exists()


def test_a_data_set_is_a_name_a_folder_a_function_or_a_toml_file(toml, shapes, checkpoint, tmp_path, monkeypatch):
    assert data_options(checkpoint, str(toml)) == ("folder", {"root": str(shapes)})
    assert data_options(checkpoint, str(shapes)) == ("folder", {"root": str(shapes)})
    assert data_options(checkpoint, "my_data:holidays") == ("my_data:holidays", {})
    (tmp_path / "shapes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert data_options(checkpoint, "shapes") == ("shapes", {}), "a name means the same in every folder"
    assert data_options(checkpoint, "./shapes") == ("folder", {"root": "./shapes"})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_options(checkpoint, "~/shapes") == ("folder", {"root": "~/shapes"})  # no shell expands --data=~/shapes


def test_a_report_names_the_data_as_the_user_did():
    assert name_in_report(None, "scene", {"root": "vectors"}) == "scene"  # not the folder with other sets as well
    assert name_in_report(None, "folder", {"root": "photos"}) == "photos"
    assert name_in_report("my.toml", "folder", {"root": "photos"}) == "my.toml"


def test_a_toml_file_of_a_data_set_needs_nothing_else(checkpoint, shapes, tmp_path, capsys):
    file = tmp_path / "data.toml"
    file.write_text(f'[data]\nname = "folder"\nroot = "{shapes}"\n')
    assert data_options(checkpoint, str(file)) == ("folder", {"root": str(shapes)})
    for content in ("[model]\nn_bits = 8\n", "[data]\nroot = 3\n", "data = 1\n"):
        file.write_text(content)
        code, _, error = run_command(capsys, "data", "inspect", file)
        assert (code, len(error.splitlines())) == (2, 1), error


@pytest.mark.parametrize("command", ["evaluate", "probe"])
def test_a_checkpoint_names_no_function_to_run(tmp_path, capsys, monkeypatch, command):
    """Whoever made it could choose any function, such as one that starts a program."""
    made, ran = tmp_path / "given.safetensors", tmp_path / "ran"
    model = HashModel(backbone="squeezenet1_1", n_bits=8)
    training = {"data": {"name": "os:mkdir", "path": str(ran)}}
    save_checkpoint(made, model, PREPROCESSING, label_names=("a", "b"), training=training)
    code, _, error = run_command(capsys, command, made)
    assert (code, len(error.splitlines())) == (2, 1)
    assert "HASHSEEK_PLUGINS=os, or pass the data set with --data" in error
    assert not ran.exists()
    monkeypatch.setenv("HASHSEEK_PLUGINS", "os")
    assert run_command(capsys, command, made)[0] == 2  # mkdir returns no splits
    assert ran.exists()


def test_an_evaluation_that_fails_leaves_no_folder(checkpoint, tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", X=rng.standard_normal((40, 9)), Y=np.eye(2)[np.arange(40) % 2], label_names=["a", "b"])
    data = tmp_path / "vectors.toml"
    data.write_text(
        f'[data]\nname = "vectors"\npath = "{tmp_path}/a.npz"\n[model]\nbackbone = "mlp:9-16"\nn_bits = 8\n'
    )
    before = sorted(checkpoint.parent.iterdir())
    assert run_command(capsys, "evaluate", checkpoint, "--data", data)[0] == 2  # it encodes images
    assert sorted(checkpoint.parent.iterdir()) == before
    out = tmp_path / "report"
    for place in (data, tmp_path / "missing"):
        assert run_command(capsys, "evaluate", checkpoint, "--data", place, "--out", out)[0] == 2
        assert not out.exists()


def test_a_run_folder_that_cannot_be_written(toml, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    code, _, err = run_command(capsys, "train", toml, "--out", tmp_path / "file" / "run")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "file/run" in err


@pytest.mark.parametrize("command", ["evaluate", "probe", "truncate"])
def test_a_run_folder_in_place_of_a_checkpoint(tmp_path, capsys, command):
    code, _, err = run_command(capsys, command, tmp_path, *(["--bits", 8] if command == "truncate" else []))
    assert code == 2
    assert str(tmp_path / "best.safetensors") in err


def test_a_run_folder_in_place_of_a_report(tmp_path, capsys):
    code, _, err = run_command(capsys, "compare", tmp_path, tmp_path)
    assert code == 2
    assert str(tmp_path / "evaluation-best") in err
