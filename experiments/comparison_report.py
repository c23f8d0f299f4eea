"""The report of a comparison: tables of its finished runs, paired tests, and critical-difference diagrams."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import friedmanchisquare, rankdata, studentized_range, wilcoxon

from experiments.comparison import SEEDS_OF_SEARCH, rows_of
from experiments.critical_difference import write_diagram
from experiments.methods import METHODS
from experiments.scoring import N
from hashseek.retrieval.metrics import holm, randomization_test
from hashseek.training.report_format import Table, table_as_markdown

_TABLES = {
    "mAP": f"mAP@{N} by Hamming distance, expected over ties",
    "asymmetric": f"mAP@{N} by the query's outputs",
    "gallery": "Precision@10 on foreign images (COCO 256), each among all others, by Hamming distance",
    "gallery_rare": "The same without the most frequent label, person",
}
_OF_QUERY = {"mAP": "AP", "asymmetric": "asymmetric_AP"}


def as_markdown(folder: Path, *, methods: Sequence[str]) -> str:
    """The tables of all finished runs, best first at the longest code, and the paired tests of `paired_tests`.

    With several searches, also the mean of each.
    """
    rows = [row for method in methods for row in rows_of(folder, method)]
    if not rows:
        return "no run is finished yet\n"
    bits = sorted({row["n_bits"] for row in rows})
    searches = sorted({_search_of(row) for row in rows})

    def values(method: str, n_bits: int, key: str, search: int | None = None) -> NDArray[np.float64]:
        found = [row for row in rows if row["method"] == method and row["n_bits"] == n_bits]
        return np.array([row[key] for row in found if key in row and search in (None, _search_of(row))])

    def means_of_searches(method: str, n_bits: int, key: str) -> str:
        of_searches = [values(method, n_bits, key, search) for search in searches]
        return ", ".join(f"{found.mean():.4f}" for found in of_searches if len(found))

    def mean(method: str, key: str) -> float:
        found = values(method, bits[-1], key)
        return float(found.mean()) if len(found) else -1.0  # ITQ-CCA has no long codes

    lines: list[str] = []
    what = "seeds" if len(searches) == 1 else "seeds and searches"
    for key, title in _TABLES.items():
        shown = {row["method"] for row in rows if key in row}
        if not shown:
            continue
        header = ["method", *(f"{k} bits" for k in bits)]
        ordered = sorted(shown, key=lambda m: -mean(m, key))
        cells = [[METHODS[m].title, *(mean_and_deviation(values(m, k, key)) for k in bits)] for m in ordered]
        table = table_as_markdown(Table(header, cells, text_columns=len(header)))
        lines += [f"{title}: mean and standard deviation over {what}.", "", table]
        if len(searches) > 1 and key in _OF_QUERY:
            cells = [[METHODS[m].title, *(means_of_searches(m, k, key) for k in bits)] for m in ordered]
            table = table_as_markdown(Table(header, cells, text_columns=len(header)))
            lines += ["", "The mean over seeds of each search:", "", table]
        tests = (
            [line for k in bits for line in paired_tests(rows, k, of_query=_OF_QUERY[key])] if key in _OF_QUERY else []
        )
        lines += ["", *tests, ""]
    distances = [
        [METHODS[method].title, *(f"{mean(method, key):.1f}" for key in ("d_intra", "d_inter"))]
        for method in methods
        if mean(method, "d_intra") >= 0
    ]
    table = table_as_markdown(Table(["method", "d_intra", "d_inter"], distances, text_columns=1))
    lines += [f"Mean distances in bits at {bits[-1]} bits:", "", table, *_chosen_table(folder, methods)]
    return "\n".join(lines) + "\n"


def _chosen_table(folder: Path, methods: Sequence[str]) -> list[str]:
    """What each search chose; nothing for a folder without searches."""
    rows: list[list[str]] = []
    for method in methods:
        for file in sorted((folder / method).glob("chosen-*.json"), key=lambda file: file.stem):
            _, n_bits, *search = file.stem.split("-")
            where = f"{n_bits}, search {int(search[0]) + 1}" if search else n_bits
            rows.append([METHODS[method].title, where, f"`{', '.join(json.loads(file.read_text('utf-8')))}`"])
    table = table_as_markdown(Table(["method", "bits", "settings"], rows, text_columns=3))
    return ["", "Settings chosen on validation images:", "", table] if rows else []


def _search_of(row: dict[str, Any]) -> int:
    return int(row["seed"]) // SEEDS_OF_SEARCH


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


def write_plots(folder: Path, *, methods: Sequence[str]) -> list[Path]:
    """Write the critical-difference diagrams of all lengths, by distance and by outputs; returns their files."""
    rows = [row for method in methods for row in rows_of(folder, method)]
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


def paired_tests(rows: Sequence[dict[str, Any]], n_bits: int, *, of_query: str) -> list[str]:
    """Is the best method at a length significantly better? Paired over queries; each query's AP is averaged over seeds.

    The best against each other method, with p corrected for their number (Holm): by the randomisation test of the mean
    difference, which matches mAP, and by Wilcoxon's signed-rank test, in which many small differences outweigh few
    large ones; one-sided, since a method with a lower mean may still be better on most queries. With three methods or
    more, also Friedman's test and the critical difference of mean ranks (Nemenyi, at 0.05), as Demšar (JMLR 2006)
    proposes. Then the share of the queries on which another method is better.
    """
    found = per_query_of(rows, n_bits, of_query)
    means = {method: np.mean(seeds, axis=0) for method, seeds in found.items()}
    means = dict(sorted(means.items(), key=lambda item: -item[1].mean()))
    if len(means) < 2:
        return []
    first, *others = means
    differences = [means[first] - means[m] for m in others]
    wins = {m: float(np.mean((d < 0) + 0.5 * (d == 0))) for m, d in zip(others, differences, strict=True)}
    better = ", ".join(f"{METHODS[m].title} ({share:.0%})" for m, share in wins.items() if share > 0.5) or "none"
    by_mean = holm([randomization_test(d) for d in differences])
    by_rank = holm([float(wilcoxon(d, alternative="greater").pvalue) if d.any() else 1.0 for d in differences])

    def close(p_values: Sequence[float]) -> str:
        pairs = zip(others, p_values, strict=True)
        return ", ".join(f"{METHODS[m].title} (p = {p:.2g})" for m, p in pairs if p >= 0.05) or "none"

    seeds = sum(
        all(np.mean(one) > np.mean(other) for other in rest)
        for one, *rest in zip(*(found[m] for m in means), strict=True)
    )
    return [
        f"- {n_bits} bits: {METHODS[first].title} is first, for {seeds} of {len(found[first])} seeds. Not "
        f"significantly worse by the randomisation test: {close(by_mean)}; by Wilcoxon's one-sided test: "
        f"{close(by_rank)}. {_by_mean_rank(means, first) if len(means) > 2 else ''}Better on most queries (equal ones "
        f"count half): {better}."
    ]


def _by_mean_rank(means: Mapping[str, NDArray[np.float64]], first: str) -> str:
    """How the method `first` compares with the others by its mean rank, and Friedman's p."""
    ranks, critical = mean_ranks(means)
    level = [METHODS[m].title for m in means if m != first and abs(ranks[m] - ranks[first]) < critical]
    ahead = [METHODS[m].title for m in means if ranks[first] - ranks[m] >= critical]
    p = float(friedmanchisquare(*means.values()).pvalue)
    friedman = f"is {p:.1g}" if p else "is below 1e-300"  # it underflows with so many queries
    return (
        f"By mean rank over queries ({ranks[first]:.2f}, Nemenyi's critical difference {critical:.2f}), it does not "
        f"differ significantly from {', '.join(level) or 'none'}, and is significantly worse than "
        f"{', '.join(ahead) or 'none'}. Friedman's p {friedman}. "
    )


def mean_and_deviation(values: Sequence[float] | NDArray[np.float64]) -> str:
    """The mean and the standard deviation, as a cell of a table; a single value alone, and nothing without values."""
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{np.mean(values):.4f} ± {deviation(values):.4f}"


def deviation(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The sample standard deviation; 0 of a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
