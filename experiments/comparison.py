"""Every method on the same data, with the same network, batches and budget, and a sweep of the same size.

On photographs the backbone is frozen, so its features are computed once and a run takes seconds. For each method a few
settings are tried on the validation part of the training split. The best are trained at every code length with several
seeds, and only those runs are scored on the query split. Rows of finished runs are kept, so an interrupted comparison
continues.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import Codes, pack
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.metrics import average_precision, class_distances, histograms
from hashseek.retrieval.models.backbones import default_preprocessing
from hashseek.training.config import Config, load_config, read_config
from hashseek.training.data.cached_features import features_of
from hashseek.training.data.datasets import Splits, build_splits
from hashseek.training.data.training_images import Images
from hashseek.training.loop.fit import fit, initial_model
from hashseek.training.runs.run_folder import read_log, read_records, write_records
from hashseek.training.runs.sweep import sweep

Space = dict[str, Any]

N = 1000
SWEEP_BITS = 24
# Validation images are searched among each other: among the images trained on, settings that memorise look best.
_HELD_OUT = ("train.val_fraction=0.3", "train.val_database=held-out")


@dataclass(frozen=True)
class Data:
    """What the methods are compared on: a configuration, and the N of the validation mAP@N."""

    config: Path
    val_n: int


DATA = {
    "mirflickr": Data(Path("mirflickr25k_mobilenet_v2_hyp2_48"), 61),  # of 961, as 1,000 are of the database
    "scene": Data(Path("scene_mlp_tie_aware_48"), 300),
    "yeast": Data(Path("yeast_mlp_tie_aware_48"), 300),
}

_LR: Space = {"optimizer.lr": {"low": 3e-4, "high": 3e-2, "log": True}, "model.dropout": [0.0, 0.3, 0.6]}
_PROXY_LR: Space = {"optimizer.proxy_lr": {"low": 1e-3, "high": 1e-1, "log": True}}
_TAU: Space = {"loss.tau": {"low": 0.05, "high": 0.5, "log": True}}
# Contrastive losses see directions only: this term draws them to the corners of the cube.
_QUANTIZATION: Space = {"loss.quantization.weight": {"low": 0.01, "high": 1.0, "log": True}}
_COS = ('loss.quantization={kind="cos", weight=0.1}',)


@dataclass(frozen=True)
class Method:
    """One row of the table: what it sets in the configuration, and what its sweep may choose."""

    title: str
    settings: tuple[str, ...]
    space: Space = field(default_factory=dict)


METHODS: dict[str, Method] = {
    "tie_aware": Method("Tie-aware (ours)", ("loss.name=tie_aware",), {**_LR, "loss.weight": [1.0, 3.0, 6.0]}),
    "hyp2": Method("HyP2", ("loss.name=hyp2",), {**_LR, **_PROXY_LR, "loss.beta": [0.5, 0.75, 1.0, 1.25]}),
    "hyp2_proxy": Method("HyP2, proxy only", ("loss.name=hyp2_proxy",), {**_LR, **_PROXY_LR}),
    "hyp2_pair": Method("HyP2, pair only", ("loss.name=hyp2_pair",), _LR),
    "hyp2_proxy_pair": Method(
        "HyP2, proxy + pair", ("loss.name=hyp2_proxy_pair",), {**_LR, **_PROXY_LR, "loss.beta": [0.5, 0.75, 1.0, 1.25]}
    ),
    "dsh": Method("DSH", ("loss.name=dsh",), {**_LR, "loss.alpha": {"low": 1e-3, "high": 1e-1, "log": True}}),
    "dpsh": Method("DPSH", ("loss.name=dpsh",), {**_LR, "loss.eta": {"low": 1e-3, "high": 1.0, "log": True}}),
    "dhn": Method("DHN", ("loss.name=dhn",), {**_LR, "loss.lam": {"low": 1e-3, "high": 1.0, "log": True}}),
    "hashnet": Method("HashNet", ("loss.name=hashnet",), {**_LR, "loss.continuation": ["epoch", "iteration", "none"]}),
    "idhn": Method("IDHN", ("loss.name=idhn",), {**_LR, "loss.gamma": {"low": 1e-2, "high": 1.0, "log": True}}),
    "csq": Method("CSQ", ("loss.name=csq",), {**_LR, "loss.lam": {"low": 1e-4, "high": 1e-1, "log": True}}),
    "orthohash": Method(
        "OrthoHash", ("loss.name=orthohash",), {**_LR, "loss.s": {"low": 4.0, "high": 16.0}, "loss.m": [0.0, 0.1, 0.2]}
    ),
    "proxy_anchor": Method(
        "Proxy Anchor", ("loss.name=proxy_anchor",), {**_LR, **_PROXY_LR, "loss.alpha": [8.0, 16.0, 32.0]}
    ),
    "mulsupcon": Method("MulSupCon + quantisation", ("loss.name=mulsupcon", *_COS), {**_LR, **_TAU, **_QUANTIZATION}),
    "reg": Method("REG + quantisation", ("loss.name=reg", *_COS), {**_LR, **_PROXY_LR, **_TAU, **_QUANTIZATION}),
    "msc": Method("MSC + quantisation", ("loss.name=msc", *_COS), {**_LR, **_PROXY_LR, **_TAU, **_QUANTIZATION}),
    "simdis": Method(
        "SimDis (outside) + quantisation",
        ("loss.name=simdis", "loss.mode=outside", *_COS),
        {**_LR, **_TAU, **_QUANTIZATION},
    ),
    "hbl": Method(
        "HBL + quantisation",
        ("loss.name=hbl", "memory.size=2048", "memory.momentum=0.99", *_COS),
        {**_LR, **_TAU, **_QUANTIZATION, "loss.lam": {"low": 1e-3, "high": 1.0, "log": True}},
    ),
}
"""Ours, rows of HyP2's Tables 3 and 5, and contrastive losses with a quantisation term."""


