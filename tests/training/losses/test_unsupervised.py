"""BiHalf: its literal form, and what it does without labels."""

import pytest
import torch
from torch import Tensor

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses import build_loss
from hashseek.training.losses.unsupervised import bi_half
from support.edge_batches import edge_batches
from support.literal_losses import batch, cos, gradients_of, total


def no_labels(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), 0)


def straight(values: list[float], like: Tensor) -> Tensor:
    """`values` with the gradient of `like`."""
    return torch.tensor(values, dtype=like.dtype) + like - like.detach()


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


@pytest.mark.parametrize("options", [{}, {"gamma": 0.5, "centre": False}])
@pytest.mark.parametrize("n", [7, 8])
def test_bihalf_equals_its_literal_form(options, n):
    outputs, features = batch(0, n=n, width=5)[0], batch(1, n=n, width=9)[0]
    loss = build_loss("bihalf", n_classes=0, n_bits=5, **options)
    fast = gradients_of(loss, outputs, no_labels(outputs), features=features)
    leaf, read = outputs.clone().requires_grad_(), features.clone().requires_grad_()
    total(loss(leaf, no_labels(leaf), features=read)).backward()
    assert read.grad is None
    value = literal_bihalf(leaf, features, **options)
    torch.testing.assert_close(fast, (value.detach(), list(torch.autograd.grad(value, leaf))))


def test_a_bit_of_bi_half_is_1_in_half_of_the_rows_whatever_the_mean():
    outputs = torch.tensor([[5.0, -1.0], [7.0, -4.0], [6.0, -2.0], [9.0, -3.0]])
    assert bi_half(outputs).tolist() == [[-1, 1], [1, -1], [-1, 1], [1, -1]]
    assert bi_half(torch.randn(9, 4)).sum(dim=0).tolist() == [-1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_edges_give_finite_gradients(dtype):
    for edge, (outputs, _) in edge_batches(6, 3, dtype).items():
        for rows in (outputs, 800 * outputs.sign(), outputs[:0]):
            loss = build_loss("bihalf", n_classes=0, n_bits=6)
            value, gradients = gradients_of(loss, rows, no_labels(rows), features=rows.abs())
            assert all(bool(found.isfinite().all()) for found in (value, *gradients)), edge


def test_wrong_features_are_refused():
    rows = torch.zeros(3, 5)
    for features in (None, torch.zeros(2, 9), torch.zeros(3)):
        with pytest.raises(BadCodes, match="features"):
            build_loss("bihalf", n_classes=0, n_bits=5)(rows, no_labels(rows), features=features)
