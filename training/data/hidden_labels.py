"""Missing labels: some of the positive labels of a training set are hidden, as when nobody annotated them."""

import numpy as np
from numpy.typing import NDArray


def drop_labels(labels: NDArray[np.uint8], *, share: float, single: bool, seed: int) -> NDArray[np.uint8]:
    """Labels (n, C) of which each positive is kept with probability `share`, or one a row with `single`.

    Drawn for each row from (seed, row): the same in every run of a seed. A row may lose all its labels; with `single`
    it keeps one, drawn evenly.

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
