"""The critical-difference diagram of Demšar (Statistical comparisons of classifiers, JMLR 2006, Figure 1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hashseek.retrieval.files import write_atomically
from hashseek.training.plotting import INK, SERIES, as_png, as_svg, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW = 0.3  # inches between two names
_WIDTH = 8.0


def groups(ranks: Mapping[str, float], critical: float) -> list[tuple[float, float]]:
    """The longest stretches (lowest, highest) of mean ranks that differ by less than the critical difference."""
    ordered, found = sorted(ranks.values()), []
    for low in ordered:
        high = max(rank for rank in ordered if rank - low < critical)
        if high > low and (not found or high > found[-1][1]):
            found.append((low, high))
    return found


def write_diagram(place: Path, panels: Sequence[tuple[str, Mapping[str, float], float]]) -> list[Path]:
    """Write `place` as .svg and .png: for each panel (title, mean ranks, critical difference) an axis of ranks.

    The lowest rank, on the left, is the best. A bar joins methods that do not differ at 0.05 (Nemenyi).
    """
    from matplotlib.figure import Figure

    heights = [_ROW * (len(ranks) // 2 + len(groups(ranks, critical)) / 2 + 4) for _, ranks, critical in panels]
    with style():
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        places = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, ranks, critical) in zip(places, panels, strict=True):
            axes.set_title(title, loc="left", fontsize=11)
            _draw(axes, ranks, critical)
        contents = {".svg": as_svg(figure, place.name).encode(), ".png": as_png(figure)}
    files = [place.with_suffix(suffix) for suffix in contents]
    for file, content in zip(files, contents.values(), strict=True):
        write_atomically(file, content)
    return files


def _draw(axes: "Axes", ranks: Mapping[str, float], critical: float) -> None:
    k, bars = len(ranks), groups(ranks, critical)
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    half = (k + 1) // 2
    margin = 0.5 * (k - 1)  # room for the names on both sides
    first = 0.8 + 0.5 * len(bars)  # below the bars
    axes.set(xlim=(1 - margin, k + margin), ylim=(first + half, -2.2))
    axes.axis("off")
    axes.plot([1, k], [0, 0], color=INK, linewidth=1)
    for rank in range(1, k + 1):
        axes.plot([rank, rank], [0, -0.15], color=INK, linewidth=1)
        axes.text(rank, -0.3, str(rank), ha="center", va="bottom", fontsize=8)
    axes.plot([1, 1 + critical], [-1.5, -1.5], color=SERIES[1], linewidth=2)
    axes.text(1 + critical + 0.25, -1.5, f"critical difference {critical:.2f}", va="center", fontsize=8)
    for number, (low, high) in enumerate(bars):
        y = 0.4 + 0.5 * number  # the ends are exact: another method may be close
        axes.plot([low, high], [y, y], color=SERIES[0], linewidth=3, solid_capstyle="butt")
    for number, (name, rank) in enumerate(ordered):
        left = number < half
        y = first + (number if left else k - 1 - number)
        end = 1 - 0.02 * k if left else k + 0.02 * k
        axes.plot([rank, rank, end], [0, y, y], color=INK, linewidth=0.7)
        text = f"{name}  {rank:.2f}" if left else f"{rank:.2f}  {name}"
        axes.text(end + (-0.1 if left else 0.1), y, text, ha="right" if left else "left", va="center", fontsize=8)
