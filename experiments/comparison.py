"""Every method on the same data under one protocol: same network, initialisation, batches, budget and dropout choices.

On photographs the backbone is frozen, so its features are computed once and a run takes seconds. For each method the
same number of settings is tried at two code lengths on the validation part of the training split, drawn independently
of the other methods. The best are trained at every length with several seeds, and only those runs are scored on the
query split, by Hamming distance and by the query's real outputs. A method without a search space has fixed settings.
Several searches show how much the choice of settings matters. Every finished trial and run is kept, so an interrupted
comparison continues.

    FOLDER/METHOD/chosen-48.json    what the search at 48 bits chose; the second search chosen-48-1.json, and so on
    FOLDER/METHOD/rows.jsonl        one line per finished run, with the AP of every query
"""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.processes import in_processes
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.hash_layers import fit_hash_layer, normalized
from hashseek.retrieval.metrics import (
    average_precision,
    average_precision_of_ranking,
    class_distances,
    gains_of,
    histograms,
    precision,
    remarks,
    without_self,
)
from hashseek.retrieval.scores import asymmetric_scores, best
from hashseek.training.config import Config, load_config, read_config
from hashseek.training.data.cached_features import engine_for, features_of
from hashseek.training.data.datasets import Splits, build_splits
from hashseek.training.data.splits import NAMES
from hashseek.training.data.training_images import Images, without_broken
from hashseek.training.loop.epoch import Diverged, OutOfMemory
from hashseek.training.loop.fit import fit, initial_model, preprocessing_of
from hashseek.training.runs.run_folder import differences, read_records, write_records
from hashseek.training.sweep import sweep

Space = dict[str, Any]
Outputs = NDArray[np.float32]

N = 1000
FINALISTS, VALIDATIONS = 3, 3  # number of best trials, each scored on this number of validation parts
SEEDS_OF_SEARCH = 100  # the seeds of search i and of its runs start at 100 i
TUNED = (12, 48)  # the lengths at which settings are searched; others use those of the nearest
_HELD_OUT = 0.3  # the share of the training images that searches validate on


@dataclass(frozen=True)
class Data:
    """The data for a comparison: a configuration, overrides of it, and the N of the validation mAP@N.

    gallery: overrides that select unrelated images, which are searched among each other. val_database: where validation
    images are searched. As in the test: new images among each other, or among the images trained on where these are
    the database. With the wrong one, settings that memorise look too good, or too bad.
    """

    config: Path
    val_n: int
    overrides: tuple[str, ...] = ()
    gallery: tuple[str, ...] = ()
    val_database: Literal["training", "held-out"] = "held-out"


# Of the same sizes as the first split. It was drawn once, with a seed that was not chosen by any result.
_SECOND = (
    'data.ignore_columns=["split", "deephash_split"]',
    "data.split_column=none",
    "data.query_fraction=0.0403",
    "data.train_fraction=0.163",
    "data.split_seed=1",
)
_SQUEEZENET = (
    "model.backbone=squeezenet1_1",
    "model.weights=$HASHSEEK_DATA/backbones/squeezenet1_1_features.safetensors",
    "model.mean=[0.485, 0.456, 0.406]",
    "model.std=[0.229, 0.224, 0.225]",
)
_COCO = (
    "data.root=$HASHSEEK_DATA/coco256",
    'data.ignore_columns=["split"]',
    "data.split_column=none",
    'data.on_error="skip"',  # two images have no label
)


def _mirflickr(*overrides: str) -> Data:
    config, start = Path("mirflickr25k_mobilenet_v2_tie_aware_48"), 'model.head_init="itq"'
    return Data(config, 61, (start, *overrides), _COCO)  # N: 61 of 961 images, the share that 1,000 are of the database


DATA = {
    "mirflickr": _mirflickr(),
    "mirflickr-second": _mirflickr(*_SECOND),
    "mirflickr-squeezenet": _mirflickr(*_SQUEEZENET),
    "mirflickr-squeezenet-second": _mirflickr(*_SQUEEZENET, *_SECOND),
    "scene": Data(Path("scene_mlp_tie_aware_48"), 700, val_database="training"),  # N: 700 of 848, and of 1,050
    "yeast": Data(Path("yeast_mlp_tie_aware_48"), 700, val_database="training"),
}


