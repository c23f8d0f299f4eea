"""The training loop.

Everything random is drawn from (seed, epoch, row), never from a running generator: that is why a run that was killed
and resumed ends with the same weights as an unbroken one.
"""

import copy
import math
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

from retrieval.backbones import default_preprocessing
from retrieval.checkpoint import save_checkpoint
from retrieval.codes import pack
from retrieval.errors import BadCodes, BadConfig, BadDataset, HashseekError
from retrieval.images import Preprocessing
from retrieval.metrics import average_precision, histograms
from retrieval.mlp import Mlp
from retrieval.model import HashModel
from retrieval.weights import load_backbone_weights
from training.config import Config
from training.datasets import build_splits
from training.datasets.folder import expand
from training.datasets.splits import Split, Splits, never_in_training
from training.features import has_features
from training.images import Images, without_broken
from training.losses.memory import gather_rows, update_key_encoder
from training.missing import drop_labels
from training.network import Keys, Network, Objective, build_network
from training.optimizers import build_optimizer, parameters_of, set_rates
from training.parallel import average_buffers, launch, own_part
from training.progress import Progress
from training.quicken import keep_freed_memory, quicken
from training.run import Run, open_run, read_log, save_state, write_log
from training.sources import Rows, Source, build_source
from training.step import backward
from training.tracking import Tracker

# Validation ranks at most so many training images: enough to tell epochs apart, and it stays cheap on large sets.
MAX_VALIDATION_DATABASE = 10_000


class Diverged(HashseekError):
    """The loss is no longer a number."""


class OutOfMemory(HashseekError):
    """A batch does not fit into the device's memory."""


class Stop(Exception):
    """Raised by `on_epoch`: the epoch was the last, and the run ends in order."""


OnEpoch = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Result:
    """What a run gave: its folder, the best epoch (from 0) and that epoch's validation mAP."""

    run: Run
    best_epoch: int
    best_score: float


