"""Every method on the same data under one protocol: same network, initialisation, batches, budget and dropout choices.

On photographs the backbone is frozen, so its features are computed once and a run takes seconds. Everything is repeated
with several seeds: for each method, the same number of settings is tried at two code lengths on the validation part of
the training split, drawn independently of other methods, data and seeds. The best is trained at every length, and only
those runs are scored on the query split, by Hamming distance and by the query's real outputs. So the spread over seeds
includes that of the searches. A method without a search space has fixed settings. Every finished trial and run is kept,
so an interrupted comparison continues.

    FOLDER/METHOD/chosen.jsonl    what each search chose
    FOLDER/METHOD/rows.jsonl      one line per finished run, with the AP of every query
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.inputs import DATA, Inputs, data_of, inputs_of
from experiments.methods import METHODS, POWERS, space_at
from experiments.processes import in_processes
from experiments.scoring import N, Outputs, cosine_scores, gallery_scores, scores_of
from hashseek.retrieval.checkpoint import Checkpoint, load_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.hash_layers import fit_hash_layer
from hashseek.retrieval.metrics import average_precision, histograms, remarks, without_self
from hashseek.training.config import Config, load_config, read_config
from hashseek.training.data.datasets import Splits, build_splits
from hashseek.training.data.splits import Rows
from hashseek.training.loop.fit import fit
from hashseek.training.loop.validation import validation_part
from hashseek.training.runs.run_folder import read_records, write_or_check, write_records
from hashseek.training.sweep import sweep

TUNED = (12, 48)  # the lengths at which settings are searched; others use those of the nearest
RIDGES = (0.1, 0.3, 1, 3, 10, 30)  # of ITQ-CCA, whose search tries all of them
_HELD_OUT = 0.3  # the share of the training images that searches validate on


@dataclass(frozen=True)
class Experiment:
    """One comparison: the same data, code lengths and budget for every method.

    data: a key of `DATA`, or the path of a configuration. bits: code lengths. n_seeds: repetitions, each with its own
    searches and validation part. n_trials: settings that each search tries. epochs: of each run. base: overrides of the
    configuration, for all methods alike.
    """

    data: str = "mirflickr"
    bits: tuple[int, ...] = (12, 24, 36, 48)
    n_seeds: int = 5
    n_trials: int = 12
    epochs: int = 30
    base: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings shared by all methods: AdamW, weight decay, schedule, batch, epochs, the CPU, and `base`."""
        adamw = ("optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.weight_decay=0.0005")
        shared = (*adamw, "optimizer.schedule=cosine", "train.batch_size=64")
        # Several methods run side by side, one on each core.
        local = ("train.device=cpu", "tracking.tensorboard=false")
        return (*data_of(self.data).overrides, *shared, *local, f"train.epochs={self.epochs}", *self.base)

    def config(self, *overrides: str) -> Config:
        """The configuration of a run."""
        return load_config(data_of(self.data).config, (*self.settings, *overrides))


def load_inputs(experiment: Experiment) -> Inputs:
    """The inputs of an experiment; features come from the cache if available."""
    gallery = data_of(experiment.data).gallery
    inputs = inputs_of(experiment.config())
    return replace(inputs, gallery=inputs_of(experiment.config(*gallery))) if gallery else inputs


def settings_of(method: str, config: Config) -> tuple[str, ...]:
    """The fixed settings of a method that are added to those of `config`."""
    entry = METHODS[method]
    starts_at_random = config.model.start_of_head == "random"
    return (*entry.settings, *(entry.random_start if starts_at_random else ()))


def tune(method: str, n_bits: int, seed: int, experiment: Experiment, folder: Path) -> None:
    """Search the method's settings at the nearest length of `TUNED`, unless `folder` already has the choice."""
    place, n_bits = folder / method, tuned_length(n_bits)
    choices = read_records(place / "chosen.jsonl")
    if any((choice["n_bits"], choice["seed"]) == (n_bits, seed) for choice in choices):
        return
    data = data_of(experiment.data)
    validation = (f"train.val_fraction={_HELD_OUT}", f"train.val_database={data.val_database}")
    tuning = (*validation, f"train.val_n={data.val_n}", f"model.n_bits={n_bits}", f"train.seed={seed}")
    content = read_config(data.config, (*experiment.settings, *tuning, *settings_of(method, experiment.config())))
    # Otherwise all methods would try the same rates, on all data.
    drawn = crc32(f"{experiment.data} {method} {n_bits} {seed}".encode())
    content["sweep"] = {"space": space_at(method, n_bits), "trials": experiment.n_trials, "seed": drawn}
    trials = place / f"search-{n_bits}-{seed}"
    best = sweep(content, folder=trials)[0]
    settings = [_rounded(setting) for setting in best.settings]
    choice = {"n_bits": n_bits, "seed": seed, "settings": settings, "validation": best.score}
    write_records(place / "chosen.jsonl", [*choices, choice])
    shutil.rmtree(trials)  # the checkpoints are large


