"""A nested checkpoint serves each of its lengths by truncation."""

import numpy as np
import pytest
import torch

from hashseek.retrieval.checkpoint import Checkpoint, load_checkpoint, load_header, save_checkpoint
from hashseek.retrieval.codes import unpack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.truncation import lengths_of, truncate
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.loop.fit import fit
from support.in_process import run_command
from support.models import run_config

PREPROCESSING = Preprocessing(size=48, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def nested(path, head: str) -> Checkpoint:
    torch.manual_seed(0)
    model = HashModel(backbone="squeezenet1_1", n_bits=32, head=head)
    training = {"loss": {"name": "hyp2", "nested": {"lengths": [8, 12, 32]}}}
    save_checkpoint(path, model, PREPROCESSING, label_names=("a", "b"), training=training)
    return load_checkpoint(path)


@pytest.mark.parametrize("head", ["linear", "linear_bn", "mlp:20"])
def test_the_short_code_is_the_prefix_of_the_long_one(tmp_path, head):
    whole = nested(tmp_path / "a.safetensors", head)
    assert lengths_of(whole) == (8, 12, 32)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 48, 48)).astype(np.uint8)
    long = Encoder(whole, device="cpu", precision="fp32").encode_pixels(pixels)
    for n_bits in (8, 12, 32):
        short = Encoder(truncate(whole, n_bits), device="cpu", precision="fp32").encode_pixels(pixels)
        np.testing.assert_array_equal(unpack(short, n_bits), unpack(long, 32)[:, :n_bits])
    assert whole.model.n_bits == 32  # as it was


def test_the_command_writes_a_checkpoint_with_a_fingerprint_of_its_own(tmp_path, capsys):
    path = tmp_path / "best.safetensors"
    whole = nested(path, "linear")
    code, printed, _ = run_command(capsys, "truncate", path, "--bits", 12)
    assert code == 0
    short = load_checkpoint(tmp_path / "best-12.safetensors")  # checks its fingerprint
    assert printed.strip() == str(tmp_path / "best-12.safetensors")
    assert short.header.n_bits == 12
    cut = truncate(whole, 12).header
    assert (short.header.label_names, short.header.training) == (cut.label_names, cut.training)
    assert run_command(capsys, "truncate", path, "--bits", 8, "--out", tmp_path / "own.safetensors")[0] == 0
    assert load_header(tmp_path / "own.safetensors").n_bits == 8
    assert short.header.fingerprint not in (whole.header.fingerprint, truncate(whole, 8).header.fingerprint)
    for bits, value in ((16, "8, 12, 32"), (12, "best-12.safetensors")):  # not trained for; exists
        code, _, error = run_command(capsys, "truncate", path, "--bits", bits)
        assert code == 2
        assert value in error


def test_a_truncated_checkpoint_serves_only_what_it_still_holds(tmp_path):
    short = truncate(nested(tmp_path / "a.safetensors", "linear"), 12)
    assert lengths_of(short) == (8, 12)
    assert truncate(short, 8).header.n_bits == 8
    with pytest.raises(BadCheckpoint, match="32"):
        truncate(short, 32)


def test_nested_lengths_of_a_projection_are_none_of_the_code(tmp_path):
    torch.manual_seed(0)
    model = HashModel(backbone="squeezenet1_1", n_bits=16)
    training = {"loss": {"name": "supcon", "on": "projection", "nested": {"lengths": [8, 16, 32]}}}
    save_checkpoint(tmp_path / "a.safetensors", model, PREPROCESSING, label_names=("a", "b"), training=training)
    whole = load_checkpoint(tmp_path / "a.safetensors")
    assert lengths_of(whole) == (16,)
    for n_bits in (8, 32):
        with pytest.raises(BadCheckpoint, match=str(n_bits)):
            truncate(whole, n_bits)


def test_a_run_with_nested_lengths_gives_such_a_checkpoint(tmp_path, own_cache):
    render_shapes(tmp_path / "data", n_query=4, n_train=20, n_database=4, size=48, seed=0)
    settings = run_config(
        tmp_path / "data",
        model={"n_bits": 24, "freeze_backbone": True, "head_init": "random"},
        loss={"nested": {"lengths": [12, 24]}, "quantization": {"kind": "cos", "weight": 0.1}},
        train={"epochs": 1, "batch_size": 9},
    )
    run = fit(settings, out=tmp_path / "run").run
    assert load_header(run.best).n_bits == 24
    assert truncate(load_checkpoint(run.best), 12).header.n_bits == 12
