"""The folder of a report: a page and Markdown for people, JSON and a table per query for programs, plots as files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashseek.retrieval.files import as_csv, write_atomically
from hashseek.training.evaluation.report.citation import as_bibtex, as_latex
from hashseek.training.evaluation.report.markdown import as_markdown
from hashseek.training.evaluation.report.projection import Points
from hashseek.training.evaluation.report.schema import EvaluationReport


@dataclass(frozen=True)
class Evaluation:
    """A report, and the other content of its folder.

    `per_query`: columns of equal length. `points`: from `project`. `query_paths`, `database_paths`: the images; empty
    for a data set without images.
    """

    report: EvaluationReport
    per_query: Mapping[str, Sequence[Any]] = field(repr=False)
    points: Points = field(repr=False)
    query_paths: Sequence[Path] = field(default=(), repr=False)
    database_paths: Sequence[Path] = field(default=(), repr=False)

    def write(self, folder: Path) -> list[Path]:
        """Write all files of the report, and return their paths, the page first.

        `folder` is created if it is missing; files of the same names are replaced.

        Raises:
            OSError: the folder cannot be written.
        """
        from hashseek.training.evaluation.report.page import as_html  # these load matplotlib and Jinja
        from hashseek.training.evaluation.report.plots import draw_all
        from hashseek.training.plotting import as_png, as_svg

        report, drawn = self.report, draw_all(self.report, self.points)
        svgs = {name: as_svg(figure, name) for name, figure in drawn.items()}
        page = as_html(report, svgs, query_paths=self.query_paths, database_paths=self.database_paths)
        texts = {
            "report.html": page,
            "report.md": as_markdown(report),
            "report.json": report.as_json(),
            "report.tex": as_latex(report),
            "report.bib": as_bibtex(report),
        }
        # A file name that is not UTF-8 is shown with question marks; the table keeps its bytes.
        contents = {name: text.encode(errors="replace") for name, text in texts.items()}
        contents["per_query.csv"] = as_csv([self.per_query, *zip(*self.per_query.values(), strict=True)])
        for name, figure in drawn.items():
            contents[f"figures/{name}.svg"] = svgs[name].encode()
            contents[f"figures/{name}.png"] = as_png(figure)
        for name, content in contents.items():
            write_atomically(folder / name, content)
        return [folder / name for name in contents]
