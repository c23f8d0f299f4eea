"""Everything that can run on a GPU, compared with the CPU."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.indexing.index.hamming_index import build_index, load_index, save_index
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.metrics import histograms
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.loop.fit import fit
from hashseek.training.runs.run_folder import read_records
from support import hamming_oracle as hamming
from support.collections import random_codes
from support.models import EVERYTHING, run_config
from support.pictures import draw
from support.service import hits, search, serving

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.xdist_group("gpu"),  # one process: each needs half a gigabyte of the GPU's memory
    pytest.mark.usefixtures("own_cache"),
]
config = partial(run_config, train__epochs=3, train__device="cuda")


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    render_shapes(root, n_query=20, n_train=120, n_database=60, size=64, seed=1)
    return root


@pytest.mark.parametrize("n_bits", [12, 48, 256])
@pytest.mark.parametrize("n_labels", [1, 38])
def test_histograms_are_the_same(n_bits, n_labels):
    rng = np.random.default_rng(n_bits + n_labels)
    xq, xb = pack(rng.standard_normal((70, n_bits))), pack(rng.standard_normal((3000, n_bits)))
    lq, lb = ((rng.random((n, n_labels)) < 0.2).astype(np.uint8) for n in (70, 3000))
    ours, theirs = (histograms(xq, xb, lq, lb, n_bits=n_bits, graded=True, device=name) for name in ("cuda", "cpu"))
    assert np.array_equal(ours.gains, theirs.gains)


def test_histograms_of_several_blocks_are_the_same():
    rng = np.random.default_rng(0)
    xq, xb = random_codes(rng, 3, 48, None), random_codes(rng, 600_000, 48, None)
    lq, lb = ((rng.random((n, 5)) < 0.3).astype(np.uint8) for n in (3, 600_000))
    ours, theirs = (histograms(xq, xb, lq, lb, n_bits=48, device=name) for name in ("cuda", "cpu"))
    assert np.array_equal(ours.relevant, theirs.relevant)


@pytest.mark.parametrize("n_bits", [12, 48, 256])
@pytest.mark.parametrize("n_distinct", [5, 300, None])
def test_an_index_finds_what_the_oracle_finds(n_distinct, n_bits, tmp_path):
    rng = np.random.default_rng(0)
    xb, xq = random_codes(rng, 5000, n_bits, n_distinct), random_codes(rng, 40, n_bits, None)
    ids = np.arange(5000) * 2
    built = build_index(xb, ids, n_bits=n_bits, kind="gpu")
    loaded = load_index(save_index(built, tmp_path), n_bits=n_bits, kind="gpu")
    everything = hamming.search(xq, xb, k=5000)
    kept = np.flatnonzero(rng.random(5000) < 0.7)
    among_kept = hamming.search(xq, xb[kept], k=800)
    for index in (built, loaded):
        distances, found = index.search(xq, k=800, among=index.subset_of(ids[kept]))
        assert np.array_equal(distances, among_kept[0])
        assert np.array_equal(found, ids[kept][among_kept[1]])
        for k in (1, 10, 900, 3000, 5000):
            distances, found = index.search(xq, k=k)
            assert np.array_equal(distances, everything[0][:, :k])
            assert np.array_equal(found, ids[everything[1][:, :k]])
            for row, (_, near) in enumerate(index.search_ties(xq, k=k)):
                as_near = everything[0][row] <= everything[0][row, k - 1]
                assert np.array_equal(near, ids[everything[1][row][as_near]])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.005), ("bf16", 0.05)])
def test_an_encoder_computes_nearly_the_same_outputs(checkpoint, precision, tolerance):
    pixels = np.stack([np.asarray(draw(seed).resize((64, 64)), np.uint8).transpose(2, 0, 1) for seed in range(30)])
    encoders = [
        Encoder(load_checkpoint(checkpoint), device="cuda", precision=precision),
        Encoder(load_checkpoint(checkpoint), device="cpu", precision="fp32", engine="torch"),
    ]
    assert encoders[0].engine.startswith("torch cuda")
    (_, ours), (_, theirs) = (encoder.features_and_outputs(pixels) for encoder in encoders)
    assert np.abs(ours - theirs).max() < tolerance * np.abs(theirs).max()


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"freeze_backbone": True, "head_init": "itq", "dropout": 0.3}},
        {**EVERYTHING, "train": {"ema": 0.9, "views": 2, "keep_labels": 0.7, "chunk_size": 8}},
        {"model": {"freeze_batch_norm": True, "backbone": "mobilenet_v2", "size": 64}},
    ],
    ids=["fine-tuned", "frozen", "everything", "frozen batch norm"],
)
def test_training_has_nearly_the_same_losses(shapes, tmp_path, sections):
    ours, theirs = (
        read_records(fit(config(shapes, **sections, train__device=name), out=tmp_path / name).run.log)
        for name in ("cuda", "cpu")
    )
    for on_gpu, on_cpu in zip(ours, theirs, strict=True):
        assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=0.03)


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"cache": "none"}])
def test_training_learns_with(shapes, tmp_path, changes):
    log = read_records(fit(config(shapes, train__epochs=5, train=changes), out=tmp_path / "run").run.log)
    assert log[-1]["loss"] < log[0]["loss"]


def test_an_interrupted_run_continues_as_if_uninterrupted(shapes, tmp_path):
    def interrupt(record):
        raise KeyboardInterrupt

    settings = config(shapes, **EVERYTHING)
    uninterrupted = fit(settings, out=tmp_path / "uninterrupted").run
    with pytest.raises(KeyboardInterrupt):
        fit(settings, out=tmp_path / "broken", on_epoch=interrupt)
    before = read_records(tmp_path / "broken" / "log.jsonl")
    resumed = read_records(fit(settings, out=tmp_path / "broken", resume=True).run.log)
    assert resumed[0] == before[0]
    for ours, theirs in zip(resumed, read_records(uninterrupted.log), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)


def test_commands_use_the_gpu(shapes, tmp_path, hashseek, weights):
    """Train, evaluate, probe, index, search, verify and serve, as a user would."""
    run, collection = fit(config(shapes), out=tmp_path / "run").run, tmp_path / "collection"
    on_gpu, unlabelled = ("--device", "cuda"), ("--backbone", "squeezenet1_1", "--bits", "16")
    for command in (
        ("evaluate", run.best, "--points", "0", *on_gpu),
        ("probe", run.best, *on_gpu),
        ("index", "add", collection, shapes / "images", "--checkpoint", run.best, *on_gpu),
        ("index", "verify", collection, "--codes", "50", *on_gpu),
        ("index", "add", tmp_path / "unlabelled", shapes / "images", "--weights", weights, *unlabelled, *on_gpu),
    ):
        code, out, err = hashseek(*command)
        assert code == 0, (command, out, err)
    picture = sorted((shapes / "images").iterdir())[0]
    code, out, err = hashseek("search", collection, picture, "--json", *on_gpu)
    assert code == 0, err
    engines = json.loads(hashseek("index", "stats", collection, "--json")[1])["engines"]
    assert [name.split()[:2] for name in engines] == [["torch", "cuda"]]
    with serving(collection, device="cuda") as client:
        fresh = draw(99).resize((64, 64))
        fresh.save(tmp_path / "fresh.png")
        answer = search(client, (tmp_path / "fresh.png").read_bytes())
        assert answer.status_code == 200
        assert len(hits(answer)) > 0
