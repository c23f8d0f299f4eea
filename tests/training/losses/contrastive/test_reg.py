import math

import pytest
import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.reg import Reg, label_shares, regularised
from support import literal_losses as literal
from support.literal_losses import batch

HAND = (
    torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64),
    torch.tensor([[1, 0], [1, 1], [0, 1]]),
)


def checked(outputs, labels):
    return Batch(outputs, labels, memory=None, logits=None, epoch=0)


def build(kind=Reg, n_classes=4, n_bits=5, **hyper):
    return kind(n_classes=n_classes, n_bits=n_bits, **hyper)


def test_three_rows_and_two_prototypes_worked_by_hand():
    loss = build(Reg, 2, 2, tau=1.0).double()
    loss.prototypes.data = torch.eye(2, dtype=torch.float64)
    terms = loss(*HAND)
    upper, lower = math.log(2 * math.e + 2), math.log(math.e + 3)
    likelihood = (upper - 1) + (upper - 1 / 2) + (lower - 1 / 2) + (upper - 1) + (lower - 1 / 2)
    assert terms["contrast"].item() == pytest.approx(likelihood / 5, abs=1e-12)
    # Only row 2 is closer to two of its positives (both at cosine 1) than its weights of 1/4 ask for.
    excess = math.e / (2 * math.e + 2) - 1 / 4
    assert terms["penalty"].item() == pytest.approx(-2 * excess / 5, abs=1e-12)
    assert set(build(Reg, 2, 2, penalty=False)(*HAND)) == {"contrast"}


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_at_the_scores_is_min_0_sigma_less_weight_on_positives_and_sigma_elsewhere(alpha, seed):
    outputs, labels = batch(seed)
    loss = build(alpha=alpha).double()
    scores, weights, _, valid = loss._scores_and_weights(checked(outputs, labels))
    scores = scores.detach().requires_grad_()
    terms = regularised(scores, weights, weights, valid, "sum", penalty=True)
    (gradient,) = torch.autograd.grad(literal.total(terms), scores)
    sigma = scores.detach().log_softmax(dim=1).exp()
    expected = torch.where(weights > 0, (sigma - weights).clamp_max(0), sigma)
    expected[weights.sum(dim=1) == 0] = 0
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.5, 3.0])
def test_weights_of_an_anchor_with_prototypes_sum_to_1(alpha):
    outputs, labels = batch(0, n=9)
    _, weights, *_ = build(alpha=alpha).double()._scores_and_weights(checked(outputs, labels))
    sums = weights.sum(dim=1)
    torch.testing.assert_close(sums[:9], (labels.sum(dim=1) > 0).double())
    assert bool(((sums[9:] - 1).abs() < 1e-12).logical_or(sums[9:] == 0).all())
    assert not weights.diagonal().any()


def test_the_largest_alpha_has_the_same_weights_in_float32():
    _, labels = batch(0, n=9, n_classes=200, density=0.7)

    def weights(y):
        shared = y @ y.T
        return label_shares(shared.fill_diagonal_(0), y, y, 10.0)

    torch.testing.assert_close(weights(labels.float()).double(), weights(labels.double()), rtol=1e-4, atol=0)


def test_a_prototype_counts_if_its_label_is_in_the_batch_though_it_may_have_no_positive():
    row, both = torch.tensor([[1.0, 0.5]], dtype=torch.float64), torch.ones(1, 2)
    loss = Reg(n_classes=2, n_bits=2, alpha=-1, penalty=False).double()
    with torch.no_grad():
        loss.prototypes.copy_(torch.eye(2))
    # The row carries more than either prototype: it alone of three anchors has positives.
    scores = 10 * torch.tensor([1.0, 0.5], dtype=torch.float64) / 1.25**0.5
    of_row = scores.logsumexp(0) - scores.mean()
    torch.testing.assert_close(literal.total(loss(row, both)), of_row / 3)
    loss = Reg(n_classes=2, n_bits=2, penalty=False).double()
    memory = (torch.tensor([[0.5, 1.0]], dtype=torch.float64), torch.tensor([[0.0, 1.0]]))
    alone = loss(row, torch.tensor([[1.0, 0.0]]), memory=memory)  # label 1 is in the memory only
    (gradient,) = torch.autograd.grad(literal.total(alone), loss.prototypes)
    assert gradient.isfinite().all()
    with torch.no_grad():
        assert alone["contrast"] == pytest.approx(
            literal.reg(row, torch.tensor([[1.0, 0.0]]), loss.prototypes, memory, penalty=False).item()
        )


@pytest.mark.parametrize("hyper", [{"alpha": 1.0}, {"proto_anchors": False}, {"reduction": "sum"}])
def test_algorithm_2_takes_few_settings(hyper):
    with pytest.raises(BadConfig, match="reg_algorithm2"):
        build(reg_algorithm2=True, **hyper)
