"""Several reports side by side: figures of one protocol only, and query by query where their tables are there."""

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
from hashseek.training.evaluation.report.markdown import cell, protocol_of
from hashseek.training.evaluation.report.schema import Report, Value, load_report

# What a hash in the certificate stands for. The data set's name is where its files lie, and settles nothing.
_HASHES = {
    "query_sha256": "the query split",
    "database_sha256": "the database split",
    "splits_sha256": "the files or labels of the three splits",
}
# Figures of per_query.csv that are compared, and the field of `Score` that is their mean.
_PAIRED = {"AP": "mean_average_precision", "precision": "precision"}


@dataclass(frozen=True)
class Entry:
    """A report, the letter it goes by, its report.json, and the figures (Q,) of its queries where they are there."""

    letter: str
    path: Path
    report: Report
    queries: tuple[str, ...] = ()
    per_query: dict[str, NDArray[np.float64]] | None = None

    @property
    def name(self) -> str:
        """How a message calls it."""
        return f"{self.letter} ({self.path})"


def load_entries(places: Sequence[Path]) -> list[Entry]:
    """Reports in the order given, of which each can be compared with the first.

    Args:
        places: folders that `hashseek evaluate` wrote, or their report.json.

    Raises:
        BadConfig: fewer than two, one that cannot be read, or two of different protocols.
    """
    if not 2 <= len(places) <= len(string.ascii_uppercase):
        raise BadConfig(f"2 to {len(string.ascii_uppercase)} reports can be compared, not {len(places)}")
    entries = [_load(letter, place) for letter, place in zip(string.ascii_uppercase, places, strict=False)]
    for other in entries[1:]:
        if reasons := differences(entries[0].report, other.report):
            raise BadConfig(
                f"figures of {entries[0].name} and {other.name} are of different protocols: {'; '.join(reasons)}: "
                "evaluate both on the same splits with the same settings"
            )
        if entries[0].queries and other.queries and entries[0].queries != other.queries:
            raise BadConfig(
                f"the per_query.csv of {entries[0].name} and of {other.name} are not of the same queries in one order: "
                "evaluate again"
            )
    if not shared_ns(entries):
        has = "; ".join(f"{entry.letter} has N = {_listed(_ns(entry.report))}" for entry in entries)
        raise BadConfig(f"the reports have no N in common ({has}): evaluate them at the same -n")
    return entries


def differences(first: Report, second: Report) -> list[str]:
    """Why the figures of two reports must not be compared; nothing if they may.

    K, checkpoint, seed and versions may differ: they are what a comparison is about.
    """
    reasons = []
    if first.normalizer != second.normalizer:
        reasons.append(f"AP is divided by {first.normalizer!r} in one and by {second.normalizer!r} in the other")
    if first.ties != second.ties:
        reasons.append(f"equal distances are taken {_ties(first)} in one and {_ties(second)} in the other")
    if (first.labels_used, first.held_out) != (second.labels_used, second.held_out):
        reasons.append(f"one is about {protocol_of(first)}, the other about {protocol_of(second)}")
    if first.gain != second.gain:
        reasons.append(f"the gain of nDCG is {first.gain!r} in one and {second.gain!r} in the other")
    for key, what in {"queries": "queries", "database": "database images", "labels": "labels"}.items():
        one, other = first.data.get(key), second.data.get(key)
        if one != other:
            reasons.append(f"one has {one} {what}, the other {other}")
    for key, what in _HASHES.items():
        one, other = first.data.get(key), second.data.get(key)
        if one is None or other is None:
            reasons.append(f"the certificate does not say {key}, the hash of {what}")
        elif one != other:
            reasons.append(
                f"{what} differ{'' if key == 'splits_sha256' else 's'} ({key} {str(one)[:12]} and {str(other)[:12]})"
            )
    return reasons


def shared_ns(entries: Sequence[Entry]) -> list[int]:
    """The N that every report has, ascending."""
    return sorted(set.intersection(*(set(_ns(entry.report)) for entry in entries)))


def as_markdown(entries: Sequence[Entry]) -> str:
    """The comparison as Markdown: protocol, what the reports are, figures at each shared N, and paired differences."""
    ns = shared_ns(entries)
    parts = ["# Comparison", "", *_protocol(entries, ns), "", *_reports(entries)]
    for n in ns:
        parts += ["", f"## N = {n}", "", *_figures(entries, n)]
    parts += ["", "## Query by query", "", *_paired(entries, ns)]
    if notes := _notes(entries, ns):
        parts += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(parts) + "\n"


def _load(letter: str, place: Path) -> Entry:
    path = place / "report.json" if place.is_dir() else place
    report = load_report(path)
    table = path.with_name("per_query.csv")
    if not table.exists():
        return Entry(letter, path, report)
    queries, columns = read_per_query(table)
    for score in report.scores:
        for figure, field in _PAIRED.items():
            value: Value = getattr(score, field)
            column = columns.get(f"{figure}@{score.n}")
            if column is None or not np.isclose(column.mean(), value.expected, rtol=0, atol=1e-9):
                raise BadConfig(
                    f"{table} is not of the evaluation in {path.name}: the mean of its {figure}@{score.n} is "
                    f"{'not there' if column is None else f'{column.mean():.6f}'}, the report says "
                    f"{value.expected:.6f}: evaluate again, or remove the table to do without it"
                )
    return Entry(letter, path, report, queries, columns)


