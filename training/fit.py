"""The training loop.

Everything random is drawn from (seed, epoch, row), never from a running generator: that is why a run that was killed
and resumed ends with the same weights as an unbroken one.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval.backbones import default_preprocessing
from retrieval.checkpoint import save_checkpoint
from retrieval.codes import pack
from retrieval.devices import pick_device, pick_dtype
from retrieval.errors import BadCodes, BadDataset, HashseekError
from retrieval.images import Preprocessing, normalizer
from retrieval.metrics import average_precision, histograms
from retrieval.model import HashModel
from retrieval.weights import load_backbone_weights
from training.config import Config, OptimizerSection
from training.datasets import build_splits
from training.datasets.folder import expand
from training.datasets.splits import Splits, never_in_training
from training.features import features_of
from training.images import Images, without_broken
from training.losses import build_loss
from training.progress import Progress
from training.run import Run, open_run, read_log, save_state, write_log

# Validation ranks at most so many training images: enough to tell epochs apart, and it stays cheap on large sets.
MAX_VALIDATION_DATABASE = 10_000


class Diverged(HashseekError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Result:
    """What a run gave: its folder, the best epoch (from 0) and that epoch's validation mAP."""

    run: Run
    best_epoch: int
    best_score: float


@dataclass(frozen=True)
class _Source:
    """Where batches come from: cached features, or augmented images.

    `batches(rows, epoch)` yields (input, rows); `outputs(input)` is differentiable; `encode(rows)` gives (n, K).
    """

    batches: Callable[[NDArray[np.int64], int], Iterator[tuple[Tensor, NDArray[np.int64]]]]
    outputs: Callable[[Tensor], Tensor]
    encode: Callable[[NDArray[np.int64]], NDArray[np.float32]]


def fit(config: Config, *, out: Path, resume: bool = False, progress: Progress | None = None) -> Result:
    """Train as `config` says into the run folder `out`.

    Raises:
        HashseekError: bad data, weights or settings, an occupied run folder, or a loss that became NaN.
    """
    progress = progress or Progress(quiet=True)
    seed = config.train.seed
    device = pick_device(config.train.device)
    model = initial_model(config)
    preprocessing = config.model.preprocessing(default_preprocessing(config.model.backbone))
    splits = build_splits(config.data.name, **config.data.options())
    loss = build_loss(
        config.loss.name,
        n_classes=len(splits.label_names),
        n_bits=config.model.n_bits,
        **config.loss.options(),
    )
    run, state = open_run(out, config.model_dump(mode="json"), resume=resume)
    train, problems = without_broken(splits.train, on_error=splits.on_error, source=config.data.name)
    progress.problems([*splits.problems, *problems], never_in_training(splits))
    fit_rows, val_rows = _validation_part(len(train), config)

    model.to(device).to(memory_format=torch.channels_last)
    loss.to(device)
    images = Images(train, preprocessing, cache_gib=config.train.cache_gib)
    source = (_frozen if config.model.freeze_backbone else _augmented)(config, model, images, device, progress)
    optimizer, rates = _optimizer(config, model, loss)
    labels = torch.from_numpy(train.labels.astype(np.float32)).to(device)
    records: list[dict[str, Any]] = []
    best_score, best_epoch, first_epoch = -math.inf, -1, 0
    if state is not None:
        model.load_state_dict(state["model"])
        loss.load_state_dict(state["loss"])
        optimizer.load_state_dict(state["optimizer"])
        best_score, best_epoch, first_epoch = state["best_score"], state["best_epoch"], state["epoch"] + 1
        records = read_log(run)[:first_epoch]

    for epoch in range(first_epoch, config.train.epochs):
        started = time.perf_counter()
        torch.manual_seed(seed * 1_000_003 + epoch)  # dropout
        order = np.random.default_rng((seed, epoch)).permutation(fit_rows)
        sums: dict[str, float] = {}
        model.train(not config.model.freeze_backbone)
        n_batches = math.ceil(len(order) / config.train.batch_size)
        progress.start_epoch(epoch, config.train.epochs, len(order))
        for step, (inputs, rows) in enumerate(source.batches(order, epoch)):
            if len(rows) == 1 and len(order) > 1:
                continue  # batch norm has no statistics of one image, and pair losses have no pair
            _set_rates(optimizer, rates, config.optimizer, (epoch + step / n_batches), config.train.epochs)
            batch_labels = labels[torch.from_numpy(rows).to(device)]
            terms = _terms(loss, source.outputs(inputs), batch_labels, epoch=epoch, step=step, run=run)
            total = torch.stack(list(terms.values())).sum()
            optimizer.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
            if config.optimizer.clip_norm is not None:
                nn.utils.clip_grad_norm_(
                    [p for group in optimizer.param_groups for p in group["params"]],
                    config.optimizer.clip_norm,
                )
            optimizer.step()
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(rows)
            progress.advance(len(rows), {name: value.item() for name, value in terms.items()})
        trained = time.perf_counter()
        score = _validate(source, train.labels, fit_rows, val_rows, config)
        record = {
            "epoch": epoch,
            "loss": sum(sums.values()) / len(order),
            **{f"loss_{name}": value / len(order) for name, value in sums.items()},
            "lr": optimizer.param_groups[0]["lr"],
            f"val_mAP@{config.train.val_n}": score,
            "images_per_s": len(order) / (trained - started),
            "seconds": time.perf_counter() - started,
        }
        records.append(record)
        if score > best_score:
            best_score, best_epoch = score, epoch
            _save(run.best, model, preprocessing, splits, config, epoch=epoch, score=score)
        # The state comes last: if we are killed before it is written, this epoch is run again with the same result.
        write_log(run, records)
        save_state(
            run,
            {
                "model": model.state_dict(),
                "loss": loss.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
                "best_score": best_score,
                "best_epoch": best_epoch,
            },
        )
        progress.end_epoch(record, is_best=best_epoch == epoch)
    last_score = records[-1][f"val_mAP@{config.train.val_n}"]
    _save(run.last, model, preprocessing, splits, config, epoch=config.train.epochs - 1, score=last_score)
    return Result(run, best_epoch, best_score)


