"""The training loop, which `hashseek train`, sweeps and experiments call.

Everything random is drawn from (seed, epoch, row), never from a running generator. So a run that was killed and
resumed ends with the same weights as an uninterrupted one.
"""

import copy
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric

from hashseek.retrieval.checkpoint import save_checkpoint
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.backbones import default_preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.mlp import Mlp
from hashseek.retrieval.models.weight_loading import load_backbone_weights
from hashseek.training.collectives import gather_rows
from hashseek.training.config import Config
from hashseek.training.data.batches import TrainingData, build_source
from hashseek.training.data.broken_images import without_broken
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.held_out_labels import choose_held_out, training_splits
from hashseek.training.data.hidden_labels import hide_labels
from hashseek.training.data.paths import expand_text
from hashseek.training.data.splits import Splits, never_in_training
from hashseek.training.data.training_images import Images
from hashseek.training.loop.cpu_speedups import compute_depthwise_in_float32, fold_frozen_batch_norm, keep_freed_memory
from hashseek.training.loop.epoch import Diverged, memory_errors_name_a_setting, train_epoch
from hashseek.training.loop.head_init import fit_head
from hashseek.training.loop.network import Keys, Network, Objective, build_network
from hashseek.training.loop.optimizers import build_optimizer, build_scheduler
from hashseek.training.loop.parallel import launch, n_batches
from hashseek.training.loop.state import State
from hashseek.training.loop.sync_batch_norm import share_batch_norm
from hashseek.training.loop.validation import validate, validation_part
from hashseek.training.progress import Progress
from hashseek.training.runs.run_folder import Run, differences, save_state, saved_state, started, write_records
from hashseek.training.runs.tracking import Tracker, check_images, write_start

OnEpoch = Callable[[dict[str, Any]], None]


class Result(NamedTuple):
    """A finished run: its folder, the best epoch (counted from 1) and the validation mAP of that epoch.

    An unsupervised loss is not validated: its best epoch is the last, with a score of NaN.
    """

    run: Run
    best_epoch: int
    best_score: float


def fit(
    config: Config,
    *,
    out: Path,
    resume: bool = False,
    quiet: bool = True,
    on_epoch: OnEpoch | None = None,
    splits: Splits | None = None,
) -> Result:
    """Train with the configuration `config`, into the run folder `out`. A run that is refused leaves no folder.

    Args:
        config: everything that determines the run.
        out: the run folder.
        resume: continue the run in `out`, if there is one.
        quiet: print no progress.
        on_epoch: called with the record of each epoch after it is saved. Only with one process.
        splits: what `build_splits` returns for `config`, if the caller has it; None reads the data set.

    Raises:
        HashseekError: bad data, weights or settings, a run folder that is in use, too little memory, or a loss that
            became NaN.
    """
    settings = config.train
    if settings.devices > 1 and on_epoch is not None:
        raise BadConfig(f"train.devices is {settings.devices}, but on_epoch works only with one process: set it to 1")
    return launch(
        _fit,
        config,
        out,
        resume,
        quiet,
        on_epoch,
        splits,
        device=settings.device,
        devices=settings.devices,
        precision=settings.precision,
    )


def _fit(
    fabric: Fabric,
    config: Config,
    out: Path,
    resume: bool,
    quiet: bool,
    on_epoch: OnEpoch | None,
    splits: Splits | None,
) -> Result:
    shown = Progress(quiet=quiet or not fabric.is_global_zero)
    job = _prepare(fabric, config, out, resume, shown, splits)
    if fabric.device.type == "cpu":
        keep_freed_memory()
    with ExitStack() as stack:
        tracker = None
        if fabric.is_global_zero:
            stack.enter_context(started(job.run, config, resume=resume))
            first_epoch = len(job.state.records) + 1
            write_start(job.run, config, job.splits, job.data, device=fabric.device, first_epoch=first_epoch)
            tracker = stack.enter_context(Tracker(job.run, config, job.state.records))
        _train(fabric, config, job, shown, on_epoch, tracker)
    fabric.barrier()
    return Result(job.run, job.state.best_epoch, job.state.best_score)


@dataclass(frozen=True)
class _Job:
    """A run that is ready to train."""

    run: Run
    splits: Splits
    held_out: tuple[str, ...]
    preprocessing: Preprocessing | None
    data: TrainingData
    state: State


