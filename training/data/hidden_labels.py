"""Hides some of the positive labels of a training set, to simulate incomplete annotation."""

import numpy as np
from numpy.typing import NDArray


def hide_labels(labels: NDArray[np.uint8], *, share: float, single: bool, seed: int) -> NDArray[np.uint8]:
    """Labels (n, C) with each positive kept with probability `share`, or with `single` one random positive per row.

    Drawn for each row from (seed, row), so that every run of a seed hides the same labels. A row may lose all its
    labels, except with `single`.

    Source: the protocols of CLML (75 %, 40 %, single positive).
    """
    if share == 1 and not single:
        return labels
    kept = np.zeros_like(labels)
    for row, positives in enumerate(labels):
        rng = np.random.default_rng((seed, 0x1ABE1, row))
        columns = np.flatnonzero(positives)
        if single and len(columns):
            kept[row, rng.choice(columns)] = 1
        else:
            kept[row, columns[rng.random(len(columns)) < share]] = 1
    return kept
