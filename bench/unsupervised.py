"""Codes without labels on real photographs, compared with supervised ones and the features, as Markdown tables.

    HASHSEEK_DATA=../shared/data make bench-unsupervised          # all tables
    make bench-unsupervised ARGS="16 64"                          # these lengths
    make bench-unsupervised ARGS=time                             # only the time of a fit, which needs no data

MIRFLICKR-25k (the 128 px copy), frozen MobileNet v2. Hash layers are fitted to the 3,205 training pictures; 793 queries
are searched in 15,667 pictures that no fit has seen. Labels are used for scoring; only supervised losses and itq_cca
learn from them.
The encoder that also indexes computes the features, but training (bihalf, hyp2, tie_aware) computes its own.

Three rankings of the same codes: by Hamming distance (mAP@1000 expected over ties), by the query's outputs against the
stored signs ("asymmetric"; ties by id), and by the cosine of the features among the first 10 k Hamming hits, the last
distance taken whole ("float").
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.hash_layers import METHODS, fit_hash_layer, normalized
from hashseek.retrieval.metrics import average_precision, average_precision_of_ranking, gains_of, histograms
from hashseek.training.config import Config, load_config
from hashseek.training.data.cached_features import engine_for, features_of
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.splits import Split, Splits
from hashseek.training.data.training_images import Images
from hashseek.training.loop.fit import fit, initial_model, preprocessing_of
from hashseek.training.progress import Progress

Rows = NDArray[np.float32]
Encode = Callable[[Rows], Rows]  # features (N, D) -> outputs (N, K)

BITS = (16, 32, 48, 64, 128, 256)
N = 1000
OVERSAMPLE = 10
N_NEAREST, N_FIRST = 10, 100
CONFIG = "mirflickr25k_mobilenet_v2_{}"
TRAINED = {"bihalf": "bihalf_64", "hyp2": "hyp2_48", "tie_aware": "tie_aware_48"}
FEW = (50, 100, 200, 500, 1000, 3205)
FEW_BITS = 128
SEEDS = range(3)


@dataclass(frozen=True)
class Data:
    """Features of the three splits."""

    splits: Splits
    train: Rows
    query: Rows
    database: Rows

    @cached_property
    def cosines(self) -> Rows:
        """Cosines (Q, N) of queries and database."""
        return normalized(self.query) @ normalized(self.database).T

    @cached_property
    def nearest(self) -> NDArray[np.int64]:
        """Rows (Q, N_NEAREST) of the highest cosines."""
        return np.argsort(-self.cosines, axis=1, kind="stable")[:, :N_NEAREST]


def load(config: Config) -> Data:
    """Features of the frozen backbone, in the precision that suits this processor."""
    splits = build_splits(config.data.name, **config.data.options())
    model, preprocessing = initial_model(config), preprocessing_of(config)
    assert preprocessing is not None  # the backbone is one for images
    engine = engine_for(model, preprocessing)
    print(f"features: {engine.name}")

    def features(split: Split) -> Rows:
        images = Images(split, preprocessing, cache="none")
        with Progress().task("features", len(images)) as advance:
            return features_of(model, images, engine=engine, advance=advance)

    return Data(splits, *(features(split) for split in (splits.train, splits.query, splits.database)))


# Scores


def signs(outputs: Rows) -> Rows:
    return np.where(outputs > 0, np.float32(1), np.float32(-1))


def of_order(scores: Rows, data: Data, n: int = N) -> float:
    """mAP@n of the ranking by descending score, ties by id."""
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :n]
    gains = gains_of(ids, data.splits.query.labels, data.splits.database.labels)
    return float(average_precision_of_ranking(gains > 0, n_relevant=(gains > 0).sum(axis=1)).mean())


def by_hamming(query: Rows, database: Rows, data: Data) -> float:
    labels = data.splits.query.labels, data.splits.database.labels
    found = histograms(pack(query), pack(database), *labels, n_bits=query.shape[1])
    return float(average_precision(found, n=N).expected.mean())


def by_cosine_of_hits(query: Rows, database: Rows, data: Data, n: int) -> float:
    """mAP@n of the first OVERSAMPLE x n Hamming hits, ordered by the cosine of their features."""
    near = signs(query) @ signs(database).T  # K - 2 x Hamming distance
    last = -np.partition(-near, OVERSAMPLE * n - 1, axis=1)[:, OVERSAMPLE * n - 1]
    return of_order(np.where(near >= last[:, None], data.cosines, -np.inf).astype(np.float32), data, n)


def nearest_found(query: Rows, database: Rows, data: Data) -> float:
    """Share of the N_NEAREST pictures of the highest cosine that are among the first N_FIRST Hamming hits."""
    first = np.argsort(-signs(query) @ signs(database).T, axis=1, kind="stable")[:, :N_FIRST]
    return float((first[:, :, None] == data.nearest[:, None]).sum() / data.nearest.size)


@dataclass(frozen=True)
class Scores:
    """mAP@1000 of two rankings, and the outputs (Q, K) and (N, K) that they rank."""

    hamming: float
    asymmetric: float
    outputs: tuple[Rows, Rows]

    def __str__(self) -> str:
        return f"{self.hamming:.3f} / {self.asymmetric:.3f}"


def scores(encode: Encode, data: Data) -> Scores:
    query, database = encode(data.query), encode(data.database)
    return Scores(
        by_hamming(query, database, data), of_order(query @ signs(database).T, data), outputs=(query, database)
    )


# Methods


def fitted(method: str, n_bits: int, data: Data) -> Encode:
    labels = data.splits.train.labels if method == "itq_cca" else None
    return fit_hash_layer(data.train, n_bits=n_bits, method=method, labels=labels)


def trained(method: str, n_bits: int) -> Encode:
    """The shipped configuration at this length; a supervised one keeps the best epoch of its validation part."""
    settings = [f"model.n_bits={n_bits}", "tracking.tensorboard=false", "train.device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        run = fit(load_config(Path(CONFIG.format(TRAINED[method])), settings), out=Path(folder) / "run").run
        model = load_checkpoint(run.best).model.eval()

    def encode(rows: Rows) -> Rows:
        with torch.inference_mode():
            return model.outputs(torch.from_numpy(rows)).numpy()

    return encode


# Tables


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def header(first: str, columns: Sequence[object]) -> None:
    row(first, *columns)
    row("---", *("---:" for _ in columns))


def table_of_methods(bits: Sequence[int], data: Data) -> None:
    columns = [f"{n_bits} bits" for n_bits in bits]
    print(f"\nmAP@{N}, Hamming / asymmetric; cosine of the features: {of_order(data.cosines, data):.3f}\n")
    header("method", columns)
    found: dict[str, list[Scores | None]] = {}
    for method in (*METHODS, "bihalf", "itq_cca", "hyp2", "tie_aware"):
        build = partial(trained, method) if method in TRAINED else partial(fitted, method, data=data)
        found[method] = [scores_or_none(build, n_bits, data) for n_bits in bits]
        row(method, *(cell or "-" for cell in found[method]))
    print(f"\nShare of the {N_NEAREST} nearest pictures by cosine among the first {N_FIRST} Hamming hits\n")
    header("method", columns)
    for method, cells in found.items():
        row(method, *(f"{nearest_found(*cell.outputs, data):.2f}" if cell else "-" for cell in cells))
    for n in (N, 100):
        print(f"\nmAP@{n} of itq's first {OVERSAMPLE} x {n} Hamming hits by cosine; of all by cosine: ", end="")
        print(f"{of_order(data.cosines, data, n):.4f}\n")
        header("", columns)
        row("itq, float", *(f"{by_cosine_of_hits(*each.outputs, data, n):.4f}" for each in found["itq"] if each))


def scores_or_none(build: Callable[[int], Encode], n_bits: int, data: Data) -> Scores | None:
    """None if a method cannot produce that many bits."""
    try:
        return scores(build(n_bits), data)
    except BadConfig:  # more bits than labels
        return None


def table_of_few(data: Data) -> None:
    """mAP@1000 of hash layers fitted to few pictures, the mean of several draws of pictures and directions."""
    print(
        f"\nmAP@{N} by Hamming distance at {FEW_BITS} bits, fitted to n of the training pictures, {len(SEEDS)} draws\n"
    )
    header("n", ("random", "itq"))
    for n in FEW:
        cells = []
        for method in ("random", "itq"):
            if method == "itq" and n <= FEW_BITS:  # refused
                cells.append("-")
                continue
            values = []
            for seed in SEEDS:
                chosen = np.random.default_rng(seed).permutation(len(data.train))[:n]
                layer = fit_hash_layer(data.train[chosen], n_bits=FEW_BITS, method=method, seed=seed)
                values.append(by_hamming(layer(data.query), layer(data.database), data))
            cells.append(f"{np.mean(values):.3f}")
        row(n, *cells)


def time_of_fit(n: int = 20_000, width: int = 1280, n_bits: int = 256) -> None:
    rng = np.random.default_rng(0)
    spread = np.exp(-np.arange(width) / 200)  # of the principal directions, about as that of MobileNet v2
    features = np.maximum(rng.standard_normal((n, width)) * spread + rng.random(width), 0).astype(np.float32)
    for method in METHODS:
        started = time.perf_counter()
        fit_hash_layer(features, n_bits=n_bits, method=method)
        seconds = time.perf_counter() - started
        print(f"fit of {method} to {n:,} x {width} features, {n_bits} bits, {n_cores()} cores: {seconds:.1f} s")


def main() -> None:
    time_of_fit()
    if sys.argv[1:] == ["time"]:
        return
    bits = [int(value) for value in sys.argv[1:]] or BITS
    data = load(load_config(Path(CONFIG.format("hyp2_48"))))
    table_of_methods(bits, data)
    table_of_few(data)


if __name__ == "__main__":
    main()
