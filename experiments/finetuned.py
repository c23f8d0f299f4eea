"""Fine-tuning, in addition to the frozen comparison: HyP2 and the strongest other methods, training the whole network.

Every loss gets the same network, batches, optimizer and epochs, and the hyperparameters and start of the hash layer
that its search on the frozen backbone chose. The images are used in their own size of 128 px: enlarged to 224, as for
the frozen network, they take 2.4 times as long.
"""

import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean

from experiments.comparison import METHODS, TUNED, chosen_settings, rows_of, split_scores
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.training.config import load_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.evaluation.split_encoder import SplitEncoder
from hashseek.training.loop.fit import fit
from hashseek.training.progress import Progress
from hashseek.training.runs.run_folder import write_records

FOLDER = "finetuned"
BASE = Path("mirflickr25k_mobilenet_v2_tie_aware_48_finetuned")
SIZE = "model.size=128"


def strongest(folder: Path, methods: Sequence[str], n: int) -> list[str]:
    """HyP2, and the n other methods whose frozen runs of the longest code are best on the validation part."""
    scores: dict[str, float] = {}
    for method in methods:
        rows = rows_of(folder, method)
        if rows and METHODS[method].fitted is None:
            longest = max(row["n_bits"] for row in rows)
            scores[method] = mean(row["validation"] for row in rows if row["n_bits"] == longest)
    others = sorted((method for method in scores if method != "hyp2"), key=lambda method: -scores[method])
    return [*(["hyp2"] if "hyp2" in scores else []), *others[:n]]


def run_finetuned(
    folder: Path,
    methods: Sequence[str],
    *,
    lengths: Sequence[int] = TUNED[::-1],
    seeds: int = 3,
    base: Sequence[str] = (),
    progress: Progress | None = None,
) -> None:
    """Fine-tune every method and score it once on the query split; finished runs are kept, others continue.

    The rows are those of a comparison in `folder` / FOLDER, for `as_markdown`.

    Args:
        folder: of the comparison; the frozen runs in it have chosen the hyperparameters.
        methods: keys of `METHODS`.
        lengths: some of `TUNED`.
        seeds: runs of each method at each length.
        base: overrides of the base configuration, for all methods alike.

    Raises:
        HashseekError: what a training run refuses.
    """
    progress = progress or Progress(quiet=True)
    for n_bits, seed, method in product(lengths, range(seeds), methods):
        place = folder / FOLDER / method
        rows = rows_of(place.parent, method)
        if any((row["n_bits"], row["seed"]) == (n_bits, seed) for row in rows):
            continue
        chosen = chosen_settings(folder, method, n_bits, n_bits=n_bits)
        of_loss = [setting for setting in chosen if setting.startswith(("loss.", "model.head_init"))]
        of_run = (f"model.n_bits={n_bits}", f"train.seed={seed}")
        config = load_config(BASE, (SIZE, *METHODS[method].settings, *of_loss, *of_run, *base))
        out = place / f"{n_bits}-{seed}"
        result = fit(config, out=out, resume=out.is_dir(), progress=progress)
        splits = build_splits(config.data.name, **config.data.options())
        checkpoint = load_checkpoint(result.run.best)
        encoder = SplitEncoder(checkpoint, device="auto", precision=config.train.precision)
        query = encoder.encode(splits.query, progress, "queries")
        database = encoder.encode(splits.database, progress, "database")
        scores = split_scores(query.outputs, database.outputs, splits)
        row = {"method": method, "n_bits": n_bits, "seed": seed, **scores, "validation": result.best_score}
        write_records(place / "rows.jsonl", [*rows, row])
        shutil.rmtree(out)
