"""The plots of a report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hashseek.training.evaluation.report.projection import Points
from hashseek.training.evaluation.report.schema import ComparedModel, EvaluationReport
from hashseek.training.plotting import FAINT, OTHER, SERIES, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (5.0, 3.4)  # inches, 72 units of the SVG each: text stays readable on a phone
_SHORT = 30  # characters of a legend entry of which two fit side by side


@dataclass(frozen=True)
class Plot:
    """The section of a plot on the page, with its title and caption."""

    section: str
    title: str
    caption: str


PLOTS = {
    "precision_curve": Plot(
        "curves",
        "Top-N precision",
        "Mean precision among the first N images; the band shows the range over all orders of ties.",
    ),
    "precision_recall": Plot(
        "curves",
        "Precision and recall",
        "By rank, and by the radius of a hash lookup (queries that find nothing count in the recall only).",
    ),
    "distances": Plot(
        "curves", "Hamming distances", "For pairs that share a label and pairs that share none; dashed: the means."
    ),
    "calibration": Plot(
        "curves",
        "Precision by distance",
        "Share of relevant pairs at each distance, the falling curve fitted to it (isotonic regression), and the "
        "expected precision within a radius.",
    ),
    "lengths": Plot(
        "models",
        "mAP by code length",
        "One point per checkpoint, on the same queries and database; lines join means over seeds. The band goes from "
        "the worst to the best order of ties, of all seeds.",
    ),
    "tsne_codes": Plot(
        "map",
        "t-SNE of the codes",
        "Database images by Hamming distance. An image with several of these labels has the colour of the rarest one.",
    ),
    "tsne_outputs": Plot(
        "map",
        "t-SNE of the outputs",
        "The same images, projected by the angle between the model's real-valued outputs.",
    ),
}


def draw_all(report: EvaluationReport, points: Points) -> dict[str, "Figure"]:
    """The plots by name; `points` are from `project`."""
    drawn: dict[str, Callable[[EvaluationReport, Axes], None]] = {
        "precision_curve": _precision_curve,
        "precision_recall": _precision_recall,
        "distances": _distances,
        "calibration": _calibration,
    }
    if len({model.n_bits for model in report.models}) > 1:
        drawn["lengths"] = _lengths
    figures = {}
    with style():
        for name, draw in drawn.items():
            figure, axes = _new(_SIZE)
            draw(report, axes)
            # The legend is above the axes, where it hides nothing.
            longest = max(len(label) for label in axes.get_legend_handles_labels()[1])
            columns = 2 if longest <= _SHORT else 1
            figure.legend(loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.2)
            figures[name] = figure
        for name, (places, group, names) in points.items():
            figures[f"tsne_{name}"] = _scatter(places, group, names)
        for figure in figures.values():  # once: saving would compute the layout twice for each file
            layout = figure.get_layout_engine()
            assert layout is not None
            layout.execute(figure)
            figure.set_layout_engine("none")
    return figures


def _new(size: tuple[float, float]) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


def _precision_curve(report: EvaluationReport, axes: "Axes") -> None:
    curves = report.curves
    shown = np.array(curves.ns) <= max(score.n for score in report.scores)
    ns = np.array(curves.ns)[shown]
    worst, best = np.array(curves.precision_worst)[shown], np.array(curves.precision_best)[shown]
    label = "worst to best order of ties"
    axes.fill_between(ns, worst, best, color=SERIES[0], alpha=0.18, linewidth=0, label=label)
    axes.plot(ns, np.array(curves.precision)[shown], color=SERIES[0], label="expected over ties")
    if report.baseline_precision:
        before = np.array(report.baseline_precision)[shown]
        axes.plot(ns, before, color=SERIES[1], linestyle=(0, (4, 2)), label=report.baseline_name)
    _random_order(report, axes)
    axes.set(xlabel="N", ylabel="precision@N", xlim=(0, ns[-1]), ylim=(0, 1.02))


def _random_order(report: EvaluationReport, axes: "Axes") -> None:
    chance = report.data["chance_(share_of_relevant_pairs)"]
    axes.axhline(chance, color=FAINT, linewidth=1, linestyle=(0, (1, 2)), label="share of relevant pairs")


def _precision_recall(report: EvaluationReport, axes: "Axes") -> None:
    curves = report.curves
    axes.plot(curves.recall, curves.precision, color=SERIES[0], label="over rank")
    within = np.array(curves.precision_skip, float)  # None, at radii where nothing was found, becomes NaN
    label = "over Hamming radius"
    axes.plot(curves.radius_recall, within, "o-", color=SERIES[1], linewidth=1.2, markersize=3, label=label)
    if report.baseline_recall:
        recall, precision, dashed = report.baseline_recall, report.baseline_precision, (0, (4, 2))
        axes.plot(recall, precision, color=SERIES[2], linestyle=dashed, label=report.baseline_name)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.02))


def _distances(report: EvaluationReport, axes: "Axes") -> None:
    found, radius = report.distances, np.arange(report.n_bits + 1)
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


def _calibration(report: EvaluationReport, axes: "Axes") -> None:
    made, relevant = report.calibration, np.asarray(report.distances.relevant)
    radius, pairs = np.arange(report.n_bits + 1), np.asarray(made.pairs)
    seen = pairs > 0
    observed = relevant[seen] / pairs[seen]
    axes.scatter(radius[seen], observed, s=9, color=OTHER, zorder=3, label="observed at the distance")
    axes.plot(radius, made.at_distance, color=SERIES[1], linewidth=1.2, label="fitted at the distance")
    axes.plot(radius, made.within_radius, color=SERIES[0], label="within the radius")
    axes.set(xlabel="Hamming distance in bits", ylabel="share of relevant pairs")
    axes.set(xlim=(0, report.n_bits), ylim=(0, 1.02))


def _lengths(report: EvaluationReport, axes: "Axes") -> None:
    """A point for each model, and a line for each method through its means at each length."""
    methods: dict[str, list[ComparedModel]] = {}
    for model in report.models:
        methods.setdefault(model.method, []).append(model)
    for place, (method, models) in enumerate(methods.items()):
        colour, dashes = SERIES[place % len(SERIES)], "-" if place < len(SERIES) else (0, (4, 2))
        bits = sorted({model.n_bits for model in models})
        scored = [(model.n_bits, report.at_main_n(model.scores).mean_average_precision) for model in models]
        at = [[value for n_bits, value in scored if n_bits == each] for each in bits]
        worst = [min(value.worst for value in values) for values in at]
        best = [max(value.best for value in values) for values in at]
        if len(bits) > 1:
            axes.fill_between(bits, worst, best, color=colour, alpha=0.14, linewidth=0)
        else:
            axes.vlines(bits, worst, best, color=colour, alpha=0.3, linewidth=6)
        means = [float(np.mean([value.expected for value in values])) for values in at]
        axes.plot(bits, means, color=colour, linestyle=dashes, label=method)
        lengths, values = [n_bits for n_bits, _ in scored], [value.expected for _, value in scored]
        axes.scatter(lengths, values, s=16, color=colour, zorder=3)
    _random_order(report, axes)
    ticks = sorted({model.n_bits for model in report.models})
    axes.set(xlabel="code length in bits", ylabel=f"mAP@{report.main_n}", xticks=ticks)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 1.02))


def _scatter(places: NDArray[np.float64], group: NDArray[np.int64], names: Sequence[str]) -> "Figure":
    figure, axes = _new((_SIZE[0], 4.6))
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
