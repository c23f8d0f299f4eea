"""Rankings in the order that search returns, and their metrics."""

import numpy as np
import pytest

from hashseek.indexing.searcher import InMemory
from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics import (
    GAINS,
    NORMALIZERS,
    count_gains,
    evaluate_codes,
    gains_of,
    histograms,
    histograms_of_ranking,
    rank_by_id,
    relevance,
)
from support import hamming_oracle as hamming
from support.collections import random_codes

N_BITS, NS = 9, (1, 30, 4000, None)


@pytest.fixture(scope="module")
def world():
    """(query codes, database codes, query labels, database labels); the database is seldom without ties."""
    rng = np.random.default_rng(0)
    xq, xb = pack(rng.standard_normal((70, N_BITS))), pack(rng.standard_normal((300, N_BITS)))
    return xq, xb, (rng.random((70, 5)) < 0.3).astype(np.uint8), (rng.random((300, 5)) < 0.3).astype(np.uint8)


@pytest.mark.parametrize("n_bits", [1, 9, 64, 200, 600])
@pytest.mark.parametrize("n", [1, 17, 300, 999])
def test_ranking_by_id_is_the_order_of_the_oracle_and_of_search(n_bits, n):
    rng = np.random.default_rng(n_bits)
    xq, xb = pack(rng.standard_normal((70, n_bits))), pack(rng.standard_normal((300, n_bits)))
    parts = list(rank_by_id(xq, xb, n_bits=n_bits, n=n))
    assert [part.stop for part, _ in parts] == [64, 70]
    ids = np.concatenate([part for _, part in parts])
    np.testing.assert_array_equal(ids, hamming.search(xq, xb, n)[1])
    served = [i for _, i in InMemory(xb, n_bits=n_bits).search(xq, k=min(n, 300))]
    np.testing.assert_array_equal(ids, served)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_by_id_is_one_of_the_orders_that_the_bounds_enclose(world, normalizer, gain):
    options = {"n_bits": N_BITS, "ns": NS, "normalizer": normalizer, "gain": gain}
    expected = evaluate_codes(*world, **options)
    by_id = evaluate_codes(*world, **options, tie_policy="by_id")
    names = [
        f"{f}@{n}" for n in ("1", "30", "4000", "all") for f in ("AP", "precision", "recall", "nDCG", "ACG", "WAP")
    ]
    assert list(expected) == names
    assert sorted(by_id) == sorted(names)
    for name in names:
        value, worst, best = by_id[name]
        assert value is worst is best
        assert (expected[name].worst <= value + 1e-12).all(), name
        assert (value <= expected[name].best + 1e-12).all(), name
    np.testing.assert_array_equal(np.stack(by_id["AP@4000"]), np.stack(by_id["AP@all"]))


def test_histograms_of_whole_rankings_are_those_of_the_codes():
    rng = np.random.default_rng(3)
    xq, xb = random_codes(rng, 7, N_BITS, 5), random_codes(rng, 60, N_BITS, 9)
    lq, lb = ((rng.random((n, 5)) < 0.4).astype(np.uint8) for n in (7, 60))
    distances, ids = hamming.search(xq, xb, 60)
    ours = histograms_of_ranking(distances, ids, lq, lb, n_bits=N_BITS)
    theirs = histograms(xq, xb, lq, lb, n_bits=N_BITS, graded=True)
    np.testing.assert_array_equal(ours.total, theirs.total)
    np.testing.assert_array_equal(ours.relevant, theirs.relevant)
    np.testing.assert_array_equal(ours.gains, theirs.gains)
    np.testing.assert_array_equal(count_gains(lq, lb), theirs.gains.sum(axis=2))
    np.testing.assert_array_equal(relevance(ids, lq, lb), np.take_along_axis(lq @ lb.T > 0, ids, axis=1))


@pytest.mark.parametrize("ids", [[[1, 2, 3], [4, 0, 4]], [[1, 300], [0, 1]], [[1, -1], [0, 1]]])
def test_a_ranking_has_each_item_of_the_database_at_most_once(world, ids):
    with pytest.raises(BadCodes):
        gains_of(np.array(ids), world[2][:2], world[3])


def test_bad_input_is_refused(world):
    _, _, lq, lb = world
    for options in ({"tie_policy": "random"}, {"ns": (0,)}, {"ns": (0,), "tie_policy": "by_id"}):
        with pytest.raises(BadConfig):
            evaluate_codes(*world, n_bits=N_BITS, **options)
    ids = np.tile(np.arange(300), (70, 1))
    for distances, ranking in ((ids[:, 1:], ids[:, 1:]), (ids, ids)):  # not all items; distances above K
        with pytest.raises(BadCodes):
            histograms_of_ranking(distances, ranking, lq, lb, n_bits=N_BITS)
