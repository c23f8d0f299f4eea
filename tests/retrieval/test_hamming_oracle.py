"""The oracle itself: distances by hand and bit by bit, ties by ascending id."""

import numpy as np
import pytest

from hashseek.retrieval.codes import pack, unpack
from support import hamming_oracle as hamming


def test_distances_by_hand():
    xq = np.array([[0b0000_0000, 0b0001], [0b1111_1111, 0b1111]], np.uint8)
    xb = np.array([[0b0000_0001, 0b0001], [0b1111_1111, 0b0000], [0b0000_0000, 0b0001]], np.uint8)
    assert hamming.distances(xq, xb).tolist() == [[1, 9, 0], [10, 4, 11]]


@pytest.mark.parametrize("n_bits", [1, 12, 36, 48, 64, 65, 1024])
def test_a_distance_is_the_number_of_bits_that_differ(n_bits):
    rng = np.random.default_rng(n_bits)
    xq, xb = pack(rng.standard_normal((5, n_bits))), pack(rng.standard_normal((40, n_bits)))
    differing = unpack(xq, n_bits)[:, None] != unpack(xb, n_bits)[None]
    assert np.array_equal(hamming.distances(xq, xb), differing.sum(axis=-1))


def test_equal_distances_come_by_ascending_id():
    xb = np.array([[3], [0], [1], [0], [2]], np.uint8)
    distances, ids = hamming.search(np.array([[0]], np.uint8), xb, k=5)
    assert distances.tolist() == [[0, 0, 1, 1, 2]]
    assert ids.tolist() == [[1, 3, 2, 4, 0]]


def test_k_beyond_the_database_gives_all_of_it_and_an_empty_database_nothing():
    xb = np.arange(5, dtype=np.uint8)[:, None]
    for k, n in ((3, 3), (6, 5), (10**12, 5)):
        distances, ids = hamming.search(np.zeros((2, 1), np.uint8), xb, k=k)
        assert distances.shape == ids.shape == (2, n)
    assert hamming.search(xb, xb[:0], k=3)[1].shape == (5, 0)
    assert hamming.search(xb[:0], xb, k=3)[1].shape == (0, 3)
