"""Hash layers fitted without training: what each method promises, on features made for it."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.hash_layers import (
    METHODS,
    best_rotation,
    canonical_directions,
    fit_hash_layer,
    normalized,
    random_rotation,
)
from hashseek.retrieval.models.heads import build_head


@pytest.fixture
def features() -> NDArray[np.float32]:
    """400 non-negative rows of 24 numbers in five groups, far from the origin, as after a ReLU."""
    rng = np.random.default_rng(0)
    centres = rng.random((5, 24)) * 2
    return (centres[rng.integers(5, size=400)] + rng.random((400, 24))).astype(np.float32)


def signs(outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(outputs > 0, np.float32(1), np.float32(-1))


def quantisation_error(outputs: NDArray[np.float32]) -> float:
    return float(np.square(signs(outputs) - outputs).sum())


@pytest.mark.parametrize("method", METHODS)
def test_directions_are_orthonormal_or_weighted_and_outputs_centred(features: NDArray[np.float32], method: str) -> None:
    layer = fit_hash_layer(features, n_bits=16, method=method)
    assert layer.weight.dtype == layer.bias.dtype == np.float32
    np.testing.assert_allclose(layer(features).mean(0), 0, atol=1e-5)
    if method != "weighted_itq":
        np.testing.assert_allclose(layer.weight @ layer.weight.T, np.eye(16), atol=1e-5)
        return
    # Rotated by R, the weighted directions P D keep their lengths: W'W = P D D P', with D the fourth roots.
    rows = normalized(features)
    deviations = np.linalg.svd(rows - rows.mean(0), compute_uv=False)[:16]
    lengths = np.linalg.svd(layer.weight, compute_uv=False)
    np.testing.assert_allclose(lengths, (deviations / deviations[0]) ** 0.25, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_depends_on_seed_and_directions_only(features: NDArray[np.float32], method: str) -> None:
    layer = fit_hash_layer(features, n_bits=8, method=method, seed=3)
    again = fit_hash_layer(features, n_bits=8, method=method, seed=3)
    np.testing.assert_array_equal(layer.weight, again.weight)
    # A row's length says nothing: powers of two leave the normalised rows the same to the last bit.
    scaled = features * np.exp2(np.random.default_rng(1).integers(-3, 4, size=(400, 1))).astype(np.float32)
    np.testing.assert_allclose(fit_hash_layer(scaled, n_bits=8, method=method, seed=3).weight, layer.weight, atol=1e-6)
    np.testing.assert_array_equal(layer(scaled) > 0, layer(features) > 0)
    other = fit_hash_layer(features, n_bits=8, method=method, seed=4)
    assert np.array_equal(other.weight, layer.weight) == (method == "pca")


def test_the_head_normalized_computes_the_same(features: NDArray[np.float32]) -> None:
    layer, head = fit_hash_layer(features, n_bits=8), build_head("normalized", n_features=24, n_bits=8)
    head.load_state_dict({"weight": torch.from_numpy(layer.weight), "bias": torch.from_numpy(layer.bias)})
    features[3] = 0
    found = head(torch.from_numpy(features)).detach().numpy()
    np.testing.assert_allclose(found, layer(features), atol=1e-6)


def test_pca_keeps_the_most_variance(features: NDArray[np.float32]) -> None:
    features[:, 7] = 0  # as of a unit that is never active
    rows = normalized(features)
    spectrum = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    outputs = fit_hash_layer(features, n_bits=6, method="pca")(features)
    np.testing.assert_allclose(np.linalg.norm(outputs, axis=0), spectrum[:6], rtol=1e-4)


def test_itq_quantises_better_than_pca_and_random(features: NDArray[np.float32]) -> None:
    error = {name: quantisation_error(fit_hash_layer(features, n_bits=12, method=name)(features)) for name in METHODS}
    assert error["itq"] < min(error["pca"], error["random"])


def test_the_quantisation_error_never_rises() -> None:
    rng = np.random.default_rng(0)
    projected = rng.standard_normal((300, 10)).astype(np.float32) * np.linspace(2, 0.1, 10, dtype=np.float32)
    start = random_rotation(projected, 10, rng)
    errors = [quantisation_error(projected @ best_rotation(projected, start, rounds=n)) for n in range(30)]
    assert errors[-1] < 0.98 * errors[0]
    assert np.diff(errors).max() <= 1e-3
    assert np.diff(errors).min() < 0


def test_itq_turns_four_clusters_into_four_codes() -> None:
    """Four points on the axes: PCA's signs split them along the axes, where two have one output of 0 each.

    The best rotation is by 45 degrees: every corner of the square is a cluster, and the error of a point (r, 0) is
    2 (1 - r / sqrt 2)^2.
    """
    r = 0.5
    points = np.array([[r, 0], [-r, 0], [0, r], [0, -r]], dtype=np.float32)
    rotation = best_rotation(points, np.array([[0.8, -0.6], [0.6, 0.8]], dtype=np.float32))
    rotated = points @ rotation
    np.testing.assert_allclose(np.abs(rotated), r / np.sqrt(2), atol=1e-6)
    assert len({tuple(row) for row in signs(rotated).tolist()}) == 4
    assert quantisation_error(rotated) == pytest.approx(4 * 2 * (1 - r / np.sqrt(2)) ** 2)


def test_random_directions_outnumber_the_features() -> None:
    """More bits than features are several rotations, and one picture is enough for them."""
    weight = fit_hash_layer(np.ones((1, 4), np.float32), n_bits=10, method="random").weight
    for first in (0, 4, 8):
        group = weight[first : first + 4]
        np.testing.assert_allclose(group @ group.T, np.eye(len(group)), atol=1e-6)


def test_itq_cca_follows_the_labels() -> None:
    """Two labels sit in directions of little variance, beside loud ones that say nothing of them."""
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=(2000, 2)).astype(np.uint8)
    loud = 5 + 2 * rng.standard_normal((2000, 6))
    quiet = labels + 0.05 * rng.standard_normal((2000, 2))
    features = np.concatenate([loud, quiet], axis=1).astype(np.float32)

    def codes_of_classes(method: str, given: NDArray[np.uint8] | None) -> float:
        """Share of pictures whose code is the most frequent one of their two labels."""
        bits = (fit_hash_layer(features, n_bits=2, method=method, labels=given)(features) > 0) @ np.array([1, 2])
        found = [np.bincount(bits[(labels == pair).all(1)], minlength=4) for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]
        assert given is None or len({int(counts.argmax()) for counts in found}) == 4
        return sum(int(counts.max()) for counts in found) / len(labels)

    assert codes_of_classes("itq_cca", labels) > 0.95
    assert codes_of_classes("itq", None) < 0.5


def test_canonical_directions_solve_their_eigenproblem(features: NDArray[np.float32]) -> None:
    """S_xy S_yy^-1 S_yx w = rho^2 S_xx w, where each variance has twice the mean variance added, and w' S_xx w = 1."""
    ridge = 2.0
    centred = normalized(features) - normalized(features).mean(0)
    rng = np.random.default_rng(1)
    labels = (centred[:, :6] + 0.1 * rng.standard_normal((400, 6)) > 0.1).astype(np.uint8)

    def covariance(one: NDArray[np.floating], other: NDArray[np.floating]) -> NDArray[np.floating]:
        return (one - one.mean(0)).T @ (other - other.mean(0)) / 400

    of_features, of_labels = (covariance(rows, rows) for rows in (centred, labels))
    for variances in (of_features, of_labels):
        variances += ridge * np.eye(len(variances)) * np.trace(variances) / len(variances)
    across = covariance(centred, labels)
    squares, vectors = eigh(across @ np.linalg.solve(of_labels, across.T), of_features)
    expected = (vectors * np.sqrt(squares.clip(0)))[:, -4:]
    found = canonical_directions(centred, 4, labels, ridge)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4 * np.abs(expected).max() ** 2)