def initial_model(config: Config) -> HashModel:
    """The model before its first step: seeded, with the weights that the configuration names."""
    torch.manual_seed(config.train.seed)
    model = HashModel(
        backbone=config.model.backbone,
        n_bits=config.model.n_bits,
        freeze_batch_norm=config.model.freeze_batch_norm,
    )
    weights = config.model.weights
    load_backbone_weights(
        model.backbone,
        name=config.model.backbone,
        weights=weights if weights in ("none", "default") else expand(weights),
    )
    return model


def _terms(loss: nn.Module, outputs: Tensor, labels: Tensor, *, epoch: int, step: int, run: Run) -> dict[str, Tensor]:
    """The terms of the loss.

    Raises:
        Diverged: the outputs or a term are NaN or infinite.
    """
    try:
        terms: dict[str, Tensor] = loss(outputs, labels, epoch=epoch)
        wrong = [name for name, value in terms.items() if not bool(torch.isfinite(value))]
        reason = f"the loss term {', '.join(wrong)} became {terms[wrong[0]].item()}" if wrong else None
    except BadCodes as error:
        reason = str(error)
    if reason is not None:
        raise Diverged(
            f"epoch {epoch + 1}, batch {step + 1}: {reason} (lower the rate or set optimizer.clip_norm; the state "
            f"before this epoch is kept in {run.folder})"
        )
    return terms


def _validation_part(n: int, config: Config) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    n_val = round(n * config.train.val_fraction)
    if n_val < 1 or n_val >= n:
        raise BadDataset(
            f"train.val_fraction {config.train.val_fraction} of {n} training images leaves nothing to validate on or "
            "nothing to train on: change it or add images"
        )
    order = np.random.default_rng((config.train.seed, 0xA11)).permutation(n)
    return np.sort(order[n_val:]), np.sort(order[:n_val])


