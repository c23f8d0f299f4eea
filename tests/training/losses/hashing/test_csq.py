import math

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hashing.centres import CENTRES, make_centres
from hashseek.training.losses.hashing.csq import CSQ


def build(n_classes=4, n_bits=8, **hyper):
    return CSQ(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    loss = build(2, 2, lam=1.0)
    assert loss.centres.tolist() == [[1, 1], [1, -1]]
    outputs = torch.tensor([[1.0, 1.0], [0.0, 2.0], [5.0, 5.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]])
    tie = loss.tie[1].item()  # bit 1 of row 1; row 2 has no label and is left out
    soft = lambda t: math.log1p(math.exp(t))  # noqa: E731
    terms = loss(outputs, labels)
    assert terms["centre"].item() == pytest.approx((2 * soft(-2) + soft(0) + soft(-4 * tie)) / 4)
    away = 2 * (math.tanh(1) - 1) ** 2 + 1 + (math.tanh(2) - 1) ** 2
    assert terms["quantization"].item() == pytest.approx(away / 4)


def test_one_label_takes_its_centre_and_no_label_the_tie():
    loss = build()
    assert torch.equal(loss.targets(torch.eye(4)), loss.centres)
    assert torch.equal(loss.targets(torch.zeros(1, 4))[0], loss.tie)


@pytest.mark.parametrize("n_bits", [1, 2, 16, 64])
def test_hadamard_centres_are_orthogonal_or_opposite(n_bits):
    centres = make_centres("hadamard", 2 * n_bits, n_bits, seed=0)
    assert set(centres.unique().tolist()) == {-1, 1}
    product = centres @ centres.T
    assert torch.equal(product, n_bits * (torch.eye(2 * n_bits) - torch.eye(2 * n_bits).roll(n_bits, 0)))
    if n_bits >= 16:  # fewer bits have no other codes
        more = make_centres("hadamard", 2 * n_bits + 3, n_bits, seed=0)
        assert torch.equal(more[: 2 * n_bits], centres)
        assert more.shape == (2 * n_bits + 3, n_bits)


@pytest.mark.parametrize(("n_classes", "n_bits"), [(2, 1), (20, 5), (30, 12), (30, 36), (30, 48)])
def test_balanced_centres_have_as_many_of_one_as_of_the_other(n_classes, n_bits):
    centres = make_centres("balanced", n_classes, n_bits, seed=1)
    assert set(centres.unique().tolist()) == {-1, 1}
    assert set(centres.sum(dim=1).tolist()) <= ({0} if n_bits % 2 == 0 else {-1, 1})


@pytest.mark.parametrize(("n_bits", "kind"), [(12, "balanced"), (16, "hadamard")])
def test_automatic_centres_are_hadamards_where_there_are_any(n_bits, kind):
    assert torch.equal(make_centres("auto", 30, n_bits, seed=1), make_centres(kind, 30, n_bits, seed=1))


def test_random_centres_keep_a_distance():
    for kind in ("balanced", "bernoulli"):
        centres = make_centres(kind, 20, 48, seed=0)
        closest = (centres @ centres.T - 48 * torch.eye(20)).max()
        assert (48 - closest) / 2 >= 12  # a quarter of the bits, as the authors ask for


def test_of_twenty_random_sets_the_one_whose_closest_rows_are_farthest_apart_is_kept():
    generator = torch.Generator().manual_seed(3)
    sets = [torch.randint(0, 2, (20, 48), generator=generator) * 2.0 - 1 for _ in range(20)]
    best = min(sets, key=lambda rows: (rows @ rows.T).triu(1).max())
    assert not torch.equal(best, sets[0])
    assert torch.equal(make_centres("bernoulli", 20, 48, seed=3), best)


@pytest.mark.parametrize(
    ("kind", "n_classes", "n_bits"),
    [
        ("balanced", 100, 12),
        ("bernoulli", 80, 8),
        ("balanced", 70, 8),
        ("bernoulli", 256, 8),
        ("balanced", 20, 5),
        ("hadamard", 70, 8),
    ],
)
def test_no_two_labels_have_the_same_centre(kind, n_classes, n_bits):
    for seed in range(5):
        centres = make_centres(kind, n_classes, n_bits, seed=seed)
        assert len(centres.unique(dim=0)) == n_classes
    with pytest.warns(UserWarning, match="bits"):
        make_centres(kind, 2**n_bits + 1, n_bits, seed=0)


@pytest.mark.parametrize("kind", CENTRES.values)
def test_centres_depend_on_the_seed_alone_and_travel_with_the_checkpoint(kind):
    torch.manual_seed(1)
    first = build(40, 16, centres=kind, seed=5)
    torch.manual_seed(2)
    again, other = build(40, 16, centres=kind, seed=5), build(40, 16, centres=kind, seed=6)
    assert torch.equal(first.centres, again.centres)
    assert torch.equal(first.tie, again.tie)
    assert not torch.equal(first.tie, other.tie)
    assert not torch.equal(first.centres, other.centres)  # 16 bits have 32 Hadamard centres
    other.load_state_dict(first.state_dict())
    assert torch.equal(first.centres, other.centres)
    assert torch.equal(first.tie, other.tie)


def test_hadamard_centres_need_a_power_of_2():
    with pytest.raises(BadConfig, match="12"):
        build(n_bits=12, centres="hadamard")
