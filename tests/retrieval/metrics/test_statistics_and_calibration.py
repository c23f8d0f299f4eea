"""Metrics by label, intervals, comparisons, calibration and the statistics of codes."""

import itertools
import json
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from scipy.stats import ttest_1samp

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics import (
    Calibration,
    Histograms,
    bit_statistics,
    bootstrap,
    calibrate,
    class_distances,
    code_statistics,
    compare,
    histograms,
    holm,
    per_label,
    queries_and_seeds,
    randomization_test,
    remarks,
)
from hashseek.retrieval.metrics.ties import hypergeometric
from support import hamming_oracle as hamming


def random_world(seed: int, n_bits: int = 16):
    """(query codes, database codes, query labels, database labels)."""
    rng = np.random.default_rng(seed)
    xq, xb = pack(rng.standard_normal((30, n_bits))), pack(rng.standard_normal((400, n_bits)))
    return xq, xb, (rng.random((30, 5)) < 0.3).astype(np.uint8), (rng.random((400, 5)) < 0.3).astype(np.uint8)


@pytest.mark.parametrize(
    ("size", "relevant", "room"),
    [(1, 0, 0), (1, 1, 1), (10, 3, 4), (10, 9, 9), (9000, 1800, 5000), (180_000, 20, 90_000), (10**6, 10**5, 5000)],
)
def test_hypergeometric_probabilities_are_those_of_scipy(size, relevant, room):
    h, probability = (row[0] for row in hypergeometric(*(np.array([v]) for v in (size, relevant, room))))
    theirs = stats.hypergeom(size, relevant, room)
    np.testing.assert_allclose(probability, theirs.pmf(h), atol=1e-11)
    assert theirs.pmf(h).sum() == pytest.approx(1, abs=1e-9)
    assert probability @ h == pytest.approx(room * relevant / size, rel=1e-9)
    assert len(h) < 1200


def test_per_label_means_and_their_macro_mean():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], np.uint8)
    found = per_label(np.array([0.2, 0.6, 1.0]), labels)
    np.testing.assert_allclose(found.mean, [0.4, 0.6, np.nan])
    assert found.n_queries.tolist() == [2, 1, 0]
    assert found.macro == pytest.approx(0.5)
    assert per_label(np.array([0.3]), labels[:1]).macro == 0.3  # one query is enough
    assert per_label(np.zeros(3), labels * 0).macro == 0


def test_remarks_name_what_is_unusual_and_nothing_else():
    lq = np.array([[1, 0, 0, 0], [0, 1, 0, 0]], np.uint8)
    lb = np.array([[1, 0, 0, 1], [0, 0, 0, 0]], np.uint8)
    found = remarks(lq, lb, ns=(1, 2, 3, None), label_names=("sky", "sea", "car", "dog"))
    assert len(found) == 4
    assert all(name in text for text, name in zip(found, ("3", "sea", "dog", "1 database"), strict=True))
    assert remarks(lq, lq, ns=(2,), label_names=("sky", "sea", "car", "dog")) == []


def test_bootstrap_intervals_are_seeded_and_cover_the_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    values = rng.random(50)
    found = bootstrap(values, seed=3)
    assert found == bootstrap(values, seed=3) != bootstrap(values, seed=4)
    assert found.mean == pytest.approx(values.mean())
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=5000, rng=1).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)
    covered = 0
    for seed in range(200):
        found = bootstrap(rng.random(60), seed=seed)
        covered += found.low <= 0.5 <= found.high
    assert 181 <= covered <= 199  # 95 % of 200, three deviations
    assert bootstrap(np.array([np.nan, 0.25])).low == 0.25


def test_a_paired_comparison_counts_queries():
    rng = np.random.default_rng(1)
    first = rng.random(200)
    second = first.copy()
    second[:60] += 0.1
    second[60:80] -= 0.05
    found = compare(first, second)
    assert (found.better, found.worse, found.equal) == (60, 20, 120)
    assert found.difference.mean == pytest.approx(0.025)
    assert 0 < found.difference.low < 0.025 < found.difference.high < 0.04


def test_rounding_is_no_difference():
    equal = np.linspace(0.1, 0.9, 90)
    found = compare(equal, (equal * 1.1 + equal * 0.9) / 2 + 1e-16)
    assert (found.difference.mean, found.p_value, found.equal) == (0, 1, 90)


