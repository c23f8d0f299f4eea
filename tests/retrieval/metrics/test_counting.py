"""Histograms of rankings against the brute-force oracle."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics import (
    average_cumulative_gain,
    counting,
    evaluate_codes,
    histograms,
    ndcg,
    weighted_average_precision,
    without_self,
)
from support import hamming_oracle as hamming


@pytest.mark.parametrize("n_bits", [1, 12, 64, 126, 127, 128, 1024])
@pytest.mark.parametrize("n_labels", [1, 38, 130])
def test_histograms_equal_the_oracle(n_bits, n_labels):
    rng = np.random.default_rng(n_bits + n_labels)
    xq, xb = pack(rng.standard_normal((5, n_bits))), pack(rng.standard_normal((70, n_bits)))
    lq = (rng.random((5, n_labels)) < 0.1).astype(np.uint8)
    lb = (rng.random((70, n_labels)) < 0.1).astype(np.uint8)
    found = histograms(xq, xb, lq, lb, n_bits=n_bits, graded=True)
    d, shared = hamming.distances(xq, xb), lq.astype(int) @ lb.T.astype(int)
    expected = np.zeros_like(found.gains)
    np.add.at(expected, (np.arange(5)[:, None], shared, d), 1)
    np.testing.assert_array_equal(found.gains, expected)
    np.testing.assert_array_equal(found.total, expected.sum(axis=1))
    np.testing.assert_array_equal(found.relevant, expected[:, 1:].sum(axis=1))
    assert histograms(xq, xb, lq, lb, n_bits=n_bits).gains is None


def test_blocks_and_threads_do_not_change_the_counts(monkeypatch):
    rng = np.random.default_rng(5)
    xq, xb = pack(rng.standard_normal((150, 20))), pack(rng.standard_normal((9000, 20)))
    lq, lb = (rng.random((150, 6)) < 0.4).astype(np.uint8), (rng.random((9000, 6)) < 0.4).astype(np.uint8)
    torch.set_num_threads(3)
    results = []
    for worth_a_thread, cores, items in ((2**60, 1, 4096), (1, 1, 2**18), (1, 2, 100), (1, 7, 4096)):
        monkeypatch.setattr(counting, "_PAIRS_WORTH_A_THREAD", worth_a_thread)
        monkeypatch.setattr(counting, "_ITEMS", items)
        monkeypatch.setattr(counting, "n_cores", lambda cores=cores: cores)
        results.append(histograms(xq, xb, lq, lb, n_bits=20, graded=True).gains)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    torch.set_num_threads(1)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    d, shared = hamming.distances(xq, xb), lq.astype(int) @ lb.T.astype(int)
    keys = (np.arange(150)[:, None] * results[0].shape[1] + shared) * 21 + d
    np.testing.assert_array_equal(results[0].ravel(), np.bincount(keys.ravel(), minlength=results[0].size))


@pytest.mark.parametrize("n_bits", [48, 256, 512, 1024])
def test_products_in_bfloat16_do_not_change_the_counts(n_bits, monkeypatch):
    """As with DNNL_DEFAULT_FPMATH_MODE=BF16, where the processor supports it."""
    rng = np.random.default_rng(n_bits)
    xq, xb = pack(rng.standard_normal((5, n_bits))), pack(rng.standard_normal((70, n_bits)))
    lq, lb = ((rng.random((n, 9)) < 0.4).astype(np.uint8) for n in (5, 70))
    expected, addmm = histograms(xq, xb, lq, lb, n_bits=n_bits, graded=True).gains, torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda start, *parts: addmm(start, *(p.bfloat16().float() for p in parts)))
    assert np.array_equal(histograms(xq, xb, lq, lb, n_bits=n_bits, graded=True).gains, expected)


def test_labels_of_no_image_and_images_without_labels_are_counted_as_irrelevant():
    codes = np.zeros((3, 1), np.uint8)
    found = histograms(codes, codes, np.zeros((3, 4), np.uint8), np.ones((3, 4), np.uint8), n_bits=8, graded=True)
    assert found.gains.shape == (3, 1, 9)
    assert (found.n_relevant == 0).sum() == 3
    for n in (1, None):
        for figure in (ndcg, average_cumulative_gain, weighted_average_precision):
            assert np.stack(figure(found, n=n)).tolist() == [[0] * 3] * 3


def test_a_query_that_is_in_the_database_can_be_left_out_of_its_own_ranking():
    rng = np.random.default_rng(6)
    codes, labels = pack(rng.standard_normal((40, 6))), (rng.random((40, 3)) < 0.5).astype(np.uint8)
    found = without_self(histograms(codes, codes, labels, labels, n_bits=6, graded=True), labels)
    for query in range(40):
        others = np.arange(40) != query
        alone = histograms(codes[[query]], codes[others], labels[[query]], labels[others], n_bits=6, graded=True)
        np.testing.assert_array_equal(found.total[query], alone.total[0])
        np.testing.assert_array_equal(found.relevant[query], alone.relevant[0])
        np.testing.assert_array_equal(found.gains[query, : alone.gains.shape[1]], alone.gains[0])
    # Of two queries, only the second is in the database: there, the first has another code or fewer labels.
    two, pair = np.array([[0], [7]], np.uint8), np.array([[1, 1], [1, 0]], np.uint8)
    fewer = np.array([[1, 0], [1, 0]], np.uint8)
    for items, theirs in ((two ^ np.array([[1], [0]], np.uint8), pair), (two, pair[::-1]), (two, fewer)):
        elsewhere = histograms(two, items, pair, theirs, n_bits=6, graded=True)
        with pytest.raises(BadCodes):
            without_self(elsewhere, pair)


@pytest.mark.parametrize(
    ("rows", "n_bits", "labels"),
    [
        (0, 16, np.ones((0, 4), np.uint8)),  # no queries
        (3, 16, np.ones((3, 3), np.uint8)),  # another number of labels
        (3, 16, np.ones((2, 4), np.uint8)),
        (3, 16, np.ones(3, np.uint8)),
        (3, 16, np.full((3, 4), 2, np.uint8)),
        (3, 16, np.tile(np.array([-1, 1], np.int8), (3, 2))),
        (3, 8, np.ones((3, 4), np.uint8)),  # another code length
    ],
)
def test_bad_input_is_refused(rows, n_bits, labels):
    codes = np.zeros((3, 2), np.uint8)
    with pytest.raises(BadCodes):
        histograms(codes[:rows], codes, labels, np.ones((3, 4), np.uint8), n_bits=n_bits)
    with pytest.raises(BadCodes):
        histograms(codes, codes[:rows], np.ones((3, 4), np.uint8), labels, n_bits=n_bits)


def test_evaluate_codes_finds_an_item_that_is_nearest_and_ranks_ties_at_random():
    codes, labels = pack(np.array([[1, 1], [1, -1], [1, -1], [-1, -1]])), np.array([[1, 0], [1, 0], [0, 1], [0, 1]])
    found = evaluate_codes(codes[:1], codes[1:], labels[:1], labels[1:], n_bits=2, ns=(1, None))
    assert found["precision@1"].expected.tolist() == [0.5]
    assert (found["AP@1"].worst[0], found["AP@1"].best[0]) == (0, 1)
    assert found["AP@all"].expected.tolist() == [0.75]  # rank 1 or 2, equally likely
    of_three = evaluate_codes(
        codes[:1], codes[1:], labels[:1] | 1, labels[1:], n_bits=2, ns=(1,), normalizer="relevant"
    )
    assert of_three["AP@1"].expected.tolist() == [1 / 3]
