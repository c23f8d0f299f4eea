"""The index finds what the oracle finds: every width, every k, ties, deletions, and from a file."""

from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest
from conftest import random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.hamming_index import build_index, load_index, save_index
from retrieval import hamming
from retrieval.errors import BadCodes, BadCollection

WIDTHS = [
    1,
    2,
    7,
    8,
    9,
    12,
    16,
    24,
    31,
    32,
    33,
    36,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    160,
    161,
    256,
    257,
    512,
    513,
    1023,
    1024,
]


def expected(xq, xb, ids, k, alive=None):
    """What the oracle finds among the living."""
    if alive is not None:
        xb, ids = xb[alive], ids[alive]
    distances, positions = hamming.search(xq, xb, k=k)
    return distances, ids[positions]


def check(index, xq, xb, ids, k, alive=None):
    distances, found = index.search(xq, k=k, alive=alive)
    wanted = expected(xq, xb, ids, k, alive)
    assert np.array_equal(distances, wanted[0])
    assert np.array_equal(found, wanted[1])


@pytest.mark.parametrize("n_bits", WIDTHS)
def test_every_width_with_many_ties_and_few(n_bits):
    rng = np.random.default_rng(n_bits)
    for n_distinct in (3, None):
        xb, xq = random_codes(rng, 200, n_bits, n_distinct), random_codes(rng, 4, n_bits)
        ids = np.sort(rng.choice(10**12, 200, replace=False))
        index = build_index(xb, ids, n_bits=n_bits)
        assert np.array_equal(index.codes, xb)
        for k in (1, 7, 199, 200, 201, 10**9):
            check(index, xq, xb, ids, k)


@settings(max_examples=60, deadline=None)
@given(
    n_bits=st.integers(1, 1024),
    n=st.integers(0, 70),
    n_distinct=st.integers(1, 5),
    k=st.integers(1, 80),
    dead=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_any_width_size_k_and_deletions(n_bits, n, n_distinct, k, dead, seed):
    rng = np.random.default_rng(seed)
    xb, xq = random_codes(rng, n, n_bits, n_distinct), random_codes(rng, 3, n_bits, n_distinct)
    ids = np.cumsum(rng.integers(1, 9, n))
    check(build_index(xb, ids, n_bits=n_bits), xq, xb, ids, k, alive=rng.random(n) >= dead)


@pytest.mark.parametrize("n_bits", [12, 48])
def test_large_k_counts_distances_instead_and_finds_the_same(n_bits):
    rng = np.random.default_rng(0)
    n = 2500
    xb, xq, ids = random_codes(rng, n, n_bits, 40), random_codes(rng, 40, n_bits), np.arange(n) * 3
    index, alive = build_index(xb, ids, n_bits=n_bits), rng.random(n) < 0.7
    for k in (999, 1000, 1001, n, n + 1):
        check(index, xq, xb, ids, k)
        check(index, xq, xb, ids, k, alive=alive)


def test_searches_with_small_and_large_k_at_the_same_time_do_not_disturb_each_other():
    rng = np.random.default_rng(1)
    xb, xq, ids = random_codes(rng, 1500, 48, 25), random_codes(rng, 33, 48), np.arange(1500)
    index = build_index(xb, ids, n_bits=48)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(check, index, xq, xb, ids, k) for k in (5, 1200, 30, 1500) * 6]:
            future.result()


def test_nothing_is_found_in_an_empty_index_or_among_the_dead():
    query = np.zeros((2, 2), np.uint8)
    index = build_index(np.zeros((0, 2), np.uint8), np.zeros(0, np.int64), n_bits=12)
    assert index.search(query, k=5)[1].shape == (2, 0)
    index = build_index(np.zeros((3, 2), np.uint8), np.arange(3), n_bits=12)
    assert index.search(query, k=5, alive=np.zeros(3, bool))[1].shape == (2, 0)
    assert index.search(query[:0], k=2)[0].shape == (0, 2)


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_1_is_refused(k):
    index = build_index(np.zeros((1, 1), np.uint8), np.zeros(1, np.int64), n_bits=8)
    with pytest.raises(BadCodes, match=f"at least 1, not {k}"):
        index.search(np.zeros((1, 1), np.uint8), k=k)


def test_queries_of_another_width_or_with_dirty_padding_are_refused():
    index = build_index(np.zeros((1, 2), np.uint8), np.zeros(1, np.int64), n_bits=12)
    for query in (np.zeros((1, 3), np.uint8), np.full((1, 2), 255, np.uint8), np.zeros((1, 2), np.int32)):
        with pytest.raises(BadCodes):
            index.search(query, k=1)


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [1], [1, 2, 3]])
def test_ids_that_repeat_or_fall_or_are_too_few_are_refused(ids):
    with pytest.raises(BadCodes, match="ascending ids"):
        build_index(np.zeros((2, 1), np.uint8), np.array(ids), n_bits=8)


@pytest.mark.parametrize("n_bits", [1, 12, 48, 1024])
def test_a_saved_index_finds_the_same(n_bits, tmp_path):
    rng = np.random.default_rng(n_bits)
    xb, ids = random_codes(rng, 50, n_bits, 9), np.arange(50) + 10
    save_index(build_index(xb, ids, n_bits=n_bits), tmp_path / "index")
    check(load_index(tmp_path / "index", ids, n_bits=n_bits), random_codes(rng, 3, n_bits), xb, ids, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_files_that_are_not_this_index_are_refused(tmp_path):
    ids, path = np.arange(5), tmp_path / "index"
    save_index(build_index(np.zeros((5, 6), np.uint8), ids, n_bits=48), path)
    for wrong_ids, n_bits in ((ids[:4], 48), (ids, 128)):
        with pytest.raises(BadCollection, match="holds 5 codes"):
            load_index(path, wrong_ids, n_bits=n_bits)
    content = path.read_bytes()
    for damaged in (b"", b"text", content[:20], content[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(BadCollection, match="not a readable index"):
            load_index(path, ids, n_bits=48)
    path.write_bytes(faiss.serialize_index_binary(faiss.IndexBinaryHash(64, 8)).tobytes())
    with pytest.raises(BadCollection, match="not a flat binary index"):
        load_index(path, ids, n_bits=48)
    with pytest.raises(BadCollection):
        load_index(tmp_path / "missing", ids, n_bits=48)
