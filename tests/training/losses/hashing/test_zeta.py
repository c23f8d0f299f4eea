import csv
from importlib import resources
from itertools import combinations_with_replacement

import pytest

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hashing.zeta import zeta


@pytest.fixture(scope="module")
def table():
    with resources.files("hashseek.training.losses.hashing").joinpath("min_distance.csv").open(newline="") as lines:
        return {(int(row["n"]), int(row["k"])): int(row["d"]) for row in csv.DictReader(lines)}


@pytest.mark.parametrize(
    ("n_classes", "values"),
    [
        ((38,), {12: 1 / 3, 24: 1 / 6, 36: 1 / 9, 48: 0}),
        ((20, 21), {12: 1 / 3, 16: 0, 24: 0, 32: 0, 36: 1 / 18, 48: 0, 64: 0}),
        ((80, 81), {16: 1 / 4, 32: 1 / 8, 48: 1 / 12, 64: 0}),
    ],
)
def test_values_that_the_papers_use(n_classes, values):
    for c in n_classes:
        for n_bits, value in values.items():
            assert zeta(n_bits, c) == pytest.approx(value, abs=1e-15)


def test_the_table_is_whole(table):
    assert set(table) == {(n, k) for n in range(1, 257) for k in range(1, min(n, 8) + 1)}


def test_families_of_codes(table):
    for n in range(1, 257):
        assert table[n, 1] == n  # repetition
        if n > 1:
            assert table[n, 2] == 2 * n // 3
        if n <= 8:
            assert table[n, n] == 1
        if 2 <= n <= 9:
            assert table[n, n - 1] == 2  # even weight
    for k in range(1, 9):
        assert table[2**k - 1, k] == 2 ** (k - 1)  # simplex
        if k > 1:
            assert table[2 ** (k - 1), k] == 2 ** (k - 2)  # first-order Reed-Muller


def test_no_bound_is_broken(table):
    for (n, k), d in table.items():
        assert d <= n - k + 1  # Singleton
        assert n >= sum(-(-d // 2**i) for i in range(k))  # Griesmer
        if (n + 1, k) in table:
            assert d <= table[n + 1, k] <= d + 1
        if (n, k + 1) in table:
            assert table[n, k + 1] <= d
        if d % 2 and (n + 1, k) in table:
            assert table[n + 1, k] == d + 1  # a parity bit makes an odd distance even


@pytest.mark.parametrize(("k", "longest"), [(2, 12), (3, 9), (4, 6)])
def test_short_codes_by_trying_every_generator_matrix(table, k, longest):
    points = range(1, 2**k)
    for n in range(k, longest + 1):
        best = max(
            min(sum((column & message).bit_count() & 1 for column in columns) for message in points)
            for columns in combinations_with_replacement(points, n)
        )
        assert table[n, k] == best


def test_one_label_takes_one_dimension():
    assert zeta(12, 1) == zeta(12, 2) == -1


def test_as_many_bits_as_dimensions_are_enough():
    assert zeta(2, 4) == 0  # all codes are used, so the nearest differ in one bit of two


@pytest.mark.parametrize(("n_bits", "n_classes"), [(64, 257), (257, 10), (4, 17)])
def test_outside_the_table(n_bits, n_classes):
    with pytest.raises(BadConfig):
        zeta(n_bits, n_classes)