def data_of(name: str) -> Data:
    """An entry of `DATA`, or your own configuration, by its path."""
    return DATA[name] if name in DATA else Data(Path(name), 100)


def _log(low: float, high: float) -> Space:
    return {"low": low, "high": high, "log": True}


# What every search may choose. Small steps suit a layer that starts from ITQ.
_ALL: Space = {
    "optimizer.lr": _log(1e-4, 1e-2),
    "model.dropout": [0.0, 0.3, 0.6],
}
_PROXIES: Space = {**_ALL, "optimizer.proxy_lr": _log(1e-3, 1e-1)}
_BETA: Space = {"loss.beta": [0.5, 0.75, 1.0, 1.25]}
_A: Space = {"loss.a": _log(1.5, 30.0)}  # divided by the code length, see `_POWERS`
# Contrastive losses see only directions: the quantisation pulls them to the corners of the cube.
_TAU: Space = {"loss.tau": _log(0.05, 0.5), "loss.quantization.weight": _log(0.01, 1.0)}
_COS = ('loss.quantization={kind="cos", weight=0.1}',)
# Those of mirflickr25k_mobilenet_v2_bihalf_64. A search would choose by labels, which this loss must not use.
_BIHALF = ("loss.gamma=60", "optimizer.lr=0.001", "model.dropout=0", "train.epochs=10")


@dataclass(frozen=True)
class Method:
    """One row of the table.

    settings: overrides of the configuration. space: what is searched; if it is empty, the settings are fixed.
    fitted: a method without training, see `fitted`.
    """

    title: str
    settings: tuple[str, ...] = ()
    space: Space = field(default_factory=dict)
    fitted: str | None = None


def _loss(title: str, name: str, space: Space, *settings: str) -> Method:
    return Method(title, (f"loss.name={name}", *settings), space)


METHODS: dict[str, Method] = {
    "tie_aware": _loss("Tie-aware (ours)", "tie_aware", {**_ALL, **_A, "loss.weight": [0.5, 1.0, 3.0, 6.0]}),
    "tie_aware_pairs": _loss("Tie-aware, weight 0", "tie_aware", {**_ALL, **_A}, "loss.weight=0"),
    "hyp2": _loss("HyP2", "hyp2", {**_PROXIES, **_BETA}),
    "hyp2_proxy": _loss("HyP2, proxy only", "hyp2_proxy", _PROXIES),
    "hyp2_pair": _loss("HyP2, pair only", "hyp2_pair", _ALL),
    "hyp2_proxy_pair": _loss("HyP2, proxy + pair", "hyp2_proxy_pair", {**_PROXIES, **_BETA}),
    "dsh": _loss("DSH", "dsh", {**_ALL, "loss.alpha": _log(1e-3, 1e-1), "loss.m": _log(4, 200)}),
    "dpsh": _loss("DPSH", "dpsh", {**_ALL, "loss.eta": _log(1e-3, 1.0)}),
    "dhn": _loss("DHN", "dhn", {**_ALL, "loss.lam": _log(1e-3, 1.0), "loss.inner": _log(0.05, 1.0)}),
    "hashnet": _loss("HashNet", "hashnet", {**_ALL, **_A, "loss.continuation": ["epoch", "iteration", "none"]}),
    "idhn": _loss("IDHN", "idhn", {**_ALL, "loss.gamma": _log(1e-2, 1.0), "loss.alpha": _log(1e-2, 1.0)}),
    "csq": _loss("CSQ", "csq", {**_ALL, "loss.lam": _log(1e-4, 1e-1)}),
    "orthohash": _loss("OrthoHash", "orthohash", {**_ALL, "loss.s": _log(4.0, 32.0), "loss.m": [0.0, 0.1, 0.2]}),
    "proxy_anchor": _loss(
        "Proxy Anchor", "proxy_anchor", {**_PROXIES, "loss.alpha": _log(4.0, 64.0), "loss.delta": [0.0, 0.1, 0.2]}
    ),
    "mulsupcon": _loss("MulSupCon + quantisation", "mulsupcon", {**_ALL, **_TAU}, *_COS),
    "reg": _loss("REG + quantisation", "reg", {**_PROXIES, **_TAU}, *_COS),
    "msc": _loss("MSC + quantisation", "msc", {**_PROXIES, **_TAU}, *_COS),
    "simdis": _loss("SimDis (outside) + quantisation", "simdis", {**_ALL, **_TAU}, "loss.mode=outside", *_COS),
    "hbl": _loss(
        "HBL + quantisation",
        "hbl",
        {**_ALL, **_TAU, "loss.lam": _log(1e-3, 1.0)},
        "memory.size=2048",
        "memory.momentum=0.99",
        *_COS,
    ),
    "bihalf": _loss("BiHalf, no labels", "bihalf", {}, *_BIHALF),
    "random": Method("Random rotation, no labels", fitted="random"),
    "pca": Method("PCA, no labels", fitted="pca"),
    "itq": Method("ITQ, no labels", fitted="itq"),
    "weighted_itq": Method("Weighted ITQ, no labels", fitted="weighted_itq"),
    "itq_cca": Method("ITQ-CCA", fitted="itq_cca"),
    "gallery_itq": Method("ITQ fitted to the gallery, no labels", fitted="gallery_itq"),
    "cosine": Method("Cosine of the features, no code", fitted="cosine"),
}
"""Ours, rows of HyP2's Tables 3 and 5, contrastive losses with a quantisation term, a loss without labels, untrained
layers, and the features themselves."""

