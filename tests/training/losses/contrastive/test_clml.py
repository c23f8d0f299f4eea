import math

import pytest
import torch

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses.contrastive.clml import CLML
from support.literal_losses import batch, gradients_of


def build(n_classes=4, n_bits=5, **hyper):
    return CLML(n_classes=n_classes, n_bits=n_bits, **hyper)


def slow(features, labels, *, lam=1.0, floor=1.0, scale="mean", count_empty=False, eps=1e-6):
    """Value and subgradient written out label by label, with singular vectors from eigenvectors of A'A."""
    n = len(features)

    def norm(a):
        values, vectors = torch.linalg.eigh(a.T @ a)
        s = values.clamp_min(0).sqrt()
        keep = s >= max(eps, 1e-6 * float(s.max()))
        v = vectors[:, keep]
        return s[keep].sum(), a @ v @ torch.diag(1 / s[keep]) @ v.T

    value, gradient = norm(features)
    value, gradient = -value, -gradient
    for k in range(labels.shape[1]):
        rows = [i for i in range(n) if labels[i, k]]
        if not rows:
            value = value + (floor if count_empty else 0)
            continue
        part, slope = norm(features[rows])
        value = value + max(floor, part.item())
        if part > floor:
            for at, i in enumerate(rows):
                gradient[i] += slope[at]
    factor = lam / (n if scale == "mean" else 1)
    return value * factor, gradient * factor


OPTIONS = [
    {},
    {"lam": 0.3},
    {"floor": 0.0},
    {"floor": 3.0},
    {"scale": "none"},
    {"count_empty": True, "floor": 2.0},
    {"floor": 0.0, "scale": "none", "count_empty": True, "eps": 1e-4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("seed", "width"), [(0, 5), (1, 5), (2, 5), (3, 20), (4, 20), (5, 7), (2, 20)])
def test_equals_the_loops_in_value_and_gradient(options, seed, width):
    features, labels = batch(seed, width=width)
    value, (gradient,) = gradients_of(build(4, width, **options), features, labels)
    expected, slope = slow(features, labels, **options)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-8, atol=1e-8)


def test_worked_by_hand():
    rows = torch.tensor([[3.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    apart = torch.eye(2)
    together = torch.tensor([[1, 0], [1, 0]])
    assert build(2, 2)(rows, apart)["clml"].item() == pytest.approx((3 + 4 - 5) / 2)
    assert build(2, 2)(rows, together)["clml"].item() == pytest.approx(0, abs=1e-12)
    assert build(2, 2, count_empty=True)(rows, together)["clml"].item() == pytest.approx((5 + 1 - 5) / 2)
    upright = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    assert build(2, 2)(upright, apart)["clml"].item() == pytest.approx(0, abs=1e-12)
    assert build(2, 2)(rows, torch.zeros(2, 2))["clml"].item() == pytest.approx(-5 / 2)  # legal without labels
    _, (gradient,) = gradients_of(build(2, 2, scale="none"), rows, apart)
    torch.testing.assert_close(gradient, torch.tensor([[1 - 0.6, 0], [1 - 0.8, 0]], dtype=torch.float64))
    # Of the singular values 3 and 4, the first is below eps: it counts, but has no gradient.
    value, (gradient,) = gradients_of(build(2, 2, scale="none", eps=3.5), upright, torch.zeros(2, 2))
    assert value.item() == pytest.approx(-7)
    torch.testing.assert_close(gradient, torch.tensor([[0, 0], [0, -1]], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_directions_of_noise_have_no_gradient(dtype):
    features, labels = batch(0, n=6)
    doubled = features.repeat(2, 1)[:, :5].to(dtype)
    loss = build(4, 5, floor=0.0)
    value, (gradient,) = gradients_of(loss, doubled, labels.repeat(2, 1))
    single, (slope,) = gradients_of(build(4, 5, floor=0.0), features, labels)
    # Every singular value grows by sqrt(2), both copies share the direction, N doubles.
    torch.testing.assert_close(value.double(), single * math.sqrt(2) / 2, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(gradient.double(), slope.repeat(2, 1) / math.sqrt(2) / 2, rtol=2e-4, atol=2e-4)


def test_correction_adds_confident_labels_from_the_second_epoch():
    features, labels = batch(0)
    logits = torch.full_like(labels, -3.0)
    logits[0] = math.log(3)  # probability exactly delta = .75 counts
    corrected = labels.clone()
    corrected[0] = 1
    loss = build()
    plain, fixed = loss(features, labels)["clml"], loss(features, corrected)["clml"]
    assert plain != fixed
    assert loss(features, labels, logits=logits, epoch=0)["clml"] == plain
    assert loss(features, labels, logits=logits, epoch=1)["clml"] == fixed
    assert build(delta=0.76)(features, labels, logits=logits, epoch=5)["clml"] == plain
    assert build(start_epoch=0)(features, labels, logits=logits)["clml"] == fixed
    assert build(start_epoch=3)(features, labels, logits=logits, epoch=2)["clml"] == plain
    assert loss(features, labels, epoch=5)["clml"] == plain


def test_correction_has_no_gradient_and_removes_nothing():
    features, labels = batch(0)
    logits = torch.full_like(labels, -800.0, requires_grad=True)
    leaf = features.clone().requires_grad_()
    value = build()(leaf, labels, logits=logits, epoch=1)["clml"]
    assert value == build()(features, labels)["clml"]
    value.backward()
    assert logits.grad is None
    kept = labels.clone()
    build()(features, labels, logits=torch.full_like(labels, 800.0), epoch=1)
    assert torch.equal(labels, kept)


def test_bad_logits():
    features, labels = batch(0)
    with pytest.raises(BadCodes, match="logits"):
        build()(features, labels, logits=torch.zeros(7, 3))
    with pytest.raises(BadCodes, match="NaN"):
        build()(features, labels, logits=torch.full((7, 4), torch.nan))