def read_per_query(path: Path) -> tuple[tuple[str, ...], dict[str, NDArray[np.float64]]]:
    """Names of the queries, and their AP@N and precision@N (Q,), from a per_query.csv.

    Raises:
        BadConfig: it cannot be read, has no queries, or a value is not a number.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        if len(lines) < 2:
            raise ValueError("it has no queries")
        header, *rows = lines
        by_name = dict(zip(header, zip(*rows, strict=True), strict=True))
        wanted = [name for name in header if name.partition("@")[0] in _PAIRED and name.partition("@")[2].isdecimal()]
        figures = {name: np.array(by_name[name], dtype=np.float64) for name in wanted}
        for name, column in figures.items():
            if not np.isfinite(column).all():
                raise ValueError(f"{name} holds something that is not finite")
        return tuple(by_name["query"]), figures
    except OSError as error:
        raise BadConfig(f"the table {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, csv.Error) as error:
        reason = f"it has no column {error}" if isinstance(error, KeyError) else error
        raise BadConfig(f"the table {path} is damaged ({reason}): evaluate again, or remove it") from None


def _protocol(entries: Sequence[Entry], ns: Sequence[int]) -> list[str]:
    report = entries[0].report
    data = report.data
    rows = {
        "data set": ", ".join(dict.fromkeys(str(entry.report.data.get("data_set")) for entry in entries)),
        "queries, database, labels": f"{data.get('queries')}, {data.get('database')}, {data.get('labels')}",
        **{key.replace("_", " "): data[key] for key in _HASHES},
        "labels used": protocol_of(report),
        "AP normaliser": report.normalizer,
        "N": _listed(ns),
        "equal distances": "expected over their orders, bounds by worst and best; as served: ascending id"
        if report.ties == "expected"
        else _ties(report),
    }
    return ["| protocol of all | |", "|---|---|", *(f"| {key} | {cell(value)} |" for key, value in rows.items())]


def _reports(entries: Sequence[Entry]) -> list[str]:
    rows = [
        (
            entry.letter,
            entry.report.title,
            entry.report.n_bits,
            entry.report.fingerprint[:12],
            entry.report.seed,
            entry.report.model.get("computed_in", "–"),
            entry.report.versions.get("hashseek", "–"),
            entry.path,
        )
        for entry in entries
    ]
    return _table(("", "report", "bits", "fingerprint", "seed", "computed in", "hashseek", "file"), "llrlrlll", rows)


def _figures(entries: Sequence[Entry], n: int) -> list[str]:
    rows = []
    for entry in entries:
        score = next(score for score in entry.report.scores if score.n == n)
        ap, p = score.mean_average_precision, score.precision
        served = "–" if score.as_served is None else f"{score.as_served:.4f}"
        rows.append(
            (
                entry.letter,
                entry.report.n_bits,
                f"**{ap.expected:.4f}**",
                f"{ap.low:.4f} to {ap.high:.4f}",
                f"{ap.worst:.4f} to {ap.best:.4f}",
                served,
                f"{p.expected:.4f}",
                f"{p.low:.4f} to {p.high:.4f}",
                f"{p.worst:.4f} to {p.best:.4f}",
            )
        )
    columns = (f"mAP@{n}", "95 % interval", "worst to best order", "as served", f"precision@{n}")
    return _table(("", "bits", *columns, "95 % interval", "worst to best order"), "lrrllrrll", rows)


def _paired(entries: Sequence[Entry], ns: Sequence[int]) -> list[str]:
    rows = []
    first = entries[0]
    for other in entries[1:]:
        if first.per_query is None or other.per_query is None:
            continue
        for n in ns:
            for figure in _PAIRED:
                name = f"{figure}@{n}"
                found = compare(first.per_query[name], other.per_query[name])
                of = found.difference
                change, spread = f"**{of.mean:+.4f}**", f"{of.low:+.4f} to {of.high:+.4f}"
                pair = f"{other.letter} - {first.letter}"
                rows.append((pair, name, change, spread, found.better, found.worse, found.equal))
    if not rows:
        return [f"No paired comparison: it needs a per_query.csv beside {first.letter} and beside another report."]
    header = ("", "figure", "mean difference", "95 % interval", "queries better", "worse", "equal")
    return _table(header, "llrlrrr", rows)


def _notes(entries: Sequence[Entry], ns: Sequence[int]) -> list[str]:
    notes = []
    for entry in entries:
        if not entry.report.data.get("same_splits_as_in_training", False):
            notes.append(f"{entry.letter}: the checkpoint was not trained on these splits, or does not say so")
        left_out = [n for n in _ns(entry.report) if n not in ns]
        if left_out:
            notes.append(f"{entry.letter}: figures at N = {_listed(left_out)} are left out, not every report has them")
        if entry.per_query is None:
            notes.append(f"{entry.letter}: no per_query.csv beside the report, so nothing is compared query by query")
    return notes


def _ties(report: Report) -> str:
    return "as expected over their orders" if report.ties == "expected" else "in the order of the service"


def _ns(report: Report) -> list[int]:
    return [score.n for score in report.scores]


def _listed(ns: Sequence[int]) -> str:
    return ", ".join(map(str, ns))


def _table(header: Sequence[str], sides: str, rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table; `sides` has l or r for each column."""
    rule = "|".join("---:" if side == "r" else "---" for side in sides)
    return [
        f"| {' | '.join(header)} |",
        f"|{rule}|",
        *("| " + " | ".join(cell(value) for value in row) + " |" for row in rows),
    ]
