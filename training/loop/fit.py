"""The training loop.

Everything random is drawn from (seed, epoch, row), never from a running generator: that is why a run that was killed
and resumed ends with the same weights as an unbroken one.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hashseek.retrieval.checkpoint import save_checkpoint
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.backbones import default_preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.mlp import Mlp
from hashseek.retrieval.models.pretrained_weights import load_backbone_weights
from hashseek.training.config import Config
from hashseek.training.data.batches import Rows, Source, build_source
from hashseek.training.data.cached_features import has_features
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.folder import expand
from hashseek.training.data.held_out_labels import choose_held_out, training_splits
from hashseek.training.data.hidden_labels import drop_labels
from hashseek.training.data.splits import Split, Splits, never_in_training
from hashseek.training.data.training_images import Images, without_broken
from hashseek.training.loop.cpu_speedups import keep_freed_memory, quicken
from hashseek.training.loop.epoch import explained, train_epoch
from hashseek.training.loop.network import Network, build_network
from hashseek.training.loop.optimizers import build_optimizer
from hashseek.training.loop.parallel import average_buffers, launch
from hashseek.training.loop.state import State
from hashseek.training.loop.sync_batch_norm import share_batch_norm
from hashseek.training.loop.validation import validate, validation_part
from hashseek.training.runs.progress import Progress
from hashseek.training.runs.run_folder import Run, open_run, read_log, save_state, write_log
from hashseek.training.runs.tracking import Tracker


class Stop(Exception):
    """Raised by `on_epoch`: the epoch was the last, and the run ends in order."""


OnEpoch = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Result:
    """What a run gave: its folder, the best epoch (from 0) and that epoch's validation mAP."""

    run: Run
    best_epoch: int
    best_score: float


def fit(
    config: Config,
    *,
    out: Path,
    resume: bool = False,
    progress: Progress | None = None,
    on_epoch: OnEpoch | None = None,
) -> Result:
    """Train as `config` says into the run folder `out`.

    Args:
        config: everything that decides the run.
        out: the run folder.
        resume: go on with the run that is in it.
        progress: where to show the way.
        on_epoch: told the record of each epoch after it is saved; it may raise `Stop`. In one process only.

    Raises:
        HashseekError: bad data, weights or settings, an occupied run folder, too little memory, or a loss that became
            NaN.
    """
    settings = config.train
    several = settings.devices > 1
    if several and on_epoch is not None:
        raise BadConfig(
            f"train.devices is {settings.devices}, but only a run in one process can be watched: set it to 1"
        )
    quiet = progress is None or progress.quiet
    return launch(
        _fit,
        config,
        out,
        resume,
        quiet if several else progress or Progress(quiet=True),
        on_epoch,
        device=settings.device,
        devices=settings.devices,
        precision=settings.precision,
    )


def _fit(
    fabric: Fabric, config: Config, out: Path, resume: bool, shown: Progress | bool, on_epoch: OnEpoch | None
) -> Result:
    tracker = Tracker()
    try:
        if isinstance(shown, bool):  # a progress bar cannot travel to another process
            shown = Progress(quiet=shown or not fabric.is_global_zero)
        job = _prepare(fabric, config, out, resume, shown)
        result = _train(fabric, config, job, shown, on_epoch, tracker)
    except BaseException as error:
        tracker.close("failed" if isinstance(error, Exception) else "killed")
        raise
    tracker.close("finished")
    return result


@dataclass(frozen=True)
class _Job:
    """What is trained, on what, and where it goes.

    `observed` are the labels that training sees, `labels` all of them; `first_epoch` is above 0 in a resumed run.
    """

    run: Run
    splits: Splits
    held_out: tuple[str, ...]
    preprocessing: Preprocessing | None
    source: Source
    labels: NDArray[np.uint8]
    observed: Tensor
    fit_rows: Rows
    val_rows: Rows
    state: State
    rates: list[float]
    first_epoch: int


