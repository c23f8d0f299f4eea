"""A report as Markdown: the file report.md, and the summary that `hashseek evaluate` prints."""

from collections.abc import Iterable

from hashseek.training.evaluation.report.schema import EvaluationReport
from hashseek.training.evaluation.report.sections import Section, sections
from hashseek.training.report_format import table_as_markdown

_SUMMARY = ("metrics", "rankings", "models", "notes", "protocol")


def as_markdown(report: EvaluationReport) -> str:
    """The whole report, without plots and pictures."""
    return document(report.title, sections(report))


def summary(report: EvaluationReport) -> str:
    """The metrics, the protocol and the notes."""
    return document(report.title, (section for section in sections(report) if section.id in _SUMMARY))


def document(title: str, parts: Iterable[Section]) -> str:
    """A heading, and the sections that have something to show."""
    return "\n".join([f"# {title}", *(section_as_markdown(part) for part in parts if part.tables or part.items), ""])


def section_as_markdown(section: Section) -> str:
    """A heading, and what is below it."""
    blocks = [f"\n## {section.title}", section.text, *(table_as_markdown(table) for table in section.tables)]
    blocks.append("\n".join(f"- {item}" for item in section.items))
    blocks += [f"```\n{text.strip()}\n```" for text in section.code]
    return "\n\n".join(block for block in blocks if block)
