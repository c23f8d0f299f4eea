"""How much of a figure is chance of the queries: bootstrap intervals, and two result sets on the same queries."""

from dataclasses import dataclass

import numpy as np

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics.counting import Floats

# Values that differ by less are equal: the closed forms round in the last digits.
_EQUAL = 1e-12
# Resamples at a time, so that memory stays at a few megabytes.
_AT_ONCE = 256


@dataclass(frozen=True)
class Interval:
    """A mean over queries and the interval that `level` of the bootstrap means fall into."""

    mean: float
    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True)
class Comparison:
    """Second minus first result set on the same queries: mean difference, its interval, and how many queries gained."""

    difference: Interval
    better: int
    worse: int
    equal: int


def bootstrap(values: Floats, *, level: float = 0.95, n_resamples: int = 2000, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of the mean over queries (Efron, 1979), the database being fixed.

    Args:
        values: of each query, (Q,); NaN are left out. level: between 0 and 1. n_resamples, seed: of the bootstrap.

    Raises:
        BadCodes: no values. BadConfig: a level or number of resamples outside its limits.
    """
    if not 0 < level < 1:
        raise BadConfig(f"the level of an interval lies between 0 and 1, for example 0.95, not {level}")
    if n_resamples < 1:
        raise BadConfig(f"a bootstrap needs at least 1 resample, not {n_resamples}")
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    if not len(values):
        raise BadCodes("there are no queries to take an interval over")
    rng = np.random.default_rng(seed)
    means = np.empty(n_resamples)
    for start in range(0, n_resamples, _AT_ONCE):
        part = means[start : start + _AT_ONCE]
        part[:] = values[rng.integers(0, len(values), (len(part), len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high), level)


def compare(
    first: Floats, second: Floats, *, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> Comparison:
    """Paired comparison of a figure (Q,) of the same queries in the same order: does `second` beat `first`?

    The interval is of the mean difference, over resampled queries; it is much narrower than the two means' own.

    Raises:
        BadCodes: the two differ in length.
    """
    if len(first) != len(second):
        raise BadCodes(
            f"a paired comparison needs the same queries, but one result set has {len(first)}, the other {len(second)}"
        )
    difference = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    return Comparison(
        bootstrap(difference, level=level, n_resamples=n_resamples, seed=seed),
        better=int((difference > _EQUAL).sum()),
        worse=int((difference < -_EQUAL).sum()),
        equal=int((np.abs(difference) <= _EQUAL).sum()),
    )
