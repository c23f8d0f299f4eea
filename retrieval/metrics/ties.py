"""Sums over the ranks of a ranking with ties: expected, least and greatest over all orders of equal distances.

`ranking_metrics` builds its metrics from them. A ranking is given by `levels` (Q, L, K + 1), the number of items of
each positive gain at each distance, and `values` (L,), these gains in ascending order; the rest of `total` (Q, K + 1)
has gain 0. Source of the closed forms: McSherry and Najork, "Computing Information Retrieval Performance Measures
Efficiently in the Presence of Tied Scores", ECIR 2008.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.metrics.counting import Counts, Floats

# Queries per block where an array has one entry per query and outcome.
_QUERIES = 512
# Outcomes of a hypergeometric distribution are left out if they are less likely than this together.
_NEGLIGIBLE = 1e-18


class MetricValues(NamedTuple):
    """A metric of each query, (Q,) or (Q, n): its expectation over ties, and its least and greatest value."""

    expected: Floats
    worst: Floats
    best: Floats


class Groups(NamedTuple):
    """Groups of ties: items, relevant items and sum of gains, in each group and ahead of it; all of one shape."""

    size: NDArray[Any]
    relevant: NDArray[Any]
    gain: NDArray[Any]
    ahead: NDArray[Any]
    relevant_ahead: NDArray[Any]
    gain_ahead: NDArray[Any]


def groups(total: Counts, levels: NDArray[np.integer], values: Floats) -> Groups:
    """The groups of the rankings."""
    relevant = levels.sum(axis=1, dtype=np.int64)
    gain = np.einsum("qld,l->qd", levels, values)
    ahead: list[NDArray[Any]] = [np.cumsum(counts, axis=1) - counts for counts in (total, relevant, gain)]
    return Groups(total, relevant, gain, *ahead)


def discounted_sum(total: Counts, levels: NDArray[np.integer], values: Floats, discounts: Floats) -> MetricValues:
    """Sum over ranks i of gain(i) * discount(i), (Q,) each.

    Args:
        total, levels, values: the rankings.
        discounts: the discounts of ranks 1..n, descending; later ranks count 0.
    """
    table = np.concatenate(([0.0], np.cumsum(discounts)))
    cut = len(discounts)

    def ranks(first: Counts, count: NDArray[np.integer]) -> Floats:
        return table[np.minimum(first + count, cut)] - table[np.minimum(first, cut)]

    found = groups(total, levels, values)
    expected = (found.gain / np.maximum(found.size, 1) * ranks(found.ahead, found.size)).sum(axis=1)
    worst, best = np.zeros(len(total)), np.zeros(len(total))
    low, high = found.ahead + found.size - found.relevant, found.ahead.copy()
    for level in range(len(values)):
        worst += values[level] * ranks(low, levels[:, level]).sum(axis=1)
        low = low + levels[:, level]
        other = len(values) - 1 - level
        best += values[other] * ranks(high, levels[:, other]).sum(axis=1)
        high = high + levels[:, other]
    return MetricValues(expected, worst, best)


def weighted_precision(
    total: Counts,
    levels: NDArray[np.integer],
    values: Floats,
    *,
    n: int,
    divisor: Callable[[Counts, NDArray[np.integer]], Counts],
) -> MetricValues:
    """Sum over relevant ranks i <= n of the mean gain of the first i items, divided by R, (Q,) each.

    This is average precision if all gains are 1, and weighted average precision if gains are shared labels.

    Args:
        total, levels, values: the rankings.
        n: how many ranks count, at most the database size.
        divisor: R, a function of (relevant items among the first n, all relevant items); where R is 0 the result is 0.
    """
    found = groups(total, levels, values)
    harmonic = harmonic_numbers(int(total[0].sum()))
    whole = found.ahead + found.size <= n
    all_relevant = found.relevant.sum(axis=1)
    sums = (
        _mean_sum(found, harmonic),
        _least_sum(found, levels, values, found.size, found.relevant, harmonic),
        _greatest_sum(found, levels, values, found.relevant, harmonic),
    )
    before = [np.where(whole, part, 0.0).sum(axis=1) for part in sums]
    at, room = _cut(found, n)
    rows = np.arange(len(total))
    cut = Groups(*(part[rows, at] for part in found))
    cut_levels = levels[rows, :, at].astype(np.int64)
    # Where rank n cuts no group, all whole groups are retrieved.
    cut = cut._replace(relevant_ahead=np.where(whole, found.relevant, 0).sum(axis=1))
    least = np.maximum(0, room - (cut.size - cut.relevant))
    most = np.minimum(room, cut.relevant)

    def over(h: Counts, value: Floats) -> Floats:
        return value / np.maximum(divisor(cut.relevant_ahead + h, all_relevant), 1)

    expected = _expectation(before[0], cut, room, harmonic, divisor, all_relevant)

    def worst_of(h: Counts) -> Floats:
        return over(h, before[1] + _least_sum(cut, cut_levels, values, room, h, harmonic))

    def best_of(h: Counts) -> Floats:
        return over(h, before[2] + _greatest_sum(cut, cut_levels, values, h, harmonic))

    worst = _least_of_valley(worst_of, least, most)
    best = np.maximum(best_of(least), best_of(most))
    if len(values) > 1:
        # With equal gains each further item adds a greater term than the one before it, so the mean falls and then
        # rises, and the best value is at an end. Falling gains can turn this around: try every number.
        for row in np.flatnonzero(most - least > 1).tolist():
            h = np.arange(least[row], most[row] + 1)
            r = divisor(cut.relevant_ahead[row] + h, all_relevant[row])
            value = before[2][row] + _sums_best_first(cut, cut_levels, values, row)[h]
            best[row] = max(best[row], float((value / np.maximum(r, 1)).max()))
    return MetricValues(expected, worst, best)


def _least_of_valley(function: Callable[[Counts], Floats], low: Counts, high: Counts) -> Floats:
    """The least value of `function` between `low` and `high`, by bisection.

    `worst_of` falls and then rises: its sum is convex in h, and R is constant or grows with h.
    """
    end = high
    while (low < high).any():
        middle = (low + high) // 2
        falls = (function(np.minimum(middle + 1, end)) < function(middle)) & (middle < high)
        low, high = np.where(falls, middle + 1, low), np.where(falls, high, middle)
    return function(low)


@lru_cache(maxsize=4)
def harmonic_numbers(n: int) -> Floats:
    """H_0 to H_n."""
    return np.concatenate(([0.0], np.cumsum(1.0 / np.arange(1, n + 1))))


def hypergeometric(size: Counts, relevant: Counts, room: Counts) -> tuple[Counts, Floats]:
    """How many of `room` items drawn from `size` items are `relevant`: (h, probability), (q, outcomes) each.

    Outcomes that together are less likely than 1e-18 (Hoeffding, "Probability inequalities for sums of bounded random
    variables", 1963, section 6) are left out. Rows with fewer outcomes are filled with probability 0.
    """
    least, most = np.maximum(0, room - (size - relevant)), np.minimum(room, relevant)
    mean = room * (relevant / np.maximum(size, 1))
    drawn = np.minimum(np.minimum(room, size - room), np.minimum(relevant, size - relevant))
    reach = np.sqrt(drawn * (math.log(2 / _NEGLIGIBLE) / 2)) + 1
    first = np.maximum(least, np.floor(mean - reach).astype(np.int64))
    last = np.minimum(most, np.ceil(mean + reach).astype(np.int64))
    h = first[:, None] + np.arange(int((last - first).max()) + 1)
    valid = h <= last[:, None]
    size, relevant, room = size[:, None], relevant[:, None], room[:, None]
    # Multiply P(h) / P(h - 1) in logarithms: this does not overflow, and loses no digits to huge factorials.
    numerator = (relevant - h + 1) * (room - h + 1.0)
    denominator = h * (size - relevant - room + h + 0.0)
    usable = valid & (h > first[:, None])
    ratio = np.divide(numerator, denominator, out=np.ones_like(numerator), where=usable)
    logarithm = np.cumsum(np.log(ratio), axis=1)
    weight = np.where(valid, np.exp(logarithm - logarithm.max(axis=1, keepdims=True)), 0.0)
    return np.where(valid, h, 0), weight / weight.sum(axis=1, keepdims=True)


def _cut(found: Groups, n: int) -> tuple[Counts, Counts]:
    """The group that rank n cuts in each query, and how many of its items are above the cut: (Q,) each."""
    ends = found.ahead + found.size
    at = np.minimum((ends <= n).sum(axis=1), ends.shape[1] - 1)
    rows = np.arange(len(at))
    return at, np.clip(n - found.ahead[rows, at], 0, np.where(ends[rows, at] > n, found.size[rows, at], 0))


def _expectation(
    before: Floats,
    cut: Groups,
    room: Counts,
    harmonic: Floats,
    divisor: Callable[[Counts, NDArray[np.integer]], Counts],
    all_relevant: Counts,
) -> Floats:
    """The expectation over the number h of relevant items above the cut, and over their order."""
    mean_gain = cut.gain / np.maximum(cut.relevant, 1)
    result = np.empty_like(before)
    for start in range(0, len(before), _QUERIES):
        chosen = slice(start, start + _QUERIES)
        part = Groups(*(values[chosen, None] for values in cut))
        drawn = room[chosen, None]
        h, probability = hypergeometric(cut.size[chosen], cut.relevant[chosen], room[chosen])
        above = part._replace(size=drawn, relevant=h, gain=h * mean_gain[chosen, None])
        value = before[chosen, None] + _mean_sum(above, harmonic)
        r = divisor(part.relevant_ahead + h, all_relevant[chosen, None])
        result[chosen] = (probability * value / np.maximum(r, 1)).sum(axis=1)
    return result


# In the sums below, `size` items, `relevant` of which are relevant, take the ranks after `ahead` others. Each gives the
# sum, over the relevant ranks i among them, of the mean gain of the first i items.


def _mean_sum(part: Groups, harmonic: Floats) -> Floats:
    """In random order rank ahead + j is relevant with probability r/m, after (j - 1)(r - 1)/(m - 1) others."""
    inverse = harmonic[part.ahead + part.size] - harmonic[part.ahead]
    mean_gain = part.gain / np.maximum(part.relevant, 1)
    slope = mean_gain * (part.relevant - 1) / np.maximum(part.size - 1, 1)
    result: Floats = (part.relevant / np.maximum(part.size, 1)) * (
        (part.gain_ahead + mean_gain) * inverse + slope * (part.size - (part.ahead + 1) * inverse)
    )
    return result


def _greatest_sum(
    part: Groups, levels: NDArray[np.integer], values: Floats, relevant: Counts, harmonic: Floats
) -> Floats:
    """With `relevant` items first, and among them the greatest gains first."""
    return _run(part.ahead, part.gain_ahead, levels, values, relevant, harmonic, range(len(values))[::-1])


def _least_sum(
    part: Groups, levels: NDArray[np.integer], values: Floats, size: Counts, relevant: Counts, harmonic: Floats
) -> Floats:
    """With `relevant` items on the last of `size` ranks, and among them the least gains first."""
    ahead = part.ahead + size - relevant
    return _run(ahead, part.gain_ahead, levels, values, relevant, harmonic, range(len(values)))


def _run(
    ahead: Counts,
    gain_ahead: Floats,
    levels: NDArray[np.integer],
    values: Floats,
    relevant: Counts,
    harmonic: Floats,
    order: range,
) -> Floats:
    """The sum for the first `relevant` items, taking the levels in `order`."""
    result: Floats = np.zeros(ahead.shape)
    for level in order:
        count = np.minimum(levels[:, level], relevant)
        inverse = harmonic[ahead + count] - harmonic[ahead]
        result += gain_ahead * inverse + values[level] * (count - ahead * inverse)
        ahead, relevant = ahead + count, relevant - count
        gain_ahead = gain_ahead + values[level] * count
    return result


def _sums_best_first(cut: Groups, levels: Counts, values: Floats, row: int) -> Floats:
    """`_greatest_sum` of one query for 0, 1, ..., all of its relevant items."""
    gains = np.repeat(values[::-1], levels[row, ::-1])
    ranks = cut.ahead[row] + np.arange(1, len(gains) + 1)
    terms = (cut.gain_ahead[row] + np.cumsum(gains)) / ranks
    return np.concatenate(([0.0], np.cumsum(terms)))
