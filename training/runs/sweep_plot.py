"""The plot of a sweep: the score of each trial, and the score over each setting."""

import io
from collections.abc import Sequence
from itertools import accumulate

from matplotlib.figure import Figure
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial


def plot_trials(trials: Sequence[FrozenTrial], space: dict[str, BaseDistribution], score_name: str) -> bytes:
    """An SVG of trials that have a score: one panel over the trials, and one for each setting in `space`."""
    scores = [float(trial.value) for trial in trials if trial.value is not None]
    figure = Figure(figsize=(4.5 * (1 + len(space)), 3.5), layout="constrained")
    first, *panels = figure.subplots(1, 1 + len(space), sharey=True, squeeze=False)[0]
    numbers = [trial.number for trial in trials]
    first.plot(numbers, scores, "o", label="trial")
    first.step(numbers, list(accumulate(scores, max)), where="post", label="best so far")
    first.set(xlabel="trial", ylabel=score_name)
    first.legend()
    best = trials[max(range(len(trials)), key=scores.__getitem__)]
    for panel, (name, distribution) in zip(panels, space.items(), strict=True):
        categorical = isinstance(distribution, CategoricalDistribution)

        def place(trial: FrozenTrial, name: str = name, categorical: bool = categorical) -> float | str:
            return str(trial.params[name]) if categorical else trial.params[name]

        panel.plot([place(trial) for trial in trials], scores, "o")
        panel.plot([place(best)], [best.value], "o", markersize=12, markerfacecolor="none")
        panel.set(xlabel=name, xscale="log" if getattr(distribution, "log", False) else "linear")
    svg = io.BytesIO()
    figure.savefig(svg, format="svg")
    return svg.getvalue()
