"""`hashseek train` and `evaluate` as a person calls them: results on stdout, one sentence per mistake."""

import subprocess
import sys
from pathlib import Path

import pytest

from hashseek.api.cli import main
from hashseek.retrieval.checkpoint import load_header
from hashseek.training.data.datasets.shapes import render_shapes

PROGRAM = "import torch; torch.set_num_threads(1); from hashseek.api.cli import main; main()"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from hashseek.api.cli import main; main()"


def hashseek(*arguments: object, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


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
    shown = hashseek("evaluate", checkpoint, "-n", 5, "--baseline", "untrained", "--data", pictures)
    assert shown.returncode == 0, shown.stderr
    assert "## The same model before training" in shown.stdout
    assert (tmp_path / "run" / "evaluation-best" / "report.json").is_file()


@pytest.mark.parametrize(
    ("changes", "named", "needs_torch"),
    [
        (["model.nbits=3"], "'model.nbits'", False),
        (["data.root=/nowhere"], "/nowhere", False),
        (["data.rot=/nowhere"], "'rot'", False),
        (["data.labels=['circle','unicorn']"], "'unicorn'", False),
        (["loss.name=hyp3"], "'hyp3'", True),
        (["loss.betta=1"], "'betta'", True),
        (["model.backbone=resnet19"], "'resnet19'", True),
        (["model.weights=none.pth"], "none.pth", True),
        (["train.device=quantum"], "'quantum'", True),
        (["model.size=8"], "not 8", True),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_before_torch_is_loaded_where_possible(
    toml, tmp_path, capsys, changes, named, needs_torch
):
    arguments = ["train", str(toml), *changes, "--out", str(tmp_path / "run")]
    if needs_torch:
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        code, error = ending.value.code, capsys.readouterr().err
    else:
        done = hashseek(*arguments, program=WITHOUT_TORCH)
        code, error = done.returncode, done.stderr
    assert code == 2, error
    assert error.startswith("hashseek: ")
    assert named in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_written(toml, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = hashseek("train", toml, "--out", tmp_path / "file" / "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "file/run" in done.stderr