@dataclass(frozen=True)
class Inputs:
    """Queries and database, as vectors or as features of the frozen backbone."""

    splits: Splits
    query: NDArray[np.float32]
    database: NDArray[np.float32]


def load_inputs(config: Config, *, advance: Callable[[int], None] = lambda _: None) -> Inputs:
    """Queries and database; features come from the cache where they are known."""
    splits = build_splits(config.data.name, **config.data.options())
    if splits.query.vectors is not None and splits.database.vectors is not None:
        return Inputs(splits, splits.query.vectors, splits.database.vectors)
    default = default_preprocessing(config.model.backbone, weights=config.model.weights)
    assert default is not None  # the base configuration has a backbone for images
    preprocessing = config.model.preprocessing(default)
    model = initial_model(config)
    device = torch.device("cpu")
    query, database = (
        features_of(
            model,
            Images(split, preprocessing, cache="none"),
            device=device,
            precision=config.train.precision,
            advance=advance,
        )
        for split in (splits.query, splits.database)
    )
    return Inputs(splits, query, database)


@dataclass(frozen=True)
class Experiment:
    """One comparison: the same data, code lengths and budget for every method.

    bits: code lengths. n_seeds: runs of each length. n_trials: settings that each method's sweep tries. epochs: of each
    run. base: overrides of the configuration, for all methods alike.
    """

    data: str = "mirflickr"
    bits: tuple[int, ...] = (12, 24, 36, 48)
    n_seeds: int = 3
    n_trials: int = 6
    epochs: int = 30
    base: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """What all methods share: AdamW, weight decay, the number of epochs, and `base`."""
        adamw = ("optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.weight_decay=0.0005")
        return (*adamw, f"train.epochs={self.epochs}", *self.base)


