"""Fine-tuned rows beside the frozen ones: HyP2 and the strongest others, the whole network trained.

Every loss gets the same network, batches, optimiser and epochs, and the hyperparameters of its own that its sweep
on the frozen backbone chose.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.comparison import METHODS, N, figures_of, read_rows
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.files import write_atomically
from hashseek.training.config import load_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.evaluation.split_encoder import SplitEncoder
from hashseek.training.loop.fit import fit
from hashseek.training.runs.progress import Progress

BASE = Path("mirflickr25k_mobilenet_v2_tie_aware_48_finetuned")


def strongest(folder: Path, methods: Sequence[str], n: int) -> list[str]:
    """HyP2, and the n other methods whose frozen runs of the longest code are best on the validation part."""
    scores: dict[str, float] = {}
    for method in methods:
        rows = read_rows(folder, method)
        if rows:
            longest = max(row["n_bits"] for row in rows)
            scores[method] = mean(row["validation"] for row in rows if row["n_bits"] == longest)
    others = sorted((method for method in scores if method != "hyp2"), key=lambda method: -scores[method])
    return [*(["hyp2"] if "hyp2" in scores else []), *others[:n]]


def run_finetuned(
    folder: Path,
    methods: Sequence[str],
    *,
    base: Sequence[str] = (),
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Fine-tune every method that has no row yet and score it once on the query split; what was stopped goes on.

    Args:
        folder: of the comparison; the frozen runs in it have chosen the hyperparameters.
        methods: keys of `METHODS`.
        base: overrides of the base configuration, for all methods alike.

    Raises:
        HashseekError: what a training run refuses.
    """
    progress = progress or Progress(quiet=True)
    rows = finetuned_rows(folder)
    for method in methods:
        if method in {row["method"] for row in rows}:
            continue
        chosen = json.loads((folder / method / "chosen.json").read_text(encoding="utf-8"))
        of_loss = [setting for setting in chosen if setting.startswith("loss.")]
        config = load_config(BASE, (*METHODS[method].settings, *of_loss, *base))
        out = folder / "finetuned" / method
        result = fit(config, out=out, resume=out.is_dir(), progress=progress)
        splits = build_splits(config.data.name, **config.data.options())
        checkpoint = load_checkpoint(result.run.best)
        encoder = SplitEncoder(checkpoint, device="auto", precision=config.train.precision)
        head = [checkpoint.model.head]
        (query,) = encoder.encode(splits.query, head, progress, "queries")
        (database,) = encoder.encode(splits.database, head, progress, "database")
        figures = figures_of(query.codes, database.codes, splits, n_bits=config.model.n_bits)
        row = {"method": method, "n_bits": config.model.n_bits, **figures, "validation": result.best_score}
        rows.append(row)
        write_atomically(_file(folder), "".join(json.dumps(each) + "\n" for each in rows).encode())
        say(f"{METHODS[method].title}, fine-tuned: done")


def finetuned_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of finished fine-tuned runs."""
    file = _file(folder)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def finetuned_markdown(folder: Path) -> str:
    """The table of fine-tuned runs, best first; empty if there are none."""
    rows = sorted(finetuned_rows(folder), key=lambda row: -row["mAP"])
    if not rows:
        return ""
    lines = [
        "",
        f"Fine-tuned, one seed; mAP@{N} (expected over ties, in the worst and in the best order of ties).",
        "",
        "| method | bits | mAP | worst to best | d_intra / d_inter |",
        "|---|---:|---:|---|---|",
    ]
    for row in rows:
        distances = f"{row['d_intra']:.1f} / {row['d_inter']:.1f}"
        bounds = f"{row['worst']:.4f} to {row['best']:.4f}"
        lines.append(
            f"| {METHODS[row['method']].title} | {row['n_bits']} | {row['mAP']:.4f} | {bounds} | {distances} |"
        )
    return "\n".join(lines) + "\n"


def _file(folder: Path) -> Path:
    return folder / "finetuned" / "rows.jsonl"
