"""Metrics of rankings in a given order."""

import numpy as np
import pytest

from hashseek.indexing.index.hamming_index import build_index
from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics import (
    NORMALIZERS,
    count_gains,
    gains_of,
    histograms,
    histograms_of_ranking,
    metrics_of_histograms,
    metrics_of_ranking,
)
from support import hamming_oracle as hamming
from support.collections import random_codes

N_BITS = 9


@pytest.fixture
def sets():
    """(query codes, database codes, query labels, database labels) with many equal distances."""
    rng = np.random.default_rng(3)
    xq, xb = random_codes(rng, 7, N_BITS, 5), random_codes(rng, 60, N_BITS, 9)
    lq, lb = ((rng.random((n, 5)) < 0.4).astype(np.uint8) for n in (7, 60))
    return xq, xb, lq, lb


@pytest.mark.parametrize("n", [1, 30, 60])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_metrics_of_the_order_that_search_returns_are_within_the_bounds_over_ties(sets, normalizer, n):
    xq, xb, lq, lb = sets
    found = histograms(*sets, n_bits=N_BITS, graded=True)
    bounds = metrics_of_histograms(found, ns=[n, None], normalizer=normalizer)
    _, ids = build_index(xb, np.arange(len(xb)), n_bits=N_BITS).search(xq, k=n)
    np.testing.assert_array_equal(ids, hamming.search(xq, xb, n)[1])
    values = metrics_of_ranking(gains_of(ids, lq, lb), n_of_gain=count_gains(lq, lb), normalizer=normalizer)
    assert sorted(bounds) == sorted(f"{name}@{at}" for name in values for at in (n, "all"))
    for name, value in values.items():
        assert (bounds[f"{name}@{n}"].worst <= value + 1e-12).all(), name
        assert (value <= bounds[f"{name}@{n}"].best + 1e-12).all(), name


def test_histograms_of_whole_rankings_are_those_of_the_codes(sets):
    xq, xb, lq, lb = sets
    distances, ids = hamming.search(xq, xb, 60)
    ours = histograms_of_ranking(distances, ids, lq, lb, n_bits=N_BITS)
    theirs = histograms(xq, xb, lq, lb, n_bits=N_BITS, graded=True)
    np.testing.assert_array_equal(ours.total, theirs.total)
    np.testing.assert_array_equal(ours.relevant, theirs.relevant)
    np.testing.assert_array_equal(ours.gains, theirs.gains)
    np.testing.assert_array_equal(count_gains(lq, lb), theirs.gains.sum(axis=2))
    np.testing.assert_array_equal(gains_of(ids, lq, lb), np.take_along_axis(lq @ lb.T, ids, axis=1))


@pytest.mark.parametrize("ids", [[[1, 2, 3], [4, 0, 4]], [[1, 60], [0, 1]], [[1, -1], [0, 1]]])
def test_a_ranking_has_each_item_of_the_database_at_most_once(sets, ids):
    with pytest.raises(BadCodes):
        gains_of(np.array(ids), sets[2][:2], sets[3])


def test_histograms_need_whole_rankings_and_possible_distances(sets):
    _, _, lq, lb = sets
    ids = np.tile(np.arange(60), (7, 1))
    for distances, ranking in ((ids[:, 1:], ids[:, 1:]), (ids, ids)):
        with pytest.raises(BadCodes):
            histograms_of_ranking(distances, ranking, lq, lb, n_bits=N_BITS)
