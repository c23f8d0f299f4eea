"""Retrieval metrics over ties: against every order that ties allow, sampling, scikit-learn and hand-worked values."""

from itertools import permutations
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics import (
    Histograms,
    Normalizer,
    average_cumulative_gain,
    average_precision,
    histograms,
    lookup,
    metrics_of_histograms,
    ndcg,
    precision,
    precision_curve,
    recall,
    recall_curve,
    tied_at_cut,
    ties,
    weighted_average_precision,
)

N_DISTANCES, N_GAINS = 4, 4


def as_histograms(items: list[tuple[int, int]]) -> Histograms:
    """One query's ranking from (distance, gain) of each item."""
    gains = np.zeros((1, N_GAINS, N_DISTANCES), np.int32)
    for distance, gain in items:
        gains[0, gain, distance] += 1
    total = gains.sum(axis=1, dtype=np.int64)
    return Histograms(total, total - gains[:, 0], gains)


def literal(gains: list[int], everything: list[int], n: int) -> dict[str, float]:
    """The figures of one order, as their definitions read."""
    top = gains[:n]
    hits = [gain > 0 for gain in top]
    divisors = {
        "retrieved": sum(hits),
        "possible": min(n, sum(g > 0 for g in everything)),
        "relevant": sum(g > 0 for g in everything),
    }
    result = {
        "precision": sum(hits) / n,
        "recall": sum(hits) / max(1, divisors["relevant"]),
        "acg": sum(top) / n,
    }
    for name, divisor in divisors.items():
        for figure, values in (("ap", hits), ("wap", top)):
            total = sum(hit * sum(values[: i + 1]) / (i + 1) for i, hit in enumerate(hits))
            result[f"{figure} {name}"] = total / divisor if divisor else 0.0
    for name, value in (("exponential", lambda g: 2**g - 1), ("linear", lambda g: g)):
        dcg, ideal = (
            sum(value(g) / np.log2(i + 2) for i, g in enumerate(order[:n])) for order in (top, sorted(everything)[::-1])
        )
        result[f"ndcg {name}"] = dcg / ideal if ideal else 0.0
    return result


