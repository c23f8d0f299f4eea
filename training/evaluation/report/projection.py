"""t-SNE of codes and outputs, coloured by label."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import pack, unpack
from hashseek.retrieval.hash_layers import normalized
from hashseek.training.data.splits import Labels

# Name of the projected space -> (places (n, 2), group (n,) or -1, names of the groups).
Points = Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64], Sequence[str]]]

N_GROUPS = 8
_FEWEST = 10


def project(outputs: NDArray[np.float32], labels: Labels, names: Sequence[str], *, n_points: int, seed: int) -> Points:
    """Project up to `n_points` images, chosen at random, to the plane: by "codes" and by "outputs".

    Each of the most frequent labels is a group. An image with several of them belongs to the rarest, which is the most
    informative; an image with none of them has group -1. A space with too few or with identical images is left out.

    Args:
        outputs: (n, K), whose signs are the codes.
        labels: 0/1 (n, C).
        names: the names of the C labels.
        n_points: largest number of images.
        seed: seed of the choice of images and of t-SNE.

    Source: van der Maaten and Hinton, "Visualizing Data using t-SNE", JMLR 2008; scikit-learn's implementation.
    """
    rows = np.sort(np.random.default_rng((seed, 0x75)).permutation(len(outputs))[:n_points])
    group, chosen = group_by_label(labels[rows], names)
    bits = unpack(pack(outputs[rows]), outputs.shape[1]).astype(np.float32)
    spaces = {"codes": bits, "outputs": normalized(outputs[rows])}
    return {
        name: (_tsne(values, seed=seed), group, chosen)
        for name, values in spaces.items()
        if len(rows) >= _FEWEST and np.ptp(values, axis=0).max() > 0
    }


def group_by_label(labels: Labels, names: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """The group of each row, and the labels of the groups, the most frequent first."""
    counts = labels.sum(axis=0, dtype=np.int64)
    frequent = [int(i) for i in np.argsort(-counts, kind="stable")[:N_GROUPS] if counts[i]]
    group = np.full(len(labels), -1)
    for number, label in enumerate(frequent):  # rarer labels overwrite
        group[labels[:, label] > 0] = number
    return group, [names[label] for label in frequent]


def _tsne(values: NDArray[np.float32], *, seed: int) -> NDArray[np.float64]:
    from sklearn.manifold import TSNE

    # The squared Euclidean distance of bits is their Hamming distance; that of unit vectors is twice their cosine
    # distance.
    model = TSNE(
        n_components=2,
        perplexity=min(30.0, (len(values) - 1) / 3),
        init="pca" if values.shape[1] > 1 else "random",
        random_state=seed,
        n_jobs=1,
    )
    return np.asarray(model.fit_transform(values), dtype=np.float64)
