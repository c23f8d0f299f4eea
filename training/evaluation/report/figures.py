"""The figures of a report, drawn by matplotlib without its global state.

Colours are those of the light page; `as_svg` turns each into a CSS variable with that colour as fallback, so that one
SVG follows the page's dark mode and still stands alone.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.metrics import Calibration
from hashseek.training.evaluation.report.schema import Distances, Model, Report, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LINE = "#16191b", "#5a6268", "#d9dcde"
# Told apart by people who confuse red and green (after Okabe and Ito), each at least 3:1 on white.
SERIES = ("#0b6a82", "#c2410c", "#7c3aed", "#15803d", "#b7791f", "#be185d", "#1d4ed8", "#334155")
OTHER = "#9aa1a6"
VARIABLES = {
    INK: "text",
    FAINT: "muted",
    LINE: "line",
    OTHER: "other",
    **{colour: f"s{i}" for i, colour in enumerate(SERIES, 1)},
}
_SIZE = (5.0, 3.4)  # inches, of which one is 72 units of the SVG: text stays readable on a phone
_SHORT = 30  # characters of a legend's entry of which two fit beside each other
_STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
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


def draw_all(
    report: Report, points: Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64], Sequence[str]]]
) -> dict[str, "Figure"]:
    """The figures by name.

    Args:
        report: what to draw.
        points: title -> (places (n, 2), group (n,) or -1, names of the groups), from `project`.
    """
    from matplotlib import rc_context

    with rc_context(_STYLE):
        figures = {"precision_curve": _precision_curve(report), "precision_recall": _precision_recall(report)}
        if report.distances is not None:
            figures["distances"] = _distances(report, report.distances)
            if report.calibration is not None:
                figures["calibration"] = _calibration(report, report.distances, report.calibration)
        if report.models:
            figures["lengths"] = _lengths(report)
        for name, (places, group, names) in points.items():
            figures[f"tsne_{name}"] = _scatter(places, group, names)
    return figures


def as_svg(figure: "Figure", name: str) -> str:
    """SVG text without a document head; ids carry `name`, so that several can stand in one page."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context(_STYLE | {"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    text = re.sub(r"font(-family)?: ([\d.]+px )?[^;\"]*sans-serif[^;\"]*", r"font: \2 system-ui, sans-serif", text)
    # As large as what it stands in; the view box keeps the proportions.
    head, end, rest = text.partition(">")
    return re.sub(r' (width|height)="[\d.]+pt"', "", head) + end + rest


