"""Rankings in the order that search returns, and every figure under either way of breaking ties."""

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


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_without_ties_both_policies_agree(normalizer):
    """Codes with 0, 1, 2, ... ones: every distance from zero differs."""
    xb = pack(np.tril(np.ones((20, 20)), -1) - 0.5)
    rng = np.random.default_rng(1)
    order = rng.permutation(20)
    lq, lb = np.ones((1, 6), np.uint8), (rng.random((20, 6)) < 0.3).astype(np.uint8)
    sets = (np.zeros((1, xb.shape[1]), np.uint8), xb[order], lq, lb)
    first, second = (
        evaluate_codes(*sets, n_bits=20, ns=(1, 5, None), normalizer=normalizer, tie_policy=policy)
        for policy in ("expected", "by_id")
    )
    for name, figure in first.items():
        np.testing.assert_allclose(np.stack(figure), np.stack(second[name]), atol=1e-12, err_msg=name)


def test_bad_input_is_refused_in_one_sentence(world):
    xq, xb, lq, lb = world
    with pytest.raises(BadConfig, match="no tie policy 'random'"):
        evaluate_codes(*world, n_bits=N_BITS, tie_policy="random")
    for policy in ("expected", "by_id"):
        with pytest.raises(BadConfig, match="N >= 1, not 0"):
            evaluate_codes(*world, n_bits=N_BITS, ns=(0,), tie_policy=policy)
        with pytest.raises(BadCodes, match="database split is empty"):
            evaluate_codes(xq, xb[:0], lq, lb[:0], n_bits=N_BITS, tie_policy=policy)
        with pytest.raises(BadCodes, match="9-bit codes have 2 bytes, not 3"):
            evaluate_codes(xq, np.zeros((300, 3), np.uint8), lq, lb, n_bits=N_BITS, tie_policy=policy)
    with pytest.raises(BadConfig, match="N >= 1, not 0"):
        next(rank_by_id(xq, xb, n_bits=N_BITS, n=0))
    with pytest.raises(BadCodes, match="ranking of query 1 names item 4 2 times"):
        gains_of(np.array([[1, 2, 3], [4, 0, 4]]), lq[:2], lb)
    with pytest.raises(BadCodes, match="names item 300, but the database has the items 0 to 299"):
        gains_of(np.array([[1, 300]]), lq[:1], lb)
    with pytest.raises(BadCodes, match="names item -1"):
        gains_of(np.array([[1, -1]]), lq[:1], lb)
    with pytest.raises(BadCodes, match="5 columns, database labels 4"):
        gains_of(np.array([[1]]), lq[:1], lb[:, :4])


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
    with pytest.raises(BadCodes, match="rankings of 59 items say too little about a database of 60: rank all of it"):
        histograms_of_ranking(distances[:, :59], ids[:, :59], lq, lb, n_bits=N_BITS)
    with pytest.raises(BadCodes, match=f"distances of {N_BITS}-bit codes go from 0 to {N_BITS}, not to 99"):
        histograms_of_ranking(np.full_like(distances, 99), ids, lq, lb, n_bits=N_BITS)
    with pytest.raises(BadCodes, match="names item 3 2 times"):
        histograms_of_ranking(distances, np.where(ids == 4, 3, ids), lq, lb, n_bits=N_BITS)
