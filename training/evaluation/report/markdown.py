"""A report as Markdown."""

from collections.abc import Sequence
from typing import Any

from hashseek.training.evaluation.report.schema import Model, Report, Score, Served, Value


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
    lines = [f"# {report.title}", ""]
    if report.held_out:
        lines += [f"Not the usual protocol: {protocol_of(report)}.", ""]
    lines += _table(report.scores)
    if report.baseline:
        lines += ["", f"## {report.baseline_name}", "", *_table(report.baseline)]
    lines += ["", *_further(report.scores), "", explanation(report), ""]
    if report.models:
        lines += [f"## mAP@{report.main_n} by code length", "", *_models(report), ""]
    if report.served is not None:
        lines += [f"## {report.served.url} beside the library", "", *served_lines(report.served, report.scores), ""]
    lines += ["## Protocol", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {cell(value)} |" for key, value in certificate(report).items()]
    if report.missing:
        lines += ["", "## Not in this report", "", *(f"- {sentence}" for sentence in report.missing)]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def explanation(report: Report) -> str:
    """How the figures are to be read."""
    if report.ties == "as served":
        return (
            "Figures are means over queries in the one order that the service gave, so that equal Hamming distances "
            "leave nothing open; ± is half of the 95 % bootstrap interval over queries."
        )
    return (
        "Figures are means over queries of the expectation over a random order of equal Hamming distances; ± is half "
        "of the 95 % bootstrap interval over queries, the range is what the worst and the best order would give. “As "
        "served” is the order of the search service: ties by ascending id."
    )


def protocol_of(report: Report) -> str:
    """Which images and labels the figures are about."""
    names = ", ".join(report.held_out)
    if not report.held_out:
        return "all; none was held out of training"
    return {
        "held-out": "labels held out of training: queries and database of images that carry one, relevance by those "
        f"labels alone ({names})",
        "seen": f"labels seen in training: queries and database of images without any label held out of it ({names})",
        "all": f"all labels, of which training never saw {names}",
    }[report.labels_used]


def certificate(report: Report) -> dict[str, Any]:
    """The protocol certificate: what must agree for two reports to be compared, and what made this one."""
    distances, bits, served = report.distances, report.bits, report.served
    made: dict[str, Any] = {
        "labels used": protocol_of(report),
        "AP normaliser": report.normalizer,
        "nDCG gain": "2^shared labels - 1" if report.gain == "exponential" else "shared labels",
        "N": ", ".join(str(score.n) for score in report.scores),
        "equal distances": "expected over their orders, with bounds"
        if report.ties == "expected"
        else "in the order of the service",
        "ranks that ties at the cut decide": ", ".join(f"{score.tied:.1%} at {score.n}" for score in report.scores),
        "code length": f"{report.n_bits} bits",
        "checkpoint fingerprint": report.fingerprint,
        **{key.replace("_", " "): value for key, value in report.data.items()},
        **{key.replace("_", " "): value for key, value in report.model.items()},
        "d_intra, d_inter (bits)": distances and f"{number(distances.intra)}, {number(distances.inter)}",
        "distinct codes in the database": bits and bits.distinct,
        "served by": served and f"{served.url}, hashseek {served.version or 'of unknown version'}",
        "engine of the service": served and (served.engine or "not told"),
        "ranks asked of the service": served and served.ranks,
        "seed": report.seed,
        "created": report.created,
        "versions": ", ".join(f"{name} {text}" for name, text in report.versions.items()),
        "command": f"`{report.command}`",
    }
    if report.ties != "expected":
        del made["ranks that ties at the cut decide"]
    return {key: value for key, value in made.items() if value is not None}


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


def served_lines(served: Served, scores: Sequence[Score]) -> list[str]:
    """What service and library gave: mAP@N of both, and every difference."""
    n_queries = served.equal + len(served.differences)
    lines = [
        f"{served.equal} of {n_queries} queries have the same ranking (ids and distances).",
        "",
        "| N | mAP@N, service | mAP@N, library | difference |",
        "|---:|---:|---:|---:|",
    ]
    for score in scores:
        if score.as_served is not None:
            ours = served.library[score.n]
            lines.append(f"| {score.n} | {score.as_served:.6f} | {ours:.6f} | {score.as_served - ours:+.6f} |")
    if served.differences:
        lines += ["", *(f"- {sentence}" for sentence in served.differences)]
    return lines


def _models(report: Report) -> list[str]:
    n = report.main_n
    lines = [
        f"| method | bits | mAP@{n} | 95 % interval | worst to best order | as served | checkpoint | fingerprint |",
        "|---|---:|---:|---|---|---:|---|---|",
    ]
    for model in report.models:
        score = next(score for score in model.scores if score.n == n)
        ap = score.mean_average_precision
        lines.append(
            f"| {cell(model.method)} | {model.n_bits} | **{ap.expected:.4f}** | {ap.low:.4f} to {ap.high:.4f} | "
            f"{ap.worst:.4f} to {ap.best:.4f} | {number(score.as_served)} | {cell(name_of(model))} | "
            f"{model.fingerprint[:12]} |"
        )
    return lines


def name_of(model: Model) -> str:
    """The checkpoint's file, and that it is the beginning of a longer code if it is."""
    cut = "" if model.cut_from is None else f", first {model.n_bits} of {model.cut_from} bits"
    return f"{model.checkpoint}{cut}"


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
