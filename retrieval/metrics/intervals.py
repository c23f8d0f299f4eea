"""Bootstrap intervals of a metric's mean over queries, and paired comparisons and tests on the same queries."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Floats

# Smaller differences count as equal: the closed forms round in the last digits.
_EQUAL = 1e-12
_RESAMPLES = 2000
_PERMUTATIONS = 9999
# Resamples per block, which bounds memory: a block takes 4 KB for each query.
_BLOCK = 256


@dataclass(frozen=True)
class Interval:
    """A mean over queries, and the interval that contains 95 % of the bootstrap means."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Second minus first result on the same queries: the mean difference, and how many queries got better or worse.

    `p_value` is that of `randomization_test`.
    """

    difference: Interval
    p_value: float
    better: int
    worse: int
    equal: int


def bootstrap(values: Floats, *, seed: int = 0) -> Interval:
    """95 % percentile bootstrap interval of the mean over queries (Efron, 1979); the database is fixed.

    Args:
        values: one for each query, (Q,); NaN are left out.
        seed: seed of the resampling.

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
    difference[np.abs(difference) <= _EQUAL] = 0  # the rounding of means over seeds is not a difference
    return Comparison(
        bootstrap(difference),
        randomization_test(difference),
        better=int((difference > 0).sum()),
        worse=int((difference < 0).sum()),
        equal=int((difference == 0).sum()),
    )


def randomization_test(differences: Floats) -> float:
    """Two-sided p-value of the paired randomisation test: are the means of two results on the same queries equal?

    If the two were interchangeable, each query's difference could as well have the other sign. The p-value is the share
    of 9,999 random choices of signs, and the observed one, whose mean is at least as far from 0 (Smucker et al., CIKM
    2007). Its smallest value is 0.0001.

    Args:
        differences: one for each query, (Q,); NaN are left out.
    """
    rng, values = np.random.default_rng(0), np.asarray(differences, dtype=np.float64)
    values = values[~np.isnan(values)]
    n, total = len(values), values.sum()
    least = abs(total) - 1e-9 * np.abs(values).sum()
    as_far = 1
    for start in range(0, _PERMUTATIONS, _BLOCK):
        rows = min(_BLOCK, _PERMUTATIONS - start)
        kept = np.unpackbits(rng.integers(0, 256, (rows, -(-n // 8)), dtype=np.uint8), axis=1)[:, :n]
        as_far += int((np.abs(2 * (kept @ values) - total) >= least).sum())
    return as_far / (_PERMUTATIONS + 1)


def queries_and_seeds(differences: Floats) -> float:
    """Two-sided p-value of a mean difference if both seeds and queries are samples; 1 for a single seed or query.

    The variance of the mean is at most that of the means of queries plus that of the means of seeds. With it, this is
    Clark's min F' (The language-as-fixed-effect fallacy, 1973): conservative if queries vary more than seeds.

    Args:
        differences: (S, Q), of S pairs of runs on Q queries; queries with NaN are left out.
    """
    from scipy.special import stdtr  # slow to import

    differences = np.where(np.abs(differences) <= _EQUAL, 0, differences)
    differences = differences[:, ~np.isnan(differences).any(axis=0)]
    n_seeds, n_queries = differences.shape
    if n_seeds < 2 or n_queries < 2:
        return 1.0
    of_queries = differences.mean(axis=0).var(ddof=1) / n_queries
    of_seeds = differences.mean(axis=1).var(ddof=1) / n_seeds
    variance = of_queries + of_seeds
    if variance == 0:
        return 0.0 if differences.mean() else 1.0
    freedom = variance**2 / (of_queries**2 / (n_queries - 1) + of_seeds**2 / (n_seeds - 1))
    return float(2 * stdtr(freedom, -abs(differences.mean()) / np.sqrt(variance)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in the same order: the step-down method of Holm (1979)."""
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)), 1)
    result: list[float] = corrected.tolist()
    return result
