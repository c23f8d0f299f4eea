"""Compare several reports with the same protocol, and query by query if per_query.csv exists."""

import csv
import io
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import compare, holm, queries_and_seeds
from hashseek.training.evaluation.report.citation import labels_in_words, protocol_in_words
from hashseek.training.evaluation.report.markdown import document
from hashseek.training.evaluation.report.schema import EvaluationReport, MeanValue, load_report
from hashseek.training.evaluation.report.sections import Section, interval, number, tie_range
from hashseek.training.report_format import Table, mean_and_deviation, table_as_latex

# What must be the same in all reports. Checkpoint, K, seed and versions may differ: they are the point of a comparison.
# The name of the data set is the path of its files, and does not matter.
_HASHES = ("query_sha256", "database_sha256")
_COUNTS = ("queries", "database", "labels")
_TEST = (
    "p is from the paired randomisation test over queries, for each metric with Holm's correction if more than two "
    "methods are compared. Reports that differ only in the training seed are one method: the mean over its seeds for "
    "each query. Neither p nor the interval covers other seeds or other settings. The p with seeds, with the same "
    "correction, is Clark's min F' (1973), for methods with the same two or more seeds: it covers other seeds as well."
)
# Metrics of per_query.csv that are compared, and the field of `Score` with their mean.
_PAIRED = {"AP": "mean_average_precision", "precision": "precision"}


@dataclass(frozen=True)
class Entry:
    """A report, its letter, the path of its report.json, and the metrics (Q,) of its queries if they are there."""

    letter: str
    path: Path
    report: EvaluationReport
    queries: tuple[str, ...] = ()
    per_query: dict[str, NDArray[np.float64]] | None = None

    @property
    def name(self) -> str:
        """Its name in a message."""
        return f"{self.letter} ({self.path})"

    @property
    def ns(self) -> list[int]:
        """The values of N of its metrics."""
        return [score.n for score in self.report.scores]

    @property
    def seed(self) -> int | None:
        """The seed of its training, if known."""
        return self.report.model.get("training_seed")

    @property
    def settings(self) -> tuple[Any, ...]:
        """What its training and evaluation must have in common with those of another seed."""
        model = self.report.model
        return model.get("training_settings_sha256"), self.report.n_bits


@dataclass(frozen=True)
class Group:
    """Reports of models that were trained in the same way except for the seed; often only one."""

    entries: list[Entry]

    @property
    def letters(self) -> str:
        """The letters of its reports, such as "A,C"."""
        return ",".join(entry.letter for entry in self.entries)

    def per_query(self, metric: str) -> NDArray[np.float64] | None:
        """The mean over seeds of a metric of each query, (Q,); None if a table is missing."""
        tables = [entry.per_query for entry in self.entries]
        return np.mean([table[metric] for table in tables if table], axis=0) if all(tables) else None

    def by_seed(self, metric: str) -> dict[int | None, NDArray[np.float64]]:
        """A metric of each query, (Q,), for each seed; without those whose table is missing."""
        return {entry.seed: entry.per_query[metric] for entry in self.entries if entry.per_query}


def grouped(entries: Sequence[Entry]) -> list[Group]:
    """The reports in groups; those that differ only in the training seed are in one group.

    If two of them have the same seed, such as the best and the last epoch of a run, all stay alone: it is unknown which
    of them belong together.
    """
    alike: dict[Any, list[Entry]] = {}
    for entry in entries:
        key = entry.letter if None in entry.settings else entry.settings
        alike.setdefault(key, []).append(entry)
    groups: list[Group] = []
    for found in alike.values():
        together = len({entry.seed for entry in found}) == len(found)
        groups += [Group(found)] if together else [Group([entry]) for entry in found]
    return groups


def load_entries(places: Sequence[Path]) -> list[Entry]:
    """Load reports that can be compared, in the given order.

    Args:
        places: folders from `hashseek evaluate`, or their report.json.

    Raises:
        BadConfig: there are fewer than two, one cannot be read, or two have different protocols.
    """
    if len(places) < 2:
        raise BadConfig(f"a comparison needs at least two reports, got {len(places)}")
    entries = [_load(letter, place) for letter, place in zip(_letters(), places, strict=False)]
    for other in entries[1:]:
        if reasons := differences(entries[0].report, other.report):
            raise BadConfig(
                f"{entries[0].name} and {other.name} have different protocols: {'; '.join(reasons)}: compare only "
                "models that were trained and evaluated on the same splits, with the same settings and labels"
            )
        if entries[0].queries and other.queries and entries[0].queries != other.queries:
            raise BadConfig(
                f"the per_query.csv of {entries[0].name} and of {other.name} have different queries: evaluate again"
            )
    if not shared_ns(entries):
        has = "; ".join(f"{entry.letter} has N = {_listed(entry.ns)}" for entry in entries)
        raise BadConfig(f"the reports have no N in common ({has}): evaluate them again with the same -n")
    return entries


