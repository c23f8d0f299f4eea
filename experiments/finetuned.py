"""Fine-tuning beside the frozen comparison: HyP2 and the strongest other methods, with the whole network trained.

Every loss gets the same network, batches, optimizer and epochs, and the hyperparameters and start of the hash layer
that its search on the frozen backbone chose.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from experiments.comparison import METHODS, TUNED, N, chosen_settings, rows_of, split_scores
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.training.config import load_config
from hashseek.training.data.datasets import build_splits
from hashseek.training.evaluation.split_encoder import SplitEncoder
from hashseek.training.loop.fit import fit
from hashseek.training.runs.progress import Progress
from hashseek.training.runs.run_folder import read_records, write_records

ROWS = Path("finetuned/rows.jsonl")
BASE = Path("mirflickr25k_mobilenet_v2_tie_aware_48_finetuned")


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
    base: Sequence[str] = (),
    progress: Progress | None = None,
) -> None:
    """Fine-tune every method that has no row yet and score it once on the query split; an interrupted run resumes.

    Args:
        folder: of the comparison; the frozen runs in it have chosen the hyperparameters.
        methods: keys of `METHODS`.
        base: overrides of the base configuration, for all methods alike.

    Raises:
        HashseekError: what a training run refuses.
    """
    progress = progress or Progress(quiet=True)
    rows = read_records(folder / ROWS)
    for method in methods:
        if method in {row["method"] for row in rows}:
            continue
        chosen = chosen_settings(folder, method, TUNED[-1], n_bits=TUNED[-1])
        of_loss = [setting for setting in chosen if setting.startswith(("loss.", "model.head_init"))]
        config = load_config(BASE, (*METHODS[method].settings, *of_loss, *base))
        out = folder / "finetuned" / method
        result = fit(config, out=out, resume=out.is_dir(), progress=progress)
        splits = build_splits(config.data.name, **config.data.options())
        checkpoint = load_checkpoint(result.run.best)
        encoder = SplitEncoder(checkpoint, device="auto", precision=config.train.precision)
        head = [checkpoint.model.head]
        (query,) = encoder.encode(splits.query, head, progress, "queries")
        (database,) = encoder.encode(splits.database, head, progress, "database")
        scores = split_scores(query.outputs, database.outputs, splits)
        row = {"method": method, "n_bits": config.model.n_bits, **scores, "validation": result.best_score}
        rows.append(row)
        write_records(folder / ROWS, rows)


def finetuned_markdown(folder: Path) -> str:
    """The table of fine-tuned runs, best first; empty if there are none."""
    rows = sorted(read_records(folder / ROWS), key=lambda row: -row["mAP"])
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