# Settings that depend on the code length K, as K to this power: inner products and squared distances are sums over the
# bits, so the factor of an inner product falls with K, and the margin of a distance grows.
_POWERS: dict[str, dict[str, int]] = {
    "tie_aware": {"loss.a": -1},
    "tie_aware_pairs": {"loss.a": -1},
    "hashnet": {"loss.a": -1},
    "dhn": {"loss.inner": -1},
    "dsh": {"loss.m": 1},
}


@dataclass(frozen=True)
class Inputs:
    """The splits, as vectors or as features of the frozen backbone, and those of the gallery if there is one."""

    splits: Splits
    train: NDArray[np.float32]
    query: NDArray[np.float32]
    database: NDArray[np.float32]
    gallery: "Inputs | None" = None

    @property
    def all(self) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """The features (N, D) and labels (N, C) of all images together."""
        splits = self.splits
        labels = [splits.train.labels, splits.query.labels, splits.database.labels]
        return np.concatenate([self.train, self.query, self.database]), np.concatenate(labels)


def load_inputs(experiment: "Experiment") -> Inputs:
    """The inputs of an experiment; features come from the cache if available."""
    gallery = data_of(experiment.data).gallery
    inputs = _inputs(experiment.config())
    return replace(inputs, gallery=_inputs(experiment.config(*gallery))) if gallery else inputs


def intact_splits(config: Config) -> Splits:
    """The splits of a configuration, without images that cannot be decoded."""
    splits = build_splits(config.data.name, **config.data.options())
    parts = {}
    for name in NAMES:
        source = f"{config.data.name} ({name})"
        parts[name], _ = without_broken(getattr(splits, name), on_error=splits.on_error, source=source)
    return replace(splits, **parts)


def _inputs(config: Config) -> Inputs:
    splits = intact_splits(config)
    parts = [splits.train, splits.query, splits.database]
    vectors = [split.vectors for split in parts if split.vectors is not None]
    if len(vectors) == len(parts):
        return Inputs(splits, *vectors)
    preprocessing = preprocessing_of(config)
    if preprocessing is None or not config.model.freeze_backbone:
        raise BadConfig(
            "methods are compared on vectors, or on photographs with a frozen backbone (model.freeze_backbone)"
        )
    model = initial_model(config)
    engine = engine_for(model, preprocessing, precision=config.train.precision)
    images = [Images(split, preprocessing, cache="none") for split in parts]
    return Inputs(splits, *[features_of(model, each, engine=engine) for each in images])


