"""The command `hashseek compare`."""

from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically


def compare(
    reports: Annotated[
        list[Path], typer.Argument(exists=True, help="Report folders from `hashseek evaluate`, or their report.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the comparison to this Markdown file.")
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the table of methods to this LaTeX file.")
    ] = None,
) -> None:
    """Compare reports with the same protocol, and each method with the first one, query by query.

    Reports of models that differ only in the training seed count as one method.
    """
    from hashseek.training.evaluation.report.compare import as_markdown, load_entries, methods_as_latex

    entries = load_entries(reports)
    text = as_markdown(entries)
    inputs = {entry.path.with_name(name).resolve() for entry in entries for name in (entry.path.name, "per_query.csv")}
    written = [(out, text), (latex, methods_as_latex(entries))]
    wanted = [(path, content) for path, content in written if path is not None]
    for path, _ in wanted:
        if path.resolve() in inputs:
            raise BadConfig(f"{path} is part of a report that would be overwritten: choose another file")
    for path, content in wanted:
        write_atomically(path, content.encode("utf-8", errors="surrogateescape"))
    typer.echo(text, nl=False)
