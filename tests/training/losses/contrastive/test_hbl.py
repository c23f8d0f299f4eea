import math
import statistics
from fractions import Fraction

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.contrastive.hbl import HBL, median_overlaps
from support import literal_losses as literal
from support.literal_losses import batch, gradients_of

# Batches as small as these leave half of it untrained, which it says.
pytestmark = pytest.mark.filterwarnings("ignore:HBL's margins need")


def build(n_classes=4, n_bits=5, **hyper):
    return HBL(n_classes=n_classes, n_bits=n_bits, **{"k_min": 1, **hyper})


@pytest.mark.parametrize("options", [options for name, options in literal.CASES if name == "hbl" and options], ids=str)
def test_the_margins_of_the_cases_are_at_work(options):
    values = [build(**options)(*batch(seed, n=9), memory=batch(seed + 10, n=14))["margins"] for seed in range(6)]
    assert any(v > 0 for v in values)


def rows_at(cosines):
    """Unit rows in the plane with the given cosines to (1, 0)."""
    return torch.tensor([[c, math.sqrt(1 - c * c)] for c in cosines], dtype=torch.float64)


def test_worked_by_hand():
    outputs, labels = rows_at([1.0]), torch.tensor([[1, 1, 0]])
    ref = rows_at([0.5, 0.8, 0.3])
    ref_y = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 1]])  # J = 1 (soft), 1/2 (hard), negative; theta = 3/4
    loss = build(3, 2, lam=0.5, gamma=2.0)
    margins = loss(outputs, labels, memory=(ref, ref_y))["margins"].item()
    rel, absolute = 0.8 - 0.5 + 0.1, max(0.0, 0.3 - 0.8 + 0.2)
    assert margins == pytest.approx(0.5 * (rel + 2 * absolute), abs=1e-12)
    wide = build(3, 2, lam=0.5, gamma=2.0, m_abs=0.9)(outputs, labels, memory=(ref, ref_y))["margins"].item()
    assert wide == pytest.approx(0.5 * (rel + 2 * (0.3 - 0.8 + 0.9)), abs=1e-12)


def test_a_batch_without_negatives_has_only_the_margin_between_positives():
    outputs, labels = rows_at([1.0, 0.5, 0.8]), torch.tensor([[1, 1], [1, 1], [1, 0]])
    margins = build(2, 2, lam=1.0, m_abs=2.0)(outputs, labels)["margins"].item()
    # Rows 0 and 1 are soft to each other, row 2 is hard to both; to row 2 all are soft.
    hard = 0.5 * 0.8 + math.sqrt(0.75) * 0.6
    assert margins == pytest.approx(((0.8 - 0.5 + 0.1) + (hard - 0.5 + 0.1)) / 3, abs=1e-12)


def random_labels(seed, n_anchors, n_rows, n_classes, density):
    """Labels from rare to frequent, one anchor and one row without any."""
    generator = torch.Generator().manual_seed(seed)
    shares = 2 * density * torch.rand(n_classes, generator=generator)
    labels = (torch.rand(n_anchors + n_rows, n_classes, generator=generator) < shares).double()
    labels[[1, n_anchors + 1]] = 0
    return labels[:n_anchors], labels[n_anchors:]


# Few labels, whose overlaps are counted, and so many that sorting the pairs is less work.
COUNTED, SORTED = {"n_classes": 12, "density": 0.2}, {"n_classes": 81, "density": 0.5}


@pytest.mark.parametrize("labels", [COUNTED, SORTED], ids=["counted", "sorted"])
@pytest.mark.parametrize("kind", ["mean", "lower"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_medians_are_those_of_the_statistics_module(labels, kind, dtype):
    for seed in range(3):
        y, ref_y = random_labels(seed, 15, 300, **labels)
        shared, sizes = (y @ ref_y.T).to(dtype), ref_y.sum(dim=1).to(dtype)
        n_labels = y.sum(dim=1, keepdim=True).to(dtype)
        cells = (shared.max() + 1) * (sizes.max() + 1)
        assert (cells <= 300) == (labels is COUNTED)
        found = median_overlaps(shared, shared.clamp(max=1), n_labels, sizes, kind)
        for own, value in zip(literal.label_sets(y), found.squeeze(1).tolist(), strict=True):
            others = literal.label_sets(ref_y)
            overlaps = [Fraction(len(own & other), len(own | other)) for other in others if own & other]
            if overlaps:
                exact = (statistics.median if kind == "mean" else statistics.median_low)(overlaps)
                assert value == pytest.approx(float(exact), rel=1e-6 if dtype == torch.float32 else 1e-15)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"base": "mulsupcon", "reduction": "labels", "lam": 1.0},
        {"median": "lower", "gate": "soft", "k_min": 40, "lam": 1.0, "m_abs": 1.0},
        {"k_min": 64, "gamma": 2.0, "lam": 1.0, "m_rel": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("labels", [COUNTED, SORTED], ids=["counted", "sorted"])
def test_equals_the_loops_beside_a_queue_of_hundreds(options, labels):
    y, ref_y = random_labels(0, 6, 300, **labels)
    rows = torch.randn(306, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss, memory = build(y.shape[1], 8, **options).double(), (rows[6:], ref_y)
    assert loss(rows[:6], y, memory=memory)["margins"] > 0
    fast = gradients_of(loss, rows[:6], y, memory=memory)
    slow = literal.literal_gradients_of("hbl", loss, rows[:6], y, memory=memory, epoch=0, **{"k_min": 1, **options})
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)


def test_every_overlap_falls_on_the_side_of_the_exact_one_in_float32():
    # The picked rows tell the partition: with cosines that fall along the overlaps, the soft row that is least similar
    # is the one with the smallest overlap that is still soft.
    for own_size in (1, 2, 5, 7, 9, 40, 54, 65, 81):  # without the slack, 5, 9, 54 and 65 would be on the wrong side
        own = frozenset(range(own_size))
        sets = [
            frozenset(range(start, start + size))
            for size in range(1, 82, 1 if own_size < 8 else 3)
            for start in range(0, 82 - size, 9)
        ]
        overlaps = [Fraction(len(own & other), len(own | other)) for other in sets]
        inside = [overlap for overlap in overlaps if overlap > 0]
        theta = statistics.median(inside)
        soft = [overlap for overlap in inside if overlap >= theta]
        if len(soft) == len(inside):
            continue
        lowest_soft, highest_hard = min(soft), max(overlap for overlap in inside if overlap < theta)
        y, ref_y = torch.zeros(1, 81), torch.zeros(len(sets), 81)
        y[0, :own_size] = 1
        for row, other in zip(ref_y, sets, strict=True):
            row[list(other)] = 1
        ref = rows_at([float(overlap) for overlap in overlaps]).float()
        terms = build(81, 2, lam=1.0, gamma=0.0, m_rel=2.0)(rows_at([1.0]).float(), y, memory=(ref, ref_y))
        expected = float(highest_hard - lowest_soft) + 2
        assert terms["margins"].item() == pytest.approx(expected, abs=2e-6), own_size


@pytest.mark.parametrize("reduction", ["labels", "sample"])
def test_sums_over_labels_need_mulsupcon(reduction):
    with pytest.raises(BadConfig, match=reduction):
        build(reduction=reduction)