@dataclass(frozen=True)
class Experiment:
    """One comparison: the same data, code lengths and budget for every method.

    data: a key of `DATA`, or the path of a configuration. bits: code lengths. n_seeds: runs of each length after each
    search. n_searches: independent searches, with other trials and other validation parts. n_trials: settings that each
    search tries. epochs: of each run. base: overrides of the configuration, for all methods alike.
    """

    data: str = "mirflickr"
    bits: tuple[int, ...] = (12, 24, 36, 48)
    n_seeds: int = 5
    n_searches: int = 1
    n_trials: int = 12
    epochs: int = 30
    base: tuple[str, ...] = ()

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs at each length."""
        return [SEEDS_OF_SEARCH * search + i for search in range(self.n_searches) for i in range(self.n_seeds)]

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings shared by all methods: AdamW, weight decay, schedule, batch, the number of epochs, and `base`."""
        adamw = ("optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.weight_decay=0.0005")
        shared = (*adamw, "optimizer.schedule=cosine", "train.batch_size=64", "tracking.tensorboard=false")
        return (*data_of(self.data).overrides, *shared, f"train.epochs={self.epochs}", *self.base)

    def config(self, *overrides: str) -> Config:
        """The configuration of a run."""
        return load_config(data_of(self.data).config, (*self.settings, *overrides))


def _name_of_search(n_bits: int, search: int) -> str:
    return f"{n_bits}-{search}" if search else str(n_bits)


def tune(method: str, n_bits: int, experiment: Experiment, folder: Path, *, search: int = 0) -> None:
    """Search the method's settings at a length on the validation part, unless `folder` already has the choice.

    The best trials are trained again with other seeds, which hold out other images, and the best mean is chosen: the
    differences between good trials are smaller than those between validation parts.
    """
    place, name, first_seed = folder / method, _name_of_search(n_bits, search), SEEDS_OF_SEARCH * search
    if (place / f"chosen-{name}.json").is_file():
        return
    data, entry = data_of(experiment.data), METHODS[method]
    validation = (f"train.val_fraction={_HELD_OUT}", f"train.val_database={data.val_database}")
    tuning = (*validation, f"train.val_n={data.val_n}", f"model.n_bits={n_bits}", *entry.settings)
    content = read_config(data.config, (*experiment.settings, *tuning, f"train.seed={first_seed}"))
    trials = place / f"search-{name}"
    seed = crc32(f"{method} {n_bits}".encode()) + search  # otherwise all methods would try the same rates
    space = dict(entry.space)
    if "loss.a" in space:
        space["loss.a"] = _log(*(space["loss.a"][end] / n_bits for end in ("low", "high")))
    scored = sweep(content, space, n_trials=experiment.n_trials, folder=trials, seed=seed)
    means: dict[tuple[str, ...], float] = {}
    for number, finalist in enumerate(scored[:FINALISTS]):
        scores, settings = [finalist.score], finalist.settings
        for other in range(1, VALIDATIONS):
            config = experiment.config(*tuning, *settings, f"train.seed={first_seed + other}")
            out = trials / f"{number}-{other}"
            try:
                scores.append(fit(config, out=out, resume=out.is_dir()).best_score)
            except (Diverged, OutOfMemory):
                scores.append(-math.inf)
        means[settings] = float(np.mean(scores))
    write_atomically(place / f"trials-{name}.csv", (trials / "trials.csv").read_bytes())
    chosen = [_rounded(setting) for setting in max(means, key=lambda one: means[one])]
    write_atomically(place / f"chosen-{name}.json", json.dumps(chosen).encode())
    shutil.rmtree(trials)  # the checkpoints are large


def _rounded(setting: str) -> str:
    """The setting with a number of three digits, so that tables can show exactly what the runs used."""
    name, value = setting.split("=", 1)
    try:
        return f"{name}={float(value):.3g}"
    except ValueError:  # a choice by name
        return setting


