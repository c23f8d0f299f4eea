"""t-SNE of codes and outputs, coloured by label."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import unpack
from hashseek.training.evaluation.report.build import Labels, Part

N_GROUPS = 8
_FEWEST = 10


def project(
    part: Part, names: Sequence[str], *, n_bits: int, n_points: int, seed: int
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.int64], list[str]]]:
    """Places in the plane of up to `n_points` images drawn at random: "codes" and "outputs" -> (places, group, names).

    The groups are the most frequent labels; an image of several of them belongs to the rarest, which says most about
    it, and one of none of them to group -1. Too few images, or images that are all the same, give nothing.

    Source: van der Maaten and Hinton, "Visualizing Data using t-SNE", JMLR 2008; scikit-learn's implementation.
    """
    rows = np.sort(np.random.default_rng((seed, 0x75)).permutation(len(part))[:n_points])
    group, chosen = group_by_label(part.labels[rows], names)
    bits = unpack(part.codes[rows], n_bits).astype(np.float32)
    lengths = np.maximum(np.linalg.norm(part.outputs[rows], axis=1, keepdims=True), 1e-12)
    spaces = {"codes": bits, "outputs": part.outputs[rows] / lengths}
    return {
        name: (_tsne(values, seed=seed), group, chosen)
        for name, values in spaces.items()
        if len(rows) >= _FEWEST and values.std(axis=0).max() > 0
    }


def group_by_label(labels: Labels, names: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """The group of each row, and what the groups are called: the most frequent labels, the most frequent first."""
    counts = labels.sum(axis=0, dtype=np.int64)
    frequent = [int(i) for i in np.argsort(-counts, kind="stable")[:N_GROUPS] if counts[i]]
    group = np.full(len(labels), -1)
    for number, label in enumerate(frequent):  # a rarer one overwrites
        group[labels[:, label] > 0] = number
    return group, [names[label] for label in frequent]


def _tsne(values: NDArray[np.float32], *, seed: int) -> NDArray[np.float64]:
    from sklearn.manifold import TSNE

    # Squared Euclidean distance of bits is their Hamming distance, of unit vectors twice their cosine distance.
    model = TSNE(
        n_components=2,
        perplexity=min(30.0, (len(values) - 1) / 3),
        init="pca" if values.shape[1] > 1 else "random",
        random_state=seed,
        n_jobs=1,
    )
    return np.asarray(model.fit_transform(values), dtype=np.float64)
