"""An evaluation as JSON for machines and Markdown for people."""

import json
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from retrieval.metrics import Figure, Histograms, Normalizer, average_precision, precision

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Value:
    """A figure averaged over queries: expected over ties, least and greatest over orders of ties."""

    expected: float
    worst: float
    best: float


@dataclass(frozen=True)
class Score:
    """mAP@N and precision@N of one model; `as_served` is mAP@N in the order that search gives (ties by id)."""

    n: int
    mean_average_precision: Value
    precision: Value
    as_served: float | None = None


@dataclass(frozen=True)
class Report:
    """Everything needed to judge and to repeat an evaluation."""

    title: str
    scores: tuple[Score, ...]
    normalizer: Normalizer
    n_bits: int
    fingerprint: str
    data: dict[str, Any]
    model: dict[str, Any]
    notes: tuple[str, ...] = ()
    baseline: tuple[Score, ...] = ()
    baseline_name: str = ""
    seed: int = 0
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: software_versions())
    command: str = ""
    schema_version: int = SCHEMA_VERSION

    def as_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def score(found: Histograms, *, n: int, normalizer: Normalizer, as_served: float | None = None) -> Score:
    """The figures at N (or at the database's size, if that is smaller)."""
    return Score(
        n=min(n, found.n_database),
        mean_average_precision=_mean(average_precision(found, n=n, normalizer=normalizer)),
        precision=_mean(precision(found, n=n)),
        as_served=as_served,
    )


def chance(found: Histograms) -> float:
    """Precision of a random order: the share of relevant pairs."""
    return float((found.relevant.sum(axis=1) / found.total.sum(axis=1)).mean())


def software_versions() -> dict[str, str]:
    """Versions of what computed the figures."""
    return {
        "hashseek": version("hashseek"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.machine()} {platform.system()}",
    }


def as_markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"# {report.title}", ""]
    lines += _table(report.scores)
    if report.baseline:
        lines += ["", f"## {report.baseline_name}", "", *_table(report.baseline)]
    lines += [
        "",
        "mAP and precision are expectations over a random order of equal Hamming distances; the range is what the best "
        "and the worst order would give. `as served` is the order of the search service: ties by ascending id.",
    ]
    lines += ["", "## Protocol", "", "| | |", "|---|---|"]
    rows = {
        "AP normaliser": report.normalizer,
        "code length": f"{report.n_bits} bits",
        "checkpoint fingerprint": report.fingerprint,
        **{key.replace("_", " "): value for key, value in report.data.items()},
        **{key.replace("_", " "): value for key, value in report.model.items()},
        "seed": report.seed,
        "created": report.created,
        "versions": ", ".join(f"{name} {number}" for name, number in report.versions.items()),
        "command": f"`{report.command}`",
    }
    lines += [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def _table(scores: tuple[Score, ...]) -> list[str]:
    lines = [
        "| N | mAP@N | worst to best order | as served | precision@N | worst to best order |",
        "|---:|---:|---|---:|---:|---|",
    ]
    for item in scores:
        ap, p = item.mean_average_precision, item.precision
        served = "" if item.as_served is None else f"{item.as_served:.4f}"
        lines.append(
            f"| {item.n} | **{ap.expected:.4f}** | {ap.worst:.4f} to {ap.best:.4f} | {served} | "
            f"{p.expected:.4f} | {p.worst:.4f} to {p.best:.4f} |"
        )
    return lines


def _cell(value: Any) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def _mean(figure: Figure) -> Value:
    return Value(*(float(values.mean()) for values in figure))
