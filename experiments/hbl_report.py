"""The report of HBL's Table II: our scores next to the paper's, and whether the margins help."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

from experiments.hbl_table_2 import MARGINS_OFF
from hashseek.retrieval.metrics.intervals import holm
from hashseek.training.report_format import Table, mean_and_deviation, table_as_markdown

FIGURES = ("p@1", "mAP", "HA", "ebF1", "maF1", "miF1")

# "Learning Semantic Boundaries: An Adaptive Structural Loss for Multi-Label Contrastive Learning", OpenReview
# lGvQaiBiD2, Table II, in the order of FIGURES; the paper gives no spread for these.
PAPER: dict[tuple[str, str], tuple[float, ...]] = {
    ("scene", "any"): (0.7993, 0.8440, 0.9232, 0.7859, 0.7767, 0.7732),
    ("scene", "any+hbl"): (0.8094, 0.8478, 0.9213, 0.7865, 0.7832, 0.7790),
    ("scene", "mulsupcon"): (0.7935, 0.8401, 0.9213, 0.7821, 0.7810, 0.7764),
    ("scene", "mulsupcon+hbl"): (0.8069, 0.8459, 0.9221, 0.7860, 0.7876, 0.7821),
    ("yeast", "any"): (0.7535, 0.4767, 0.7950, 0.6365, 0.4645, 0.6495),
    ("yeast", "any+hbl"): (0.7688, 0.4792, 0.7995, 0.6465, 0.4661, 0.6536),
    ("yeast", "mulsupcon"): (0.7415, 0.4916, 0.8000, 0.6574, 0.4780, 0.6664),
    ("yeast", "mulsupcon+hbl"): (0.7557, 0.4944, 0.8032, 0.6579, 0.4803, 0.6677),
}
TITLES = {
    "any": "Any-Loss",
    "any+hbl": "Any-Loss + HBL",
    "mulsupcon": "MulSupCon",
    "mulsupcon+hbl": "MulSupCon + HBL",
}
BASES = {"any+hbl": "any", "mulsupcon+hbl": "mulsupcon"}
DECISIONS = {
    "folds": "ours, thresholds from the training split",
    "half": "ours, threshold 0.5",
    "oracle": "ours, best of nine thresholds on the test part",
}

Row = Mapping[str, Any]


def as_markdown(rows: Sequence[Row]) -> str:
    """The report of finished seeds: our scores next to the paper's, how many rows reach them, and what HBL adds."""
    parts = [_table(_figures(rows)), _verdict(rows), _table(_margins(rows)), _table(_settings(rows))]
    return "\n\n".join(parts) + "\n"


def _table(rows: Iterable[Sequence[str]]) -> str:
    header, *others = rows
    return table_as_markdown(Table(header, others, text_columns=len(header)))


def _figures(rows: Sequence[Row]) -> Iterable[Sequence[str]]:
    yield ("data", "method", "figures", *FIGURES)
    for data, method in PAPER:
        yield (data, TITLES[method], "paper", *(f"{value:.4f}" for value in PAPER[data, method]))
        seeds = _of(rows, data, method)
        for decision, title in DECISIONS.items():
            if not seeds:
                yield ("", "", title, *["not run"] * len(FIGURES))
                break
            cells = [mean_and_deviation([row["figures"][decision][name] for row in seeds]) for name in FIGURES]
            if decision != "folds":
                cells[:2] = ["", ""]  # p@1 and mAP need no threshold: as above
            yield ("", "", title, *cells)


def _verdict(rows: Sequence[Row]) -> str:
    above = [
        [_mean(seeds, name) >= PAPER[data, method][FIGURES.index(name)] for name in ("mAP", "p@1")]
        for data, method in PAPER
        if (seeds := _of(rows, data, method))
    ]
    by_map, by_first = (sum(row[column] for row in above) for column in (0, 1))
    return (
        f"At or above the paper, mean over seeds: mAP in {by_map} of {len(above)} rows, p@1 in {by_first}, "
        f"both in {sum(map(all, above))}."
    )


def _margins(rows: Sequence[Row]) -> Iterable[Sequence[str]]:
    """HBL against its base, and against itself without margins, paired by seed; p-values corrected for their number."""
    measured = ("figure", "mean difference", "std", "seeds better", "t-test p (Holm)")
    yield ("data", "comparison, paired by seed", *measured, "HBL helps")
    compared: list[tuple[str, str, str, list[float]]] = []
    for data, method in PAPER:
        if method not in BASES:
            continue
        ours = _of(rows, data, method)
        others = {
            f"{TITLES[method]} - {TITLES[BASES[method]]}, each as searched": _of(rows, data, BASES[method]),
            f"{TITLES[method]} - the same settings with lam = 0": _of(rows, data, method, MARGINS_OFF),
        }
        for title, against in others.items():
            for name in ("mAP", "p@1"):
                differences = _paired(ours, against, name)
                if len(differences) > 1:
                    compared.append((data, title, name, differences))
    corrected = holm([_p_value(differences) for *_, differences in compared])
    for (data, title, name, differences), p in zip(compared, corrected, strict=True):
        mean, shown = float(np.mean(differences)), "< 0.001" if p < 0.001 else f"{p:.3f}"
        better = f"{sum(d > 0 for d in differences)} of {len(differences)}"
        figures = (f"{mean:+.4f}", f"{np.std(differences, ddof=1):.4f}", better, shown)
        yield (data, title, name, *figures, _answer(mean, p))


def _settings(rows: Sequence[Row]) -> Iterable[Sequence[str]]:
    """The settings chosen by the search, and their scores."""
    yield ("data", "method", "mAP on the folds", "p@1 on the folds", "probe", "settings chosen")
    for data, method in PAPER:
        for row in _of(rows, data, method)[:1]:
            choice = row["choice"]
            settings = ", ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row["settings"].items()
            )
            probe = f"{choice['layer']} after {choice['cycles']} cycles, decay {choice['decay']:g}"
            scores = f"{choice['mean_ap']:.4f}", f"{choice['p_at_1']:.4f}"
            yield (data, TITLES[method], *scores, probe, settings)


def _answer(mean: float, p: float) -> str:
    if p >= 0.05:
        return "not beyond the spread"
    return "yes" if mean > 0 else "no, it hurts"


def _p_value(differences: Sequence[float]) -> float:
    """Of a two-sided t-test that the mean difference is 0; 1 where all differences are 0."""
    if np.std(differences, ddof=1) == 0:
        return 1.0 if differences[0] == 0 else 0.0
    return float(ttest_1samp(differences, 0).pvalue)


def _paired(rows: Sequence[Row], others: Sequence[Row], name: str) -> list[float]:
    against = {row["seed"]: row["figures"]["folds"][name] for row in others}
    return [row["figures"]["folds"][name] - against[row["seed"]] for row in rows if row["seed"] in against]


def _of(rows: Sequence[Row], data: str, method: str, variant: str = "") -> list[Row]:
    """Rows of one line of the table, of the trial chosen last."""
    found = [r for r in rows if (r["data"], r["method"], r["variant"]) == (data, method, variant)]
    newest = found[-1]["trial"] if found else None
    return sorted((row for row in found if row["trial"] == newest), key=lambda row: int(row["seed"]))


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row["figures"]["folds"][name] for row in rows]))
