"""One pass over the training images, and what can go wrong in it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from hashseek.retrieval.errors import BadCodes, BadConfig, HashseekError
from hashseek.retrieval.images import Preprocessing
from hashseek.training.config import Config
from hashseek.training.data.batches import Rows, Source
from hashseek.training.loop.optimizers import parameters_of, set_rates
from hashseek.training.loop.parallel import own_part
from hashseek.training.loop.state import State
from hashseek.training.loop.step import backward
from hashseek.training.losses.memory import update_key_encoder
from hashseek.training.runs.progress import Progress


class Diverged(HashseekError):
    """The loss is no longer a number."""


class OutOfMemory(HashseekError):
    """A batch does not fit into the device's memory."""


def train_epoch(
    fabric: Fabric,
    config: Config,
    state: State,
    source: Source,
    labels: Tensor,
    fit_rows: Rows,
    rates: list[float],
    epoch: int,
    *,
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, float], int]:
    """Mean of each term over the images of the epoch, and their number.

    Raises:
        Diverged: a term is no number any more; the message names it, the batch and the run's `folder`.
    """
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
                f"before this epoch is kept in {folder})"
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


@contextmanager
def explained(config: Config, preprocessing: Preprocessing | None, device: torch.device) -> Iterator[None]:
    """Turn what PyTorch says of a step that cannot be done into what can be done about it.

    Raises:
        OutOfMemory: a batch does not fit.
        BadConfig: batch norm got a single image.
    """
    size = "this width" if preprocessing is None else f"{preprocessing.size} px"
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise BadConfig(
            f"batch norm has no statistics of a single image at {size}, but a process got no more "
            f"of a batch of {config.train.batch_size} or of the last one: set model.freeze_batch_norm = true, or "
            "change train.batch_size or model.size"
        ) from None
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"a batch of {config.train.batch_size} at {size} does not fit into the memory of "
            f"{device}: lower train.batch_size, or set train.chunk_size to keep the batch and compute it in "
            "parts"
        ) from None
