"""How likely a search result at each Hamming distance is relevant, estimated from a labelled set."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics.counting import Histograms

VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Precision by Hamming distance, pooled over all (query, item) pairs of a labelled set; each list has K + 1 values.

    `at_distance[d]`: how likely an item at distance d is relevant, a smooth estimate. `within_radius[r]`: the share of
    relevant pairs among all within radius r. `pairs[d]`: how many pairs were seen at distance d; where there were none,
    `at_distance` is interpolated between the neighbours.
    """

    n_bits: int
    n_queries: int
    at_distance: tuple[float, ...]
    within_radius: tuple[float, ...]
    pairs: tuple[int, ...]
    version: int = VERSION

    def radius(self, precision: float) -> int | None:
        """The largest radius with an expected precision of at least `precision`, or None if there is none.

        Raises:
            BadConfig: `precision` is not between 0 and 1.
        """
        if not 0 <= precision <= 1:
            raise BadConfig(f"a precision must be between 0 and 1, got {precision}")
        enough = np.flatnonzero(np.asarray(self.within_radius) >= precision)
        return int(enough[-1]) if len(enough) else None

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; lists, as JSON has them, become tuples.

        Raises:
            BadCodes: it comes from a newer version.
            KeyError, TypeError: it is not a calibration.
        """
        if stored["version"] > VERSION:
            raise BadCodes(
                f"the calibration has version {stored['version']}, this Hashseek reads up to {VERSION}: update Hashseek"
            )
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in stored.items()}
        values.pop("monotone", None)  # of earlier checkouts
        return cls(**values)


def calibrate(found: Histograms) -> Calibration:
    """Precision at each distance and within each radius.

    `at_distance` falls with distance (isotonic regression, weighted by pairs), as it would with enough data: few pairs
    at small distances would give a ragged curve.

    Args:
        found: histograms of labelled queries. If the queries are items of the database, remove each from its own
            ranking with `without_self`; otherwise distance 0 looks better than it is.
    """
    pairs, relevant = found.total.sum(axis=0), found.relevant.sum(axis=0)
    seen = np.flatnonzero(pairs)
    if not len(seen):
        raise BadCodes("there are no pairs to calibrate on: the labelled set needs queries and other items")
    from sklearn.isotonic import IsotonicRegression  # slow to import, and most commands never calibrate

    smooth = IsotonicRegression(increasing=False)
    values = smooth.fit_transform(seen, relevant[seen] / pairs[seen], sample_weight=pairs[seen])
    at_distance = np.interp(np.arange(found.n_bits + 1), seen, values)
    # Not from `at_distance`: sums of values that were made to fall are too high. Before the first pair, its estimate.
    n_within = np.cumsum(pairs)
    within = np.where(n_within > 0, np.cumsum(relevant) / np.maximum(n_within, 1), at_distance)
    return Calibration(
        n_bits=found.n_bits,
        n_queries=len(found),
        at_distance=tuple(at_distance.tolist()),
        within_radius=tuple(within.tolist()),
        pairs=tuple(pairs.tolist()),
    )
