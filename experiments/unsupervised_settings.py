"""How `weighted_itq`, `itq_cca` and `bihalf` do with other settings, on the training pictures of MIRFLICKR.

A random third of these pictures is searched by another third, and hash layers are fitted to the last, so the queries of
the data set do not influence a choice. Labels are used for scoring; only ITQ-CCA learns from them.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from experiments import comparison
from experiments.inputs import DATA, Inputs, inputs_of
from experiments.scoring import Outputs, gallery_scores, split_scores
from experiments.unsupervised import CONFIG, N_NEAREST, TRAINED, share_of_nearest, signs
from hashseek.retrieval import hash_layers
from hashseek.retrieval.hash_layers import fit_hash_layer, normalized
from hashseek.training.config import load_config
from hashseek.training.report_format import Table, table_as_markdown

BITS = (16, 64, 256)
CCA_BITS = (12, 24, 36)  # there are 38 labels
DRAWS = 3
N = 68  # of the 1,069 pictures searched, about the share that 1,000 are of the whole database
N_FIRST = 30
POWERS = (0, 0.125, 0.25, 0.375, 0.5, 1)
CHANGES = (
    "loss.gamma=6",
    "loss.gamma=20",
    "loss.gamma=200",
    "optimizer.lr=1e-4",
    "optimizer.lr=1e-2",
    "train.epochs=30",
    "model.dropout=0.3",
    "model.head_init=random",
)

Layer = Callable[[NDArray[np.float32]], Outputs]


def run(*, say: Callable[[str], None]) -> None:
    """Say a table of scores for each method: a row for each setting, a column for each code length."""
    inputs = inputs_of(load_config(Path(CONFIG.format(TRAINED["bihalf"]))))
    gallery = inputs_of(load_config(DATA["mirflickr"].config, DATA["mirflickr"].gallery))
    parts = [replace(part, gallery=gallery) for part in thirds(inputs)]

    def table(title: str, settings: Sequence[object], layer: Callable[..., Layer], bits: Sequence[int]) -> None:
        cells = [
            [f"{setting}", *(mean_scores([(layer(part, n_bits, setting), part) for part in parts]) for n_bits in bits)]
            for setting in settings
        ]
        header = [title, *(f"{n_bits} bits" for n_bits in bits)]
        say(f"\n{table_as_markdown(Table(header, cells, text_columns=1))}")

    say(f"mAP@{N} / share of the {N_NEAREST} nearest pictures among the first {N_FIRST} / precision@10 on COCO")
    table("power of weighted_itq", POWERS, weighted, BITS)
    table("ridge of itq_cca", comparison.RIDGES, correlated, CCA_BITS)
    table("change of bihalf", ("none", *CHANGES), trained, BITS)


def thirds(inputs: Inputs) -> Iterator[Inputs]:
    """The training pictures in random thirds, as inputs; several times."""
    train, size = inputs.splits.train, len(inputs.train) // 3
    for seed in range(DRAWS):
        order = np.random.default_rng(seed).permutation(len(train))
        rows = order[:size], order[size : 2 * size], order[2 * size :]
        names = "train", "query", "database"
        splits = replace(inputs.splits, **{name: train.take(part) for name, part in zip(names, rows, strict=True)})
        yield Inputs(splits, *(inputs.train[part] for part in rows))


def mean_scores(layers: Sequence[tuple[Layer, Inputs]]) -> str:
    """Means of mAP@N, of the share of the nearest pictures found, and of precision on the gallery."""
    found = []
    for layer, part in layers:
        query, database = layer(part.query), layer(part.database)
        cosines = normalized(part.query) @ normalized(part.database).T
        share = share_of_nearest(signs(query) @ signs(database).T, cosines, n_first=N_FIRST)
        assert part.gallery is not None
        of_gallery = gallery_scores(layer, part.gallery)["gallery"]
        found.append((split_scores(query, database, part.splits, n=N)["mAP"], share, of_gallery))
    return " / ".join(f"{value:.3f}" for value in np.mean(found, axis=0))


def weighted(part: Inputs, n_bits: int, power: float) -> Layer:
    """Weighted ITQ with another power of the standard deviations; 0: ITQ."""
    with mock.patch.object(hash_layers, "POWER", power):
        return fit_hash_layer(part.train, n_bits=n_bits, method="weighted_itq")


def correlated(part: Inputs, n_bits: int, ridge: float) -> Layer:
    """ITQ-CCA with another ridge."""
    return fit_hash_layer(part.train, n_bits=n_bits, method="itq_cca", labels=part.splits.train.labels, ridge=ridge)


def trained(part: Inputs, n_bits: int, change: str) -> Layer:
    """BiHalf with its shipped configuration and a change of it."""
    settings = [f"model.n_bits={n_bits}", "tracking.tensorboard=false", "train.device=cpu"]
    config = load_config(Path(CONFIG.format(TRAINED["bihalf"])), [*settings, *([] if change == "none" else [change])])
    with tempfile.TemporaryDirectory() as folder:
        return comparison.trained(config, Path(folder) / "run", part.splits)[0].head
