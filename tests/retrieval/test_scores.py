"""Scores for ranking by real outputs and by features."""

from fractions import Fraction

import numpy as np
import pytest

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.scores import asymmetric_scores, best, cosines, stored_features


def test_asymmetric_scores_by_hand():
    """Bits 0 and 9 of ten are set; the query's outputs are 1, 2, 4, ..., 512."""
    outputs = 2.0 ** np.arange(10)
    codes = pack(np.array([[1, *[-1] * 8, 1], [-1] * 10, [1] * 10]))
    assert asymmetric_scores(codes, outputs).tolist() == [1 + 512 - 510, -1023, 1023]


@pytest.mark.parametrize("n_bits", [1, 8, 12, 48, 256, 1024])
def test_asymmetric_scores_are_exact_sums(n_bits):
    rng = np.random.default_rng(n_bits)
    outputs, signs = rng.standard_normal(n_bits).astype(np.float32), rng.choice([-1, 1], (40, n_bits))
    scores = asymmetric_scores(pack(signs), outputs)
    for score, row in zip(scores, signs, strict=True):
        exact = sum(int(sign) * Fraction(float(output)) for sign, output in zip(row, outputs, strict=True))
        assert abs(Fraction(float(score)) - exact) <= Fraction(1, 2**45)
    assert asymmetric_scores(pack(outputs[None]), outputs)[0] >= scores.max()  # its own code scores highest


def test_codes_of_another_length_are_refused():
    with pytest.raises(BadCodes):
        asymmetric_scores(np.full((1, 2), 255, np.uint8), np.ones(12))
    assert asymmetric_scores(np.zeros((0, 2), np.uint8), np.ones(12)).shape == (0,)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_cosines_do_not_depend_on_the_other_images():
    """Sums of products of float16 numbers do not round in float64, so they are the same in any order.

    Rounding to float16 has changed the lengths, but equal features still have a cosine of 1, and others less.
    """
    rng = np.random.default_rng(0)
    features = stored_features(rng.exponential(size=(5000, 300)))
    queries = features[[7, 4999]]
    together = cosines(features, queries)
    assert together.shape == (2, 5000)
    for query, row in zip(queries, together, strict=True):
        assert np.array_equal(cosines(features, query), row)
        for at in (0, 7, 4095, 4096, 4999):
            assert cosines(features[at : at + 1], query)[0] == row[at]
            a, b = ([Fraction(float(value)) for value in vector] for vector in (features[at], query))
            product, squares = dot(a, b), dot(a, a) * dot(b, b)
            assert abs(Fraction(float(row[at])) ** 2 * squares - product**2) <= Fraction(1, 2**48)
    assert together[0].argmax() == 7
    assert (together.max(axis=1) == 1).all()
    assert cosines(features[:0], queries).shape == (2, 0)


def test_normalized_features_have_length_1_and_zeros_stay_zeros():
    features = stored_features(np.array([[3.0, 4.0], [0.0, 0.0], [1e6, 0.0]], np.float32))
    assert features.dtype == np.float16
    np.testing.assert_allclose(features, [[0.6, 0.8], [0, 0], [1, 0]], atol=1e-3)
    np.testing.assert_allclose(cosines(features, features), [[1, 0, 0.6], [0, 0, 0], [0.6, 0, 1]], atol=1e-3)


@pytest.mark.parametrize("k", [1, 3, 7, 30, 100])
def test_best_are_the_first_of_a_full_sort(k):
    rng = np.random.default_rng(k)
    scores, ids = rng.integers(0, 6, 60) / 4, rng.permutation(1000)[:60]
    expected = sorted(range(60), key=lambda at: (-scores[at], ids[at]))[:k]
    assert best(scores, ids, k).tolist() == expected