@dataclass
class _State:
    """What changes from epoch to epoch."""

    network: Network
    objective: Objective
    keys: Keys | None
    optimizer: torch.optim.Optimizer
    ema: HashModel | None
    records: list[dict[str, Any]]
    best_score: float = -math.inf
    best_epoch: int = -1

    @property
    def evaluated(self) -> HashModel:
        """The model that is validated and saved."""
        return self.network.model if self.ema is None else self.ema

    def modules(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        """Everything with a state, by name."""
        found: dict[str, nn.Module | torch.optim.Optimizer | None] = {
            "network": self.network,
            "objective": self.objective,
            "optimizer": self.optimizer,
            "keys": self.keys,
            "ema": self.ema,
        }
        return {name: module for name, module in found.items() if module is not None}


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
        result = _tracked(fabric, config, out, resume, shown, on_epoch, tracker)
    except BaseException as error:
        tracker.close("failed" if isinstance(error, Exception) else "killed")
        raise
    tracker.close("finished")
    return result


def _tracked(
    fabric: Fabric,
    config: Config,
    out: Path,
    resume: bool,
    shown: Progress | bool,
    on_epoch: OnEpoch | None,
    tracker: Tracker,
) -> Result:
    if isinstance(shown, bool):  # a progress bar cannot travel to another process
        shown = Progress(quiet=shown or not fabric.is_global_zero)
    model = initial_model(config)
    default = default_preprocessing(config.model.backbone, weights=config.model.weights)
    preprocessing = None if default is None else config.model.preprocessing(default)
    if preprocessing is not None:
        model.check_input_size(preprocessing.size)
    splits = build_splits(config.data.name, **config.data.options())
    network, objective, keys = build_network(config, model, n_classes=len(splits.label_names))
    if config.train.chunk_size is not None:
        _check_chunks(config, network)
    with fabric.rank_zero_first():
        run, saved = open_run(out, config.model_dump(mode="json"), resume=resume or not fabric.is_global_zero)
    train, images = _training_images(config, model, splits, preprocessing, fabric.device, shown)
    fit_rows, val_rows = _validation_part(len(train), config)
    if train.vectors is not None:
        _standardize(model, torch.from_numpy(train.vectors[fit_rows]))

    if not config.model.freeze_backbone:
        quicken(model.backbone, frozen_batch_norm=config.model.freeze_batch_norm, device=fabric.device)
    if fabric.device.type == "cpu":
        keep_freed_memory()
    network.to(fabric.device).to(memory_format=torch.channels_last)
    objective.to(fabric.device)
    if keys is not None:
        keys.to(fabric.device).to(memory_format=torch.channels_last)
    source = build_source(config, model, train, images, fabric=fabric, progress=shown)
    optimizer, rates = build_optimizer(config, network, objective)
    ema = None if config.train.ema is None else copy.deepcopy(model)
    state = _State(network, objective, keys, optimizer, ema, [])
    first_epoch = 0
    if saved is not None:
        for name, module in state.modules().items():
            module.load_state_dict(module.state_dict() | saved[name])
        state.best_score, state.best_epoch = saved["best_score"], saved["best_epoch"]
        first_epoch = saved["epoch"] + 1
        state.records = _earlier_records(run, first_epoch)
    if fabric.is_global_zero:
        tracker.start(
            run,
            config,
            splits,
            n_fit=len(fit_rows),
            n_validation=len(val_rows),
            device=fabric.device,
            records=state.records,
        )
    if config.train.compile:
        model.backbone.compile()

    observed = drop_labels(
        train.labels, share=config.train.keep_labels, single=config.train.single_label, seed=config.train.seed
    )
    labels = torch.from_numpy(observed.astype(np.float32)).to(fabric.device)
    for epoch in range(first_epoch, config.train.epochs):
        if _is_patience_over(config, state):
            break
        started = time.perf_counter()
        try:
            means, n_seen = _train_epoch(fabric, config, state, source, labels, fit_rows, rates, epoch, run, shown)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise BadConfig(
                f"batch norm has no statistics of a single image at {_input(preprocessing)}, but a process got no more "
                f"of a batch of {config.train.batch_size} or of the last one: set model.freeze_batch_norm = true, or "
                "change train.batch_size or model.size"
            ) from None
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            raise OutOfMemory(
                f"a batch of {config.train.batch_size} at {_input(preprocessing)} does not fit into the memory of "
                f"{fabric.device}: lower train.batch_size, or set train.chunk_size to keep the batch and compute it in "
                "parts"
            ) from None
        trained = time.perf_counter()
        average_buffers(state.network, state.ema)
        score = _validate(fabric, source, state.evaluated, train.labels, fit_rows, val_rows, config)
        record = {
            "epoch": epoch,
            "loss": sum(means.values()),
            **{f"loss_{name}": value for name, value in means.items()},
            "lr": optimizer.param_groups[0]["lr"],
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
                _save(run.best, state.evaluated, preprocessing, splits, config, epoch=epoch, score=score)
            # The state comes last: if we are killed before it is written, this epoch is run again with the same result.
            write_log(run, state.records)
            scalars = {"epoch": epoch, "best_score": state.best_score, "best_epoch": state.best_epoch}
            save_state(run, {name: _what_changes(module, config) for name, module in state.modules().items()} | scalars)
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
        _save(run.last, state.evaluated, preprocessing, splits, config, epoch=last["epoch"], score=score)
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


def _train_epoch(
    fabric: Fabric,
    config: Config,
    state: _State,
    source: Source,
    labels: Tensor,
    fit_rows: Rows,
    rates: list[float],
    epoch: int,
    run: Run,
    progress: Progress,
) -> tuple[dict[str, float], int]:
    """Mean of each term over the images of the epoch, and their number."""
    settings = config.train
    n_ranks = fabric.world_size
    torch.manual_seed(settings.seed * 1_000_003 + epoch + 7_919 * fabric.global_rank)  # dropout
    order = np.random.default_rng((settings.seed, epoch)).permutation(fit_rows)
    share = settings.batch_size // n_ranks
    own = own_part(order, batch_size=settings.batch_size, rank=fabric.global_rank, n_ranks=n_ranks)
    n_steps = math.ceil(len(order) / settings.batch_size)
    sums: dict[str, float] = {}
    n_seen = 0
    state.network.train()
    if state.keys is not None:
        state.keys.train()
    if config.model.freeze_backbone:
        state.network.model.backbone.eval()
    progress.start_epoch(epoch, settings.epochs, len(order))
    for step, (inputs, rows) in enumerate(source.batches(own, share, epoch)):
        set_rates(state.optimizer, rates, config.optimizer, epoch + step / n_steps, settings.epochs)
        state.optimizer.zero_grad(set_to_none=True)
        try:
            terms = backward(
                state.network,
                state.objective,
                state.keys,
                inputs,
                labels[torch.from_numpy(rows).to(labels.device)],
                epoch=epoch,
                autocast=fabric.autocast,
                chunk_size=settings.chunk_size,
                views=settings.views,
            )
            wrong = [name for name, value in terms.items() if not bool(torch.isfinite(value))]
            reason = f"the loss term {', '.join(wrong)} became {terms[wrong[0]].item()}" if wrong else None
        except BadCodes as error:
            reason = str(error)
        if reason is not None:
            raise Diverged(
                f"epoch {epoch + 1}, batch {step + 1}: {reason} (lower the rate or set optimizer.clip_norm; the state "
                f"before this epoch is kept in {run.folder})"
            )
        if config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters_of(state.optimizer), config.optimizer.clip_norm)
        state.optimizer.step()
        if state.ema is not None and settings.ema is not None:
            learns = (state.ema.head, state.network.model.head) if config.model.freeze_backbone else None
            update_key_encoder(*(learns or (state.ema, state.network.model)), settings.ema)
        n_rows = min(settings.batch_size, len(order) - step * settings.batch_size)
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + value.item() * n_rows
        n_seen += n_rows
        progress.advance(n_rows, {name: value.item() for name, value in terms.items()})
    return {name: value / max(n_seen, 1) for name, value in sums.items()}, n_seen


def _what_changes(module: nn.Module | torch.optim.Optimizer, config: Config) -> dict[str, Any]:
    """The state of `module`, without a frozen backbone: that is in the weights the configuration names."""
    state = module.state_dict()
    frozen = config.model.freeze_backbone and isinstance(module, nn.Module)
    return {name: value for name, value in state.items() if not (frozen and "backbone." in name)}


def _is_patience_over(config: Config, state: _State) -> bool:
    return config.train.patience is not None and len(state.records) > state.best_epoch + config.train.patience


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


def _input(preprocessing: Preprocessing | None) -> str:
    return "this width" if preprocessing is None else f"{preprocessing.size} px"


def _validation_part(n: int, config: Config) -> tuple[Rows, Rows]:
    n_val = round(n * config.train.val_fraction)
    if n_val < 1 or n_val >= n:
        raise BadDataset(
            f"train.val_fraction {config.train.val_fraction} of {n} training images leaves nothing to validate on or "
            "nothing to train on: change it or add images"
        )
    if n - n_val < config.train.devices:
        raise BadDataset(
            f"{n - n_val} training images are too few for train.devices = {config.train.devices}: lower it to "
            f"{n - n_val} or add images"
        )
    order = np.random.default_rng((config.train.seed, 0xA11)).permutation(n)
    return np.sort(order[n_val:]), np.sort(order[:n_val])


def _validate(
    fabric: Fabric,
    source: Source,
    model: HashModel,
    labels: NDArray[np.uint8],
    fit_rows: Rows,
    val_rows: Rows,
    config: Config,
) -> float:
    """mAP@val_n of the validation part as queries against the rest of the training split as database.

    Every process encodes its share and then ranks everything, which is quick.
    """
    database = fit_rows
    if len(database) > MAX_VALIDATION_DATABASE:
        chosen = np.random.default_rng((config.train.seed, 0xDB)).permutation(len(database))
        database = np.sort(database[chosen[:MAX_VALIDATION_DATABASE]])

    def encode(rows: Rows) -> NDArray[np.uint8]:
        share = np.array_split(rows, fabric.world_size)[fabric.global_rank]
        outputs = torch.from_numpy(source.encode(model, share)).to(fabric.device)
        return pack(gather_rows(outputs).cpu().numpy())

    found = histograms(
        encode(val_rows), encode(database), labels[val_rows], labels[database], n_bits=config.model.n_bits
    )
    return float(average_precision(found, n=config.train.val_n).expected.mean())


def _save(
    path: Path,
    model: HashModel,
    preprocessing: Preprocessing | None,
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
