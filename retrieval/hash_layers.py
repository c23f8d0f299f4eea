"""Hash layers fitted to features without training: a projection whose signs are the code.

`fit_hash_layer` is the one contract: features in, a `HashLayer` out. `index add` uses it for a collection without a
checkpoint, training to start a hash layer, evaluation as a baseline.

random        a random rotation, the locality-sensitive hashing of Charikar (STOC 2002)
pca           the principal directions
itq           these, rotated for the least quantisation error: Gong and Lazebnik, "Iterative Quantization" (CVPR 2011)
weighted_itq  the principal directions, each times the fourth root of the deviation along it, rotated in the same way
itq_cca       the directions that correlate most with labels, rotated in the same way (section 4 there): needs labels

All work on features of length 1 (cosine similarity) and subtract their mean.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hashseek.retrieval.codes import check_n_bits
from hashseek.retrieval.errors import BadConfig

Features = NDArray[np.float32]
Labels = NDArray[np.uint8]

ITQ_ROUNDS = 50  # as in the paper
POWER = 0.25  # weighted_itq weights a direction by the standard deviation along it, to this power


@dataclass(frozen=True)
class HashLayer:
    """Outputs are `normalized(features) @ weight.T + bias`; their signs are the code.

    Args:
        weight: float32 (K, D).
        bias: float32 (K,).
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __call__(self, features: Features) -> NDArray[np.float32]:
        """Real outputs (N, K) of features (N, D)."""
        return normalized(features) @ self.weight.T + self.bias


