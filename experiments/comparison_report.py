"""The report of a comparison: tables of its finished runs, paired tests, and critical-difference diagrams."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import friedmanchisquare, rankdata, studentized_range

from experiments.comparison import rows_of
from experiments.critical_difference import write_diagram
from experiments.methods import COMPARED, METHODS
from experiments.scoring import N
from hashseek.retrieval.metrics import holm, queries_and_seeds, randomization_test
from hashseek.training.report_format import Table, mean_and_deviation, table_as_markdown
from hashseek.training.runs.run_folder import read_records

_TABLES = {
    "mAP": f"mAP@{N} by Hamming distance, expected over ties",
    "asymmetric": f"mAP@{N} by the query's outputs",
    "gallery": "Precision@10 on foreign images (COCO 256), each among all others, by Hamming distance",
    "gallery_rare": "The same without the most frequent label, person",
}
_OF_QUERY = {"mAP": "AP", "asymmetric": "asymmetric_AP"}


CONTROL = "tie_aware"  # ours, which is compared with every other method; chosen before any run


def as_markdown(folder: Path) -> str:
    """The tables of all finished runs, best first at the longest code, and the tests of `paired_tests`."""
    rows = [row for method in COMPARED for row in rows_of(folder, method)]
    if not rows:
        return "no run is finished yet\n"
    bits = sorted({row["n_bits"] for row in rows})

    def values(method: str, n_bits: int, key: str) -> NDArray[np.float64]:
        found = [row for row in rows if row["method"] == method and row["n_bits"] == n_bits]
        return np.array([row[key] for row in found if key in row])

    def mean(method: str, key: str) -> float:
        found = values(method, bits[-1], key)
        return float(found.mean()) if len(found) else -1.0  # ITQ-CCA has no long codes

    lines: list[str] = []
    for key, title in _TABLES.items():
        shown = {row["method"] for row in rows if key in row}
        if not shown:
            continue
        header = ["method", *(f"{k} bits" for k in bits)]
        ordered = sorted(shown, key=lambda m: -mean(m, key))
        cells = [[METHODS[m].title, *(mean_and_deviation(values(m, k, key)) for k in bits)] for m in ordered]
        table = table_as_markdown(Table(header, cells, text_columns=len(header)))
        lines += [f"{title}: mean and standard deviation over seeds.", "", table, ""]
        if key in _OF_QUERY:
            lines += _tests(rows, bits, ordered, of_query=_OF_QUERY[key])
    distances = [
        [METHODS[method].title, *(f"{mean(method, key):.1f}" for key in ("d_intra", "d_inter"))]
        for method in COMPARED
        if mean(method, "d_intra") >= 0
    ]
    table = table_as_markdown(Table(["method", "d_intra", "d_inter"], distances, text_columns=1))
    lines += [f"Mean distances in bits at {bits[-1]} bits:", "", table, *_chosen_table(folder)]
    return "\n".join(lines) + "\n"


def _chosen_table(folder: Path) -> list[str]:
    """What each search chose; nothing for a folder without searches."""
    rows = [
        [METHODS[method].title, str(choice["n_bits"]), str(choice["seed"]), f"`{', '.join(choice['settings'])}`"]
        for method in COMPARED
        for choice in sorted(
            read_records(folder / method / "chosen.jsonl"), key=lambda choice: (choice["n_bits"], choice["seed"])
        )
    ]
    table = table_as_markdown(Table(["method", "bits", "seed", "settings"], rows, text_columns=4))
    return ["", "Settings chosen on validation images:", "", table] if rows else []


def _tests(rows: Sequence[dict[str, Any]], bits: Sequence[int], methods: Sequence[str], *, of_query: str) -> list[str]:
    """The table of `paired_tests`, and what the mean ranks say, at each length."""
    results = {n_bits: paired_tests(rows, n_bits, of_query=of_query) for n_bits in bits}
    results = {n_bits: tests for n_bits, tests in results.items() if tests}
    if not results:
        return []
    cells = [
        [METHODS[method].title, *(str(tests.get(method, "")) for tests in results.values())]
        for method in methods
        if any(method in tests for tests in results.values())
    ]
    header = ["method", *(f"{n_bits} bits" for n_bits in results)]
    return [
        f"Difference of {METHODS[_control(rows)].title} from each method; in brackets p over queries, and over queries "
        "and seeds, both corrected by Holm for the methods at a length; then the share of the queries on which the "
        "method is better:",
        "",
        table_as_markdown(Table(header, cells, text_columns=len(header))),
        "",
        *[line for n_bits in results for line in _ranks(rows, n_bits, of_query=of_query)],
        "",
    ]


def _control(rows: Sequence[dict[str, Any]]) -> str:
    """The method that is compared with the others: `CONTROL`, or the first if that has no runs."""
    methods = [str(row["method"]) for row in rows]
    return CONTROL if CONTROL in methods else methods[0]


def per_query_of(rows: Sequence[dict[str, Any]], n_bits: int, of_query: str) -> dict[str, list[list[float]]]:
    """The AP of each query at a length, for each method and each seed that every method has finished."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["n_bits"] == n_bits and of_query in row:
            found.setdefault(row["method"], {})[row["seed"]] = row[of_query]
    seeds = sorted(set.intersection(*map(set, found.values()))) if found else []
    return {method: [of_seed[seed] for seed in seeds] for method, of_seed in found.items() if seeds}


