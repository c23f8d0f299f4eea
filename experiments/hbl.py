"""One training of HBL's Table II: contrastive training of an MLP on vectors, then a linear probe on it frozen.

What the paper states is fixed here: embeddings of 128, AdamW, cosine warm restarts, and a queue of 4,096 keys from a
momentum encoder, of which the filled part is used. What the paper searches or does not state is a setting; `suggest`
is the search space. As in MulSupCon's code, both views of a row are the standardised row with random entries set to 0,
and the probe reads either the encoder's last hidden layer or the embedding. `hbl_table_2` runs the experiment.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from optuna import Trial
from torch import Tensor, nn

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.models.mlp import Mlp
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.classification_metrics import (
    best_thresholds,
    figures,
    mean_average_precision,
    precision_at_1,
)
from hashseek.training.evaluation.logistic_regression import Probe, fit_probe
from hashseek.training.losses import build_loss
from hashseek.training.losses.memory import KeyQueue, update_key_encoder
from hashseek.training.sweep import Report
from hashseek.training.sweep_space import parse_space

WIDTH = 128
QUEUE = 4096
CYCLES = (2, 3)  # cycles after which an encoder is probed; every cycle is twice as long as the one before
PROBED = ("features", "embedding")
DECAYS = (1.0, 0.3, 0.1, 0.03)  # of the probe, strongest first: each starts from the one before

# Name of each method -> the loss, what of it is fixed, and whether its margins are searched.
METHODS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "any": ("supcon", {"positives": "any"}, False),
    "any+hbl": ("hbl", {"base": "any"}, True),
    "mulsupcon": ("mulsupcon", {}, False),
    "mulsupcon+hbl": ("hbl", {"base": "mulsupcon"}, True),
}
MARGINS = ("lam", "gamma", "m_rel", "m_abs", "k_min")

# Setting -> the value tried first, and what is searched: tau, momentum and margins as in the paper, others our own.
SPACE: dict[str, tuple[Any, Any]] = {
    "hidden": ("512-512", ["512", "1024", "512-512"]),  # widths of the hidden layers
    "first_cycle": (8, [4, 8, 16]),  # epochs until the learning rate restarts
    "mask": (0.5, {"low": 0.1, "high": 0.7}),  # share of a row's entries set to 0, drawn for each view
    "batch_size": (128, [128, 256]),  # approximately: an epoch is divided equally, so that no batch is small and noisy
    "lr": (1e-3, {"low": 3e-4, "high": 3e-3, "log": True}),
    "weight_decay": (1e-4, {"low": 1e-5, "high": 0.1, "log": True}),
    "tau": (0.1, [0.01, 0.1]),
    "momentum": (0.99, [0.99, 0.999, 0.9999]),  # of the key encoder
    "lam": (0.01, {"low": 0.001, "high": 1.0, "log": True}),
    "gamma": (0.8, [0.5, 0.7, 0.8, 1.0, 1.5, 2.0]),
    "m_rel": (0.1, [0.05, 0.1]),
    "m_abs": (0.2, [0.2, 0.3]),
    "k_min": (64, [64, 128, 256]),
}


def suggest(trial: Trial, method: str) -> dict[str, Any]:
    """Settings of `method` from the search space."""
    space = parse_space({name: SPACE[name][1] for name in defaults(method)})
    return {name: trial._suggest(name, distribution) for name, distribution in space.items()}


def defaults(method: str) -> dict[str, Any]:
    """The settings that the search of `method` begins with."""
    return {name: first for name, (first, _) in SPACE.items() if METHODS[method][2] or name not in MARGINS}


class EmbeddingNetwork(nn.Module):
    """Standardised vectors (n, D) -> features (n, last hidden width) -> embedding (n, 128)."""

    def __init__(self, n_inputs: int, hidden: str) -> None:
        super().__init__()
        widths = tuple(int(width) for width in hidden.split("-"))
        self.body = Mlp(n_inputs, widths)
        self.head = nn.Linear(widths[-1], WIDTH)

    def forward(self, vectors: Tensor) -> Tensor:
        """Embedding (n, 128)."""
        embedding: Tensor = self.head(self.body(vectors))
        return embedding

    @torch.no_grad()
    def probed(self, vectors: Tensor) -> dict[str, Tensor]:
        """What a probe can read of vectors (n, D): "features" and "embedding"."""
        features = self.body(vectors)
        return {"features": features, "embedding": self.head(features)}


def train_encoder(
    vectors: Tensor, labels: Tensor, *, method: str, settings: Mapping[str, Any], seed: int
) -> Iterator[EmbeddingNetwork]:
    """Train on standardised vectors (n, D) with labels (n, C); yields the encoder at the end of each cycle.

    It is the same encoder each time, trained further, until the caller stops iterating. Equal arguments give equal
    weights, regardless of other random draws.

    Args:
        vectors: (n, D) float32.
        labels: (n, C) float32, 0/1.
        method: a key of `METHODS`.
        settings: as `suggest` returns them, see `SPACE`.
        seed: determines initial weights, order and masks.

    Raises:
        BadCodes: the embeddings became NaN or infinite.
    """
    name, fixed, _ = METHODS[method]
    of_loss = {key: value for key, value in settings.items() if key in ("tau", *MARGINS)}
    loss = build_loss(name, n_classes=labels.shape[1], n_bits=WIDTH, **fixed, **of_loss)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = EmbeddingNetwork(vectors.shape[1], settings["hidden"])
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    queue = KeyQueue(n_classes=labels.shape[1], n_bits=WIDTH, size=QUEUE)
    rate, decay, first_cycle = settings["lr"], settings["weight_decay"], settings["first_cycle"]
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=rate, weight_decay=decay, fused=True)
    n_batches = max(1, round(len(vectors) / settings["batch_size"]))
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, first_cycle * n_batches, T_mult=2)

    def view(rows: Tensor) -> Tensor:
        return rows * (torch.rand(rows.shape, generator=generator) >= settings["mask"])

    for cycle in itertools.count():
        for _ in range(first_cycle * 2**cycle):
            for rows in torch.randperm(len(vectors), generator=generator).tensor_split(n_batches):
                x, y = vectors[rows], labels[rows]
                update_key_encoder(key_encoder, encoder, momentum=settings["momentum"])
                with torch.no_grad():
                    keys = key_encoder(view(x))
                terms = loss(encoder(view(x)), y, memory=queue.memory(keys, y))
                queue.enqueue(keys, y)
                optimizer.zero_grad(set_to_none=True)
                torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        yield encoder


@dataclass(frozen=True)
class CrossValidation:
    """The choices of cross-validation for one point of the search space, and its scores.

    `score` is the mean of mAP and p@1, each averaged over the folds. `thresholds` are the best on all folds together.
    """

    cycles: int
    layer: str
    decay: float
    score: float
    mean_ap: float
    p_at_1: float
    thresholds: dict[str, float]


def cross_validate(
    train: Split,
    *,
    method: str,
    settings: Mapping[str, Any],
    n_folds: int,
    report: Report = lambda *_: None,
) -> CrossValidation:
    """Train `method` with `settings` on all folds but one and probe on that one, for every fold of the training split.

    Every number of cycles, layer and decay of the probe is tried; the one with the best mean over folds is chosen.

    Args:
        train: the training split, of vectors.
        method: a key of `METHODS`.
        settings: as `suggest` returns them.
        n_folds: parts of the training split; the same rows for every method and point.
        report: called after each fold with the best mean so far; it may raise an exception to stop.

    Raises:
        BadCodes: training diverged.
        BadDataset: fewer rows than folds.
    """
    vectors, labels = train.vectors, train.labels
    assert vectors is not None
    if len(vectors) < 2 * n_folds:
        raise BadDataset(f"the training split has {len(vectors)} rows, too few for {n_folds} folds: use fewer folds")
    tried = list(itertools.product(CYCLES, PROBED, DECAYS))
    mean_ap, p_at_1 = np.zeros((2, n_folds, len(tried)))
    left_out = np.zeros((len(tried), *labels.shape))  # probabilities of each row from the models that did not see it
    folds = np.array_split(np.random.default_rng(0).permutation(len(vectors)), n_folds)
    for fold, inside in enumerate(folds):
        outside = np.setdiff1d(np.arange(len(vectors)), inside)
        x, held = standardized(vectors[outside], vectors[inside])
        y = torch.from_numpy(labels[outside].astype(np.float32))
        encoders = train_encoder(x, y, method=method, settings=settings, seed=fold)
        point = 0
        for cycle, encoder in zip(range(1, max(CYCLES) + 1), encoders, strict=False):
            if cycle not in CYCLES:
                continue
            seen, unseen = encoder.probed(x), encoder.probed(held)
            for layer in PROBED:
                probe: Probe | None = None
                for decay in DECAYS:
                    probe = fit_probe(seen[layer], y, weight_decay=decay, start=probe)
                    probabilities = probe.probabilities(unseen[layer]).numpy()
                    left_out[point, inside] = probabilities
                    mean_ap[fold, point] = mean_average_precision(probabilities, labels[inside])
                    p_at_1[fold, point] = precision_at_1(probabilities, labels[inside])
                    point += 1
        score = (mean_ap[: fold + 1].mean(axis=0) + p_at_1[: fold + 1].mean(axis=0)) / 2
        report(fold + 1, float(score.max()), n_folds)
    best = int(score.argmax())
    cycles, layer, decay = tried[best]
    return CrossValidation(
        cycles,
        layer,
        decay,
        float(score[best]),
        float(mean_ap[:, best].mean()),
        float(p_at_1[:, best].mean()),
        best_thresholds(left_out[best], labels),
    )


def query_scores(
    splits: Splits, *, method: str, settings: Mapping[str, Any], choice: CrossValidation, seed: int
) -> dict[str, dict[str, float]]:
    """Train on the whole training split as chosen, fit a probe, and score the query split three ways.

    "folds": with thresholds chosen on the training split; "half": with 0.5; "oracle": for each score with the best of
    nine thresholds on the query split itself, which is what MulSupCon's code reports.
    """
    train, query = splits.train, splits.query
    assert train.vectors is not None
    assert query.vectors is not None
    x, held = standardized(train.vectors, query.vectors)
    y = torch.from_numpy(train.labels.astype(np.float32))
    encoders = train_encoder(x, y, method=method, settings=settings, seed=seed)
    encoder = next(itertools.islice(encoders, choice.cycles - 1, None))
    probe = fit_probe(encoder.probed(x)[choice.layer], y, weight_decay=choice.decay)
    probabilities = probe.probabilities(encoder.probed(held)[choice.layer]).numpy()
    return {
        "folds": figures(probabilities, query.labels, thresholds=choice.thresholds),
        "half": figures(probabilities, query.labels),
        "oracle": figures(probabilities, query.labels, thresholds=best_thresholds(probabilities, query.labels)),
    }


def standardized(train: NDArray[np.float32], other: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Both arrays, standardised by the column means and deviations of `train` (a deviation of 0 counts as 1)."""
    mean, std = train.mean(axis=0), train.std(axis=0)
    std[std == 0] = 1
    return torch.from_numpy((train - mean) / std), torch.from_numpy((other - mean) / std)
