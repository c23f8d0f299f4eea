"""One pass over the training images, and the errors that can end it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from hashseek.retrieval.errors import BadCodes, HashseekError
from hashseek.retrieval.images import Preprocessing
from hashseek.training.config import Config
from hashseek.training.data.batches import TrainingData
from hashseek.training.loop.dropout import row_seeds
from hashseek.training.loop.parallel import own_part
from hashseek.training.loop.state import State
from hashseek.training.loop.step import backward
from hashseek.training.progress import Progress


class Diverged(HashseekError):
    """The loss became NaN or infinite."""


class OutOfMemory(HashseekError):
    """A batch does not fit in the device's memory."""


def train_epoch(
    fabric: Fabric,
    config: Config,
    state: State,
    data: TrainingData,
    epoch: int,
    *,
    progress: Progress,
) -> tuple[dict[str, float], int, float]:
    """Train on every image once.

    Returns the mean of each loss term over the images, their number, and the seconds spent waiting for batches.

    Raises:
        Diverged: a loss term became NaN or infinite; the message names the term and the batch.
    """
    settings = config.train
    rank, n_ranks = fabric.global_rank, fabric.world_size
    # For layers of your own that draw from PyTorch's generator; ours draw from `row_seeds`.
    torch.manual_seed(settings.seed * 1_000_003 + epoch + 7_919 * rank)
    order = np.random.default_rng((settings.seed, epoch)).permutation(data.fit_rows)
    own = own_part(order, batch_size=settings.batch_size, rank=rank, n_ranks=n_ranks)
    state.network.train()
    sums: dict[str, float] = {}
    n_seen, waited, started = 0, 0.0, time.perf_counter()
    with progress.task(f"epoch {epoch + 1}/{settings.epochs}", len(order)) as advance:
        ready = started
        for step, (inputs, rows) in enumerate(data.source.batches(own, settings.batch_size // n_ranks, epoch)):
            waited += time.perf_counter() - ready
            try:
                seeds = row_seeds(rows, seed=settings.seed, epoch=epoch, views=settings.views).to(inputs.device)
                labels = data.observed[torch.from_numpy(rows).to(data.observed.device)]
                terms = _train_batch(fabric, config, state, inputs, labels, seeds, epoch)
            except (BadCodes, FloatingPointError) as error:
                raise Diverged(
                    f"epoch {epoch + 1}, batch {step + 1}: {error} (lower optimizer.lr, or set optimizer.clip_norm)"
                ) from None
            n_rows = min(settings.batch_size, len(order) - step * settings.batch_size)
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + value * n_rows
            n_seen += n_rows
            shown = "  ".join(f"{name} {value:.4f}" for name, value in terms.items())
            ready = time.perf_counter()
            advance(n_rows, f"{shown}  {n_seen / (ready - started):.0f} images/s")
    return {name: value / n_seen for name, value in sums.items()}, n_seen, waited


def _train_batch(
    fabric: Fabric, config: Config, state: State, inputs: Tensor, labels: Tensor, seeds: Tensor, epoch: int
) -> dict[str, float]:
    state.optimizer.zero_grad(set_to_none=True)
    terms = backward(
        state.network,
        state.objective,
        state.keys,
        inputs,
        labels,
        seeds=seeds,
        epoch=epoch,
        autocast=fabric.autocast,
        chunk_size=config.train.chunk_size,
        views=config.train.views,
    )
    values = {name: value.item() for name, value in terms.items()}
    for name, value in values.items():
        if not np.isfinite(value):
            raise FloatingPointError(f"the loss term {name} became {value}")
    state.update(config)
    return values


@contextmanager
def memory_errors_name_a_setting(
    config: Config, preprocessing: Preprocessing | None, device: torch.device
) -> Iterator[None]:
    """Replace PyTorch's error when memory runs out with one that names the settings to change.

    On a CPU, PyTorch has no exception class for it, so only its message can tell.

    Raises:
        OutOfMemory: a batch does not fit.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        size = "this width" if preprocessing is None else f"{preprocessing.size} px"
        raise OutOfMemory(
            f"a batch of {config.train.batch_size} at {size} does not fit in the memory of {device}: lower "
            "train.batch_size, or set train.chunk_size to compute the batch in parts"
        ) from None
