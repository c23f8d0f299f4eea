"""The command `hashseek compare`."""

from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically


def compare(
    reports: Annotated[
        list[Path], typer.Argument(exists=True, help="Folders that `hashseek evaluate` wrote, or their report.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the comparison to this Markdown file.")
    ] = None,
) -> None:
    """Compare reports of the same protocol, and each with the first query by query."""
    from hashseek.training.evaluation.report.compare import as_markdown, load_entries

    entries = load_entries(reports)
    text = as_markdown(entries)
    if out is not None:
        inputs = {
            entry.path.with_name(name).resolve() for entry in entries for name in (entry.path.name, "per_query.csv")
        }
        if out.resolve() in inputs:
            raise BadConfig(f"--out {out} would overwrite a report: choose another file")
        write_atomically(out, text.encode("utf-8", errors="surrogateescape"))
    typer.echo(text, nl=False)