@pytest.mark.parametrize("differences", [[1.0] * 5, [3, -1, 2, -2, 5, 1, 0.5, -4], [0.3, -0.3], [2, -1, 0, 0, 0, 7, 3]])
def test_the_randomisation_test_is_near_the_share_of_all_choices_of_signs(differences):
    values = np.array(differences)
    means = [abs((values * signs).mean()) for signs in itertools.product((1, -1), repeat=len(values))]
    exact = np.mean(np.array(means) >= abs(values.mean()) - 1e-12)
    found = randomization_test(values)
    assert found == pytest.approx(exact, abs=0.02)
    assert found == randomization_test(-values) == randomization_test(values * 1e-9)


def test_the_randomisation_test_tells_a_difference_from_none():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(200, 50))
    p_values = np.array([randomization_test(row) for row in noise])
    assert 0.01 < (p_values < 0.05).mean() < 0.1  # as often as it says
    assert randomization_test(noise[0] + 1) == pytest.approx(1e-4)
    assert randomization_test(np.zeros(9)) == 1
    assert randomization_test(np.append(noise[0], np.nan)) == p_values[0]


def test_seeds_that_disagree_are_no_evidence_however_many_queries_there_are():
    # Every query has the same difference with a seed: a t-test of the three seeds.
    differences = np.tile([[0.01], [0.02], [0.06]], 500)
    assert queries_and_seeds(differences) == pytest.approx(ttest_1samp([0.01, 0.02, 0.06], 0).pvalue)
    # Every seed has the same differences: a t-test of the queries.
    of_queries = np.random.default_rng(0).normal(0.1, size=50)
    assert queries_and_seeds(np.tile(of_queries, (4, 1))) == pytest.approx(ttest_1samp(of_queries, 0).pvalue)
    both = differences + np.random.default_rng(1).normal(scale=0.01, size=(3, 500))
    assert queries_and_seeds(both) > max(ttest_1samp(both.mean(axis=0), 0).pvalue, ttest_1samp([1, 2, 6], 0).pvalue)
    assert queries_and_seeds(np.append(both, [[0], [np.nan], [0]], axis=1)) == queries_and_seeds(both)
    assert queries_and_seeds(differences[:1]) == 1, "one seed says nothing about others"
    assert queries_and_seeds(differences[:, :1]) == 1, "nor does one query"
    assert (queries_and_seeds(np.zeros((2, 3))), queries_and_seeds(np.ones((2, 2)))) == (1, 0)
    assert queries_and_seeds(np.array([[1.0, -1.0], [-1.0, 1.0]])) == 1, "the mean is 0"
    assert queries_and_seeds(np.full((2, 3), 1e-16)) == 1, "rounding"


def test_holm_worked_out_by_hand():
    # Sorted 0.01, 0.03, 0.04: times 3, 2, 1 is 0.03, 0.06, 0.04, and none may be below the one before.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.2]) == [0.2]
    assert holm([0.9, 0.6]) == [1, 1]
    assert holm([]) == []


def test_calibration_is_the_share_of_relevant_pairs_and_goes_through_json():
    xq, xb, lq, lb = random_world(2)
    found = histograms(xq, xb, lq, lb, n_bits=16)
    d, relevant = hamming.distances(xq, xb), lq.astype(int) @ lb.T.astype(int) > 0
    made = calibrate(found)
    assert (made.n_bits, made.n_queries) == (16, 30)
    assert list(made.pairs) == [(d == distance).sum() for distance in range(17)]
    assert all(near >= far - 1e-12 for near, far in pairwise(made.at_distance))
    for radius in range(int(d.min()), 17):
        assert made.within_radius[radius] == pytest.approx(relevant[d <= radius].mean())
    assert Calibration.from_dict(json.loads(json.dumps(asdict(made)))) == made


def test_a_wanted_precision_becomes_the_largest_radius_that_gives_it():
    # 8 of 10 at distance 0, none seen at 1, 2 of 10 at 2, 10 of 80 at 3
    found = Histograms(np.array([[10, 0, 10, 80]]), np.array([[8, 0, 2, 10]]))
    made = calibrate(found)
    assert made.at_distance == pytest.approx((0.8, 0.5, 0.2, 0.125))
    assert made.within_radius == pytest.approx((0.8, 0.8, 0.5, 0.2))
    assert [made.radius(p) for p in (0, 0.2, 0.21, 0.5, 0.8, 0.81, 1)] == [3, 3, 2, 2, 1, None, None]
    with pytest.raises(BadCodes, match="version 2"):
        Calibration.from_dict(asdict(made) | {"version": 2})
    # 1 of 2 at distance 0 and 9 of 10 at 1: nearer ones are no worse, but only half of those at 0 were relevant.
    ragged = calibrate(Histograms(np.array([[2, 10]]), np.array([[1, 9]])))
    assert ragged.at_distance == pytest.approx((10 / 12, 10 / 12))
    assert ragged.within_radius == pytest.approx((0.5, 10 / 12))
    for relevant in ([1, 0], [0, 3]):  # a single pair at distance 0
        single = calibrate(Histograms(np.array([[1, 3]]), np.array([relevant])))
        assert single.within_radius == pytest.approx((relevant[0], sum(relevant) / 4))
    assert calibrate(Histograms(np.array([[0, 4]]), np.array([[0, 3]]))).within_radius == (0.75, 0.75)  # nothing at 0


