"""What a Hamming distance is worth: how likely a hit at each distance is relevant, learnt from a labelled set."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics.counting import Counts, Floats, Histograms

VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Precision by Hamming distance, pooled over all (query, item) pairs of a labelled set; each list has K + 1 values.

    `at_distance[d]`: how likely an item at distance d is relevant. `within_radius[r]`: the expected precision among all
    items within r. `pairs[d]`: pairs seen at distance d; where there were none, `at_distance` lies between that of the
    neighbours.
    """

    n_bits: int
    n_queries: int
    monotone: bool
    at_distance: tuple[float, ...]
    within_radius: tuple[float, ...]
    pairs: tuple[int, ...]
    version: int = VERSION

    def radius(self, precision: float) -> int | None:
        """The largest radius at which at least `precision` is expected; None if no radius gives that much.

        Raises:
            BadConfig: `precision` is not between 0 and 1.
        """
        if not 0 <= precision <= 1:
            raise BadConfig(f"a precision lies between 0 and 1, not {precision}")
        enough = np.flatnonzero(np.asarray(self.within_radius) >= precision)
        return int(enough[-1]) if len(enough) else None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """The calibration that `as_dict` gave.

        Raises:
            BadCodes: it is of a newer version, or not a calibration.
        """
        version = stored.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise BadCodes(f"a calibration of version {version} cannot be read, only up to {VERSION}: upgrade hashseek")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in stored.items()}
        try:
            made = cls(**values)
        except TypeError as error:
            raise BadCodes(f"this is no calibration ({error}): calibrate again") from None
        if not len(made.at_distance) == len(made.within_radius) == len(made.pairs) == made.n_bits + 1:
            raise BadCodes(f"a calibration of {made.n_bits}-bit codes has {made.n_bits + 1} values: calibrate again")
        return made


def calibrate(found: Histograms, *, monotone: bool = True) -> Calibration:
    """Precision at each distance and within each radius.

    Args:
        found: rankings of labelled queries. Where the queries are items of the database, leave each out of its own
            ranking with `without_self`, or distance 0 looks better than it is.
        monotone: make `at_distance` fall with distance (isotonic regression, weighted by pairs), as it would with
            enough data; without it few pairs at small distances give a ragged curve.
    """
    pairs, relevant = found.total.sum(axis=0), found.relevant.sum(axis=0)
    seen = np.flatnonzero(pairs)
    if not len(seen):
        raise BadCodes("there are no pairs to calibrate on: the labelled set needs queries and other items")
    values = relevant[seen] / pairs[seen]
    if monotone:
        values = falling(values, pairs[seen])
    at_distance = np.interp(np.arange(found.n_bits + 1), seen, values)
    # Within a radius: over the pairs that were seen; before the first of them there is only the neighbours' value.
    ahead = np.cumsum(pairs)
    within = np.where(ahead > 0, np.cumsum(pairs * at_distance) / np.maximum(ahead, 1), at_distance)
    return Calibration(
        n_bits=found.n_bits,
        n_queries=len(found),
        monotone=monotone,
        at_distance=tuple(at_distance.tolist()),
        within_radius=tuple(within.tolist()),
        pairs=tuple(pairs.tolist()),
    )


def falling(values: Floats, weights: Counts) -> Floats:
    """The sequence that never rises and is nearest to `values` in weighted squares.

    Pool adjacent violators (Ayer et al., "An empirical distribution function for sampling with incomplete information",
    1955).
    """
    means: list[float] = []
    sizes: list[float] = []
    lengths: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        means.append(value)
        sizes.append(weight)
        lengths.append(1)
        while len(means) > 1 and means[-1] > means[-2]:
            size = sizes[-1] + sizes[-2]
            mean = (means[-1] * sizes[-1] + means[-2] * sizes[-2]) / size
            means[-2:], sizes[-2:], lengths[-2:] = [mean], [size], [lengths[-1] + lengths[-2]]
    return np.repeat(means, lengths)