def mean_ranks(means: Mapping[str, NDArray[np.float64]]) -> tuple[dict[str, float], float]:
    """The mean rank of each method over its queries (Q,), 1 is best, and Nemenyi's critical difference at 0.05."""
    k, n = len(means), len(next(iter(means.values())))
    ranks = rankdata([-values for values in means.values()], axis=0).mean(axis=1)
    critical = studentized_range.ppf(0.95, k, np.inf) * np.sqrt(k * (k + 1) / (12 * n))
    return dict(zip(means, ranks.tolist(), strict=True)), float(critical)


def write_plots(folder: Path) -> list[Path]:
    """Write the critical-difference diagrams of all lengths, by distance and by outputs; returns their files."""
    rows = [row for method in COMPARED for row in rows_of(folder, method)]
    files: list[Path] = []
    for key, of_query in _OF_QUERY.items():
        panels = []
        for n_bits in sorted({row["n_bits"] for row in rows}):
            found = per_query_of(rows, n_bits, of_query)
            if len(found) > 2:
                means = {METHODS[method].title: np.mean(seeds, axis=0) for method, seeds in found.items()}
                panels.append((f"{n_bits} bits: {_TABLES[key]}, mean rank over queries", *mean_ranks(means)))
        if panels:
            files += write_diagram(folder / f"critical-difference-{key}", panels)
    return files


@dataclass(frozen=True)
class Tested:
    """How the control differs from a method in mean AP.

    over_queries: p of the randomisation test. over_both: p of `queries_and_seeds`. better: the share of the queries on
    which the method is better than the control; equal ones count half.
    """

    difference: float
    over_queries: float
    over_both: float
    better: float

    def __str__(self) -> str:
        return f"{self.difference:+.4f} ({self.over_queries:.2g}; {self.over_both:.2g}) {self.better:.0%}"


def paired_tests(rows: Sequence[dict[str, Any]], n_bits: int, *, of_query: str) -> dict[str, Tested]:
    """The control against each other method at a length, two-sided; p-values are corrected for their number (Holm).

    The randomisation test, paired over queries, takes the runs as given: it says whether a difference would persist
    with other queries. `queries_and_seeds` says whether it would with other queries and other seeds.
    """
    found = {method: np.array(of_seeds) for method, of_seeds in per_query_of(rows, n_bits, of_query).items()}
    control = _control(rows)
    if control not in found:
        return {}
    differences = {method: found[control] - found[method] for method in found if method != control}
    means = {method: one.mean(axis=0) for method, one in differences.items()}
    over_queries = holm([randomization_test(one) for one in means.values()])
    over_both = holm([queries_and_seeds(one) for one in differences.values()])
    return {
        method: Tested(float(one.mean()), p, both, float(np.mean((one < 0) + 0.5 * (one == 0))))
        for (method, one), p, both in zip(means.items(), over_queries, over_both, strict=True)
    }


def _ranks(rows: Sequence[dict[str, Any]], n_bits: int, *, of_query: str) -> list[str]:
    """The place of the control, and how its mean rank over queries compares (Demšar, JMLR 2006); for three or more."""
    found, control = per_query_of(rows, n_bits, of_query), _control(rows)
    if control not in found or len(found) < 3:
        return []
    means = {method: np.mean(seeds, axis=0) for method, seeds in found.items()}
    of_seeds = [[np.mean(one) for one in seeds] for method, seeds in found.items() if method != control]
    ahead_in = sum(np.mean(own) > max(others) for own, *others in zip(found[control], *of_seeds, strict=True))
    place = 1 + sum(values.mean() > means[control].mean() for values in means.values())
    ranks, critical = mean_ranks(means)
    level = [METHODS[m].title for m in means if m != control and abs(ranks[m] - ranks[control]) < critical]
    ahead = [METHODS[m].title for m in means if ranks[control] - ranks[m] >= critical]
    p = float(friedmanchisquare(*means.values()).pvalue)
    friedman = f"is {p:.1g}" if p else "is below 1e-300"  # it underflows with so many queries
    return [
        f"- {n_bits} bits: {METHODS[control].title} is number {place} of {len(means)}, and the first for {ahead_in} of "
        f"{len(found[control])} seeds. Its mean rank over queries is {ranks[control]:.2f} (Nemenyi's critical "
        f"difference {critical:.2f}; Friedman's p {friedman}). Significantly better: {'; '.join(ahead) or 'none'}. "
        f"Not significantly different: {'; '.join(level) or 'none'}."
    ]