def closed_form(found: Histograms, n: int) -> dict[str, list[float]]:
    figures = {
        "precision": precision(found, n=n),
        "recall": recall(found, n=n),
        "acg": average_cumulative_gain(found, n=n),
        **{f"ap {name}": average_precision(found, n=n, normalizer=name) for name in get_args(Normalizer)},
        **{f"wap {name}": weighted_average_precision(found, n=n, normalizer=name) for name in get_args(Normalizer)},
        **{f"ndcg {name}": ndcg(found, n=n, gain=name) for name in ("exponential", "linear")},
    }
    return {name: [float(part[0]) for part in figure] for name, figure in figures.items()}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, N_DISTANCES - 1), st.integers(0, N_GAINS - 1)), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_metrics_are_the_mean_least_and_greatest_over_every_order_of_ties(items, n):
    n = min(n, len(items))
    everything = [gain for _, gain in items]
    orders = [
        literal([items[i][1] for i in order], everything, n)
        for order in permutations(range(len(items)))
        if [items[i][0] for i in order] == sorted(distance for distance, _ in items)
    ]
    for name, found in closed_form(as_histograms(items), n).items():
        values = [order[name] for order in orders]
        np.testing.assert_allclose(found, [np.mean(values), min(values), max(values)], atol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_where_a_large_group_is_cut_are_those_of_every_choice(seed):
    """One group of ties after a short head, cut in its middle: the extremes of which items lie above the cut."""
    rng = np.random.default_rng(seed)
    head = [(0, int(gain)) for gain in rng.integers(0, N_GAINS, rng.integers(0, 4))]
    group = [(1, int(gain)) for gain in rng.choice(N_GAINS, 7, p=[0.4, 0.3, 0.2, 0.1])]
    items, n = head + group, len(head) + int(rng.integers(1, 7))
    everything = [gain for _, gain in items]
    orders = [
        literal([*first, *last], everything, n)
        for first in set(permutations(gain for _, gain in head))
        for last in set(permutations(gain for _, gain in group))
    ]
    for name, found in closed_form(as_histograms(items), n).items():
        values = [order[name] for order in orders]
        np.testing.assert_allclose(found[1:], [min(values), max(values)], atol=1e-12, err_msg=name)


def test_the_best_order_of_two_gains_may_retrieve_neither_the_fewest_nor_the_most_relevant_items():
    # Gains 0, 0, 1, 2 at one distance, cut after two: 2 and 0 give 2 / 1, 2 and 1 give (2 + 3 / 2) / 2, 0 and 0 give 0.
    found = as_histograms([(0, 0), (0, 0), (0, 1), (0, 2)])
    found = Histograms(found.total, found.relevant, found.gains[:, :3])
    assert weighted_average_precision(found, n=2).best.tolist() == [2]


def test_a_hand_worked_ranking_without_ties():
    # gains 2, 0, 1 in this order: DCG = 3 + 0 + 1/2, ideal = 3 + 1/log2(3); ACG@i = 2, 1, 1; precision@i = 1, 1/2, 2/3
    found = as_histograms([(0, 2), (1, 0), (2, 1)])
    for part in range(3):
        assert ndcg(found, n=3)[part][0] == pytest.approx(3.5 / (3 + 1 / np.log2(3)))
        assert ndcg(found, n=3, gain="linear")[part][0] == pytest.approx(2.5 / (2 + 1 / np.log2(3)))
        assert average_cumulative_gain(found, n=2)[part][0] == pytest.approx(1)
        assert weighted_average_precision(found, n=3)[part][0] == pytest.approx((2 + 1) / 2)
        assert average_precision(found, n=3)[part][0] == pytest.approx((1 + 2 / 3) / 2)
        assert average_precision(found, n=1, normalizer="relevant")[part][0] == pytest.approx(0.5)
        assert (precision(found, n=2)[part][0], recall(found, n=2)[part][0]) == (0.5, 0.5)


def test_large_groups_agree_with_sampling():
    rng = np.random.default_rng(0)
    distances, gains = rng.integers(0, N_DISTANCES, 2000), rng.choice(N_GAINS, 2000, p=[0.6, 0.2, 0.15, 0.05])
    found = as_histograms(list(zip(distances.tolist(), gains.tolist(), strict=True)))
    n, samples = 500, []
    for _ in range(60):
        order = np.lexsort((rng.random(2000), distances))
        samples.append(literal(gains[order[:n]].tolist(), gains.tolist(), n))
    for name, (expected, worst, best) in closed_form(found, n).items():
        values = [sample[name] for sample in samples]
        assert expected == pytest.approx(np.mean(values), abs=4 * np.std(values) / np.sqrt(60) + 1e-12), name
        assert worst < min(values), name
        assert best > max(values), name


def test_queries_evaluated_together_get_the_values_they_get_alone(monkeypatch):
    monkeypatch.setattr(ties, "_QUERIES", 3)
    # The cut groups have different sizes, so the number of relevant items above the cut has different ranges.
    rng = np.random.default_rng(4)
    gains = np.zeros((8, N_GAINS, N_DISTANCES), np.int32)
    for query in range(8):
        for distance in rng.choice(N_DISTANCES, 60, p=rng.dirichlet(np.ones(N_DISTANCES))):
            gains[query, rng.choice(N_GAINS, p=[0.6, 0.2, 0.15, 0.05]), distance] += 1
    total = gains.sum(axis=1, dtype=np.int64)
    together, relevant = Histograms(total, total - gains[:, 0], gains), total - gains[:, 0]
    for figure in (average_precision, weighted_average_precision, precision, recall, average_cumulative_gain, ndcg):
        for n in (1, 20, 59):
            alone = [figure(Histograms(total[[query]], relevant[[query]], gains[[query]]), n=n) for query in range(8)]
            np.testing.assert_allclose(figure(together, n=n), np.concatenate(alone, axis=1), rtol=1e-12, atol=1e-12)


def test_bounds_hold_for_orders_that_chance_would_never_give():
    """10,000 of 20,000 equal distances are above the cut: all of them relevant has a probability of 1e-6000."""
    found = Histograms(np.array([[20_000, 5]]), np.array([[10_000, 5]]))
    found = Histograms(found.total, found.relevant, np.stack((found.total - found.relevant, found.relevant), axis=1))
    for figure in (average_precision, weighted_average_precision, precision, average_cumulative_gain, ndcg):
        expected, worst, best = (part[0] for part in figure(found, n=10_000))
        assert (worst, best) == pytest.approx((0, 1))
        assert expected == pytest.approx(0.5, abs=0.001)


def test_metrics_equal_those_of_scikit_learn():
    rng = np.random.default_rng(2)
    gains = rng.integers(0, N_GAINS, (20, 300))
    distances = rng.integers(0, N_DISTANCES, (20, 300))
    for row in range(20):
        found = as_histograms(list(zip(distances[row].tolist(), gains[row].tolist(), strict=True)))
        for n in (1, 10, 100, 300):
            # scikit-learn's nDCG has linear gains and averages over ties, as ours does
            theirs = ndcg_score(gains[row][None], -distances[row][None], k=n)
            assert ndcg(found, n=n, gain="linear").expected[0] == pytest.approx(theirs, abs=1e-12)


def test_curves_are_the_metrics_at_each_n():
    rng = np.random.default_rng(3)
    xq, xb = pack(rng.standard_normal((6, 7))), pack(rng.standard_normal((90, 7)))
    lq, lb = ((rng.random((n, 4)) < 0.4).astype(np.uint8) for n in (6, 90))
    found = histograms(xq, xb, lq, lb, n_bits=7, graded=True)
    ns = [1, 2, 17, 89, 90, 500]
    for curve, figure in ((precision_curve, precision), (recall_curve, recall)):
        whole = curve(found, ns)
        for column, n in enumerate(ns):
            for part, single in zip(whole, figure(found, n=n), strict=True):
                np.testing.assert_allclose(part[:, column], single, atol=1e-12)
    assert recall(found, n=None).worst[found.n_relevant > 0] == pytest.approx(1)
    figures = {"precision": precision, "recall": recall, "nDCG": ndcg, "ACG": average_cumulative_gain}
    of_relevant = {"AP": average_precision, "WAP": weighted_average_precision}
    expected = {name: figure(found, n=17) for name, figure in figures.items()}
    expected |= {name: figure(found, n=17, normalizer="relevant") for name, figure in of_relevant.items()}
    named = metrics_of_histograms(found, ns=[17], normalizer="relevant")
    assert named.keys() == {f"{name}@17" for name in expected}
    for name, values in expected.items():
        np.testing.assert_array_equal(named[f"{name}@17"], values)


def test_lookup_counts_empty_balls_as_zero_or_leaves_them_out():
    # Nothing is within 0 bits; query 0 finds nothing within 2 bits and 1 of 2 within 3; queries 1 and 2 find 1 of 1 and
    # 0 of 1 within 1, and 1 of 2 within 3.
    total, relevant = [[0, 0, 0, 2], [0, 1, 0, 1], [0, 1, 0, 1]], [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]]
    curve = lookup(Histograms(np.array(total), np.array(relevant)))
    np.testing.assert_allclose(curve.precision_zero, [0, 1 / 3, 1 / 3, 0.5])
    np.testing.assert_array_equal(curve.precision_skip, [np.nan, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(curve.recall, [0, 1 / 3, 1 / 3, 1])
    np.testing.assert_allclose(curve.empty, [1, 1 / 3, 1 / 3, 0])


def test_share_of_ranks_that_ties_at_the_cut_decide():
    found = Histograms(np.array([[2, 6, 2]]), np.array([[1, 1, 1]]))
    shares = [tied_at_cut(found, n=n)[0] for n in (1, 2, 4, 8, 9, None)]
    np.testing.assert_allclose(shares, [1, 0, 0.5, 0, 1 / 9, 0])


def test_n_beyond_the_database_is_the_whole_database_and_nothing_relevant_scores_0():
    found = Histograms(np.array([[2, 1], [1, 2]]), np.array([[0, 0], [1, 0]]))
    assert (found.n_relevant == 0).sum() == 1
    np.testing.assert_array_equal(average_precision(found, n=99), average_precision(found, n=None))
    assert average_precision(found, n=None).expected.tolist() == [0.0, 1.0]
    assert precision(found, n=99).expected[1] == pytest.approx(1 / 3)
    assert lookup(found).recall.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda found: ndcg(found, n=1), BadCodes),  # not graded
        (lambda found: average_precision(found, n=1, normalizer="all"), BadConfig),
        (lambda found: ndcg(found, n=1, gain="square"), BadConfig),
        (lambda found: recall(found, n=0), BadConfig),
        (lambda found: average_precision(found, n=-3), BadConfig),
    ],
)
def test_bad_input_is_refused(call, error):
    with pytest.raises(error):
        call(Histograms(np.array([[1, 1]]), np.array([[1, 0]])))