def test_class_distances_are_the_mean_distances_of_relevant_and_irrelevant_pairs():
    xq, xb, lq, lb = random_world(3)
    found = class_distances(histograms(xq, xb, lq, lb, n_bits=16))
    d, relevant = hamming.distances(xq, xb), lq.astype(int) @ lb.T.astype(int) > 0
    assert (found.intra, found.inter) == pytest.approx((d[relevant].mean(), d[~relevant].mean()))
    nothing = class_distances(histograms(xq, xb, lq * 0, lb, n_bits=16))
    assert np.isnan(nothing.intra)
    assert nothing.inter == pytest.approx(d.mean())


def test_bit_statistics_of_hand_worked_codes():
    # bit 0: half ones; bit 1 = bit 0; bit 2 = its opposite; bit 3 independent; bit 4 constant
    bits = np.array(
        [[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 1, 0, 0]]
    )
    found = bit_statistics(pack(bits - 0.5), n_bits=5)
    np.testing.assert_allclose(found.balance, [0.5, 0.5, 0.5, 0.5, 0])
    theirs = np.abs(np.corrcoef(bits[:, :4].T))[np.triu_indices(4, 1)]
    assert found.mean_correlation == pytest.approx(theirs.mean())
    assert found.max_correlation == 1.0
    assert (found.n_constant, found.n_distinct, found.most_common) == (1, 4, 2)
    assert found.quantisation_error is None
    only = bit_statistics(np.zeros((3, 1), np.uint8), n_bits=4)
    assert (only.n_constant, only.mean_correlation, only.max_correlation, only.n_distinct) == (4, 0, 0, 1)


def test_bit_statistics_of_codes_of_several_bytes_and_blocks(monkeypatch):
    monkeypatch.setattr(code_statistics, "_ROWS", 3)
    bits = np.random.default_rng(1).integers(0, 2, (8, 12))
    bits[:, 10], bits[7] = 1, bits[0]  # a bit that is always set, and a code that occurs twice
    found = bit_statistics(pack(bits - 0.5), n_bits=12)
    np.testing.assert_allclose(found.balance, bits.mean(axis=0))
    theirs = np.abs(np.corrcoef(np.delete(bits, 10, axis=1).T))[np.triu_indices(11, 1)]
    assert theirs.max() < 1
    assert (found.mean_correlation, found.max_correlation) == pytest.approx((theirs.mean(), theirs.max()))
    assert (found.n_constant, found.n_distinct, found.most_common) == (1, 7, 2)


def test_quantisation_error_of_outputs():
    outputs = np.array([[1.0, -1.0], [5.0, -12.0], [0.0, 0.0]])
    found = bit_statistics(pack(outputs), n_bits=2, outputs=outputs)
    assert found.quantisation_error == pytest.approx((0 + 0 + 16 + 121 + 1 + 1) / 6)
    assert found.quantisation_angle == pytest.approx(1 - (1 + 17 / (13 * np.sqrt(2)) + 0) / 3)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: bootstrap(np.array([np.nan])), BadCodes),
        (lambda: compare(np.zeros(3), np.zeros(4)), BadCodes),
        (lambda: per_label(np.zeros(2), np.ones((3, 2), np.uint8)), BadCodes),
        (lambda: calibrate(Histograms(np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64))), BadCodes),
        (lambda: calibrate(Histograms(np.ones((1, 4), int), np.ones((1, 4), int))).radius(1.5), BadConfig),
        (lambda: calibrate(Histograms(np.ones((1, 4), int), np.ones((1, 4), int))).radius(-0.5), BadConfig),
        (lambda: bit_statistics(np.zeros((0, 1), np.uint8), n_bits=8), BadCodes),
        (lambda: bit_statistics(np.zeros((3, 1), np.uint8), n_bits=2, outputs=np.zeros((2, 2))), BadCodes),
    ],
)
def test_bad_input_is_refused(call, error):
    with pytest.raises(error):
        call()
