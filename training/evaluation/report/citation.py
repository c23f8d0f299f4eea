"""Texts of a report for a paper: the headline in words, the metrics for LaTeX, references for BibTeX."""

from collections.abc import Mapping

from hashseek.training.evaluation.report.schema import EvaluationReport, MeanValue, Score
from hashseek.training.report_format import LATEX, Table, table_as_latex

DIVISORS = {
    "retrieved": "the relevant items retrieved",
    "possible": "the relevant items that could be retrieved",
    "relevant": "all relevant items",
}
# What the texts cite besides losses and data sets.
_TIES = (
    "McSherry and Najork, Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied "
    "Scores, ECIR 2008"
)
HASHSEEK = {"author": "{The Hashseek maintainers}", "title": "{Hashseek: image retrieval with deep hashing}"}


def cited(report: EvaluationReport) -> str:
    """The headline and its protocol in words, for a paper."""
    value = report.main.mean_average_precision
    return (
        f"mAP@{report.main_n} of {report.n_bits}-bit codes is {value.expected:.4f} (95 % bootstrap interval over "
        f"queries {value.low:.4f} to {value.high:.4f}). {protocol_in_words(report)} Computed by Hashseek."
    )


def protocol_in_words(report: EvaluationReport) -> str:
    """What a reader must know to compare the figures with others, in sentences."""
    labels = f" Images and labels: {labels_in_words(report)}." if report.held_out else ""
    return (
        f"{report.data.get('queries')} queries, {report.data.get('database')} items in the database; an item is "
        f"relevant if it shares a label with the query.{labels} AP is divided by {DIVISORS[report.normalizer]}. Values "
        "are expected values over the order of ties (McSherry and Najork, ECIR 2008)."
    )


def labels_in_words(report: EvaluationReport) -> str:
    """Which images and labels are used."""
    names = ", ".join(report.held_out)
    if not report.held_out:
        return "all; none were held out of training"
    return {
        "held-out": "labels held out of training: only queries and database images with one of them, and relevance by "
        f"these labels only ({names})",
        "seen": f"labels seen in training: only queries and database images without a held-out label ({names})",
        "all": f"all labels, of which {names} were never used in training",
    }[report.labels_used]


def as_latex(report: EvaluationReport) -> str:
    """mAP@N and precision@N at every N as a LaTeX table: of the checkpoint, and of the baseline if there is one."""

    def cell(value: MeanValue) -> str:
        return f"{value.expected:.4f} ± {(value.high - value.low) / 2:.4f}"

    def row(name: str, scores: list[Score]) -> list[str]:
        found = [score.mean_average_precision for score in scores] + [score.precision for score in scores]
        return [name, str(report.n_bits), *map(cell, found)]

    rows = [row(str(report.model.get("method", report.title)), report.scores)]
    if report.baseline:
        rows.append(row(report.baseline_name, report.baseline))
    header = ["method", "bits", *(f"{name}@{score.n}" for name in ("mAP", "precision") for score in report.scores)]
    caption = (
        "Means over queries, and half of their 95 % bootstrap interval, which does not cover other training seeds. "
        + protocol_in_words(report)
    )
    return table_as_latex(Table(header, rows, text_columns=1, caption=caption), label="tab:retrieval")


def as_bibtex(report: EvaluationReport) -> str:
    """Entries for Hashseek, for the order of ties, and for losses and data sets whose sources are known."""
    entries = [_entry("software", "hashseek", {**HASHSEEK, "version": report.versions.get("hashseek", "")})]
    entries += [_entry("misc", key, fields) for key, fields in parsed({"ties": _TIES, **report.sources}).items()]
    return "\n".join(entries)


def parsed(sources: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The BibTeX fields of sources such as "Xu et al., TITLE, ACM MM 2022"; several are separated by semicolons."""
    found: dict[str, dict[str, str]] = {}
    for name, source in sources.items():
        for place, text in enumerate(source.split("; "), start=1):
            parts = text.translate(LATEX).split(", ")
            if len(parts) == 1:
                continue  # "a textbook loss" is not a reference
            fields = {"note": ", ".join(parts)}
            if len(parts) > 2:
                author, title = parts[0].replace(" et al.", " and others"), ", ".join(parts[1:-1])
                where, _, year = parts[-1].rpartition(" ")
                place_and_year = (
                    {"howpublished": where, "year": year} if year.isdecimal() else {"howpublished": parts[-1]}
                )
                fields = {"author": author, "title": f"{{{title}}}", **place_and_year}
            found[name if place == 1 else f"{name}-{place}"] = fields
    return found


def _entry(kind: str, key: str, fields: Mapping[str, str]) -> str:
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}", ""])
