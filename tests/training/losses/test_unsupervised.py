"""CIBHash and BiHalf: their literal forms, and what they do without labels."""

import math

import pytest
import torch
from torch import Tensor

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses import build_loss
from hashseek.training.losses.unsupervised import bi_half
from support.edge_batches import edge_batches
from support.literal_losses import batch, cos, gradients_of


def no_labels(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), 0)


def straight(values: list[float], like: Tensor) -> Tensor:
    """`values` with the gradient of `like`."""
    return torch.tensor(values, dtype=like.dtype) + like - like.detach()


def literal_cibhash(outputs: Tensor, *, tau: float = 0.3, beta: float = 0.001) -> Tensor:
    """The formula of the docstring, with the divergence written out as in the authors' code."""
    n = len(outputs) // 2
    p = torch.sigmoid(outputs)
    codes = [straight([1.0 if u > 0 else -1.0 for u in row.tolist()], q) for row, q in zip(outputs, p, strict=True)]
    total = outputs.sum() * 0
    for i in range(2 * n):
        scores = {j: cos(codes[i], codes[j]) / tau for j in range(2 * n) if j != i}
        other = (i + n) % (2 * n)
        total = total + torch.logsumexp(torch.stack(list(scores.values())), 0) - scores[other]
        for mine, its in zip(p[i], p[other].detach(), strict=True):
            total = total + beta * (mine * (mine / its).log() + (1 - mine) * ((1 - mine) / (1 - its)).log())
    return total / (2 * n)


def literal_bihalf(outputs: Tensor, features: Tensor, *, gamma: float = 6.0, centre: bool = True) -> Tensor:
    n, k = outputs.shape
    codes = torch.zeros_like(outputs)
    for bit in range(k):
        order = sorted(range(n), key=lambda i: -outputs[i, bit].item())
        codes[:, bit] = straight([1.0 if i in order[: n // 2] else -1.0 for i in range(n)], outputs[:, bit])
    x = torch.stack([row / row.norm() for row in features])
    x = x - x.mean(0) if centre else x
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    similarity = sum((cos(codes[i], codes[j]) - cos(x[i], x[j])) ** 2 for i, j in pairs) / len(pairs)
    balance = sum((u - b) ** 2 for u, b in zip(outputs.flatten(), codes.detach().flatten(), strict=True)) / (n * k)
    return similarity + gamma / 2 * balance


@pytest.mark.parametrize("options", [{}, {"tau": 1.5, "beta": 0.7}])
def test_cibhash_equals_its_literal_form(options):
    outputs = batch(0, n=8, width=5)[0]
    loss = build_loss("cibhash", n_classes=0, n_bits=5, **options)
    fast = gradients_of(loss, outputs, no_labels(outputs), views=2)
    leaf = outputs.clone().requires_grad_()
    value = literal_cibhash(leaf, **options)
    torch.testing.assert_close(fast, (value.detach(), list(torch.autograd.grad(value, leaf))))


@pytest.mark.parametrize("options", [{}, {"gamma": 0.5, "centre": False}])
@pytest.mark.parametrize("n", [7, 8])
def test_bihalf_equals_its_literal_form(options, n):
    outputs, features = batch(0, n=n, width=5)[0], batch(1, n=n, width=9)[0]
    loss = build_loss("bihalf", n_classes=0, n_bits=5, **options)
    fast = gradients_of(loss, outputs, no_labels(outputs), features=features)
    leaf = outputs.clone().requires_grad_()
    value = literal_bihalf(leaf, features, **options)
    torch.testing.assert_close(fast, (value.detach(), list(torch.autograd.grad(value, leaf))))


def test_cibhash_of_two_images_by_hand():
    """Equal views of two opposite codes: each row has a cosine of 1 with its partner and of -1 with the other two."""
    outputs = torch.tensor([[2.0, -1.0], [-3.0, 0.5]]).repeat(2, 1)
    terms = build_loss("cibhash", n_classes=0, n_bits=2, tau=0.5)(outputs, no_labels(outputs), views=2)
    assert terms["contrast"].item() == pytest.approx(math.log(math.exp(2) + 2 * math.exp(-2)) - 2)
    assert terms["agreement"].item() == 0


def test_a_bit_of_bi_half_is_1_in_half_of_the_rows_whatever_the_mean():
    outputs = torch.tensor([[5.0, -1.0], [7.0, -4.0], [6.0, -2.0], [9.0, -3.0]])
    assert bi_half(outputs).tolist() == [[-1, 1], [1, -1], [-1, 1], [1, -1]]
    assert bi_half(torch.randn(9, 4)).sum(dim=0).tolist() == [-1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_edges_give_finite_gradients(dtype):
    for edge, (outputs, _) in edge_batches(6, 3, dtype).items():
        for rows in (outputs, 800 * outputs.sign(), outputs[:0]):
            both = torch.cat([rows, rows.flip(0)])
            given = {"cibhash": (both, {"views": 2}), "bihalf": (rows, {"features": rows.abs()})}
            for name, (seen, context) in given.items():
                loss = build_loss(name, n_classes=0, n_bits=6)
                value, gradients = gradients_of(loss, seen, no_labels(seen), **context)
                assert all(bool(found.isfinite().all()) for found in (value, *gradients)), (edge, name)


def test_one_view_is_nothing_to_compare():
    outputs = batch(0)[0]
    value, (gradient,) = gradients_of(build_loss("cibhash", n_classes=0, n_bits=5), outputs, no_labels(outputs))
    assert value == 0
    assert not gradient.any()


def test_wrong_views_and_features_are_refused():
    rows = torch.zeros(3, 5)
    with pytest.raises(BadCodes, match="views"):
        build_loss("cibhash", n_classes=0, n_bits=5)(rows, no_labels(rows), views=2)
    for features in (None, torch.zeros(2, 9), torch.zeros(3)):
        with pytest.raises(BadCodes, match="features"):
            build_loss("bihalf", n_classes=0, n_bits=5)(rows, no_labels(rows), features=features)
