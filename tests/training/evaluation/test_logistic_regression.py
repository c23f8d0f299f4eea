"""The linear probe against scikit-learn's logistic regression and against the optimality of what it minimises."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from hashseek.retrieval.errors import BadCodes
from hashseek.training.evaluation.logistic_regression import fit_probe

fit_exactly = partial(fit_probe, tolerance=1e-13, max_iterations=1000)


def data(n=120, d=6, c=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, d, generator=generator, dtype=dtype) * torch.tensor([1, 2, 0.5, 1, 3, 1], dtype=dtype) + 4
    truth = (features - 4) @ torch.randn(d, c, generator=generator, dtype=dtype)
    labels = (truth + torch.randn(n, c, generator=generator, dtype=dtype) > 0).to(dtype)
    return features, labels


@pytest.mark.parametrize("weight_decay", [1.0, 0.01])
def test_equals_one_logistic_regression_per_label(weight_decay):
    features, labels = data()
    probe = fit_exactly(features, labels, weight_decay=weight_decay)
    x = ((features - probe.shift) / probe.scale).numpy()
    for c in range(labels.shape[1]):
        oracle = LogisticRegression(C=1 / (len(x) * weight_decay), tol=1e-10, max_iter=1000).fit(x, labels[:, c])
        assert probe.weight[:, c].numpy() == pytest.approx(oracle.coef_[0], abs=1e-4)
        assert probe.bias[c].item() == pytest.approx(oracle.intercept_[0], abs=1e-4)
        assert probe.probabilities(features)[:, c].numpy() == pytest.approx(oracle.predict_proba(x)[:, 1], abs=1e-4)


def test_labels_do_not_influence_each_other():
    features, labels = data()
    together = fit_exactly(features, labels, weight_decay=0.1)
    alone = fit_exactly(features, labels[:, 1:2], weight_decay=0.1)
    assert together.logits(features)[:, 1].numpy() == pytest.approx(alone.logits(features)[:, 0].numpy(), abs=1e-4)


def test_a_weight_decay_means_the_same_at_any_scale_and_place_of_the_features():
    features, labels = data()
    probe = fit_exactly(features, labels, weight_decay=0.1)
    torch.testing.assert_close(probe.scale, features.std(dim=0, correction=0).mean())
    moved = fit_exactly(features * 50 - 7, labels, weight_decay=0.1)
    assert moved.logits(features * 50 - 7).numpy() == pytest.approx(probe.logits(features).numpy(), abs=1e-6)


def test_the_default_tolerance_in_float32_is_close_and_equal_calls_are_equal():
    features, labels = data()
    exact = fit_exactly(features, labels, weight_decay=0.01).logits(features)
    single = [fit_probe(features.float(), labels.float(), weight_decay=0.01).logits(features.float()) for _ in range(2)]
    assert torch.equal(*single)
    assert single[0].numpy() == pytest.approx(exact.numpy(), abs=2e-2)
    warm = fit_exactly(features, labels, weight_decay=0.01, start=fit_exactly(features, labels, weight_decay=1.0))
    assert warm.logits(features).numpy() == pytest.approx(exact.numpy(), abs=1e-3)


def test_labels_that_all_or_no_rows_carry_and_constant_features_give_finite_numbers():
    features, labels = data(dtype=torch.float32)
    labels[:, 0], labels[:, 1] = 1, 0
    probe = fit_probe(features, labels, weight_decay=0.01)
    probabilities = probe.probabilities(features)
    assert probabilities.isfinite().all()
    assert probabilities[:, 0].min() > 0.95
    assert probabilities[:, 1].max() < 0.05
    constant = fit_probe(torch.ones(20, 3), labels[:20], weight_decay=0.01).probabilities(torch.ones(20, 3))
    assert constant[:, 2].numpy() == pytest.approx(np.full(20, labels[:20, 2].mean().item()), abs=1e-3)


def test_features_that_are_not_finite_are_refused():
    features = torch.zeros(4, 3)
    features[1, 2] = torch.inf
    with pytest.raises(BadCodes):
        fit_probe(features, torch.zeros(4, 2), weight_decay=0.1)