def _rounded(setting: str) -> str:
    """The setting with a number of three digits, so that tables can show exactly what the runs used."""
    name, value = setting.split("=", 1)
    try:
        return f"{name}={float(value):.3g}"
    except ValueError:  # a choice by name
        return setting


def tuned_length(n_bits: int) -> int:
    """The length whose search codes of `n_bits` use."""
    return min(TUNED, key=lambda length: abs(length - n_bits))


def chosen_settings(folder: Path, method: str, n_bits: int, seed: int) -> tuple[str, ...]:
    """What the search of this seed at the nearest length chose, scaled to codes of `n_bits`.

    Raises:
        BadConfig: the folder has no such choice.
    """
    tuned = tuned_length(n_bits)
    for choice in read_records(folder / method / "chosen.jsonl"):
        if (choice["n_bits"], choice["seed"]) == (tuned, seed):
            pairs = [setting.split("=", 1) for setting in choice["settings"]]
            powers, ratio = POWERS.get(method, {}), n_bits / tuned
            return tuple(f"{k}={float(v) * ratio ** powers[k]:.4g}" if k in powers else f"{k}={v}" for k, v in pairs)
    raise BadConfig(
        f"{folder} has no chosen settings of {method} at {tuned} bits for seed {seed}: run `python -m experiments "
        f"losses` with --seeds {seed + 1} or more first"
    )


def trained(config: Config, out: Path, splits: Splits | None = None) -> tuple[Checkpoint, dict[str, float]]:
    """Train once, or continue the run in `out`: the best checkpoint, its validation score, and the time."""
    result = fit(config, out=out, resume=out.is_dir(), splits=splits)
    seconds = sum(row["seconds"] for row in read_records(result.run.log))
    return load_checkpoint(result.run.best), {"validation": result.best_score, "seconds": seconds}


def outputs_of(checkpoint: Checkpoint) -> Callable[[NDArray[np.float32]], Outputs]:
    """The function from `Inputs` to real outputs: from features of photographs, or from vectors."""
    if checkpoint.header.preprocessing is not None:
        return checkpoint.head
    return lambda vectors: checkpoint.head(checkpoint.vector_backbone(vectors))


def tune_ridge(inputs: Inputs, n_bits: int, seed: int, experiment: Experiment, folder: Path) -> float:
    """The ridge of ITQ-CCA with the highest mAP on the validation part that `tune` uses, which is added to `folder`."""
    config = experiment.config(f"train.val_fraction={_HELD_OUT}", f"train.seed={seed}")
    fit_rows, val_rows = validation_part(len(inputs.train), config)
    data, labels = data_of(experiment.data), inputs.splits.train.labels
    searched = val_rows if data.val_database == "held-out" else fit_rows

    def score(ridge: float) -> float:
        layer = fit_hash_layer(
            inputs.train[fit_rows], n_bits=n_bits, method="itq_cca", seed=seed, labels=labels[fit_rows], ridge=ridge
        )
        codes = pack(layer(inputs.train))
        found = histograms(codes[val_rows], codes[searched], labels[val_rows], labels[searched], n_bits=n_bits)
        if searched is val_rows:
            found = without_self(found, labels[val_rows])
        return float(average_precision(found, n=data.val_n).expected.mean())

    scores = {ridge: score(ridge) for ridge in RIDGES}
    best = max(scores, key=lambda ridge: scores[ridge])
    choice = {"n_bits": n_bits, "seed": seed, "settings": [f"ridge={best}"], "validation": scores[best]}
    file = folder / "itq_cca" / "chosen.jsonl"
    others = [one for one in read_records(file) if (one["n_bits"], one["seed"]) != (n_bits, seed)]
    write_records(file, [*others, choice])
    return best


def fitted(method: str, inputs: Inputs, rows: Rows, *, n_bits: int, seed: int, **options: float) -> dict[str, Any]:
    """Scores without training: of a layer of `fit_hash_layer`, fitted to `rows` of the training split; "gallery_itq":
    ITQ fitted to the gallery, which it searches; "cosine": the features themselves."""
    if method == "cosine":
        return cosine_scores(inputs)
    if method == "gallery_itq":
        assert inputs.gallery is not None  # `run_method` leaves it out
        return gallery_scores(fit_hash_layer(inputs.gallery.all[0], n_bits=n_bits, seed=seed), inputs.gallery)
    labels = inputs.splits.train.labels[rows]  # only ITQ-CCA reads them
    layer = fit_hash_layer(inputs.train[rows], n_bits=n_bits, method=method, seed=seed, labels=labels, **options)
    return scores_of(layer, inputs)


