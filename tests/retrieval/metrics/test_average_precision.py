"""Expected, best and worst figures over ties, against every order that ties allow."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics import (
    NORMALIZERS,
    Histograms,
    average_cumulative_gain,
    average_precision,
    average_precision_of_ranking,
    counting,
    histograms,
    ndcg,
    precision,
    relevance,
    weighted_average_precision,
    without_self,
)
from support import hamming_oracle as hamming


def brute_force(distances: list[int], relevant: list[bool], n: int, normalizer: str) -> tuple[list[float], list[float]]:
    """AP@n and precision@n of every order of the items that sorts the distances."""
    ap, at_n = [], []
    for order in permutations(range(len(distances))):
        if [distances[i] for i in order] != sorted(distances):
            continue
        hits, total = 0, 0.0
        for rank, item in enumerate(order[:n], start=1):
            if relevant[item]:
                hits += 1
                total += hits / rank
        divisor = {"retrieved": hits, "possible": min(n, sum(relevant)), "relevant": sum(relevant)}[normalizer]
        ap.append(total / divisor if divisor else 0.0)
        at_n.append(hits / n)
    return ap, at_n


def as_histograms(distances: list[int], relevant: list[bool]) -> Histograms:
    total, hits = np.zeros((1, 5), np.int64), np.zeros((1, 5), np.int64)
    for distance, hit in zip(distances, relevant, strict=True):
        total[0, distance] += 1
        hits[0, distance] += hit
    return Histograms(total, hits)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6), st.integers(1, 6))
def test_figures_are_the_mean_least_and_greatest_over_every_order_of_ties(items, n):
    distances, relevant = [d for d, _ in items], [r for _, r in items]
    n = min(n, len(items))
    for normalizer in NORMALIZERS:
        ap, at_n = brute_force(distances, relevant, n, normalizer)
        figure = average_precision(as_histograms(distances, relevant), n=n, normalizer=normalizer)
        np.testing.assert_allclose([f[0] for f in figure], [np.mean(ap), min(ap), max(ap)], atol=1e-12)
        figure = precision(as_histograms(distances, relevant), n=n)
        np.testing.assert_allclose([f[0] for f in figure], [np.mean(at_n), min(at_n), max(at_n)], atol=1e-12)


def test_a_hand_worked_ranking_without_ties():
    # ranks 1..4 relevant? yes no yes no: AP = (1 + 2/3) / 2
    found = as_histograms([0, 1, 2, 3], [True, False, True, False])
    for figure in average_precision(found, n=4):
        assert figure[0] == pytest.approx(5 / 6)
    assert average_precision(found, n=1, normalizer="relevant").expected[0] == pytest.approx(0.5)
    assert precision(found, n=2).expected[0] == 0.5


def test_large_groups_agree_with_sampling():
    rng = np.random.default_rng(0)
    distances, relevant = rng.integers(0, 4, 3000), rng.random(3000) < 0.3
    found = as_histograms(distances.tolist(), relevant.tolist())
    samples = []
    for _ in range(400):
        order = np.lexsort((rng.random(3000), distances))[:1000]
        samples.append(average_precision_of_ranking(relevant[order][None], n_relevant=np.array([relevant.sum()]))[0])
    expected, worst, best = (f[0] for f in average_precision(found, n=1000))
    assert expected == pytest.approx(np.mean(samples), abs=4 * np.std(samples) / 20)
    assert worst < min(samples)
    assert best > max(samples)


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("n_bits", [1, 7, 12, 48, 64, 126, 127, 128, 200, 1024])
@pytest.mark.parametrize("n_labels", [1, 9, 38, 80, 130])
def test_histograms_equal_the_oracle(n_bits, n_labels, in_int8, monkeypatch):
    monkeypatch.setattr(counting, "_has_int8", lambda: in_int8)
    rng = np.random.default_rng(n_bits + n_labels)
    xq, xb = pack(rng.standard_normal((5, n_bits))), pack(rng.standard_normal((70, n_bits)))
    lq = (rng.random((5, n_labels)) < 0.1).astype(np.uint8)
    lb = (rng.random((70, n_labels)) < 0.1).astype(np.uint8)
    found = histograms(xq, xb, lq, lb, n_bits=n_bits, graded=True)
    d, shared = hamming.distances(xq, xb), lq.astype(int) @ lb.T.astype(int)
    for distance in range(n_bits + 1):
        np.testing.assert_array_equal(found.total[:, distance], (d == distance).sum(axis=1))
        np.testing.assert_array_equal(found.relevant[:, distance], ((d == distance) & (shared > 0)).sum(axis=1))
        for gain in range(found.gains.shape[1]):
            expected = ((d == distance) & (shared == gain)).sum(axis=1)
            np.testing.assert_array_equal(found.gains[:, gain, distance], expected)
    assert histograms(xq, xb, lq, lb, n_bits=n_bits).gains is None


@pytest.mark.parametrize("in_int8", [False, True])
def test_blocks_and_threads_do_not_change_the_counts(in_int8, monkeypatch):
    monkeypatch.setattr(counting, "_has_int8", lambda: in_int8)
    rng = np.random.default_rng(5)
    xq, xb = pack(rng.standard_normal((150, 20))), pack(rng.standard_normal((9000, 20)))
    lq, lb = (rng.random((150, 6)) < 0.4).astype(np.uint8), (rng.random((9000, 6)) < 0.4).astype(np.uint8)
    threads = torch.get_num_threads()
    results = []
    for worth_a_thread, cores, items in ((2**60, 1, 4096), (1, 1, 2**18), (1, 2, 100), (1, 7, 4096)):
        monkeypatch.setattr(counting, "_PAIRS_WORTH_A_THREAD", worth_a_thread)
        monkeypatch.setattr(counting, "_ITEMS", items)
        monkeypatch.setattr(counting, "n_cores", lambda cores=cores: cores)
        results.append(histograms(xq, xb, lq, lb, n_bits=20, graded=True).gains)
    assert torch.get_num_threads() == threads
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    d, shared = hamming.distances(xq, xb), lq.astype(int) @ lb.T.astype(int)
    keys = (np.arange(150)[:, None] * results[0].shape[1] + shared) * 21 + d
    np.testing.assert_array_equal(results[0].ravel(), np.bincount(keys.ravel(), minlength=results[0].size))


def test_labels_of_no_image_and_images_without_labels_are_counted_as_irrelevant():
    codes = np.zeros((3, 1), np.uint8)
    found = histograms(codes, codes, np.zeros((3, 4), np.uint8), np.ones((3, 4), np.uint8), n_bits=8, graded=True)
    assert found.gains.shape == (3, 1, 9)
    assert found.without_relevant == 3
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
    elsewhere = histograms(codes[:1], codes[1:] ^ 1, labels[:1], labels[1:], n_bits=6)
    elsewhere.total[0, 0] = 0
    with pytest.raises(BadCodes, match="not in the database"):
        without_self(elsewhere, labels[:1])


@pytest.mark.parametrize("n_labels", [1, 21, 64, 130])
def test_relevance_of_a_ranking_is_sharing_a_label(n_labels):
    rng = np.random.default_rng(n_labels)
    lq, lb = ((rng.random((n, n_labels)) < 0.05).astype(np.uint8) for n in (4, 50))
    ids = np.stack([rng.permutation(50)[:30] for _ in range(4)])
    expected = [[bool((lq[q] & lb[i]).any()) for i in ids[q]] for q in range(4)]
    np.testing.assert_array_equal(relevance(ids, lq, lb), expected)


def test_a_query_without_relevant_items_counts_as_zero_and_is_counted():
    found = Histograms(np.array([[2, 1], [1, 2]]), np.array([[0, 0], [1, 0]]))
    assert found.without_relevant == 1
    assert average_precision(found, n=None).expected.tolist() == [0.0, 1.0]


def test_n_beyond_the_database_is_the_whole_database():
    found = as_histograms([0, 1, 1], [True, False, True])
    assert average_precision(found, n=99) == average_precision(found, n=None)
    assert precision(found, n=99).expected[0] == pytest.approx(2 / 3)


def test_order_of_the_database_does_not_change_a_figure():
    rng = np.random.default_rng(3)
    xq, xb = pack(rng.standard_normal((4, 12))), pack(rng.standard_normal((500, 12)))
    lq, lb = (rng.random((4, 6)) < 0.4).astype(np.uint8), (rng.random((500, 6)) < 0.4).astype(np.uint8)
    order = rng.permutation(500)
    first = average_precision(histograms(xq, xb, lq, lb, n_bits=12), n=100)
    second = average_precision(histograms(xq, xb[order], lq, lb[order], n_bits=12), n=100)
    np.testing.assert_array_equal(np.stack(first), np.stack(second))


def test_bad_input_is_refused_in_one_sentence():
    codes, labels = np.zeros((3, 2), np.uint8), np.ones((3, 4), np.uint8)
    with pytest.raises(BadCodes, match="query split is empty"):
        histograms(codes[:0], codes, labels[:0], labels, n_bits=16)
    with pytest.raises(BadCodes, match="4 columns, database labels 3"):
        histograms(codes, codes, labels, labels[:, :3], n_bits=16)
    with pytest.raises(BadCodes, match=r"labels of shape \(3, C\)"):
        histograms(codes, codes, labels[:2], labels, n_bits=16)
    with pytest.raises(BadCodes, match="must be 0 or 1"):
        histograms(codes, codes, labels * 2, labels, n_bits=16)
    with pytest.raises(BadCodes, match="have 1 bytes, not 2"):
        histograms(codes, codes, labels, labels, n_bits=8)
    found = histograms(codes, codes, labels, labels, n_bits=16)
    with pytest.raises(BadConfig, match="not 0"):
        precision(found, n=0)
    with pytest.raises(BadConfig, match="no normalizer 'all'"):
        average_precision(found, n=1, normalizer="all")
