"""The search of the kind gpu, run on the CPU; `tests/test_gpu.py` runs it on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hashseek.indexing.index import gpu
from hashseek.indexing.index.code_layouts import Subset
from hashseek.indexing.index.hamming_index import build_index
from hashseek.retrieval.errors import BadConfig
from support import hamming_oracle as hamming
from support.collections import random_codes


@pytest.mark.parametrize("n_bits", [8, 64, 1024])
@pytest.mark.parametrize("n_distinct", [5, 300, None])
@pytest.mark.parametrize("rows", [2**20, 300])
def test_it_finds_what_the_oracle_finds(n_distinct, n_bits, rows, monkeypatch):
    monkeypatch.setattr(gpu, "_ROWS", rows)
    monkeypatch.setattr(gpu, "_QUERIES", 7)
    monkeypatch.setattr(gpu, "_RESULTS", 2000)
    rng = np.random.default_rng(0)
    xb, xq = random_codes(rng, 1000, n_bits, n_distinct), random_codes(rng, 20, n_bits)
    xq[0], xq[1] = 0, 255
    xb[500] = 255
    index = gpu.Gpu(torch.tensor(xb))
    usable = rng.random(1000) < 0.4
    for k in (1, 10, 290, 301, 1000):
        distances, found = index.search(xq, k=k)
        wanted = hamming.search(xq, xb, k=k)
        assert np.array_equal(distances, wanted[0])
        assert np.array_equal(found, wanted[1])
        k = min(k, usable.sum())
        distances, found = index.search(xq, k=k, usable=usable)
        wanted = hamming.search(xq, xb[usable], k=k)
        assert np.array_equal(distances, wanted[0])
        assert np.array_equal(found, np.flatnonzero(usable)[wanted[1]])


@pytest.mark.parametrize("is_full", [False, True])
def test_an_index_on_a_gpu_answers_like_the_exact_kind(is_full, monkeypatch, caplog):
    """Also if its memory is too small: then the CPU searches."""
    rng = np.random.default_rng(1)
    xb, xq, ids = random_codes(rng, 3000, 48, 300), random_codes(rng, 5, 48), np.arange(3000) * 3
    exact = build_index(xb, ids, n_bits=48)
    index = replace(exact, kind="gpu", gpu=gpu.Gpu(torch.tensor(np.pad(xb, ((0, 0), (0, 2))))))
    if is_full:

        def no_room(*_):
            raise torch.OutOfMemoryError

        monkeypatch.setattr(gpu.Gpu, "_search", no_room)
    for among in (None, Subset(rng.random(3000) < 0.5), Subset(rng.random(3000) < 0.001)):
        for k in (1, 50, 3000):
            for ours, theirs in zip(
                index.search(xq, k=k, among=among), exact.search(xq, k=k, among=among), strict=True
            ):
                assert np.array_equal(ours, theirs)
            ties = zip(index.search_ties(xq, k=k, among=among), exact.search_ties(xq, k=k, among=among), strict=True)
            assert all(np.array_equal(ours[1], theirs[1]) for ours, theirs in ties)
    assert bool(caplog.records) == is_full


def test_a_gpu_without_room_for_the_codes_leaves_the_search_to_the_cpu(monkeypatch, caplog):
    def no_room(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu, "is_available", lambda: True)
    monkeypatch.setattr(torch, "tensor", no_room)
    xb = random_codes(np.random.default_rng(2), 20, 8)
    index = build_index(xb, np.arange(20), n_bits=8, kind="gpu")
    assert index.search(xb[3:4], k=1)[0].item() == 0
    assert len(caplog.records) == 1


def test_without_a_gpu_it_is_refused(monkeypatch):
    monkeypatch.setattr(gpu, "is_available", lambda: False)
    for n in (0, 1):
        with pytest.raises(BadConfig):
            build_index(np.zeros((n, 1), np.uint8), np.zeros(n, np.int64), n_bits=8, kind="gpu")
