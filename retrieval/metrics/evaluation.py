"""All ranking figures of a set of queries at once, under either way of breaking ties."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hashseek.retrieval.codes import Codes
from hashseek.retrieval.metrics import rankings
from hashseek.retrieval.metrics.counting import Counts, Floats, Histograms, Labels, histograms
from hashseek.retrieval.metrics.figures import (
    Gain,
    Normalizer,
    average_cumulative_gain,
    average_precision,
    check_choice,
    effective_n,
    ndcg,
    precision,
    recall,
    weighted_average_precision,
)
from hashseek.retrieval.metrics.ties import Figure

TiePolicy = Literal["expected", "by_id"]
TIE_POLICIES: tuple[TiePolicy, ...] = ("expected", "by_id")


def evaluate_codes(
    query_codes: Codes,
    database_codes: Codes,
    query_labels: Labels,
    database_labels: Labels,
    *,
    n_bits: int,
    ns: Sequence[int | None] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    gain: Gain = "exponential",
    tie_policy: TiePolicy = "expected",
    device: str = "cpu",
) -> dict[str, Figure]:
    """AP, precision, recall, nDCG, ACG and WAP of each query, by names such as "AP@1000" and "nDCG@all".

    Args:
        query_codes, database_codes, query_labels, database_labels, n_bits, device: see `histograms`.
        ns: ranks that count; None for all. normalizer: see `average_precision`. gain: see `ndcg`.
        tie_policy: "expected": expectation, worst and best over the orders of equal distances; "by_id": the one order
            that search returns, equal distances by ascending position in the database (worst = best = expected).

    Raises:
        BadCodes, BadConfig: see `histograms`, or an N < 1.
    """
    check_choice("tie policy", tie_policy, TIE_POLICIES)
    names = name_ns(ns)
    found = histograms(
        query_codes, database_codes, query_labels, database_labels, n_bits=n_bits, graded=True, device=device
    )
    if tie_policy == "expected":
        return figures_of(found, ns=ns, normalizer=normalizer, gain=gain)
    limits = {name: effective_n(n, found.n_database) for name, n in zip(names, ns, strict=True)}
    of_gain = found.gains.sum(axis=2, dtype=np.int64) if found.gains is not None else np.zeros((0, 0), np.int64)
    parts: dict[str, list[Floats]] = {}
    for chosen, ids in rankings.rank_by_id(query_codes, database_codes, n_bits=n_bits, n=max(limits.values())):
        gains = rankings.gains_of(ids, query_labels[chosen], database_labels)
        for name, n in limits.items():
            values = figures_of_ranking(
                gains[:, :n],
                n_relevant=found.n_relevant[chosen],
                n_of_gain=of_gain[chosen],
                normalizer=normalizer,
                gain=gain,
            )
            for figure, value in values.items():
                parts.setdefault(f"{figure}@{name}", []).append(value)
    joined = {name: np.concatenate(values) for name, values in parts.items()}
    return {name: Figure(values, values, values) for name, values in joined.items()}


def figures_of(
    found: Histograms,
    *,
    ns: Sequence[int | None],
    normalizer: Normalizer = "retrieved",
    gain: Gain = "exponential",
) -> dict[str, Figure]:
    """The figures of `evaluate_codes` from histograms that were counted with `graded=True`."""
    result = {}
    for name, n in zip(name_ns(ns), ns, strict=True):
        result[f"AP@{name}"] = average_precision(found, n=n, normalizer=normalizer)
        result[f"precision@{name}"] = precision(found, n=n)
        result[f"recall@{name}"] = recall(found, n=n)
        result[f"nDCG@{name}"] = ndcg(found, n=n, gain=gain)
        result[f"ACG@{name}"] = average_cumulative_gain(found, n=n)
        result[f"WAP@{name}"] = weighted_average_precision(found, n=n, normalizer=normalizer)
    return result


def name_ns(ns: Sequence[int | None]) -> list[str]:
    """How each N is called: its digits, or "all"."""
    for n in ns:
        effective_n(n, 1)
    return ["all" if n is None else str(n) for n in ns]


def figures_of_ranking(
    gains: Counts,
    *,
    n_relevant: Counts,
    n_of_gain: Counts,
    normalizer: Normalizer = "retrieved",
    gain: Gain = "exponential",
) -> dict[str, Floats]:
    """AP, precision, recall, nDCG, ACG and WAP (Q,) over all the ranks of `gains` (Q, n).

    Args:
        gains: labels that each item shares with the query. n_relevant: (Q,) in the whole database.
        n_of_gain: (Q, G + 1) items of each gain in it. normalizer: see `average_precision`. gain: see `ndcg`.
    """
    hits = (gains > 0).sum(axis=1)
    return {
        "AP": rankings.average_precision_of_ranking(gains > 0, n_relevant=n_relevant, normalizer=normalizer),
        "precision": hits / gains.shape[1],
        "recall": hits / np.maximum(n_relevant, 1),
        "nDCG": rankings.ndcg_of_ranking(gains, n_of_gain=n_of_gain, gain=gain),
        "ACG": gains.mean(axis=1),
        "WAP": rankings.weighted_average_precision_of_ranking(gains, n_relevant=n_relevant, normalizer=normalizer),
    }
