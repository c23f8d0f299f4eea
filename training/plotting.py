"""Plots as SVG and PNG by matplotlib, in one style, without its global state.

Evaluation reports, run reports and sweeps draw with it. Colours are those of a light page; `as_svg` turns each into a
CSS variable with that colour as fallback, so that the same SVG follows a page's dark mode and also stands alone.
"""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, LINE = "#16191b", "#5a6268", "#d9dcde"
# Distinct for colour-blind readers (after Okabe and Ito), each with a contrast of at least 3:1 on white.
SERIES = ("#0b6a82", "#c2410c", "#7c3aed", "#15803d", "#b7791f", "#be185d", "#1d4ed8", "#334155")
OTHER = "#9aa1a6"
_CSS_VARIABLES = {
    INK: "text",
    FAINT: "muted",
    LINE: "line",
    OTHER: "other",
    **{colour: f"s{i}" for i, colour in enumerate(SERIES, 1)},
}
_STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Series:
    """Points (x, y), joined by a line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Series in one pair of axes.

    whole_x: x values are integers. mark: a point (x, y) to ring, with the text beside it.
    """

    title: str
    series: Sequence[Series]
    x_label: str = "epoch"
    whole_x: bool = False
    from_zero: bool = False
    mark: tuple[float, float, str] | None = None


def draw(panels: Sequence[Panel]) -> str:
    """The panels in two columns, as SVG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with style():
        columns = min(2, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(5 * columns, 3 * rows), layout="constrained")
        for place, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            axes.set(title=panel.title, xlabel=panel.x_label)
            for number, series in enumerate(panel.series):
                marker = "o" if len(series.x) == 1 else ""
                axes.plot(series.x, series.y, marker=marker, color=SERIES[number % len(SERIES)], label=series.name)
            if panel.whole_x:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if panel.from_zero:
                axes.set_ylim(bottom=0)
            if panel.mark is not None:
                x, y, text = panel.mark
                axes.plot(x, y, "o", markersize=9, markerfacecolor="none", color=INK)
                left, right = axes.get_xlim()
                side = "right" if x > (left + right) / 2 else "left"
                axes.annotate(text, (x, y), (0, -14), textcoords="offset points", ha=side)
            if len(panel.series) > 1:
                axes.legend()
        return as_svg(figure, "panels")


def style() -> AbstractContextManager[None]:
    """To be entered while something is drawn."""
    from matplotlib import rc_context

    return rc_context(_STYLE)


def as_svg(figure: "Figure", name: str) -> str:
    """SVG without an XML header; ids depend on `name`, so that several plots can be in one page."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context(_STYLE | {"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _CSS_VARIABLES.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    text = re.sub(r"font(-family)?: ([\d.]+px )?[^;\"]*sans-serif[^;\"]*", r"font: \2 system-ui, sans-serif", text)
    # The SVG fills what contains it; its view box keeps the proportions.
    head, end, rest = text.partition(">")
    return re.sub(r' (width|height)="[\d.]+pt"', "", head) + end + rest


def as_png(figure: "Figure") -> bytes:
    """PNG on white, with 200 dots per inch."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