def _letters() -> Iterator[str]:
    """A to Z, then AA, AB and so on."""
    for length in count(1):
        yield from map("".join, product(string.ascii_uppercase, repeat=length))


def differences(first: EvaluationReport, second: EvaluationReport) -> list[str]:
    """Why the metrics of two reports cannot be compared; empty if they can."""
    one, other = _protocol_values(first), _protocol_values(second)
    return [
        f"{name}: {one[name]} and {other[name]}"
        for name in one
        if one[name] != other[name] or (name in _HASHES and one[name] is None)
    ]


def _protocol_values(report: EvaluationReport) -> dict[str, Any]:
    return {
        "AP normalizer": report.normalizer,
        "ties": report.ties,
        "labels used": labels_in_words(report),
        **{name: report.data.get(name) for name in (*_COUNTS, *_HASHES)},
    }


def shared_ns(entries: Sequence[Entry]) -> list[int]:
    """The values of N that every report has, ascending."""
    return sorted(set.intersection(*(set(entry.ns) for entry in entries)))


def as_markdown(entries: Sequence[Entry]) -> str:
    """The comparison as Markdown: protocol, reports, metrics at each shared N, and paired differences."""
    ns = shared_ns(entries)
    first = entries[0].report
    names = dict.fromkeys(str(entry.report.data.get("data_set")) for entry in entries)
    protocol = {"data set": ", ".join(names), **_protocol_values(first), "N": _listed(ns)}
    groups = grouped(entries)
    paired = _paired(groups, ns)
    parts = [
        Section("protocol", "Protocol", tables=[Table(("", ""), [(key, str(v)) for key, v in protocol.items()], 2)]),
        Section("reports", "Reports", tables=[_reports(entries)]),
        Section("methods", "Methods", tables=[methods(entries)]),
        *(Section("metrics", f"N = {n}", tables=_metrics(entries, n)) for n in ns),
        Section("paired", "Query by query", _TEST, [paired] if paired.rows else []),
        Section("notes", "Notes", items=_notes(entries, ns)),
    ]
    return document("Comparison", parts)


def _load(letter: str, place: Path) -> Entry:
    path = place / "report.json" if place.is_dir() else place
    if place.is_dir() and not path.is_file():
        raise BadConfig(
            f"{place} has no report.json: pass a folder that `hashseek evaluate` wrote, such as "
            f"{place / 'evaluation-best'}"
        )
    report = load_report(path)
    table = path.with_name("per_query.csv")
    if not table.exists():
        return Entry(letter, path, report)
    queries, columns = read_per_query(table)
    for score in report.scores:
        for metric, field in _PAIRED.items():
            value: MeanValue = getattr(score, field)
            column = columns.get(f"{metric}@{score.n}")
            if column is None or not np.isclose(column.mean(), value.expected, rtol=0, atol=1e-9):
                raise BadConfig(
                    f"{table} does not belong to {path.name} (the means of {metric}@{score.n} differ): evaluate again, "
                    "or delete the table to compare without it"
                )
    return Entry(letter, path, report, queries, columns)


