"""An overview of a collection: its labels, how its codes use their bits, and a map of them; for `GET /v1/overview`."""

import numpy as np
from numpy.typing import NDArray

from hashseek.api.messages.schemas import BitFigures, LabelOverview, MapPoint, Overview
from hashseek.indexing.collection import Collection
from hashseek.retrieval.codes import Codes, unpack
from hashseek.retrieval.metrics.code_statistics import bit_statistics

N_SAMPLED = 50_000  # codes used for the statistics
N_PAIRS = 100_000  # pairs whose distances are counted
N_ON_MAP = 2_000
N_LABELS = 200


def make_overview(collection: Collection) -> Overview:
    """The overview of a collection. Samples are drawn at random, the same for the same images."""
    rng, n_bits = np.random.default_rng(0), collection.n_bits
    view, labels = collection.index.current(), collection.label_counts()
    everything = view.ids
    ids = everything[np.sort(rng.choice(len(everything), min(len(everything), N_SAMPLED), replace=False))]
    codes = view.codes_of(ids)
    on_map = np.sort(rng.permutation(len(ids))[:N_ON_MAP])
    images = [image for image in collection.get(ids[on_map].tolist()) if image is not None]
    chosen = on_map[np.isin(ids[on_map], [image.id for image in images])]  # the others have just been removed
    bits = unpack(codes[chosen], n_bits).astype(np.float64)
    places, explained = principal_plane(2 * bits - 1)
    names = sorted(labels, key=lambda name: (-labels[name], name))[:N_LABELS]
    has = np.array([[name in image.labels for name in names] for image in images], np.float64).reshape(
        len(images), len(names)
    )
    within, to_others = label_distances(bits, has)
    return Overview(
        n_images=len(everything),
        n_bits=n_bits,
        n_sampled=len(codes),
        bits=BitFigures(**vars(bit_statistics(codes, n_bits=n_bits))) if len(codes) else None,
        distances=pair_distances(codes, n_bits, rng).tolist(),
        labels=[
            LabelOverview(label=name, n_images=labels[name], within=_number(inside), to_others=_number(outside))
            for name, inside, outside in zip(names, within, to_others, strict=True)
        ],
        explained=explained,
        map=[
            MapPoint(id=image.id, x=round(x, 3), y=round(y, 3), labels=list(image.labels))
            for image, (x, y) in zip(images, places.tolist(), strict=True)
        ],
    )


def principal_plane(signs: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The first two principal components (n, 2) of bits as -1 and 1 (n, K), and the share of the variance they hold."""
    centred = signs - signs.mean(axis=0) if len(signs) else signs
    values, vectors = np.linalg.eigh(centred.T @ centred)
    axes = vectors[:, ::-1][:, :2]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])  # the sign is arbitrary
    places = np.zeros((len(signs), 2))
    places[:, : axes.shape[1]] = centred @ axes
    return places, float(values[::-1][:2].sum() / values.sum()) if values.sum() > 0 else 0.0


def label_distances(
    bits: NDArray[np.float64], has: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean Hamming distance of two images with each label, and of one with and one without it; NaN without such pairs.

    Args:
        bits: 0/1 (n, K).
        has: 0/1 (n, C), which image has which label.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        n = has.sum(axis=0)[:, None]
        ones = has.T @ bits
        other = bits.sum(axis=0) - ones
        p, q = ones / n, other / (len(bits) - n)
        within = (2 * p * (1 - p) * n / (n - 1)).sum(axis=1)
        to_others = (p * (1 - q) + q * (1 - p)).sum(axis=1)
    return np.where(n[:, 0] > 1, within, np.nan), to_others


def pair_distances(codes: Codes, n_bits: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How many of up to `N_PAIRS` random pairs of packed codes have each Hamming distance 0 to K: (K + 1,)."""
    first, second = rng.integers(0, max(len(codes), 1), (2, N_PAIRS if len(codes) > 1 else 0))
    apart = np.bitwise_count(codes[first] ^ codes[second])[first != second]
    return np.bincount(apart.sum(axis=1, dtype=np.int64), minlength=n_bits + 1)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 2)
