import math

import pytest
import torch
import torch.nn.functional as F

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.contrastive.supcon import SupCon
from support.literal_losses import batch, gradients_of


def build(n_classes=4, n_bits=5, **hyper):
    return SupCon(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    a = math.log(1 + math.exp(-1))
    value = build(2, 2, tau=1.0)(outputs, labels)["supcon"]
    assert value.item() == pytest.approx((a + (a + 0.5) + math.log(2)) / 3, abs=1e-12)
    assert build(2, 2, tau=1.0, positives="all")(outputs, labels)["supcon"] == 0


@pytest.mark.parametrize("positives", ["any", "all"])
def test_memory_twice_over_only_adds_log_2(positives):
    outputs, labels = batch(0)
    ref, ref_y = batch(7, n=12)
    once = gradients_of(build(positives=positives), outputs, labels, memory=(ref, ref_y))
    twice = gradients_of(build(positives=positives), outputs, labels, memory=(ref.repeat(2, 1), ref_y.repeat(2, 1)))
    torch.testing.assert_close(twice[0], once[0] + math.log(2))
    torch.testing.assert_close(twice[1][0], once[1][0])


def test_single_labels_give_the_usual_supcon_for_both_kinds_of_positives():
    outputs, _ = batch(0, n=8)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0, 3]), 4)
    assert torch.equal(
        build(positives="any")(outputs, labels)["supcon"], build(positives="all")(outputs, labels)["supcon"]
    )


def test_empty_match_needs_all_positives():
    with pytest.raises(BadConfig, match="empty_match"):
        build(empty_match=True)
