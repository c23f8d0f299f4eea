"""`hashseek train` and `evaluate` as a person calls them: results on stdout, one sentence per mistake."""

import subprocess
import sys
from pathlib import Path

import pytest

from hashseek.retrieval.checkpoint import load_header
from hashseek.training.data.datasets.shapes import render_shapes


def hashseek(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    program = "import torch; torch.set_num_threads(1); from hashseek.api.cli import main; main()"
    words = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    render_shapes(root, n_query=8, n_train=40, n_database=20, size=48, seed=3)
    return root


@pytest.fixture
def toml(tmp_path: Path, pictures: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(
        f'[data]\nname = "folder"\nroot = "{pictures}"\n'
        '[model]\nbackbone = "squeezenet1_1"\nn_bits = 12\nsize = 48\n'
        '[loss]\nname = "hyp2"\n'
        '[train]\nepochs = 2\nbatch_size = 16\ndevice = "cpu"\n'
    )
    return file


def test_train_then_evaluate(toml, tmp_path, pictures):
    done = hashseek("train", toml, "model.n_bits=8", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    checkpoint = Path(done.stdout.strip())
    assert checkpoint == tmp_path / "run" / "best.safetensors"
    assert load_header(checkpoint).n_bits == 8
    assert done.stderr.count("\nepoch ") + done.stderr.startswith("epoch ") == 2
    for part in ("loss_proxy", "loss_irrelevant", "val_mAP@1000", "images/s"):
        assert part in done.stderr
    again = hashseek("train", toml, "model.n_bits=8", "--out", tmp_path / "run", "--resume")
    assert again.returncode == 0
    shown = hashseek("evaluate", checkpoint, "-n", 5, "--baseline", "untrained", "--data", pictures)
    assert shown.returncode == 0, shown.stderr
    assert "## The same model before training" in shown.stdout
    assert (tmp_path / "run" / "evaluation-best" / "report.json").is_file()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["model.nbits=3"], "no setting 'model.nbits': did you mean 'n_bits'"),
        (["model.n_bits=0"], "'model.n_bits' is 0"),
        (["loss.name=hyp3"], "no loss 'hyp3'"),
        (["loss.betta=1"], "no hyperparameter 'betta': did you mean 'beta'"),
        (["model.backbone=resnet19"], "no backbone 'resnet19'"),
        (["model.weights=none.pth"], "no weights file none.pth"),
        (["data.root=/nowhere"], "no folder or list /nowhere"),
        (["data.labels=['circle']"], "has 1 label ('circle')"),
        (["data.labels=['circle','unicorn']"], "the label 'unicorn' never occurs"),
        (["train.device=cuda:9"], "this machine has"),
        (["train.device=quantum"], "no device 'quantum'"),
        (["model.size=8"], "must be 16 to 2048 pixels, not 8"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(toml, tmp_path, changes, sentence):
    done = hashseek("train", toml, *changes, "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("hashseek: ")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_a_run_folder_that_cannot_be_written(toml, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = hashseek("train", toml, "--out", tmp_path / "file" / "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "file/run" in done.stderr
