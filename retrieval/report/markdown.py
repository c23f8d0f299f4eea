"""A report as Markdown."""

from collections.abc import Sequence
from typing import Any

from retrieval.report.schema import Report, Score, Value


def as_markdown(report: Report) -> str:
    """The whole report, without pictures."""
    lines = [summary(report), "## Labels", ""]
    lines += [
        f"| label | queries | database | mAP@{report.main_n} | precision@{report.main_n} |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {cell(row.name)} | {row.queries} | {row.database} | {number(row.mean_average_precision)} | "
        f"{number(row.precision)} |"
        for row in report.labels
    ]
    if report.confusions:
        lines += ["", "## Labels taken for each other", ""]
        lines += ["| asked for | found | share of irrelevant hits | times chance |", "|---|---|---:|---:|"]
        lines += [
            f"| {cell(pair.asked)} | {cell(pair.returned)} | {pair.share:.1%} | {pair.lift:.1f} |"
            for pair in report.confusions
        ]
    if report.worst:
        lines += ["", "## Worst queries", "", f"| query | labels | AP@{report.main_n} |", "|---|---|---:|"]
        lines += [
            f"| {cell(query.name)} | {cell(', '.join(query.labels))} | {query.average_precision:.4f} |"
            for query in report.worst
        ]
    return "\n".join(lines) + "\n"


def summary(report: Report) -> str:
    """Headline figures, protocol and notes."""
    lines = [f"# {report.title}", "", *_table(report.scores)]
    if report.baseline:
        lines += ["", f"## {report.baseline_name}", "", *_table(report.baseline)]
    lines += ["", *_further(report.scores), "", EXPLANATION, "", "## Protocol", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {cell(value)} |" for key, value in certificate(report).items()]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


EXPLANATION = (
    "Figures are means over queries of the expectation over a random order of equal Hamming distances; ± is half of "
    "the 95 % bootstrap interval over queries, the range is what the worst and the best order would give. “As served” "
    "is the order of the search service: ties by ascending id."
)


def certificate(report: Report) -> dict[str, Any]:
    """The protocol certificate: what must agree for two reports to be compared, and what made this one."""
    distances, bits = report.distances, report.bits
    return {
        "AP normaliser": report.normalizer,
        "nDCG gain": "2^shared labels - 1" if report.gain == "exponential" else "shared labels",
        "N": ", ".join(str(score.n) for score in report.scores),
        "ranks that ties at the cut decide": ", ".join(f"{score.tied:.1%} at {score.n}" for score in report.scores),
        "code length": f"{report.n_bits} bits",
        "checkpoint fingerprint": report.fingerprint,
        **{key.replace("_", " "): value for key, value in report.data.items()},
        **{key.replace("_", " "): value for key, value in report.model.items()},
        "d_intra, d_inter (bits)": f"{number(distances.intra)}, {number(distances.inter)}",
        "distinct codes in the database": bits.distinct,
        "seed": report.seed,
        "created": report.created,
        "versions": ", ".join(f"{name} {text}" for name, text in report.versions.items()),
        "command": f"`{report.command}`",
    }


def number(value: float | None) -> str:
    """Four digits, or a dash for nothing."""
    return "–" if value is None else f"{value:.4f}"


def interval(value: Value) -> str:
    """The value with its bootstrap interval, which is nearly symmetric."""
    return f"{value.expected:.4f} ± {(value.high - value.low) / 2:.4f}"


def cell(value: Any) -> str:
    """Text for a cell of a table."""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {item}" for key, item in value.items())
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def _table(scores: Sequence[Score]) -> list[str]:
    lines = [
        "| N | mAP@N | ± | worst to best order | as served | precision@N | worst to best order |",
        "|---:|---:|---:|---|---:|---:|---|",
    ]
    for item in scores:
        ap, p = item.mean_average_precision, item.precision
        lines.append(
            f"| {item.n} | **{ap.expected:.4f}** | {(ap.high - ap.low) / 2:.4f} | {ap.worst:.4f} to {ap.best:.4f} | "
            f"{'' if item.as_served is None else number(item.as_served)} | {p.expected:.4f} | "
            f"{p.worst:.4f} to {p.best:.4f} |"
        )
    return lines


def _further(scores: Sequence[Score]) -> list[str]:
    lines = [
        "| N | mAP@N, mean over labels | nDCG@N | ACG@N | WAP@N | recall@N |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for item in scores:
        lines.append(
            f"| {item.n} | {item.mean_average_precision.macro:.4f} | {item.ndcg.expected:.4f} | "
            f"{item.acg.expected:.4f} | {item.wap.expected:.4f} | {item.recall.expected:.4f} |"
        )
    return lines