def tune(method: str, experiment: Experiment, folder: Path) -> tuple[str, ...]:
    """The settings that the method's sweep chose on the validation part; remembered in `folder`."""
    chosen = folder / method / "chosen.json"
    if not chosen.is_file():
        data, entry = DATA[experiment.data], METHODS[method]
        tuning = (*_HELD_OUT, f"train.val_n={data.val_n}", f"model.n_bits={SWEEP_BITS}")
        content = read_config(data.config, (*experiment.settings, *tuning, *entry.settings))
        trials = folder / method / "sweep"
        best = sweep(content, entry.space, n_trials=experiment.n_trials, folder=trials, seed=0)
        write_atomically(chosen, json.dumps(best.settings).encode())
        shutil.rmtree(trials)  # the checkpoints are large, and the choice is kept
    return tuple(json.loads(chosen.read_text(encoding="utf-8")))


def measure(data: Data, settings: Sequence[str], out: Path, inputs: Inputs) -> dict[str, Any]:
    """Train once and score on the query split; the run folder is deleted afterwards."""
    config = load_config(data.config, settings)
    result = fit(config, out=out, resume=out.is_dir())
    log = read_log(result.run)
    scores = score(result.run.best, inputs)
    curve = [row[f"val_mAP@{config.train.val_n}"] for row in log]
    nearly = next(epoch for epoch, value in enumerate(curve) if value >= 0.95 * curve[-1])
    shutil.rmtree(out)  # some megabytes each, and there are hundreds
    return {
        "n_bits": config.model.n_bits,
        "seed": config.train.seed,
        **scores,
        "validation": result.best_score,
        "epochs_to_95": nearly + 1,
        "seconds_to_95": sum(row["seconds"] for row in log[: nearly + 1]),
        "seconds": sum(row["seconds"] for row in log),
        "settings": list(settings),
    }


def score(checkpoint: Path, inputs: Inputs) -> dict[str, float]:
    """Scores of a checkpoint on the query split."""
    model = load_checkpoint(checkpoint).model.eval()
    function = model.outputs if inputs.splits.query.vectors is None else model

    def encode(rows: NDArray[np.float32]) -> Codes:
        with torch.inference_mode():
            return pack(function(torch.from_numpy(rows)).numpy())

    return scores_of(encode(inputs.query), encode(inputs.database), inputs.splits, n_bits=model.n_bits)


def scores_of(query: Codes, database: Codes, splits: Splits, *, n_bits: int) -> dict[str, float]:
    """mAP@1000 (expected, worst and best over ties), d_intra and d_inter of the codes of both splits."""
    found = histograms(query, database, splits.query.labels, splits.database.labels, n_bits=n_bits)
    precision = average_precision(found, n=N)
    distances = class_distances(found)
    return {
        "mAP": float(precision.expected.mean()),
        "worst": float(precision.worst.mean()),
        "best": float(precision.best.mean()),
        "d_intra": distances.intra,
        "d_inter": distances.inter,
    }


def rows_of(folder: Path, method: str) -> list[dict[str, Any]]:
    """The finished runs of a method."""
    return read_records(folder / method / "rows.jsonl")


def run_method(method: str, experiment: Experiment, folder: Path) -> None:
    """Tune a method and train all of its runs that are not finished; each adds a row in `folder`.

    Raises:
        HashseekError: what a training run refuses.
    """
    torch.set_num_threads(1)  # on features a run is too small to share between cores; methods run side by side
    data = DATA[experiment.data]
    chosen = tune(method, experiment, folder)
    rows = rows_of(folder, method)
    done = {(row["n_bits"], row["seed"]) for row in rows}
    wanted = [run for run in product(experiment.bits, range(experiment.n_seeds)) if run not in done]
    if not wanted:
        return
    inputs = load_inputs(load_config(data.config, experiment.settings))
    for n_bits, seed in wanted:
        of_run = (f"model.n_bits={n_bits}", f"train.seed={seed}")
        settings = (*experiment.settings, *METHODS[method].settings, *chosen, *of_run)
        rows.append({"method": method, **measure(data, settings, folder / method / f"{n_bits}-{seed}", inputs)})
        write_records(folder / method / "rows.jsonl", rows)


