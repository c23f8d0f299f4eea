"""The search of the kind gpu, run on the CPU; `tests/test_gpu.py` runs it on a GPU."""

import numpy as np
import pytest

from hashseek.indexing.index import gpu
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
    rng = np.random.default_rng(0)
    xb, xq = random_codes(rng, 1000, n_bits, n_distinct), random_codes(rng, 20, n_bits)
    xq[0], xq[1] = 0, 255
    xb[500] = 255
    index = gpu.Gpu(xb, device="cpu")
    for k in (1, 10, 290, 301, 1000):
        distances, found = index.search(xq, k=k)
        wanted = hamming.search(xq, xb, k=k)
        assert np.array_equal(distances, wanted[0])
        assert np.array_equal(found, wanted[1])


def test_without_a_gpu_it_is_refused(monkeypatch):
    monkeypatch.setattr(gpu, "is_available", lambda: False)
    for n in (0, 1):
        with pytest.raises(BadConfig):
            build_index(np.zeros((n, 1), np.uint8), np.zeros(n, np.int64), n_bits=8, kind="gpu")