def _prepare(fabric: Fabric, config: Config, out: Path, resume: bool, shown: Progress, given: Splits | None) -> _Job:
    """Check everything that can be checked before training."""
    run = Run(out)
    saved = _saved_everywhere(fabric, run, config, resume=resume)
    with fabric.rank_zero_first(local=True):  # it may download weights or pictures, which the others then find
        model = initial_model(config)
        splits = build_splits(config.data.name, **config.data.options()) if given is None else given
    _check_alike(fabric, config, splits)
    preprocessing = preprocessing_of(config)
    if preprocessing is not None:
        model.check_input_size(preprocessing.size)
    held_out = choose_held_out(splits.label_names, config.data.held_out, seed=config.data.held_out_seed)
    splits = training_splits(splits, held_out)
    if held_out:
        left = f"{len(splits.train)} training images have none of them"
        shown.console.print(f"note: held out of training: {', '.join(held_out)}; {left}", markup=False)
    network, objective, keys = build_network(config, model, n_classes=len(splits.label_names))
    splits, images = _without_broken(config, splits, preprocessing, shown)
    train = splits.train
    fit_rows, val_rows = validation_part(len(train), config)
    # Before the backbone is patched: engines convert the version that is in a checkpoint.
    source = build_source(config, model, train, images, fabric=fabric, progress=shown)
    if train.vectors is not None and isinstance(model.backbone, Mlp):
        vectors = torch.from_numpy(train.vectors[fit_rows])
        model.backbone.standardize(vectors.mean(dim=0), vectors.std(dim=0))
    _move_to_device(fabric, config, network, objective, keys)
    observed = hide_labels(
        train.labels, share=config.train.keep_labels, single=config.train.single_label, seed=config.train.seed
    )
    observed_labels = torch.from_numpy(observed.astype(np.float32)).to(fabric.device)
    data = TrainingData(source, train.labels, observed_labels, fit_rows, val_rows)
    if saved is None and config.model.start_of_head != "random":
        fit_head(fabric, config, network.model, data, progress=shown)
        if keys is not None and keys.encoder is not None:
            keys.encoder.model.head.load_state_dict(model.head.state_dict())
    state = _initial_state(fabric, config, network, objective, keys, n_images=len(fit_rows))
    if saved is not None and fabric.is_global_zero:
        check_images(run, splits, data)
    fabric.barrier()  # every process has checked the folder and the data
    if saved is not None:
        state.load(saved)
    return _Job(run, splits, held_out, preprocessing, data, state)


def _saved_everywhere(fabric: Fabric, run: Run, config: Config, *, resume: bool) -> dict[str, Any] | None:
    """The state from which all processes continue: the one that the first process finds in its folder.

    Raises:
        BadConfig: see `saved_state`, or another host has the run and the first one does not.
    """
    saved = saved_state(run, config, resume=resume) if fabric.is_global_zero else None
    found = gather_rows(torch.tensor([run.config.is_file()], device=fabric.device)).tolist()
    if any(found) and not found[0]:
        raise BadConfig(
            f"{run.folder} holds the run on the host of process {found.index(True)}, but not on that of process 0, "
            "which writes it: set --out to a folder that all hosts share"
        )
    return fabric.broadcast(saved)


def _check_alike(fabric: Fabric, config: Config, splits: Splits) -> None:
    """Raise `BadConfig` unless all processes have the same settings and splits."""
    own = {**config.model_dump(mode="json"), "splits_sha256": splits.fingerprint}
    if changes := differences(fabric.broadcast(own), own):
        raise BadConfig(
            f"process {fabric.global_rank} differs from process 0 ({'; '.join(changes)}): use the same command "
            "and data on all hosts"
        )


def _move_to_device(fabric: Fabric, config: Config, network: Network, objective: Objective, keys: Keys | None) -> None:
    """Patch the networks for speed and several processes, and move them to the device."""
    if fabric.device.type == "cpu" and not config.model.freeze_backbone:
        if config.model.freeze_batch_norm:  # on a GPU, folding it takes longer than computing it
            fold_frozen_batch_norm(network.model.backbone)
        compute_depthwise_in_float32(network.model.backbone)
    objective.to(fabric.device)
    for part in (network, keys):
        if part is not None:
            if fabric.world_size > 1:
                share_batch_norm(part)
            part.to(fabric.device).to(memory_format=torch.channels_last)


