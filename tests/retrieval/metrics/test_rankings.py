"""Metrics of rankings in a given order."""

from typing import get_args

import numpy as np
import pytest

from hashseek.indexing.index.hamming_index import build_index
from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics import Normalizer, average_precision, average_precision_of_ranking, gains_of, histograms
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
@pytest.mark.parametrize("normalizer", get_args(Normalizer))
def test_ap_in_the_order_that_search_returns_is_within_the_bounds_over_ties(sets, normalizer, n):
    xq, xb, lq, lb = sets
    found = histograms(*sets, n_bits=N_BITS)
    bounds = average_precision(found, n=n, normalizer=normalizer)
    _, ids = build_index(xb, np.arange(len(xb)), n_bits=N_BITS).search(xq, k=n)
    np.testing.assert_array_equal(ids, hamming.search(xq, xb, n)[1])
    gains = gains_of(ids, lq, lb)
    np.testing.assert_array_equal(gains, np.take_along_axis(lq @ lb.T, ids, axis=1))
    value = average_precision_of_ranking(gains > 0, n_relevant=found.n_relevant, normalizer=normalizer)
    assert (bounds.worst <= value + 1e-12).all()
    assert (value <= bounds.best + 1e-12).all()


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [("retrieved", [5 / 6, 0, 0.25]), ("possible", [5 / 12, 0, 0.125]), ("relevant", [1 / 3, 0, 0.125])],
)
def test_ap_of_hand_worked_rankings(normalizer, expected):
    relevant = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]], bool)
    found = average_precision_of_ranking(relevant, n_relevant=np.array([5, 0, 2]), normalizer=normalizer)
    np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("ids", [[[1, 2, 3], [4, 0, 4]], [[1, 60], [0, 1]], [[1, -1], [0, 1]]])
def test_a_ranking_has_each_item_of_the_database_at_most_once(sets, ids):
    with pytest.raises(BadCodes):
        gains_of(np.array(ids), sets[2][:2], sets[3])
    with pytest.raises(BadCodes):
        gains_of(np.array([[1, 2]]), sets[2][:1, 1:], sets[3])  # another number of labels
