"""Bootstrap intervals of a metric's mean over queries, and paired comparisons on the same queries."""

from dataclasses import dataclass

import numpy as np

from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Floats

# Smaller differences count as equal: the closed forms round in the last digits.
_EQUAL = 1e-12
_RESAMPLES = 2000
# Resamples per block, so that memory stays at a few megabytes.
_BLOCK = 256


@dataclass(frozen=True)
class Interval:
    """A mean over queries, and the interval that contains 95 % of the bootstrap means."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Second minus first result on the same queries: the mean difference, and how many queries got better or worse."""

    difference: Interval
    better: int
    worse: int
    equal: int


def bootstrap(values: Floats, *, seed: int = 0) -> Interval:
    """95 % percentile bootstrap interval of the mean over queries (Efron, 1979); the database is fixed.

    Args:
        values: one for each query, (Q,); NaN are left out.
        seed: of the resampling.

    Raises:
        BadCodes: no values.
    """
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    if not len(values):
        raise BadCodes("a bootstrap interval needs at least one query")
    rng = np.random.default_rng(seed)
    means = np.empty(_RESAMPLES)
    for start in range(0, _RESAMPLES, _BLOCK):
        part = means[start : start + _BLOCK]
        part[:] = values[rng.integers(0, len(values), (len(part), len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def compare(first: Floats, second: Floats) -> Comparison:
    """Paired comparison of a metric (Q,) on the same queries in the same order: is `second` better than `first`?

    The interval is that of the mean difference over resampled queries. It is much narrower than the intervals of the
    two means.

    Raises:
        BadCodes: the two have different lengths.
    """
    if len(first) != len(second):
        raise BadCodes(f"a paired comparison needs the same queries, but got {len(first)} and {len(second)} values")
    difference = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    return Comparison(
        bootstrap(difference),
        better=int((difference > _EQUAL).sum()),
        worse=int((difference < -_EQUAL).sum()),
        equal=int((np.abs(difference) <= _EQUAL).sum()),
    )
