"""The text and the tables of a report, section by section: what the page and the Markdown file both show."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hashseek.training.evaluation.report.citation import as_bibtex, as_latex, cited, labels_in_words
from hashseek.training.evaluation.report.schema import EvaluationReport, MeanValue, Score
from hashseek.training.report_format import Table

_HYP2 = (
    " hyp2 is the value that HyP2's evaluation code prints for this checkpoint: ties in the order of an unstable sort, "
    "AP divided by the relevant images retrieved. The paper's training also evaluates every fifth epoch on the queries "
    "and keeps the best: hyp2-best is the highest value of the checkpoints of the same run, if there are several."
)
_EXPLANATION = (
    "An image is relevant if it shares a label with the query. Metrics are means over queries, and expectations over a "
    "random order of images at equal Hamming distance. ± is "
    "half the width of the 95 % bootstrap interval over queries. Worst to best is the range over all such orders; as "
    "served is the order of search, which breaks ties by ascending id."
)
_LOOKUP = (
    "Precision and recall of all images within a radius in bits, as means over queries; empty: the share of queries "
    "that find none. The expected precision pools the pairs of all queries."
)
_RADII = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True)
class Section:
    """A part of a report: a paragraph, tables, a list of notes, and text to copy; each may be missing."""

    id: str
    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    items: Sequence[str] = ()
    code: Sequence[str] = ()


def sections(report: EvaluationReport) -> list[Section]:
    """All sections in order, of which some may be empty; the page adds plots and pictures to those that have them."""
    n = report.main_n
    warning = f"Not the usual protocol: {labels_in_words(report)}. " if report.held_out else ""
    baseline = _scores(report.baseline, report.baseline_name) if report.baseline else []
    comparable = "The metrics of two reports are comparable if splits, labels, normalizer, ties and N are the same."
    return [
        Section("metrics", "Metrics", warning + _EXPLANATION, [*_scores(report.scores, ""), *baseline]),
        Section(
            "rankings",
            "Rankings",
            "The whole database, ranked in several ways: hamming compares codes; asymmetric compares the query's "
            "real-valued outputs with the stored bits; float compares features by their cosine. hamming is the "
            "expectation over ties, the other two take ties in the order of the database. `hashseek search --rank` has "
            "the same three."
            f"{_HYP2 if any(score.rank == 'hyp2' for score in report.rankings) else ''}",
            [_rankings(report)] if report.rankings else [],
        ),
        Section("curves", "Curves and distances"),
        Section("models", f"mAP@{n} by code length", tables=[_models(report)] if report.models else []),
        Section("lookup", "Hash lookup and bits", _LOOKUP, tables=[_lookup(report), _bits(report)]),
        Section("labels", "Labels", tables=[_labels(report), *([_confusions(report)] if report.confusions else [])]),
        Section("map", "Map of the database"),
        Section("examples", "Example queries", f"Chosen at random (seed {report.seed}), in the order of search."),
        Section(
            "worst",
            "Worst queries",
            f"The lowest AP@{n} of all queries with something relevant in the database.",
            [_worst(report)] if report.worst else [],
        ),
        Section("notes", "Notes", items=report.notes),
        Section("protocol", "Protocol", comparable, [_protocol(report)]),
        Section("citation", "Citation", items=[cited(report)], code=[as_latex(report), as_bibtex(report)]),
    ]


def _scores(scores: Sequence[Score], caption: str) -> list[Table]:
    """Every metric at every N, in two tables."""
    first, second = [], []
    for score in scores:
        ap, precision = score.mean_average_precision, score.precision
        row = [str(score.n), number(ap.expected), half_width(ap), tie_range(ap), number(score.as_served)]
        first.append([*row, f"{score.tied:.1%}", number(ap.macro)])
        others = (score.recall, score.ndcg, score.acg, score.wap)
        row = [str(score.n), number(precision.expected), tie_range(precision)]
        second.append([*row, *(number(value.expected) for value in others)])
    header = ["N", "mAP@N", "±", "worst to best", "as served", "ties at the cut", "mean over labels"]
    further = ["N", "precision@N", "worst to best", "recall@N", "nDCG@N", "ACG@N", "WAP@N"]
    return [Table(header, first, bold=1, caption=caption), Table(further, second)]


def _rankings(report: EvaluationReport) -> Table:
    of_hamming = {score.n: score.mean_average_precision for score in report.rankings if score.rank == "hamming"}
    rows = []
    for score in report.rankings:
        ap = score.mean_average_precision
        rows.append([score.rank, str(score.n), number(ap), f"{ap - of_hamming[score.n]:+.4f}", number(score.precision)])
    return Table(["ranking", "N", "mAP@N", "vs. hamming", "precision@N"], rows, text_columns=1, bold=2)


def _models(report: EvaluationReport) -> Table:
    rows = []
    for model in report.models:
        score = report.at_main_n(model.scores)
        ap = score.mean_average_precision
        row = [model.method, model.name, model.fingerprint[:12], str(model.n_bits), number(ap.expected)]
        rows.append([*row, interval(ap), tie_range(ap), number(score.as_served)])
    header = ["method", "checkpoint", "fingerprint", "bits", f"mAP@{report.main_n}"]
    return Table([*header, "95 % interval", "worst to best", "as served"], rows, text_columns=3, bold=4)


def _lookup(report: EvaluationReport) -> Table:
    curves, calibration = report.curves, report.calibration
    rows = [
        [
            str(radius),
            number(curves.precision_zero[radius]),
            number(curves.precision_skip[radius]),
            number(curves.radius_recall[radius]),
            f"{curves.empty[radius]:.1%}",
            number(calibration.within_radius[radius]),
        ]
        for radius in _RADII
        if radius < len(curves.empty)
    ]
    header = ["radius", "precision (empty: 0)", "precision (empty left out)", "recall", "empty", "expected precision"]
    return Table(header, rows)


def _bits(report: EvaluationReport) -> Table:
    bits, distances = report.bits, report.distances
    rows = [
        ["distinct codes", f"{bits.n_distinct} of {report.data.get('database')}"],
        ["images with the most common code", str(bits.most_common)],
        ["share of ones per bit", f"{min(bits.balance):.2f} to {max(bits.balance):.2f}"],
        ["bits that never change", str(bits.n_constant)],
        ["correlation of two bits", f"{bits.mean_correlation:.3f} on average, at most {bits.max_correlation:.3f}"],
        ["quantisation error (|u| − 1)²", number(bits.quantisation_error)],
        ["1 − cosine of outputs and signs", number(bits.quantisation_angle)],
        ["mean distance of relevant pairs", f"{number(distances.intra)} bits"],
        ["mean distance of other pairs", f"{number(distances.inter)} bits"],
    ]
    return Table(["", ""], rows, text_columns=1)


def _labels(report: EvaluationReport) -> Table:
    ordered = sorted(report.labels, key=lambda row: (-(row.mean_average_precision or -1), row.name))
    rows = [
        [row.name, str(row.queries), str(row.database), number(row.mean_average_precision), number(row.precision)]
        for row in ordered
    ]
    n = report.main_n
    header = ["label", "queries", "database", f"mAP@{n}", f"precision@{n}"]
    return Table(header, rows, text_columns=1, caption="Means over the queries with the label")


def _confusions(report: EvaluationReport) -> Table:
    rows = [[pair.asked, pair.returned, f"{pair.share:.1%}", f"{pair.lift:.1f}"] for pair in report.confusions]
    header = ["query", "found", "share of irrelevant hits", "times chance"]
    return Table(header, rows, text_columns=2, caption="Labels mistaken for each other")


def _worst(report: EvaluationReport) -> Table:
    rows = [[query.name, ", ".join(query.labels), number(query.average_precision)] for query in report.worst]
    return Table(["query", "labels", f"AP@{report.main_n}"], rows, text_columns=2)


def _protocol(report: EvaluationReport) -> Table:
    """What must be the same in two reports to compare them, and how this one was produced."""
    rows: dict[str, Any] = {
        "labels used": labels_in_words(report),
        "AP normalizer": report.normalizer,
        "nDCG gain": "2^shared labels - 1",
        "N": ", ".join(str(score.n) for score in report.scores),
        "ties": "expectation, with bounds",
        "code length": f"{report.n_bits} bits",
        "checkpoint fingerprint": report.fingerprint,
        **{key.replace("_", " "): value for key, value in report.data.items()},
        **{key.replace("_", " "): value for key, value in report.model.items()},
        "seed": report.seed,
        "created": report.created,
        "versions": report.versions,
        "command": report.command,
    }
    cells = [[key, _as_text(value)] for key, value in rows.items() if value not in (None, {}, "")]
    return Table(["", ""], cells, text_columns=2)


def number(value: float | None) -> str:
    """Four digits, or a dash for None."""
    return "–" if value is None else f"{value:.4f}"


def half_width(value: MeanValue) -> str:
    """Half of the bootstrap interval, which is nearly symmetric."""
    return number((value.high - value.low) / 2)


def interval(value: MeanValue) -> str:
    """The bootstrap interval."""
    return f"{value.low:.4f} to {value.high:.4f}"


def tie_range(value: MeanValue) -> str:
    """The range over all orders of ties."""
    return f"{value.worst:.4f} to {value.best:.4f}"


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_as_text(item)}" for key, item in value.items())
    return number(value) if isinstance(value, float) else str(value)