@pytest.mark.parametrize(
    ("n", "settings", "named"),
    [
        (400, {"n_bits": 8, "method": "lsh"}, "itq_cca"),
        (400, {"n_bits": 25}, "24"),
        (8, {"n_bits": 8}, "8 images"),
        (400, {"n_bits": 8, "method": "itq_cca"}, "labels"),
        (400, {"n_bits": 8, "method": "itq_cca", "labels": np.eye(400, 7, dtype=np.uint8)}, "7 labels"),
        (400, {"n_bits": 25, "method": "itq_cca", "labels": np.eye(400, 30, dtype=np.uint8)}, "24"),
    ],
)
def test_refuses(features: NDArray[np.float32], n: int, settings: dict[str, object], named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        fit_hash_layer(features[:n], **settings)  # type: ignore[arg-type]


def test_as_many_bits_as_features_are_allowed(features: NDArray[np.float32]) -> None:
    weight = fit_hash_layer(features, n_bits=24, method="pca").weight
    np.testing.assert_allclose(weight @ weight.T, np.eye(24), atol=1e-5)


def test_rows_that_are_all_alike_are_refused() -> None:
    with pytest.raises(BadConfig):
        fit_hash_layer(np.ones((100, 24), np.float32), n_bits=4, method="pca")


@pytest.mark.parametrize("method", ["random", "itq"])
def test_features_that_are_not_finite_are_refused(features: NDArray[np.float32], method: str) -> None:
    damaged = features.copy()
    damaged[3, 0] = np.nan
    with pytest.raises(BadConfig):
        fit_hash_layer(damaged, n_bits=4, method=method)
