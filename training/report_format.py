"""Tables and HTML pages, shared by the reports of evaluations and training runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from numpy.typing import NDArray


@dataclass(frozen=True)
class Table:
    """Cells as text. The first `text_columns` are aligned left, the others right; the column `bold` stands out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 0
    bold: int | None = None
    caption: str = ""


def table_as_markdown(table: Table) -> str:
    """The table, below its caption."""
    rule = "|".join("---" if place < table.text_columns else "---:" for place in range(len(table.header)))
    lines = [f"**{table.caption}**\n"] if table.caption else []
    lines += [f"| {' | '.join(table.header)} |", f"|{rule}|"]
    for row in table.rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        if table.bold is not None:
            cells[table.bold] = f"**{cells[table.bold]}**"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_as_latex(table: Table, *, label: str) -> str:
    """The table as a LaTeX `table` with the rules of booktabs, caption and label below. No column is bold."""

    def row(cells: Sequence[str]) -> str:
        return f"{' & '.join(cell.translate(LATEX) for cell in cells)} \\\\"

    columns = "l" * table.text_columns + "r" * (len(table.header) - table.text_columns)
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table}", "\\centering", f"\\begin{{tabular}}{{{columns}}}"]
    lines += ["\\toprule", row(table.header), "\\midrule", *map(row, table.rows)]
    lines += ["\\bottomrule", "\\end{tabular}", f"\\caption{{{table.caption.translate(LATEX)}}}"]
    return "\n".join([*lines, f"\\label{{{label}}}", "\\end{table}", ""])


LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "–": "--"}
    | {"<": "$<$", ">": "$>$", "\n": " "}
)


def mean_and_deviation(values: Sequence[float] | NDArray[np.float64]) -> str:
    """The mean and the standard deviation as a cell; a single value alone, and nothing without values."""
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"


def render_page(template: str, **values: Any) -> str:
    """An HTML page from a Jinja template in `training/templates`; text in `values` is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