def _prepare(fabric: Fabric, config: Config, out: Path, resume: bool, shown: Progress) -> _Job:
    model = initial_model(config)
    default = default_preprocessing(config.model.backbone, weights=config.model.weights)
    preprocessing = None if default is None else config.model.preprocessing(default)
    if preprocessing is not None:
        model.check_input_size(preprocessing.size)
    splits = build_splits(config.data.name, **config.data.options())
    held_out = choose_held_out(splits.label_names, config.data.held_out, seed=config.data.held_out_seed)
    splits = training_splits(splits, held_out)
    if held_out:
        shown.held_out(held_out, n_images=len(splits.train))
    network, objective, keys = build_network(config, model, n_classes=len(splits.label_names))
    if config.train.chunk_size is not None:
        _check_chunks(config, network)
    train, images = _training_images(config, model, splits, preprocessing, fabric.device, shown)
    with fabric.rank_zero_first():
        run, saved = open_run(out, config.model_dump(mode="json"), resume=resume or not fabric.is_global_zero)
    fit_rows, val_rows = validation_part(len(train), config)
    if train.vectors is not None:
        _standardize(model, torch.from_numpy(train.vectors[fit_rows]))

    if not config.model.freeze_backbone:
        quicken(model.backbone, frozen_batch_norm=config.model.freeze_batch_norm, device=fabric.device)
    if fabric.world_size > 1:
        share_batch_norm(network)
        if keys is not None:
            share_batch_norm(keys)
    if fabric.device.type == "cpu":
        keep_freed_memory()
    network.to(fabric.device).to(memory_format=torch.channels_last)
    objective.to(fabric.device)
    if keys is not None:
        keys.to(fabric.device).to(memory_format=torch.channels_last)
    source = build_source(config, model, train, images, fabric=fabric, progress=shown)
    optimizer, rates = build_optimizer(config, network, objective)
    ema = None if config.train.ema is None else copy.deepcopy(model)
    state = State(network, objective, keys, optimizer, ema, [])
    first_epoch = 0
    if saved is not None:
        state.load(saved)
        first_epoch = saved["epoch"] + 1
        state.records = _earlier_records(run, first_epoch)
    if config.train.compile:
        model.backbone.compile()
    observed = drop_labels(
        train.labels, share=config.train.keep_labels, single=config.train.single_label, seed=config.train.seed
    )
    return _Job(
        run,
        splits,
        held_out,
        preprocessing,
        source,
        labels=train.labels,
        observed=torch.from_numpy(observed.astype(np.float32)).to(fabric.device),
        fit_rows=fit_rows,
        val_rows=val_rows,
        state=state,
        rates=rates,
        first_epoch=first_epoch,
    )


def _train(
    fabric: Fabric, config: Config, job: _Job, shown: Progress, on_epoch: OnEpoch | None, tracker: Tracker
) -> Result:
    run, state = job.run, job.state
    if fabric.is_global_zero:
        tracker.start(
            run,
            config,
            job.splits,
            n_fit=len(job.fit_rows),
            n_validation=len(job.val_rows),
            device=fabric.device,
            records=state.records,
        )
    for epoch in range(job.first_epoch, config.train.epochs):
        if state.is_patience_over(config):
            break
        started = time.perf_counter()
        with explained(config, job.preprocessing, fabric.device):
            means, n_seen = train_epoch(
                fabric,
                config,
                state,
                job.source,
                job.observed,
                job.fit_rows,
                job.rates,
                epoch,
                folder=run.folder,
                progress=shown,
            )
        trained = time.perf_counter()
        average_buffers(state.network, state.ema)
        score = validate(fabric, job.source, state.evaluated, job.labels, job.fit_rows, job.val_rows, config)
        record = {
            "epoch": epoch,
            "loss": sum(means.values()),
            **{f"loss_{name}": value for name, value in means.items()},
            "lr": state.optimizer.param_groups[0]["lr"],
            f"val_mAP@{config.train.val_n}": score,
            "images_per_s": n_seen / (trained - started),
            "seconds": time.perf_counter() - started,
        }
        state.records.append(record)
        is_best = score > state.best_score
        if is_best:
            state.best_score, state.best_epoch = score, epoch
        if fabric.is_global_zero:
            if is_best:
                _save(run.best, job, config, epoch=epoch, score=score)
            # The state comes last: if we are killed before it is written, this epoch is run again with the same result.
            write_log(run, state.records)
            save_state(run, state.saved(config, epoch=epoch))
            tracker.epoch(record)
        shown.end_epoch(record, is_best=is_best)
        if on_epoch is not None:
            try:
                on_epoch(record)
            except Stop:
                break
    if fabric.is_global_zero:
        last = state.records[-1]
        score = last[f"val_mAP@{config.train.val_n}"]
        _save(run.last, job, config, epoch=last["epoch"], score=score)
    fabric.barrier()
    return Result(run, state.best_epoch, state.best_score)


