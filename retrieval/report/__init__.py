"""An evaluation as a folder: a page and Markdown for people, JSON and a table per query for machines."""

from retrieval.report.build import Part, Scores, chance, main_n, score_all, values_of
from retrieval.report.markdown import as_markdown, certificate, summary
from retrieval.report.schema import SCHEMA_VERSION, Report, Score, Value, load_report, software_versions

__all__ = [
    "SCHEMA_VERSION",
    "Part",
    "Report",
    "Score",
    "Scores",
    "Value",
    "as_markdown",
    "certificate",
    "chance",
    "load_report",
    "main_n",
    "score_all",
    "software_versions",
    "summary",
    "values_of",
]
