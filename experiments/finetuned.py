"""Fine-tuning the whole network, with HyP2 and the seven losses that were the best in an earlier frozen comparison.

Every loss gets the same network, random hash layer, batches, optimizer and epochs, and its own hyperparameters, which
its search on the frozen backbone has chosen.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.comparison import (
    TUNED,
    Experiment,
    add_row,
    chosen_settings,
    run_folder,
    settings_of,
    trained,
    unfinished,
)
from experiments.inputs import intact_splits
from experiments.methods import METHODS
from experiments.processes import in_processes
from experiments.scoring import split_scores
from hashseek.training.config import load_config
from hashseek.training.evaluation.split_encoder import SplitEncoder
from hashseek.training.progress import Progress

FOLDER = "finetuned"
CHOSEN = ("tie_aware", "hyp2", "dpsh", "dhn", "hashnet", "idhn", "mulsupcon", "simdis")  # published
BASE = Path("mirflickr25k_mobilenet_v2_tie_aware_48_finetuned")


def run_finetuned(
    folder: Path,
    methods: Sequence[str],
    *,
    lengths: Sequence[int] = TUNED[::-1],
    seeds: int = 3,
    jobs: int = 2,
    base: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """`fine_tune` every method, `jobs` runs at a time; finished runs are kept, others continue.

    All methods are trained with one seed before the next. The rows are those of a comparison in `folder` / FOLDER, for
    `as_markdown`.

    Args:
        folder: of the comparison, whose searches have chosen the hyperparameters.
        methods: keys of `METHODS`.
        lengths: some of `TUNED`.
        seeds: runs of each method at each length.
        base: overrides of the base configuration, for all methods alike.

    Raises:
        HashseekError: what a training run refuses.
    """
    experiment = Experiment(bits=tuple(lengths), n_seeds=seeds)
    missing = {method: unfinished(folder / FOLDER, method, experiment) for method in methods}
    wanted = [
        (method, n_bits, seed)
        for seed, n_bits, method in product(range(seeds), lengths, methods)
        if (n_bits, seed) in missing[method]
    ]
    if not wanted:
        return
    for (method, n_bits, seed), row in in_processes(partial(fine_tune, folder, base=base), wanted, jobs=jobs):
        add_row(folder / FOLDER, row)
        say(f"{METHODS[method].title}, {n_bits} bits, seed {seed}: fine-tuned")


def fine_tune(folder: Path, method: str, n_bits: int, seed: int, *, base: Sequence[str] = ()) -> dict[str, Any]:
    """Fine-tune a method and score it on the query split; an interrupted run continues. See `run_finetuned`."""
    torch.set_num_threads(1)
    chosen = chosen_settings(folder, method, n_bits, seed)
    of_loss = [setting for setting in chosen if setting.startswith("loss.")]
    of_run = (f"model.n_bits={n_bits}", f"train.seed={seed}")
    config = load_config(BASE, (*settings_of(method, load_config(BASE, base)), *of_loss, *of_run, *base))
    splits = intact_splits(config)
    checkpoint, facts = trained(config, run_folder(folder / FOLDER, method, n_bits, seed), splits)
    encoder = SplitEncoder(checkpoint, device="auto", precision=config.train.precision)
    progress = Progress(quiet=True)
    query, database = (encoder.encode(split, progress, "images").outputs for split in (splits.query, splits.database))
    scores = split_scores(query, database, splits)
    return {"method": method, "n_bits": n_bits, "seed": seed, **scores, **facts}
