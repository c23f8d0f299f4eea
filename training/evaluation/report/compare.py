"""Compare several reports: metrics of the same protocol only, and query by query where per_query.csv is there."""

import csv
import io
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import compare
from hashseek.training.evaluation.report.markdown import section_as_markdown
from hashseek.training.evaluation.report.schema import EvaluationReport, MeanValue, load_report
from hashseek.training.evaluation.report.sections import Section, interval, number, protocol_of, tie_range
from hashseek.training.report_format import Table

# What must be the same, as (name, value of a report). Checkpoint, K, seed and versions may differ: they are what a
# comparison is about. The name of the data set is the place of its files, and does not matter.
_HASHES = ("query_sha256", "database_sha256", "splits_sha256")
_COUNTS = ("queries", "database", "labels")
# Metrics of per_query.csv that are compared, and the field of `Score` that is their mean.
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
        """The N of its metrics."""
        return [score.n for score in self.report.scores]


def load_entries(places: Sequence[Path]) -> list[Entry]:
    """Load reports that can be compared, in the given order.

    Args:
        places: folders that `hashseek evaluate` wrote, or their report.json.

    Raises:
        BadConfig: there are fewer than two, one cannot be read, or two have different protocols.
    """
    if not 2 <= len(places) <= len(string.ascii_uppercase):
        raise BadConfig(f"2 to {len(string.ascii_uppercase)} reports can be compared, not {len(places)}")
    entries = [_load(letter, place) for letter, place in zip(string.ascii_uppercase, places, strict=False)]
    for other in entries[1:]:
        if reasons := differences(entries[0].report, other.report):
            raise BadConfig(
                f"{entries[0].name} and {other.name} have different protocols: {'; '.join(reasons)}: evaluate both on "
                "the same splits with the same settings"
            )
        if entries[0].queries and other.queries and entries[0].queries != other.queries:
            raise BadConfig(
                f"the per_query.csv of {entries[0].name} and of {other.name} have different queries: evaluate again"
            )
    if not shared_ns(entries):
        has = "; ".join(f"{entry.letter} has N = {_listed(entry.ns)}" for entry in entries)
        raise BadConfig(f"the reports have no N in common ({has}): evaluate them with the same -n")
    return entries


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
        "labels used": protocol_of(report),
        "nDCG gain": report.gain,
        **{name: report.data.get(name) for name in (*_COUNTS, *_HASHES)},
    }


def shared_ns(entries: Sequence[Entry]) -> list[int]:
    """The N that every report has, ascending."""
    return sorted(set.intersection(*(set(entry.ns) for entry in entries)))


def as_markdown(entries: Sequence[Entry]) -> str:
    """The comparison as Markdown: protocol, reports, metrics at each shared N, and paired differences."""
    ns = shared_ns(entries)
    first = entries[0].report
    names = dict.fromkeys(str(entry.report.data.get("data_set")) for entry in entries)
    protocol = {"data set": ", ".join(names), **_protocol_values(first), "N": _listed(ns)}
    paired = _paired(entries, ns)
    parts = [
        Section("protocol", "Protocol", tables=[Table(("", ""), [(key, str(v)) for key, v in protocol.items()], 2)]),
        Section("reports", "Reports", tables=[_reports(entries)]),
        *(Section("metrics", f"N = {n}", tables=_metrics(entries, n)) for n in ns),
        Section("paired", "Query by query", tables=[paired] if paired.rows else []),
        Section("notes", "Notes", items=_notes(entries, ns)),
    ]
    return "\n".join(["# Comparison", *(section_as_markdown(part) for part in parts if part.tables or part.items), ""])


def _load(letter: str, place: Path) -> Entry:
    path = place / "report.json" if place.is_dir() else place
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
        raise BadConfig(f"cannot read the table {path} ({error}): evaluate again, or delete it") from None


def _reports(entries: Sequence[Entry]) -> Table:
    rows = []
    for entry in entries:
        report = entry.report
        versions = [report.model.get("computed_in", "–"), report.versions.get("hashseek", "–")]
        numbers = [str(report.n_bits), str(report.seed)]
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


def _paired(entries: Sequence[Entry], ns: Sequence[int]) -> Table:
    rows = []
    first = entries[0]
    for other in entries[1:]:
        if first.per_query is None or other.per_query is None:
            continue
        for name in (f"{metric}@{n}" for n in ns for metric in _PAIRED):
            found = compare(first.per_query[name], other.per_query[name])
            change = found.difference
            counts = [str(found.better), str(found.worse), str(found.equal)]
            spread = f"{change.low:+.4f} to {change.high:+.4f}"
            rows.append([f"{other.letter} - {first.letter}", name, f"{change.mean:+.4f}", spread, *counts])
    header = ["", "metric", "mean difference", "95 % interval", "queries better", "worse", "equal"]
    return Table(header, rows, text_columns=2, bold=2)


def _notes(entries: Sequence[Entry], ns: Sequence[int]) -> list[str]:
    notes = []
    for entry in entries:
        if not entry.report.data.get("same_splits_as_in_training", False):
            notes.append(f"{entry.letter}: the checkpoint was not trained on these splits, or does not say so")
        left_out = [n for n in entry.ns if n not in ns]
        if left_out:
            notes.append(f"{entry.letter}: N = {_listed(left_out)} is left out, because not every report has it")
        if entry.per_query is None:
            notes.append(f"{entry.letter}: there is no per_query.csv, so it is not compared query by query")
    return notes


def _listed(ns: Sequence[int]) -> str:
    return ", ".join(map(str, ns))