def _frozen(config: Config, model: HashModel, images: Images, device: torch.device, progress: Progress) -> _Source:
    with progress.task("features of the frozen backbone", len(images)) as advance:
        features = torch.from_numpy(
            features_of(model, images, device=device, precision=config.train.precision, advance=advance)
        ).to(device)

    def batches(rows: NDArray[np.int64], epoch: int) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:  # noqa: ARG001
        for start in range(0, len(rows), config.train.batch_size):
            chosen = rows[start : start + config.train.batch_size]
            yield features[torch.from_numpy(chosen).to(device)], chosen

    def encode(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            outputs: NDArray[np.float32] = model.head(features[torch.from_numpy(rows).to(device)]).cpu().numpy()
        return outputs

    return _Source(batches, model.head, encode)


def _augmented(
    config: Config,
    model: HashModel,
    images: Images,
    device: torch.device,
    progress: Progress,  # noqa: ARG001 - same signature as _frozen
) -> _Source:
    normalize = normalizer(images.preprocessing, device)
    dtype = pick_dtype(config.train.precision, device)
    size = config.train.batch_size

    def batches(rows: NDArray[np.int64], epoch: int) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        return images.batches(
            rows,
            batch_size=size,
            flip=config.train.flip,
            min_crop=config.train.min_crop,
            seed=(config.train.seed, epoch),
        )

    def outputs(pixels: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            result: Tensor = model(normalize(pixels))
        return result

    def encode(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        model.eval()
        with torch.inference_mode():
            parts = [
                outputs(pixels).float().cpu().numpy()
                for pixels, _ in images.batches(rows, batch_size=size, flip=False, min_crop=1, seed=(0,))
            ]
        return np.concatenate(parts)

    return _Source(batches, outputs, encode)


def _optimizer(config: Config, model: HashModel, loss: nn.Module) -> tuple[torch.optim.Optimizer, list[float]]:
    settings = config.optimizer
    groups = [(list(model.head.parameters()), settings.lr)]
    if not config.model.freeze_backbone:
        groups.append((list(model.backbone.parameters()), settings.backbone_lr or settings.lr))
    if list(loss.parameters()):
        groups.append((list(loss.parameters()), settings.proxy_lr or settings.lr))
    parameters = [{"params": params, "lr": rate} for params, rate in groups]
    rates = [rate for _, rate in groups]
    if settings.name == "sgd":
        sgd = torch.optim.SGD(parameters, momentum=settings.momentum, weight_decay=settings.weight_decay)
        return sgd, rates
    return torch.optim.AdamW(parameters, weight_decay=settings.weight_decay), rates


def rate_factor(settings: OptimizerSection, epoch: float, epochs: int) -> float:
    """What the learning rates are multiplied with at a (fractional) epoch."""
    if epoch < settings.warmup_epochs:
        return (epoch + 1e-3) / settings.warmup_epochs
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (epoch - settings.warmup_epochs) / (epochs - settings.warmup_epochs)))
    if settings.schedule == "step":
        return float(settings.step_factor ** (int(epoch) // settings.step_epochs))
    return 1.0


def _set_rates(
    optimizer: torch.optim.Optimizer,
    rates: list[float],
    settings: OptimizerSection,
    epoch: float,
    epochs: int,
) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * rate_factor(settings, epoch, epochs)


def _validate(
    source: _Source,
    labels: NDArray[np.uint8],
    fit_rows: NDArray[np.int64],
    val_rows: NDArray[np.int64],
    config: Config,
) -> float:
    """mAP@val_n of the validation part as queries against the rest of the training split as database."""
    database = fit_rows
    if len(database) > MAX_VALIDATION_DATABASE:
        chosen = np.random.default_rng((config.train.seed, 0xDB)).permutation(len(database))
        database = np.sort(database[chosen[:MAX_VALIDATION_DATABASE]])
    found = histograms(
        pack(source.encode(val_rows)),
        pack(source.encode(database)),
        labels[val_rows],
        labels[database],
        n_bits=config.model.n_bits,
    )
    return float(average_precision(found, n=config.train.val_n).expected.mean())


def _save(
    path: Path,
    model: HashModel,
    preprocessing: Preprocessing,
    splits: Splits,
    config: Config,
    *,
    epoch: int,
    score: float,
) -> None:
    save_checkpoint(
        path,
        model,
        preprocessing,
        label_names=splits.label_names,
        training={**config.model_dump(mode="json"), "splits_sha256": splits.fingerprint},
        scores={"epoch": epoch, f"val_mAP@{config.train.val_n}": score},
    )