def chosen_settings(folder: Path, method: str, tuned: int, *, n_bits: int, search: int = 0) -> tuple[str, ...]:
    """What the search at `tuned` bits chose, scaled to codes of `n_bits`."""
    file = folder / method / f"chosen-{_name_of_search(tuned, search)}.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    pairs = [setting.split("=", 1) for setting in settings]
    powers, ratio = _POWERS.get(method, {}), n_bits / tuned
    return tuple(f"{k}={float(v) * ratio ** powers[k]:.4g}" if k in powers else f"{k}={v}" for k, v in pairs)


def trained(settings: Sequence[str], experiment: Experiment, out: Path, inputs: Inputs) -> dict[str, Any]:
    """Train once and score on the query split; the run folder is deleted afterwards."""
    config = experiment.config(*settings)
    result = fit(config, out=out, resume=out.is_dir())
    model = load_checkpoint(result.run.best).model.eval()
    function = model.outputs if inputs.splits.query.vectors is None else model
    seconds = sum(row["seconds"] for row in read_records(result.run.log))
    shutil.rmtree(out)  # some megabytes each, and there are hundreds
    with torch.inference_mode():
        scores = scores_of(lambda rows: function(torch.from_numpy(rows)).numpy(), inputs)
    return {**scores, "validation": result.best_score, "seconds": seconds, "settings": list(settings)}


def fitted(method: str, inputs: Inputs, *, n_bits: int, seed: int) -> dict[str, Any]:
    """Scores without training: of a layer of `fit_hash_layer`, fitted to the training split; "gallery_itq": ITQ fitted
    to the gallery, which it searches; "cosine": the features themselves."""
    if method == "cosine":
        return cosine_scores(inputs)
    if method == "gallery_itq":
        assert inputs.gallery is not None  # `run_method` leaves it out
        return gallery_scores(fit_hash_layer(inputs.gallery.all[0], n_bits=n_bits, seed=seed), inputs.gallery)
    labels = inputs.splits.train.labels if method == "itq_cca" else None
    layer = fit_hash_layer(inputs.train, n_bits=n_bits, method=method, seed=seed, labels=labels)
    return scores_of(layer, inputs)


def scores_of(outputs: Callable[[NDArray[np.float32]], Outputs], inputs: Inputs) -> dict[str, Any]:
    """Scores of a function from features (B, D) to real outputs (B, K): `split_scores`, and `gallery_scores`."""
    scores = split_scores(outputs(inputs.query), outputs(inputs.database), inputs.splits)
    return scores | (gallery_scores(outputs, inputs.gallery) if inputs.gallery else {})


def gallery_scores(outputs: Callable[[NDArray[np.float32]], Outputs], gallery: Inputs) -> dict[str, float]:
    """Precision@10 of every image of a gallery as a query among all the others, expected over ties.

    "gallery": with all labels; "gallery_rare": without the most frequent label, which chance finds, too.
    """
    features, labels = gallery.all
    real = outputs(features)
    codes, scores = pack(real), {}
    for name, chosen in _with_and_without_most_frequent(labels).items():
        found = histograms(codes, codes, chosen, chosen, n_bits=real.shape[1])
        values = precision(without_self(found, chosen), n=10).expected
        scores[name] = float(values[chosen.any(axis=1)].mean())
    return scores


def _with_and_without_most_frequent(labels: NDArray[np.uint8]) -> dict[str, NDArray[np.uint8]]:
    counts = labels.sum(axis=0)
    return {"gallery": labels, "gallery_rare": np.where(counts == counts.max(), 0, labels).astype(np.uint8)}