def as_png(figure: "Figure") -> bytes:
    """PNG on white, 200 dots an inch."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _new() -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.add_subplot()


def _legend(figure: "Figure") -> None:
    """Above the axes, where it hides nothing."""
    labels = figure.axes[0].get_legend_handles_labels()[1]
    columns = 2 if max(len(label) for label in labels) <= _SHORT else 1
    figure.legend(loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.2)


def _precision_curve(report: Report) -> "Figure":
    figure, axes = _new()
    curves = report.curves
    largest = max(score.n for score in report.scores)
    shown = [i for i, n in enumerate(curves.ns) if n <= largest]
    ns = [curves.ns[i] for i in shown]
    worst, best, expected = (
        [values[i] for i in shown] for values in (curves.precision_worst, curves.precision_best, curves.precision)
    )
    if report.ties == "expected":
        axes.fill_between(
            ns, worst, best, color=SERIES[0], alpha=0.18, linewidth=0, label="worst to best order of ties"
        )
    label = "expected over ties" if report.ties == "expected" else "in the order of the service"
    axes.plot(ns, expected, color=SERIES[0], label=label)
    if report.baseline_precision:
        before = [report.baseline_precision[i] for i in shown]
        axes.plot(ns, before, color=SERIES[1], linestyle=(0, (4, 2)), label=report.baseline_name.lower())
    _random_order(report, axes)
    axes.set(xlabel="N", ylabel="precision@N", xlim=(0 if ns[-1] > 1 else 0.5, max(ns[-1], 1)), ylim=(0, 1.02))
    _legend(figure)
    return figure


def _random_order(report: Report, axes: "Axes") -> None:
    chance = report.data.get("chance_(share_of_relevant_pairs)")
    if isinstance(chance, float):
        axes.axhline(chance, color=FAINT, linewidth=1, linestyle=(0, (1, 2)), label="a random order")


def _precision_recall(report: Report) -> "Figure":
    figure, axes = _new()
    curves = report.curves
    axes.plot(curves.recall, curves.precision, color=SERIES[0], label="over rank")
    pairs = [(r, p) for r, p in zip(curves.radius_recall, curves.precision_skip, strict=True) if p is not None]
    if pairs:
        axes.plot(
            [r for r, _ in pairs],
            [p for _, p in pairs],
            color=SERIES[1],
            linewidth=1.2,
            marker="o",
            markersize=3,
            label="over Hamming radius",
        )
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.02))
    _legend(figure)
    return figure


def _distances(report: Report, found: Distances) -> "Figure":
    figure, axes = _new()
    radius = np.arange(report.n_bits + 1)
    for counts, mean, colour, name in (
        (found.relevant, found.intra, SERIES[0], "share a label"),
        (found.irrelevant, found.inter, SERIES[1], "share none"),
    ):
        if mean is None:
            continue
        density = np.asarray(counts) / sum(counts)
        axes.fill_between(radius, density, step="mid", color=colour, alpha=0.3, linewidth=0)
        axes.step(radius, density, where="mid", color=colour, linewidth=1.2, label=f"{name}, mean {mean:.1f} bits")
        axes.axvline(mean, color=colour, linewidth=1, linestyle=(0, (3, 2)))
    axes.set(xlabel="Hamming distance in bits", ylabel="share of such pairs", xlim=(0, report.n_bits))
    axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _calibration(report: Report, found: Distances, made: Calibration) -> "Figure":
    figure, axes = _new()
    radius = np.arange(report.n_bits + 1)
    counts = np.asarray(found.relevant), np.asarray(made.pairs)
    seen = counts[1] > 0
    axes.scatter(
        radius[seen], (counts[0][seen] / counts[1][seen]), s=9, color=OTHER, zorder=3, label="observed at the distance"
    )
    axes.plot(radius, made.at_distance, color=SERIES[1], linewidth=1.2, label="falling with distance")
    axes.plot(radius, made.within_radius, color=SERIES[0], label="within the radius")
    axes.set(
        xlabel="Hamming distance in bits", ylabel="share of relevant pairs", xlim=(0, report.n_bits), ylim=(0, 1.02)
    )
    _legend(figure)
    return figure


def _lengths(report: Report) -> "Figure":
    """A line for each method through the means of its models at each length, and a point for each model."""
    figure, axes = _new()
    methods: dict[str, list[Model]] = {}
    for model in report.models:
        methods.setdefault(model.method, []).append(model)
    for place, (method, models) in enumerate(methods.items()):
        colour, dashes = SERIES[place % len(SERIES)], "-" if place < len(SERIES) else (0, (4, 2))
        bits = sorted({model.n_bits for model in models})
        at = {n_bits: [main_figure(report, model) for model in models if model.n_bits == n_bits] for n_bits in bits}
        worst = [min(value.worst for value in at[n_bits]) for n_bits in bits]
        best = [max(value.best for value in at[n_bits]) for n_bits in bits]
        if len(bits) > 1:
            axes.fill_between(bits, worst, best, color=colour, alpha=0.14, linewidth=0)
        else:
            axes.vlines(bits, worst, best, color=colour, alpha=0.3, linewidth=6)
        means = [float(np.mean([value.expected for value in at[n_bits]])) for n_bits in bits]
        axes.plot(bits, means, color=colour, linestyle=dashes, label=method)
        points = [(n_bits, value.expected) for n_bits in bits for value in at[n_bits]]
        axes.scatter([x for x, _ in points], [y for _, y in points], s=16, color=colour, zorder=3)
    _random_order(report, axes)
    ticks = sorted({model.n_bits for model in report.models})
    axes.set(xlabel="code length in bits", ylabel=f"mAP@{report.main_n}", xticks=ticks)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 1.02))
    _legend(figure)
    return figure


def main_figure(report: Report, model: Model) -> Value:
    """mAP of one of the report's models at the N of the headline."""
    return next(score for score in model.scores if score.n == report.main_n).mean_average_precision


def _scatter(places: NDArray[np.float64], group: NDArray[np.int64], names: Sequence[str]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0], 4.6), layout="constrained")
    axes = figure.add_subplot()
    for number in (-1, *range(len(names))):
        chosen = group == number
        if chosen.any():
            colour, name = (OTHER, "none of these") if number < 0 else (SERIES[number], names[number])
            axes.scatter(places[chosen, 0], places[chosen, 1], s=7, color=colour, linewidth=0, alpha=0.75, label=name)
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_axis_off()
    figure.legend(loc="outside lower center", ncols=3, markerscale=2, handletextpad=0.1, columnspacing=1)
    return figure
