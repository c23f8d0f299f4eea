from itertools import permutations

import pytest
import torch

from hashseek.training.losses.hashing.tie_aware import TieAware, tie_aware_ap


def build(n_classes=4, n_bits=5, **hyper):
    return TieAware(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_a_ranking_worked_by_hand():
    """Codes of 2 bits: row 0 finds row 1 (similar) at 0, rows 2 (similar) and 3 (not) at 1."""
    h = torch.tensor([[1.0, 1], [1, 1], [1, -1], [-1, 1]])
    theta = (h[:1] @ h.T)[:, 1:]
    similar, others = torch.tensor([[1.0, 1, 0]]), torch.ones(1, 3)
    # At 0: (1 + 1) / 2 over (1 + 1) / 2 = 1. At 1: 1 + (1 + 1) / 2 = 2 over 1 + (2 + 1) / 2 = 2.5.
    assert tie_aware_ap(theta, similar, others, n_bits=2).item() == pytest.approx((1 + 2 / 2.5) / 2)


def test_without_ties_it_is_average_precision_and_with_them_near_its_mean_over_all_orders():
    theta = torch.tensor([[6.0, 4, 2, 0, -2]])  # distances 0 to 4 of 6 bits
    similar = torch.tensor([[1.0, 0, 1, 1, 0]])
    exact = (1 / 1 + 2 / 3 + 3 / 4) / 3
    assert tie_aware_ap(theta, similar, torch.ones(1, 5), n_bits=6).item() == pytest.approx(exact)
    tied = torch.tensor([[6.0, 2, 2, 2, -2]])
    values = []
    for order in permutations((1, 2, 3)):
        ranked = [similar[0, i].item() for i in (0, *order, 4)]
        hits = [sum(ranked[: i + 1]) / (i + 1) for i in range(5) if ranked[i]]
        values.append(sum(hits) / len(hits))
    mean = sum(values) / len(values)
    # Half of a tie in front of each item: an approximation of the mean, within two hundredths here.
    assert tie_aware_ap(tied, similar, torch.ones(1, 5), n_bits=6).item() == pytest.approx(mean, abs=0.02)


def test_a_perfect_ranking_has_no_missing_precision_and_the_worst_has():
    codes = torch.tensor([[9.0, 9, 9], [9, 9, 9], [-9, -9, -9], [-9, -9, -9]], dtype=torch.float64)
    together, apart = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]), torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])
    assert build(2, 3)(codes, together)["ap"].item() == pytest.approx(0, abs=1e-6)
    # One nearest that is not similar, then one of two tied: (1 + 1) / 2 over 1 + (2 + 1) / 2.
    assert build(2, 3, weight=1)(codes, apart)["ap"].item() == pytest.approx(1 - 1 / 2.5, abs=1e-6)