def initial_model(config: Config) -> HashModel:
    """The model before its first step: seeded, with the weights that the configuration names."""
    torch.manual_seed(config.train.seed)
    model = HashModel(
        backbone=config.model.backbone,
        n_bits=config.model.n_bits,
        head=config.model.head,
        freeze_batch_norm=config.model.freeze_batch_norm,
    )
    weights = config.model.weights
    load_backbone_weights(
        model.backbone,
        name=config.model.backbone,
        weights=weights if weights in ("none", "default") else expand(weights),
    )
    return model


def _standardize(model: HashModel, vectors: Tensor) -> None:
    # A backbone for images has no such method: `build_source` refuses it next.
    if isinstance(model.backbone, Mlp) and model.backbone.n_inputs == vectors.shape[1]:
        model.backbone.standardize(vectors.mean(dim=0), vectors.std(dim=0))


def _training_images(
    config: Config,
    model: HashModel,
    splits: Splits,
    preprocessing: Preprocessing | None,
    device: torch.device,
    progress: Progress,
) -> tuple[Split, Images | None]:
    settings = config.train
    train, images, problems = splits.train, None, splits.problems
    if train.vectors is None and preprocessing is not None:
        images = Images(train, preprocessing, cache="none")
        known = config.model.freeze_backbone and has_features(
            model, images, device=device, precision=settings.precision
        )
        if not known:
            train, broken = without_broken(train, on_error=splits.on_error, source=config.data.name)
            problems = (*problems, *broken)
            # A frozen backbone sees every image once.
            cache = "none" if config.model.freeze_backbone else settings.cache
            images = Images(train, preprocessing, cache=cache, cache_gib=settings.cache_gib)
    progress.problems(problems, never_in_training(splits))
    return train, images


def _check_chunks(config: Config, network: Network) -> None:
    def has_batch_norm(part: nn.Module) -> bool:
        return any(isinstance(module, _BatchNorm) for module in part.modules())

    live = not (config.model.freeze_backbone or config.model.freeze_batch_norm)
    if has_batch_norm(network.model.head):
        raise BadConfig(
            f"train.chunk_size is {config.train.chunk_size}, but batch norm in the head {config.model.head!r} would "
            "take its statistics of a chunk and not of the batch: set model.head = 'linear', or leave chunk_size out"
        )
    if live and has_batch_norm(network.model.backbone):
        raise BadConfig(
            f"train.chunk_size is {config.train.chunk_size}, but batch norm would take its statistics of a chunk and "
            "not of the batch: set model.freeze_batch_norm = true, or leave chunk_size out"
        )


def _earlier_records(run: Run, n_epochs: int) -> list[dict[str, Any]]:
    """The log of the epochs that the saved state has behind it."""
    try:
        records = read_log(run)
    except ValueError:  # not JSON
        records = []
    if len(records) < n_epochs:
        raise BadConfig(
            f"{run.log} is missing or damaged: it holds {len(records)} readable epochs, but {n_epochs} are trained: "
            "put it back or train into another folder"
        )
    return records[:n_epochs]


def _save(path: Path, job: _Job, config: Config, *, epoch: int, score: float) -> None:
    held_out = {"held_out": list(job.held_out)} if job.held_out else {}
    save_checkpoint(
        path,
        job.state.evaluated,
        job.preprocessing,
        label_names=job.splits.label_names,
        training={**config.model_dump(mode="json"), "splits_sha256": job.splits.fingerprint, **held_out},
        scores={"epoch": epoch, f"val_mAP@{config.train.val_n}": score},
    )