def cosine_scores(inputs: Inputs) -> dict[str, float]:
    """mAP@1000 and the scores of `gallery_scores`, by the cosine of features. No AP of queries: it is not tested."""
    places = np.argsort(-normalized(inputs.query) @ normalized(inputs.database).T, axis=1, kind="stable")[:, :N]
    relevant = gains_of(places, inputs.splits.query.labels, inputs.splits.database.labels) > 0
    scores = {"mAP": float(average_precision_of_ranking(relevant, n_relevant=relevant.sum(axis=1)).mean())}
    if inputs.gallery:
        features, labels = inputs.gallery.all
        cosines = normalized(features) @ normalized(features).T
        np.fill_diagonal(cosines, -np.inf)
        nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :10]
        for name, chosen in _with_and_without_most_frequent(labels).items():
            found = gains_of(nearest, chosen, chosen) > 0
            scores[name] = float(found[chosen.any(axis=1)].mean())
    return scores


def split_scores(query: Outputs, database: Outputs, splits: Splits) -> dict[str, Any]:
    """Scores of real outputs of queries (Q, K) and database (N, K).

    AP@1000 of each query by Hamming distance (expected over ties) and by the query's real outputs (equal codes in the
    order of the database), their means, the bounds over ties, d_intra and d_inter.
    """
    n_bits, codes = query.shape[1], pack(database)
    found = histograms(pack(query), codes, splits.query.labels, splits.database.labels, n_bits=n_bits)
    by_distance, distances = average_precision(found, n=N), class_distances(found)
    ids = np.arange(len(codes))
    ranked = np.stack([best(asymmetric_scores(codes, row), ids, N) for row in query])
    relevant = gains_of(ranked, splits.query.labels, splits.database.labels) > 0
    asymmetric = average_precision_of_ranking(relevant, n_relevant=found.n_relevant)
    return {
        "mAP": float(by_distance.expected.mean()),
        "asymmetric": float(asymmetric.mean()),
        "worst": float(by_distance.worst.mean()),
        "best": float(by_distance.best.mean()),
        "d_intra": distances.intra,
        "d_inter": distances.inter,
        "AP": np.round(by_distance.expected, 5).tolist(),
        "asymmetric_AP": np.round(asymmetric, 5).tolist(),
    }


def rows_of(folder: Path, method: str) -> list[dict[str, Any]]:
    """The finished runs of a method."""
    return read_records(folder / method / "rows.jsonl")


def run_method(method: str, experiment: Experiment, folder: Path) -> None:
    """Search the settings of a method and finish all of its runs; each adds a row in `folder`.

    Raises:
        HashseekError: see `fit`.
    """
    torch.set_num_threads(1)
    rows, entry = rows_of(folder, method), METHODS[method]
    done = {(row["n_bits"], row["seed"]) for row in rows}
    wanted = [run for run in product(experiment.bits, experiment.seeds) if run not in done]
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
            scores = fitted(entry.fitted, inputs, n_bits=n_bits, seed=seed)
        else:
            chosen: tuple[str, ...] = ()
            if entry.space:
                tuned = min(TUNED, key=lambda length: abs(length - n_bits))
                search = seed // SEEDS_OF_SEARCH
                tune(method, tuned, experiment, folder, search=search)
                chosen = chosen_settings(folder, method, tuned, n_bits=n_bits, search=search)
            settings = (*entry.settings, *chosen, f"model.n_bits={n_bits}", f"train.seed={seed}")
            scores = trained(settings, experiment, folder / method / f"{n_bits}-{seed}", inputs)
        rows.append({"method": method, "n_bits": n_bits, "seed": seed, **scores})
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
    file = folder / "experiment.json"
    extendable = ("bits", "n_seeds", "n_searches")
    budget = {name: value for name, value in asdict(experiment).items() if name not in extendable}
    budget |= {"base": list(experiment.base), "protocol": 7}  # earlier ones had other spaces, rows, sizes and scales
    config = experiment.config()
    budget["splits_sha256"] = build_splits(config.data.name, **config.data.options()).fingerprint
    if experiment.data not in DATA:  # a file of the user's own, which may change
        budget["configuration"] = config.model_dump(mode="json")
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(budget).encode())
    elif changes := differences(json.loads(file.read_text(encoding="utf-8")), budget):
        raise BadConfig(
            f"{folder} holds runs with other settings or data ({'; '.join(changes)}): use the same ones, or choose "
            "another --out"
        )