def run(
    folder: Path,
    experiment: Experiment,
    *,
    methods: Sequence[str],
    jobs: int,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """`run_method` for each of `methods`, `jobs` at a time.

    Raises:
        HashseekError: the first error of any method.
    """
    config = DATA[experiment.data].config
    for n_bits in experiment.bits:  # a bad one is refused before anything is computed
        load_config(config, (*experiment.settings, f"model.n_bits={n_bits}"))
    _check_same_budget(folder, experiment)
    say("queries and database")
    # The features are computed before methods run side by side, or each would compute them.
    load_inputs(load_config(config, experiment.settings))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_method, method, experiment, folder): method for method in methods}
        for future in as_completed(running):
            future.result()
            say(f"{METHODS[running[future]].title}: done")


def _check_same_budget(folder: Path, experiment: Experiment) -> None:
    """Raise BadConfig if the folder's runs had another data set or budget: their rows would not compare."""
    file = folder / "experiment.json"
    budget = {name: value for name, value in asdict(experiment).items() if name not in ("bits", "n_seeds")}
    budget["base"] = list(experiment.base)
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(budget).encode())
    elif (earlier := json.loads(file.read_text(encoding="utf-8"))) != budget:
        raise BadConfig(f"{folder} holds runs with {earlier}, not {budget}: use the same, or choose another --out")


def as_markdown(folder: Path, *, methods: Sequence[str]) -> str:
    """The table of all finished runs: mean and standard deviation over seeds, best first at the longest code."""
    rows = [row for method in methods for row in rows_of(folder, method)]
    if not rows:
        return "no run is finished yet\n"
    bits = sorted({row["n_bits"] for row in rows})
    means = {(method, k): _values(rows, method, k, "mAP") for method in methods for k in bits}
    ordered = sorted(
        (method for method in methods if len(means[method, bits[-1]])), key=lambda m: -means[m, bits[-1]].mean()
    )
    lines = [
        f"mAP@{N} (expected over ties), mean and standard deviation over seeds; d_intra and d_inter in bits,",
        f"and epochs and seconds until 95 % of the final validation mAP, both at {bits[-1]} bits.",
        "",
        f"| method | {' | '.join(f'{k} bits' for k in bits)} | d_intra / d_inter | epochs to 95 % | s |",
        f"|---|{'---|' * len(bits)}---|---:|---:|",
    ]
    for method in ordered:
        cells = [_cell(means[method, k]) for k in bits]
        intra, inter = (_values(rows, method, bits[-1], key).mean() for key in ("d_intra", "d_inter"))
        epochs, seconds = (_values(rows, method, bits[-1], f"{unit}_to_95").mean() for unit in ("epochs", "seconds"))
        distances = f"{intra:.1f} / {inter:.1f}"
        lines.append(f"| {METHODS[method].title} | {' | '.join(cells)} | {distances} | {epochs:.1f} | {seconds:.1f} |")
    lines.append("")
    for k in bits:
        there = sorted((method for method in methods if len(means[method, k])), key=lambda m: -means[m, k].mean())
        lines.append(f"{k} bits: " + " > ".join(METHODS[method].title for method in there[:4]) + _place(there))
    return "\n".join(lines) + "\n"


def _place(ordered: Sequence[str]) -> str:
    return f"; HyP2 is number {ordered.index('hyp2') + 1} of {len(ordered)}" if "hyp2" in ordered else ""


def _values(rows: Sequence[dict[str, Any]], method: str, n_bits: int, key: str) -> NDArray[np.float64]:
    return np.array([row[key] for row in rows if row["method"] == method and row["n_bits"] == n_bits])


def _cell(values: NDArray[np.float64]) -> str:
    if not len(values):
        return ""
    return f"{values.mean():.4f} ± {values.std(ddof=1) if len(values) > 1 else 0:.4f}"
