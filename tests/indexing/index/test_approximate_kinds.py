"""Approximate kinds say how much they find, find no less with more effort, and are exact where they say so."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

import numpy as np
import pytest

from hashseek.indexing.index import approximate
from hashseek.indexing.index.approximate import APPROXIMATE, GOOD_RECALL, default_effort
from hashseek.indexing.index.code_layouts import Subset
from hashseek.indexing.index.hamming_index import build_index, load_index, save_index
from hashseek.retrieval.errors import BadCollection, BadConfig
from support import hamming_oracle as hamming
from support.collections import random_codes

N, N_BITS = 3000, 48


def clustered(rng, n, n_bits):
    """Codes around 30 centres, as a trained network gives them."""
    centres = rng.integers(0, 2, (30, n_bits))
    bits = centres[rng.integers(0, 30, n)] ^ (rng.random((n, n_bits)) < 0.08)
    return np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    xb, ids = clustered(rng, N, N_BITS), np.cumsum(rng.integers(1, 5, N))
    return (
        xb,
        ids,
        clustered(np.random.default_rng(0), 60, N_BITS) ^ np.packbits(rng.random((60, N_BITS)) < 0.03, axis=1),
    )


@pytest.fixture(scope="module", params=APPROXIMATE)
def index(request, data):
    xb, ids, _ = data
    return build_index(xb, ids, n_bits=N_BITS, kind=request.param)


def recall(index, data, k=10, **options):
    xb, _, xq = data
    furthest = hamming.search(xq, xb, k=k)[0][:, -1:]
    return float((index.search(xq, k=k, **options)[0] <= furthest).mean())


def test_results_are_true_distances_in_order_without_repetition(index, data):
    xb, ids, xq = data
    for k in (1, 10, 400, N, N + 5):
        for effort in (None, *index.recall):
            distances, found = index.search(xq, k=k, effort=effort)
            assert found.shape == distances.shape == (len(xq), min(k, N))
            truth = hamming.distances(xq, xb)
            assert np.array_equal(distances, np.take_along_axis(truth, np.searchsorted(ids, found), axis=1))
            for of_query, row in zip(distances, found, strict=True):
                assert np.array_equal(np.lexsort((row, of_query)), np.arange(len(row)))
                assert len(np.unique(row)) == len(row)


def test_recall_on_other_queries_is_about_the_measured_one(index, data):
    effort = default_effort(index.recall)
    assert index.recall[effort] >= GOOD_RECALL
    assert recall(index, data) == recall(index, data, effort=effort) > GOOD_RECALL - 0.1
    assert index.describe()[f"recall@10 at effort {effort}"] == round(index.recall[effort], 3)


def test_more_effort_finds_no_less(index, data):
    efforts = {"ivf": (1, 2, 5, 20, 76), "hnsw": (10, 40, 200, 1000)}[index.kind]
    found = [recall(index, data, effort=effort) for effort in efforts]
    assert found == sorted(found)
    assert found[-1] > 0.999


def test_searches_with_different_efforts_at_the_same_time_do_not_disturb_each_other(index, data, monkeypatch):
    _, _, xq = data
    alone, both = {effort: index.search(xq, k=20, effort=effort) for effort in (1, 76)}, Barrier(2)
    assert not np.array_equal(alone[1], alone[76])
    monkeypatch.setattr(approximate, "FaissThreads", lambda n: (both.wait(20), nullcontext())[1])
    with ThreadPoolExecutor(2) as pool:
        for effort, search in [(e, pool.submit(index.search, xq, k=20, effort=e)) for e in (1, 76)]:
            assert np.array_equal(search.result(), alone[effort])


def test_ranges_and_small_subsets_are_exact(index, data):
    xb, ids, xq = data
    mask = np.random.default_rng(1).random(N) < 0.4
    wanted = hamming.search(xq, xb[mask], k=12)
    distances, found = index.search(xq, k=12, among=Subset(mask), effort=1)
    assert np.array_equal(distances, wanted[0])
    assert np.array_equal(found, ids[mask][wanted[1]])
    for row, (apart, near) in enumerate(index.range(xq, radius=6)):
        truth = hamming.distances(xq[row : row + 1], xb)[0]
        order = np.argsort(truth, kind="stable")[: (truth <= 6).sum()]
        assert np.array_equal(apart, truth[order])
        assert np.array_equal(near, ids[order])


def test_all_at_the_distance_of_the_last_are_found_among_twice_as_many(index, data):
    _, _, xq = data
    distances, found = index.search(xq, k=20)
    tied = distances <= distances[:, 9:10]
    for row, (apart, near) in enumerate(index.search_ties(xq, k=10)):
        assert np.array_equal(apart, distances[row][tied[row]])
        assert np.array_equal(near, found[row][tied[row]])
    assert (tied.sum(axis=1) > 10).any()


def test_excluded_rows_are_not_found(index, data):
    _, _, xq = data
    distances, found = index.search(xq, k=3)
    mask = ~np.isin(index.ids, found[:, 0])
    again = index.search(xq, k=3, among=Subset(mask))
    assert not np.isin(again[1], found[:, 0]).any()
    assert (again[0] >= distances).all()


@pytest.mark.parametrize("kind", APPROXIMATE)
@pytest.mark.parametrize("n", [0, 1, 2, 40])
@pytest.mark.parametrize("n_bits", [1, 12, 100, 1024])
def test_small_sizes_and_every_width(kind, n, n_bits, tmp_path):
    rng = np.random.default_rng(n)
    xb, ids, xq = random_codes(rng, n, n_bits), np.arange(n) + 7, random_codes(rng, 3, n_bits)
    index = build_index(xb, ids, n_bits=n_bits, kind=kind)
    for loaded in (index, load_index(save_index(index, tmp_path), n_bits=n_bits, kind=kind)):
        assert loaded.kind == loaded.describe()["kind"] == kind
        distances, found = loaded.search(xq, k=5)
        wanted = hamming.search(xq, xb, k=5)[0]
        assert found.shape == wanted.shape
        assert (found >= 7).all()
        assert (distances >= wanted).all()
        assert np.array_equal(loaded.codes, xb)


def test_a_saved_index_finds_the_same(index, data, tmp_path):
    xb, ids, xq = data
    files = save_index(index, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    loaded = load_index(files, n_bits=N_BITS, kind=index.kind)
    assert loaded.recall == index.recall
    assert loaded.n_bytes == index.n_bytes > build_index(xb, ids, n_bits=N_BITS).n_bytes
    for effort in (None, 1, 4):
        assert np.array_equal(loaded.search(xq, k=9, effort=effort), index.search(xq, k=9, effort=effort))


def test_a_structure_that_is_damaged_or_gone_is_refused(index, tmp_path):
    *_, beside = files = save_index(index, tmp_path)
    for content in (beside.read_bytes()[:200], b"", None):
        beside.unlink() if content is None else beside.write_bytes(content)
        with pytest.raises(BadCollection):
            load_index(files, n_bits=N_BITS, kind=index.kind)


def test_invalid_efforts_are_refused(index, data):
    xq = data[2]
    for effort in (0, -3, 10**6):
        with pytest.raises(BadConfig, match=str(effort)):
            index.search(xq, k=1, effort=effort)


def test_unknown_kinds_are_refused():
    with pytest.raises(BadConfig, match="lsh"):
        build_index(np.zeros((1, 1), np.uint8), np.zeros(1, np.int64), n_bits=8, kind="lsh")
