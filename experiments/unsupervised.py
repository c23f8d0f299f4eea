"""Codes without labels on MIRFLICKR, compared with supervised ones and with the features themselves.

Hash layers are fitted to the features of the training pictures by a frozen MobileNet v2, and the queries are searched
in pictures that no fit has seen. Labels are used for scoring; only supervised losses and itq_cca learn from them.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments import comparison
from experiments.inputs import Inputs, inputs_of
from experiments.scoring import N, Outputs, order_scores, split_scores
from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.hash_layers import METHODS, fit_hash_layer, normalized
from hashseek.training.config import load_config
from hashseek.training.report_format import Table, table_as_markdown

BITS = (16, 32, 48, 64, 128, 256)
CONFIG = "mirflickr25k_mobilenet_v2_{}"
TRAINED = {"bihalf": "bihalf_64", "hyp2": "hyp2_48", "tie_aware": "tie_aware_48"}
OVERSAMPLE = 10
N_NEAREST, N_FIRST = 10, 100
FEW, FEW_BITS, DRAWS = (50, 100, 200, 500, 1000, 3205), 128, 3


def run(bits: Sequence[int], *, say: Callable[[str], None]) -> None:
    """Say the tables of docs/explanation/unsupervised.md for codes of these lengths, and the time of a fit."""
    time_fits(say)
    inputs = inputs_of(load_config(Path(CONFIG.format("hyp2_48"))))
    cosines = normalized(inputs.query) @ normalized(inputs.database).T
    for n in (N, 100):
        say(f"mAP@{n} of all pictures by the cosine of their features: {order_scores(cosines, inputs.splits, n=n):.4f}")
    rows: dict[str, list[list[str]]] = {}
    for method in (*METHODS, "bihalf", "itq_cca", "hyp2", "tie_aware"):
        cells = [cells_of(method, n_bits, inputs, cosines) for n_bits in bits]
        for title in dict.fromkeys(title for of_length in cells for title in of_length):
            rows.setdefault(title, []).append([method, *(of_length.get(title, "-") for of_length in cells)])
    header = ["method", *(f"{n_bits} bits" for n_bits in bits)]
    for title, of_methods in rows.items():
        say(f"\n{title}\n\n{table_as_markdown(Table(header, of_methods, text_columns=1))}")
    say(f"\nmAP@{N} by Hamming distance at {FEW_BITS} bits, fitted to n of the training pictures, {DRAWS} draws\n")
    say(table_as_markdown(Table(["n", "random", "itq"], [few(n, inputs) for n in FEW])))


def cells_of(method: str, n_bits: int, inputs: Inputs, cosines: NDArray[np.float32]) -> dict[str, str]:
    """The cells of a method at a length by the title of their table; none if it cannot have that many bits."""
    if method == "itq_cca" and n_bits > len(inputs.splits.label_names):
        return {}
    if method in TRAINED:
        outputs = trained(method, n_bits)
    else:  # only ITQ-CCA reads labels
        outputs = fit_hash_layer(inputs.train, n_bits=n_bits, method=method, labels=inputs.splits.train.labels)
    query, database = outputs(inputs.query), outputs(inputs.database)
    near = signs(query) @ signs(database).T  # K - 2 x Hamming distance
    found = split_scores(query, database, inputs.splits)
    share = share_of_nearest(near, cosines)
    cells = {
        f"mAP@{N}, Hamming / asymmetric": f"{found['mAP']:.3f} / {found['asymmetric']:.3f}",
        f"Share of the {N_NEAREST} nearest by cosine among the first {N_FIRST} Hamming hits": f"{share:.2f}",
    }
    for n in (N, 100) if method == "itq" else ():
        last = -np.partition(-near, OVERSAMPLE * n - 1, axis=1)[:, OVERSAMPLE * n - 1, None]  # taken whole
        of_hits = order_scores(np.where(near >= last, cosines, -np.inf), inputs.splits, n=n)
        cells[f"mAP@{n} of the first {OVERSAMPLE} x {n} Hamming hits by cosine"] = f"{of_hits:.4f}"
    return cells


def share_of_nearest(near: NDArray[np.float32], cosines: NDArray[np.float32], *, n_first: int = N_FIRST) -> float:
    """The share of each query's nearest by cosine (Q, N) that are among the first by Hamming distance.

    near: K - 2 x distance (Q, N).
    """
    first = np.argsort(-near, axis=1, kind="stable")[:, :n_first]
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :N_NEAREST]
    return float((first[:, :, None] == nearest[:, None]).sum() / nearest.size)


def signs(outputs: Outputs) -> Outputs:
    """1 and -1 in place of outputs."""
    return np.where(outputs > 0, np.float32(1), np.float32(-1))


def trained(method: str, n_bits: int) -> Callable[[NDArray[np.float32]], Outputs]:
    """The hash layer of the shipped configuration at this length; a supervised one keeps its best epoch."""
    place = Path(CONFIG.format(TRAINED[method]))
    settings = [f"model.n_bits={n_bits}", "tracking.tensorboard=false", "train.device=cpu"]
    shipped = load_config(place)
    if factor := shipped.loss.options().get("a"):  # of inner products, which grow with the number of bits
        settings.append(f"loss.a={factor * shipped.model.n_bits / n_bits:.4g}")
    with tempfile.TemporaryDirectory() as folder:
        return comparison.trained(load_config(place, settings), Path(folder) / "run")[0].head


def few(n: int, inputs: Inputs) -> list[str]:
    """A row for layers fitted to `n` pictures: means over several draws of pictures and directions."""
    cells = [f"{n:,}"]
    for method in ("random", "itq"):
        values = []
        for seed in range(DRAWS) if method == "random" or n > FEW_BITS else ():  # ITQ would be refused
            chosen = np.random.default_rng(seed).permutation(len(inputs.train))[:n]
            layer = fit_hash_layer(inputs.train[chosen], n_bits=FEW_BITS, method=method, seed=seed)
            values.append(split_scores(layer(inputs.query), layer(inputs.database), inputs.splits)["mAP"])
        cells.append(f"{np.mean(values):.3f}" if values else "-")
    return cells


def time_fits(say: Callable[[str], None]) -> None:
    """Say how long the fit of each hash layer takes, for features with about the spread of MobileNet v2's."""
    n, width, n_bits = 20_000, 1280, 256
    rng = np.random.default_rng(0)
    spread = np.exp(-np.arange(width) / 200)  # of the principal directions
    features = np.maximum(rng.standard_normal((n, width)) * spread + rng.random(width), 0).astype(np.float32)
    for method in METHODS:
        started = time.perf_counter()
        fit_hash_layer(features, n_bits=n_bits, method=method)
        seconds = time.perf_counter() - started
        say(f"fit of {method} to {n:,} x {width} features, {n_bits} bits, {n_cores()} cores: {seconds:.1f} s")
