"""Plots as SVG and PNG with matplotlib, in one style, without its global state.

Evaluation reports, run reports and experiments draw with it. Colours are those of a light page; `as_svg` turns each
into a CSS variable with that colour as fallback, so that the same SVG follows a page's dark mode and stands alone.
"""

import io
import re
from contextlib import AbstractContextManager
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
    "axes.titley": 1.0,  # matplotlib would lay out all labels once more to find it
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


def style() -> AbstractContextManager[None]:
    """Context manager for drawing."""
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
    # The SVG fills its container; its view box keeps the proportions.
    head, end, rest = text.partition(">")
    return re.sub(r' (width|height)="[\d.]+pt"', "", head) + end + rest


def as_png(figure: "Figure") -> bytes:
    """PNG on white, with 200 dots per inch."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
