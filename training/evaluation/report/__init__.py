"""An evaluation as a folder: a page and Markdown for people, JSON and a table per query for machines."""

from hashseek.training.evaluation.report.build import (
    Part,
    Scores,
    chance,
    main_n,
    score_all,
    score_ranking,
    values_of,
    values_of_ranking,
)
from hashseek.training.evaluation.report.markdown import as_markdown, certificate, summary
from hashseek.training.evaluation.report.schema import (
    SCHEMA_VERSION,
    Model,
    Report,
    Score,
    Served,
    Value,
    load_report,
    software_versions,
)

__all__ = [
    "SCHEMA_VERSION",
    "Model",
    "Part",
    "Report",
    "Score",
    "Scores",
    "Served",
    "Value",
    "as_markdown",
    "certificate",
    "chance",
    "load_report",
    "main_n",
    "score_all",
    "score_ranking",
    "software_versions",
    "summary",
    "values_of",
    "values_of_ranking",
]