def normalized(features: Features) -> Features:
    """Features (N, D) with rows of length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    rows: Features = (features / np.maximum(lengths, 1e-12)).astype(np.float32)
    return rows


def fit_hash_layer(
    features: Features,
    *,
    n_bits: int,
    method: str = "itq",
    seed: int = 0,
    labels: Labels | None = None,
    ridge: float = 1.0,
) -> HashLayer:
    """Fit a hash layer to features (N, D) of images.

    Args:
        features: N >= 1 rows; all methods but `random` need more than `n_bits` rows that differ.
        n_bits: K; at most C for `itq_cca`, and at most D for all methods but `random`.
        method: a name in `METHODS`, or "itq_cca".
        seed: seed of the random rotation, from which the other methods start as well.
        labels: 0/1 (N, C), which only `itq_cca` uses.
        ridge: what `itq_cca` adds to the variance of each feature and label, as a share of their mean variance.

    Raises:
        BadConfig: the method is unknown, labels are missing, there are too few rows, features are not finite, or there
            are too few features or labels for that many bits.
    """
    if method not in (*METHODS, "itq_cca"):
        names = ", ".join((*METHODS, "itq_cca"))
        raise BadConfig(f"there is no method {method!r} for fitting a hash layer: use one of {names}")
    check_n_bits(n_bits)
    rows, rng = normalized(features), np.random.default_rng(seed)
    if not np.isfinite(rows).all():
        raise BadConfig("the features contain NaN or infinity: use other weights")
    mean = rows.mean(0)
    centred = rows - mean
    if method != "itq_cca":
        directions = METHODS[method](centred, n_bits, rng)
    elif labels is None:
        raise BadConfig("the method itq_cca needs labels: pass labels, or use itq")
    else:
        directions = _rotated(centred, canonical_directions(centred, n_bits, labels, ridge), rng)
    weight = np.ascontiguousarray(directions.T, dtype=np.float32)
    return HashLayer(weight, -(weight @ mean))


def random_rotation(centred: Features, n_bits: int, rng: np.random.Generator) -> Features:
    """Directions (D, K): orthogonal in groups of D."""
    width = centred.shape[1]
    groups = [np.linalg.qr(rng.standard_normal((width, width)))[0] for _ in range(-(-n_bits // width))]
    return np.concatenate(groups, axis=1)[:, :n_bits].astype(np.float32)


def principal_directions(centred: Features, n_bits: int, _: np.random.Generator) -> Features:
    """Directions (D, K) of the largest variance, the largest first."""
    n, width = centred.shape
    if n_bits > width:
        raise BadConfig(f"features of {width} numbers can have at most {width} bits, got {n_bits}: use fewer bits")
    values, vectors = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    if values[-n_bits] <= 1e-6 * values[-1]:
        raise BadConfig(
            f"{n:,} images do not vary in {n_bits} directions: add more different images, use fewer bits, or choose "
            "the method random (in training, model.head_init = 'random')"
        )
    return vectors[:, : -n_bits - 1 : -1].astype(np.float32)


def itq(centred: Features, n_bits: int, rng: np.random.Generator) -> Features:
    """Directions (D, K): the principal ones, rotated."""
    return _rotated(centred, principal_directions(centred, n_bits, rng), rng)


def weighted_itq(centred: Features, n_bits: int, rng: np.random.Generator) -> Features:
    """Directions (D, K): the principal ones, each times the fourth root of the standard deviation along it, rotated.

    Codes may have more bits than the features have relevant directions; ITQ gives the other directions as many bits.
    The weights reduce their share, as those of the correlations do in `canonical_directions`.
    """
    directions = principal_directions(centred, n_bits, rng)
    deviations = (centred @ directions).std(0)
    weights = np.power(deviations / deviations.max(), np.float32(POWER), dtype=np.float32)
    return _rotated(centred, directions * weights, rng)


def canonical_directions(centred: Features, n_bits: int, labels: Labels, ridge: float) -> Features:
    """Directions (D, K) of the largest correlation with the labels (N, C), each times its correlation (section 4)."""
    n_labels = labels.shape[1]
    if n_bits > min(n_labels, centred.shape[1]):
        raise BadConfig(
            f"with {n_labels} labels and features of {centred.shape[1]} numbers, itq_cca can have at most "
            f"{min(n_labels, centred.shape[1])} bits, not {n_bits}: use fewer bits, or itq"
        )
    counted = labels - labels.mean(0)
    n = len(labels)
    whiten, whiten_labels = (_inverse_root(each.T @ each / n, ridge) for each in (centred, counted))
    left, correlations, _ = np.linalg.svd(whiten @ (centred.T @ counted / n) @ whiten_labels)
    directions: Features = (whiten @ (left[:, :n_bits] * correlations[:n_bits])).astype(np.float32)
    return directions


def _inverse_root(covariance: NDArray[np.floating], ridge: float) -> NDArray[np.float64]:
    """(S + r I)^(-1/2) of a covariance matrix S; r: `ridge` times the mean variance."""
    values, vectors = np.linalg.eigh(covariance.astype(np.float64))
    values = np.maximum(values, 0) + max(ridge * values.mean(), 1e-12)
    root: NDArray[np.float64] = vectors / np.sqrt(values) @ vectors.T
    return root


def _rotated(centred: Features, directions: Features, rng: np.random.Generator) -> Features:
    projected = centred @ directions
    return directions @ best_rotation(projected, random_rotation(projected, projected.shape[1], rng))


def best_rotation(projected: Features, rotation: Features, *, rounds: int = ITQ_ROUNDS) -> Features:
    """The rotation R (K, K) that makes |sign(V R) - V R| small for V (N, K), starting from `rotation` (section 2.2).

    Each round computes the signs for the rotation, then the best rotation for the signs, so the error never rises.
    """
    # With matrices this small, threads wait for each other at every step: ten times as long on a busy machine.
    with threadpool_limits(1):
        for _ in range(rounds):
            signs = np.where(projected @ rotation >= 0, np.float32(1), np.float32(-1))
            left, _, right = np.linalg.svd(projected.T @ signs)
            rotation = left @ right
    return rotation


METHODS: dict[str, Callable[[Features, int, np.random.Generator], Features]] = {
    "random": random_rotation,
    "pca": principal_directions,
    "itq": itq,
    "weighted_itq": weighted_itq,
}