def _initial_state(
    fabric: Fabric, config: Config, network: Network, objective: Objective, keys: Keys | None, *, n_images: int
) -> State:
    optimizer = build_optimizer(config, network, objective)
    steps = n_batches(n_images, batch_size=config.train.batch_size, n_ranks=fabric.world_size)
    scheduler = build_scheduler(config, optimizer, steps_per_epoch=steps)
    ema = None if config.train.ema is None else copy.deepcopy(network.model)
    return State(network, objective, keys, optimizer, scheduler, ema, records=[])


def _train(
    fabric: Fabric, config: Config, job: _Job, shown: Progress, on_epoch: OnEpoch | None, tracker: Tracker | None
) -> None:
    run, state = job.run, job.state
    score_name = f"val_mAP@{config.train.val_n}"
    for epoch in range(len(state.records), config.train.epochs):
        if config.train.patience is not None and epoch >= state.best_epoch + config.train.patience:
            break
        record = _train_and_validate(fabric, config, job, epoch, shown)
        state.records.append(record)
        # Without labels, there is no score to choose an epoch by: the last one is used.
        score = record.get(score_name, math.nan)
        is_best = math.isnan(score) or score > state.best_score
        if is_best:
            state.best_score, state.best_epoch = score, record["epoch"]
        if tracker is not None:
            if is_best:
                _save(run.best, job, config, record)
            if config.tracking.keep_every and record["epoch"] % config.tracking.keep_every == 0:
                _save(run.epoch(record["epoch"]), job, config, record)
            # The state comes last: if we are killed before it is written, this epoch is repeated with the same result.
            write_records(run.log, state.records)
            tracker.epoch(record)
            save_state(run, state.saved(config))
        shown.epoch(record, is_best=is_best and not math.isnan(score))
        if on_epoch is not None:
            on_epoch(record)
    if tracker is not None:
        _save(run.last, job, config, state.records[-1])


def _train_and_validate(fabric: Fabric, config: Config, job: _Job, epoch: int, shown: Progress) -> dict[str, Any]:
    """One epoch and its record in the log."""
    state = job.state
    began = time.perf_counter()
    with memory_errors_name_a_setting(config, job.preprocessing, fabric.device):
        means, n_seen, waited = train_epoch(fabric, config, state, job.data, epoch, progress=shown)
    trained = time.perf_counter()
    score: dict[str, float] = {}
    try:
        if len(job.data.val_rows):
            score[f"val_mAP@{config.train.val_n}"] = validate(fabric, config, state.evaluated, job.data)
    except BadCodes as error:  # after the last step of the epoch, which no later loss shows
        raise Diverged(f"epoch {epoch + 1}: {error} (lower optimizer.lr, or set optimizer.clip_norm)") from None
    return {
        "epoch": epoch + 1,
        "loss": sum(means.values()),
        **{f"loss_{name}": value for name, value in means.items()},
        "lr": state.optimizer.param_groups[0]["lr"],
        **score,
        "images_per_s": n_seen / (trained - began),
        "seconds_waiting_for_data": waited,
        "seconds": time.perf_counter() - began,
    }


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
        weights=weights if weights in ("none", "default") else expand_text(weights),
    )
    return model


def preprocessing_of(config: Config) -> Preprocessing | None:
    """How the network's input is prepared; None for a backbone for vectors."""
    default = default_preprocessing(config.model.backbone, weights=config.model.weights)
    return None if default is None else config.model.preprocessing(default)


def _without_broken(
    config: Config, splits: Splits, preprocessing: Preprocessing | None, progress: Progress
) -> tuple[Splits, Images | None]:
    """The splits without broken training images, and the training images if there are any.

    Raises:
        BadDataset: an image is broken and the data set does not set on_error = 'skip'.
    """
    images = None
    if splits.train.vectors is None and preprocessing is not None:
        splits = without_broken(splits, ("train",), source=config.data.name)
        # A frozen backbone sees every image once, so a cache of images would not be read again.
        cache = "none" if config.model.freeze_backbone else config.train.cache
        images = Images(splits.train, preprocessing, cache=cache, cache_gib=config.train.cache_gib)
    progress.problems(splits.problems, never_in_training(splits))
    return splits, images


def _save(path: Path, job: _Job, config: Config, record: dict[str, Any]) -> None:
    held_out = {"held_out": list(job.held_out)} if job.held_out else {}
    scores = {key: value for key, value in record.items() if key == "epoch" or key.startswith("val_")}
    save_checkpoint(
        path,
        job.state.evaluated,
        job.preprocessing,
        label_names=job.splits.label_names,
        training={**config.model_dump(mode="json"), "splits_sha256": job.splits.fingerprint, **held_out},
        scores=scores,
    )
