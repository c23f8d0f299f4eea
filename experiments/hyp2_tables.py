"""HyP2's Tables 5 and 6 in the setting of the comparison: ablations, beta, and distances to the centres of labels.

Each ablation has searches of its own, as every method of the comparison. HyP2 with a given beta has the rates and the
dropout that its own search chose. All start from ITQ. The paper fine-tunes AlexNet on all of Flickr-25k, so only the
order of the variants can be compared.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from experiments.comparison import (
    Experiment,
    add_row,
    chosen_settings,
    load_inputs,
    rows_of,
    run_folder,
    trained,
    tune,
    unfinished,
)
from experiments.comparison_report import paired_tests
from experiments.methods import METHODS
from experiments.processes import in_processes
from experiments.scoring import split_scores
from hashseek.training.report_format import Table, mean_and_deviation, table_as_markdown

FOLDER = "hyp2-tables"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {  # a method whose searches choose the settings, and other settings
    "pair": ("hyp2_pair", ()),
    "proxy": ("hyp2_proxy", ()),
    "proxy + pair": ("hyp2_proxy_pair", ()),
    **{f"HyP2, beta {beta:.2f}": ("hyp2", (f"loss.beta={beta}",)) for beta in (0.5, 0.75, 1.0, 1.25)},
}
_TESTED = "HyP2, beta 1.00"  # against the others

# "HyP2 Loss: Beyond Hypersphere Metric Space for Multi-label Image Retrieval" (ACM MM 2022), Flickr-25k, AlexNet, at
# 12, 24, 36 and 48 bits. Table 5, mAP@1000; Table 6, mean l2 distances (its row HyP2 is with beta 1).
PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "mAP": {
        "pair": (0.779, 0.832, 0.837, 0.847),
        "proxy": (0.787, 0.834, 0.856, 0.871),
        "proxy + pair": (0.817, 0.851, 0.857, 0.870),
        "HyP2, beta 0.50": (0.838, 0.876, 0.893, 0.896),
        "HyP2, beta 0.75": (0.842, 0.877, 0.891, 0.896),
        "HyP2, beta 1.00": (0.845, 0.881, 0.893, 0.901),
        "HyP2, beta 1.25": (0.841, 0.877, 0.891, 0.897),
    },
    "centre_intra": {
        "pair": (3.043, 3.453, 4.320, 4.749),
        "proxy": (2.094, 2.695, 3.174, 3.763),
        "proxy + pair": (2.387, 2.792, 3.351, 3.734),
        "HyP2, beta 1.00": (1.859, 2.395, 2.877, 3.237),
    },
    "centre_inter": {
        "pair": (2.264, 2.868, 3.480, 4.152),
        "proxy": (2.564, 3.322, 4.144, 4.890),
        "proxy + pair": (2.402, 2.995, 3.524, 3.837),
        "HyP2, beta 1.00": (3.633, 4.331, 4.560, 5.202),
    },
}
_TITLES = {
    "mAP": "Table 5: mAP@1000 by Hamming distance",
    "centre_intra": "Table 6, d_intra: mean distance of a code (-1, 1) to the centres of its labels",
    "centre_inter": "Table 6, d_inter: mean distance of a centre to the nearest one of a label on other images",
}
BITS = (12, 24, 36, 48)


def centre_distances(outputs: NDArray[np.float32], labels: NDArray[np.uint8]) -> dict[str, float]:
    """d_intra and d_inter of HyP2's Table 6, of codes in {-1, 1}; a centre is the mean code of the images of a label.

    The paper does not say what makes a centre irrelevant, nor whether outputs or codes are meant. Here, two labels are
    irrelevant to each other if no image has both.

    Args:
        outputs: (N, K).
        labels: 0/1 (N, C).
    """
    codes, member = np.where(outputs > 0, 1.0, -1.0), labels.astype(np.float64)
    used = member.any(axis=0)
    member = member[:, used]
    centres = member.T @ codes / member.sum(axis=0)[:, None]
    to_centres = cdist(codes, centres)
    between = np.where(member.T @ member > 0, np.inf, cdist(centres, centres)).min(axis=1)
    return {
        "centre_intra": float((to_centres * member).sum() / member.sum()),
        "centre_inter": float(between[np.isfinite(between)].mean()) if np.isfinite(between).any() else float("nan"),
    }


def run_variant(variant: str, experiment: Experiment, folder: Path) -> None:
    """Train a variant at every length with every seed; each run adds a row in `folder` / FOLDER.

    Args:
        variant: a key of `VARIANTS`.
        experiment: of the comparison in `folder`, which has chosen the settings of HyP2; those of ablations are
            searched here.
    """
    torch.set_num_threads(1)
    place, inputs = folder / FOLDER, load_inputs(experiment)
    method, own = VARIANTS[variant]
    for n_bits, seed in unfinished(place, variant, experiment):
        tune(method, n_bits, seed, experiment, folder)
        chosen = chosen_settings(folder, method, n_bits, seed)
        settings = (*METHODS[method].settings, *chosen, *own, f"model.n_bits={n_bits}", f"train.seed={seed}")
        config, out = experiment.config(*settings), run_folder(place, variant, n_bits, seed)
        checkpoint, _ = trained(config, out, inputs.splits)
        query, database = checkpoint.head(inputs.query), checkpoint.head(inputs.database)
        scores = split_scores(query, database, inputs.splits)
        centres = centre_distances(database, inputs.splits.database.labels)
        add_row(place, {"method": variant, "n_bits": n_bits, "seed": seed, **scores, **centres})


def run(folder: Path, experiment: Experiment, *, jobs: int, say: Callable[[str], None] = lambda _: None) -> None:
    """`run_variant` for each variant, `jobs` at a time."""
    load_inputs(experiment)  # before variants run side by side, or each would compute the features
    for (variant, *_), _ in in_processes(run_variant, [(one, experiment, folder) for one in VARIANTS], jobs=jobs):
        say(f"{variant}: done")


def as_markdown(folder: Path) -> str:
    """The tables of all finished runs: the paper's figures, then ours, means and deviations over seeds, and tests."""
    rows = {variant: rows_of(folder / FOLDER, variant) for variant in VARIANTS}
    return "\n\n".join([*(_table(key, rows) for key in PAPER), _tests(rows)]) + "\n"


def _tests(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """`paired_tests` of HyP2 against each other variant by Hamming distance."""
    found = [dict(row) for variant in (_TESTED, *VARIANTS) for row in rows[variant]]
    results = [paired_tests(found, n_bits, of_query="AP") for n_bits in BITS]
    others = [variant for variant in VARIANTS if variant != _TESTED]
    cells = [[variant, *(str(tests.get(variant, "")) for tests in results)] for variant in others]
    table = table_as_markdown(Table(["variant", *(f"{n_bits} bits" for n_bits in BITS)], cells, text_columns=5))
    return (
        f"mAP@1000 of {_TESTED} minus that of each variant; in brackets p over queries, and over queries and seeds, "
        "both corrected by Holm for the variants at a length; then the share of the queries on which the variant is "
        "better."
        f"\n\n{table}"
    )


def _table(key: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    cells = []
    for variant, paper in PAPER[key].items():
        ours = [[row[key] for row in rows[variant] if row["n_bits"] == n_bits] for n_bits in BITS]
        cells.append([variant, "paper", *(f"{value:.3f}" for value in paper)])
        cells.append([variant, "ours", *(mean_and_deviation(values) for values in ours)])
    header = ["variant", "", *(f"{n_bits} bits" for n_bits in BITS)]
    return f"{_TITLES[key]}.\n\n{table_as_markdown(Table(header, cells, text_columns=2))}"
