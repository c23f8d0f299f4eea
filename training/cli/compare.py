"""Subcommand `compare`."""

from pathlib import Path
from typing import Annotated

import typer

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically


def compare(
    reports: Annotated[list[Path], typer.Argument(help="Folders that `hashseek evaluate` wrote, or report.json.")],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison to this Markdown file.")] = None,
) -> None:
    """Put reports of one protocol side by side, and compare each with the first query by query."""
    from hashseek.training.evaluation.report.compare import as_markdown, load_entries

    entries = load_entries(reports)
    text = as_markdown(entries)
    if out is not None:
        read = {
            entry.path.with_name(name).resolve() for entry in entries for name in (entry.path.name, "per_query.csv")
        }
        if out.is_dir() or out.resolve() in read:
            what = "a folder" if out.is_dir() else "one of the files that are compared"
            raise BadConfig(f"--out {out} is {what}: name a Markdown file of its own")
        write_atomically(out, text.encode("utf-8", errors="surrogateescape"))
    typer.echo(text, nl=False)
