"""The plots of a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.metrics import Calibration
from hashseek.training.evaluation.report.projection import Points
from hashseek.training.evaluation.report.schema import ComparedModel, Distances, EvaluationReport
from hashseek.training.plotting import FAINT, OTHER, SERIES, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (5.0, 3.4)  # inches, 72 units of the SVG each: text stays readable on a phone
_SHORT = 30  # characters of a legend entry of which two fit side by side


@dataclass(frozen=True)
class Plot:
    """Where the page shows a plot, and what it says about it."""

    section: str
    title: str
    caption: str


PLOTS = {
    "precision_curve": Plot(
        "curves",
        "Top-N precision",
        "Mean precision among the first N images; a band shows the range over all orders of ties.",
    ),
    "precision_recall": Plot(
        "curves",
        "Precision and recall",
        "Over rank, and over the radius of a hash lookup (queries that find nothing are left out).",
    ),
    "distances": Plot(
        "curves", "Hamming distances", "Of pairs that share a label and of pairs that share none; dashed: the means."
    ),
    "calibration": Plot(
        "curves",
        "Precision by distance",
        "How likely an image at a distance is relevant, and the expected precision within a radius.",
    ),
    "lengths": Plot(
        "models",
        "mAP by code length",
        "One point per checkpoint, on the same queries and database; band: worst to best order of ties.",
    ),
    "tsne_codes": Plot(
        "map",
        "t-SNE of the codes",
        "Database images by Hamming distance. An image with several of these labels has the colour of the rarest.",
    ),
    "tsne_outputs": Plot(
        "map", "t-SNE of the outputs", "The same images by the angle between the model's real outputs."
    ),
}


def draw_all(report: EvaluationReport, points: Points) -> dict[str, "Figure"]:
    """The plots by name; `points` are from `project`."""
    with style():
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


def _new() -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.add_subplot()


def _legend(figure: "Figure") -> None:
    """A legend above the axes, where it hides nothing."""
    labels = figure.axes[0].get_legend_handles_labels()[1]
    columns = 2 if max(len(label) for label in labels) <= _SHORT else 1
    figure.legend(loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.2)


def _precision_curve(report: EvaluationReport) -> "Figure":
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
        axes.plot(ns, before, color=SERIES[1], linestyle=(0, (4, 2)), label=report.baseline_name)
    _random_order(report, axes)
    axes.set(xlabel="N", ylabel="precision@N", xlim=(0 if ns[-1] > 1 else 0.5, max(ns[-1], 1)), ylim=(0, 1.02))
    _legend(figure)
    return figure


def _random_order(report: EvaluationReport, axes: "Axes") -> None:
    chance = report.data.get("chance_(share_of_relevant_pairs)")
    if isinstance(chance, float):
        axes.axhline(chance, color=FAINT, linewidth=1, linestyle=(0, (1, 2)), label="random order")


def _precision_recall(report: EvaluationReport) -> "Figure":
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
    if report.baseline_recall:
        recall, precision, dashed = report.baseline_recall, report.baseline_precision, (0, (4, 2))
        axes.plot(recall, precision, color=SERIES[2], linestyle=dashed, label=report.baseline_name)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.02))
    _legend(figure)
    return figure


def _distances(report: EvaluationReport, found: Distances) -> "Figure":
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


def _calibration(report: EvaluationReport, found: Distances, made: Calibration) -> "Figure":
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


def _lengths(report: EvaluationReport) -> "Figure":
    """A point for each model, and a line for each method through its means at each length."""
    figure, axes = _new()
    methods: dict[str, list[ComparedModel]] = {}
    for model in report.models:
        methods.setdefault(model.method, []).append(model)
    for place, (method, models) in enumerate(methods.items()):
        colour, dashes = SERIES[place % len(SERIES)], "-" if place < len(SERIES) else (0, (4, 2))
        bits = sorted({model.n_bits for model in models})
        at = {
            n_bits: [
                report.at_main_n(model.scores).mean_average_precision for model in models if model.n_bits == n_bits
            ]
            for n_bits in bits
        }
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


def _scatter(places: NDArray[np.float64], group: NDArray[np.int64], names: Sequence[str]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0], 4.6), layout="constrained")
    axes = figure.add_subplot()
    for number in (-1, *range(len(names))):
        chosen = group == number
        if chosen.any():
            colour, name = (OTHER, "other labels") if number < 0 else (SERIES[number], names[number])
            axes.scatter(places[chosen, 0], places[chosen, 1], s=7, color=colour, linewidth=0, alpha=0.75, label=name)
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_axis_off()
    figure.legend(loc="outside lower center", ncols=3, markerscale=2, handletextpad=0.1, columnspacing=1)
    return figure
