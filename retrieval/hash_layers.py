"""Hash layers fitted to features without training: a projection whose signs are the code.

`fit_hash_layer` is the one contract: features in, a `HashLayer` out. `index add` uses it for a collection without a
checkpoint, training to start a hash layer, evaluation as a baseline.

random   a random rotation, the locality-sensitive hashing of Charikar (STOC 2002)
pca      the principal directions
itq      these, rotated so that the signs lose least: Gong and Lazebnik, "Iterative Quantization" (CVPR 2011)

All three work on features of length 1 (cosine similarity) and subtract their mean.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import check_n_bits
from hashseek.retrieval.errors import BadConfig

Features = NDArray[np.float32]

ITQ_ROUNDS = 50  # as in the paper


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
        outputs: NDArray[np.float32] = normalized(features) @ self.weight.T + self.bias
        return outputs


def normalized(features: Features) -> Features:
    """Features (N, D) with rows of length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    rows: Features = (features / np.maximum(lengths, 1e-12)).astype(np.float32)
    return rows


def fit_hash_layer(features: Features, *, n_bits: int, method: str = "itq", seed: int = 0) -> HashLayer:
    """Fit a hash layer to features (N, D) of images without labels.

    Args:
        features: N >= 1 rows; `pca` and `itq` need more than `n_bits` rows that differ.
        n_bits: K; `pca` and `itq` give at most D.
        method: a name in `METHODS`.
        seed: of the random rotation, from which `itq` starts as well.

    Raises:
        BadConfig: the method is unknown, there are too few rows, or the features are too narrow for so many bits.
    """
    if method not in METHODS:
        raise BadConfig(f"there is no method {method!r} to fit a hash layer: use one of {', '.join(METHODS)}")
    check_n_bits(n_bits)
    rows = normalized(features)
    mean = rows.mean(0)
    directions = METHODS[method](rows - mean, n_bits, np.random.default_rng(seed))
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
        raise BadConfig(f"features of {width} numbers give at most {width} bits, not {n_bits}: ask for fewer bits")
    values, vectors = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    if values[-n_bits] <= 1e-6 * max(values[-1], 1e-12):
        raise BadConfig(
            f"{n:,} images do not vary in {n_bits} directions: add more different images, ask for fewer bits, or use "
            "the method random"
        )
    directions: Features = vectors[:, : -n_bits - 1 : -1].astype(np.float32)
    return directions


def itq(centred: Features, n_bits: int, rng: np.random.Generator) -> Features:
    """Directions (D, K): the principal ones times the rotation R that minimises |sign(V R) - V R| (section 2.2)."""
    principal = principal_directions(centred, n_bits, rng)
    projected = centred @ principal
    rotation = random_rotation(projected, n_bits, rng)
    for _ in range(ITQ_ROUNDS):
        signs = np.where(projected @ rotation >= 0, np.float32(1), np.float32(-1))
        left, _, right = np.linalg.svd(projected.T @ signs)
        rotation = left @ right
    directions: Features = principal @ rotation
    return directions


METHODS: dict[str, Callable[[Features, int, np.random.Generator], Features]] = {
    "random": random_rotation,
    "pca": principal_directions,
    "itq": itq,
}