def read_per_query(path: Path) -> tuple[tuple[str, ...], dict[str, NDArray[np.float64]]]:
    """Names of the queries, and their AP@N and precision@N (Q,), from a per_query.csv.

    Raises:
        BadConfig: the table cannot be read, or is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        by_name = dict(zip(header, zip(*rows, strict=True), strict=True))
        wanted = [name for name in header if name.partition("@")[0] in _PAIRED and name.partition("@")[2].isdecimal()]
        metrics = {name: np.array(by_name[name], dtype=np.float64) for name in wanted}
        return tuple(by_name["query"]), metrics
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise BadConfig(f"cannot read the table {path} ({error}): evaluate again, or delete the table") from None


def _reports(entries: Sequence[Entry]) -> Table:
    rows = []
    for entry in entries:
        report = entry.report
        versions = [report.model.get("computed_in", "–"), report.versions.get("hashseek", "–")]
        numbers = [str(report.n_bits), "–" if entry.seed is None else str(entry.seed)]
        rows.append([entry.letter, report.title, report.fingerprint[:12], *versions, str(entry.path), *numbers])
    return Table(["", "report", "fingerprint", "computed in", "hashseek", "file", "bits", "seed"], rows, text_columns=6)


def _metrics(entries: Sequence[Entry], n: int) -> list[Table]:
    tables = []
    for name, field in {"mAP": "mean_average_precision", "precision": "precision"}.items():
        rows = []
        for entry in entries:
            score = next(score for score in entry.report.scores if score.n == n)
            value: MeanValue = getattr(score, field)
            served = [number(score.as_served)] if name == "mAP" else []
            cells = [number(value.expected), interval(value), tie_range(value)]
            rows.append([entry.letter, str(entry.report.n_bits), *cells, *served])
        header = ["", "bits", f"{name}@{n}", "95 % interval", "worst to best"]
        tables.append(Table([*header, *["as served"] * (name == "mAP")], rows, text_columns=1, bold=2))
    return tables


def methods(entries: Sequence[Entry]) -> Table:
    """mAP@N of each method, as mean and standard deviation over its seeds."""
    ns, rows = shared_ns(entries), []
    for group in grouped(entries):
        first = group.entries[0].report
        cells = []
        for n in ns:
            values = [s.mean_average_precision.expected for e in group.entries for s in e.report.scores if s.n == n]
            cells.append(mean_and_deviation(values))
        method = str(first.model.get("method", first.title))
        rows.append([group.letters, method, str(first.n_bits), str(len(group.entries)), *cells])
    caption = "Mean and standard deviation over training seeds."
    return Table(["", "method", "bits", "seeds", *(f"mAP@{n}" for n in ns)], rows, text_columns=2, caption=caption)


def methods_as_latex(entries: Sequence[Entry]) -> str:
    """The table of methods for a paper, with the protocol in its caption."""
    table = methods(entries)
    caption = f"{table.caption} {protocol_in_words(entries[0].report)}"
    return table_as_latex(replace(table, caption=caption), label="tab:methods")


def _paired(groups: Sequence[Group], ns: Sequence[int]) -> Table:
    """Each group compared with the first; p-values are corrected for the number of groups per metric."""
    first, rows = groups[0], []
    others = {f"{other.letters} - {first.letters}": other for other in groups[1:]}
    for name in (f"{metric}@{n}" for n in ns for metric in _PAIRED):
        own, found = first.per_query(name), []
        for pair, other in others.items():
            theirs = other.per_query(name)
            if own is not None and theirs is not None:
                found.append((pair, compare(own, theirs), _over_seeds(first.by_seed(name), other.by_seed(name))))
        corrected = holm([each.p_value for _, each, _ in found])
        of_both = iter(holm([p for _, _, p in found if not np.isnan(p)]))
        for (pair, each, both), p_value in zip(found, corrected, strict=True):
            change = each.difference
            spread = f"{change.low:+.4f} to {change.high:+.4f}"
            counts = [str(each.better), str(each.worse), str(each.equal)]
            p_values = [f"{p_value:.4f}", "–" if np.isnan(both) else f"{next(of_both):.4f}"]
            rows.append([pair, name, f"{change.mean:+.4f}", spread, *p_values, *counts])
    rows.sort(key=lambda row: list(others).index(row[0]))  # stable: metrics stay in order
    header = ["", "metric", "mean difference", "95 % interval", "p", "p with seeds", "queries better", "worse", "equal"]
    return Table(header, rows, text_columns=2, bold=2)


def _over_seeds(first: dict[int | None, NDArray[np.float64]], second: dict[int | None, NDArray[np.float64]]) -> float:
    """p of `queries_and_seeds`; NaN unless both have the same seeds, at least two."""
    if first.keys() != second.keys() or len(first) < 2:
        return float("nan")
    return queries_and_seeds(np.array([second[seed] - first[seed] for seed in first]))


def _notes(entries: Sequence[Entry], ns: Sequence[int]) -> list[str]:
    notes = []
    for entry in entries:
        if not entry.report.data.get("same_splits_as_in_training", False):
            notes.append(f"{entry.letter}: the checkpoint was trained on other splits, or does not record them")
        left_out = [n for n in entry.ns if n not in ns]
        if left_out:
            notes.append(f"{entry.letter}: N = {_listed(left_out)} is left out because not every report has it")
        if entry.per_query is None:
            notes.append(f"{entry.letter}: there is no per_query.csv, so it is not compared query by query")
    return notes


def _listed(ns: Sequence[int]) -> str:
    return ", ".join(map(str, ns))