def rows_of(folder: Path, method: str) -> list[dict[str, Any]]:
    """The finished runs of a method."""
    return read_records(folder / method / "rows.jsonl")


def add_row(folder: Path, row: dict[str, Any]) -> None:
    """Keep a finished run, and delete its run folder: some megabytes each, and there are hundreds."""
    rows = rows_of(folder, row["method"])
    write_records(folder / row["method"] / "rows.jsonl", [*rows, row])
    shutil.rmtree(run_folder(folder, row["method"], row["n_bits"], row["seed"]), ignore_errors=True)


def run_folder(folder: Path, method: str, n_bits: int, seed: int) -> Path:
    """Where a run is kept until it is finished."""
    return folder / method / f"{n_bits}-{seed}"


def unfinished(folder: Path, method: str, experiment: Experiment) -> list[tuple[int, int]]:
    """The length and the seed of each run of a method that has no row yet."""
    done = {(row["n_bits"], row["seed"]) for row in rows_of(folder, method)}
    return [run for run in product(experiment.bits, range(experiment.n_seeds)) if run not in done]


def run_method(method: str, experiment: Experiment, folder: Path) -> None:
    """Search the settings of a method and finish all of its runs; each adds a row in `folder`.

    Raises:
        HashseekError: see `fit`.
    """
    torch.set_num_threads(1)
    entry, wanted = METHODS[method], unfinished(folder, method, experiment)
    if not wanted:
        return
    inputs = load_inputs(experiment)
    limits = {  # a direction for each label at most, and fewer than there are images to fit to
        "itq_cca": len(inputs.splits.label_names),
        "gallery_itq": len(inputs.gallery.all[0]) - 1 if inputs.gallery else 0,
    }
    for n_bits, seed in wanted:
        if entry.fitted is not None:
            if n_bits > limits.get(entry.fitted, n_bits):
                continue
            rows, _ = validation_part(len(inputs.train), experiment.config(f"train.seed={seed}"))  # as losses see them
            tuned = entry.fitted == "itq_cca"
            options = {"ridge": tune_ridge(inputs, n_bits, seed, experiment, folder)} if tuned else {}
            scores = fitted(entry.fitted, inputs, rows, n_bits=n_bits, seed=seed, **options)
        else:
            chosen: tuple[str, ...] = ()
            if entry.space:
                tune(method, n_bits, seed, experiment, folder)
                chosen = chosen_settings(folder, method, n_bits, seed)
            fixed = settings_of(method, experiment.config())
            settings = (*fixed, *chosen, f"model.n_bits={n_bits}", f"train.seed={seed}")
            config, out = experiment.config(*settings), run_folder(folder, method, n_bits, seed)
            checkpoint, facts = trained(config, out, inputs.splits)
            scores = {**scores_of(outputs_of(checkpoint), inputs), **facts, "settings": list(settings)}
        add_row(folder, {"method": method, "n_bits": n_bits, "seed": seed, **scores})


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
    for n_bits in experiment.bits:  # a bad one is refused before anything is computed
        experiment.config(f"model.n_bits={n_bits}")
    _check_same_budget(folder, experiment)
    say("features of training images, queries and database")
    splits = load_inputs(experiment).splits  # before methods run side by side, or each would compute the features
    for remark in remarks(splits.query.labels, splits.database.labels, ns=(N,), label_names=splits.label_names):
        say(remark)
    for (method, *_), _ in in_processes(run_method, [(method, experiment, folder) for method in methods], jobs=jobs):
        say(f"{METHODS[method].title}: done")


def _check_same_budget(folder: Path, experiment: Experiment) -> None:
    """Raise BadConfig if the folder's runs had other data or another budget: their rows would not be comparable."""
    extendable = ("bits", "n_seeds")
    budget = {name: value for name, value in asdict(experiment).items() if name not in extendable}
    config = experiment.config()
    budget["protocol"] = 9  # earlier ones had other spaces, rows, sizes, scales and draws
    budget["splits_sha256"] = build_splits(config.data.name, **config.data.options()).fingerprint
    if experiment.data not in DATA:  # a file of the user's own, which may change
        budget["configuration"] = config.model_dump(mode="json")
    write_or_check(folder / "experiment.json", budget)
