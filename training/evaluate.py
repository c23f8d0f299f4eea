"""Evaluation: encode query and database splits, rank them with the searcher, and report figures that hold.

The only module of `training` that reaches into `indexing`: figures must come from the code that serves.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from indexing.searcher import InMemory, Searcher
from retrieval.checkpoint import Checkpoint, load_checkpoint
from retrieval.codes import Codes, pack
from retrieval.encoder import Encoder
from retrieval.errors import BadConfig
from retrieval.images import Pixels, decode_for, read_bytes
from retrieval.metrics import Histograms, Normalizer, average_precision_of_ranking, histograms, relevance
from retrieval.model import HashModel
from retrieval.report import Report, Score, chance, score
from training.config import parse_config
from training.datasets.splits import Split, Splits
from training.fit import initial_model
from training.images import without_broken
from training.progress import Progress

Baseline = Literal["none", "random-directions", "untrained"]
BASELINES: dict[Baseline, str] = {
    "none": "",
    "random-directions": "The same backbone with random hash directions",
    "untrained": "The same model before training",
}

# Rankings are as long as the largest N times Q; so many queries at once keep them small.
QUERIES_AT_ONCE = 512


def evaluate(
    checkpoint_path: Path,
    splits: Splits,
    *,
    data_name: str,
    ns: Sequence[int] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    baseline: Baseline = "none",
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    command: str = "",
    progress: Progress | None = None,
) -> Report:
    """Evaluate a checkpoint on the query and database splits.

    Args:
        checkpoint_path: a Hashseek checkpoint.
        splits: the data set. data_name: what to call it in the report.
        ns: the N of mAP@N and precision@N; more than the database holds means all of it.
        normalizer: see `retrieval.metrics.average_precision`.
        baseline: also evaluate, in the same run, "random-directions": the same backbone with a random hash layer
            (drawn with `seed`), or "untrained": the model as it was before its first training step.
        seed: of the random hash layer.
        device, precision: see `Encoder`.
        command: recorded in the report.
        progress: where to show the way.

    Raises:
        HashseekError: a bad checkpoint, broken images under on_error = "stop", or N < 1.
    """
    for n in ns:
        if n < 1:
            raise BadConfig(f"figures at N need N >= 1, not {n}")
    progress = progress or Progress(quiet=True)
    checkpoint = load_checkpoint(checkpoint_path)
    header = checkpoint.header
    query, query_problems = without_broken(splits.query, on_error=splits.on_error, source=f"{data_name} (query)")
    database, problems = without_broken(splits.database, on_error=splits.on_error, source=f"{data_name} (database)")
    progress.problems([*splits.problems, *query_problems, *problems], [])
    notes = [str(problem) for problem in (*splits.problems, *query_problems, *problems)]
    for n in ns:
        if n > len(database):
            notes.append(f"N = {n} exceeds the database of {len(database)} images; figures are over all of it")
    trained_on = header.training.get("splits_sha256")
    if trained_on is not None and trained_on != splits.fingerprint:
        notes.append(
            "the checkpoint was trained on other splits than these: query images may have been seen in training"
        )

    encoder = Encoder(checkpoint, device=device, precision=precision)
    heads = [encoder.head]
    if baseline == "random-directions":
        heads.append(random_head(encoder.head, seed=seed))
    measure = partial(_measure, query=query, database=database, ns=ns, normalizer=normalizer, progress=progress)
    found, scores = measure(encoder, heads)
    if baseline == "untrained":
        before = Checkpoint(_untrained(checkpoint), header)
        other = Encoder(before, device=device, precision=precision)
        scores += measure(other, [other.head])[1]
    return Report(
        title=f"{header.backbone}, {header.n_bits} bits, on {data_name}",
        scores=scores[0],
        normalizer=normalizer,
        n_bits=header.n_bits,
        fingerprint=header.fingerprint,
        data={
            "data_set": data_name,
            "queries": len(query),
            "database": len(database),
            "labels": len(splits.label_names),
            "splits_sha256": splits.fingerprint,
            "same_splits_as_in_training": trained_on == splits.fingerprint,
            "queries_without_a_relevant_item": found.without_relevant,
            "chance_(share_of_relevant_pairs)": chance(found),
        },
        model=_describe(encoder),
        notes=tuple(notes),
        baseline=scores[1] if baseline != "none" else (),
        baseline_name=BASELINES[baseline],
        seed=seed,
        command=command,
    )


def random_head(head: nn.Linear, *, seed: int) -> nn.Linear:
    """A freshly drawn hash layer of the same shape: what training has to beat."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(head.in_features, head.out_features)


def encode_split(
    encoder: Encoder, split: Split, heads: Sequence[nn.Linear], progress: Progress, title: str
) -> list[Codes]:
    """Packed codes (n, code_size) of a split, in its order, for each of several hash layers on one backbone."""
    preprocessing = encoder.header.preprocessing

    def encode(pixels: Pixels) -> Codes:
        features = encoder.features(pixels)
        return np.concatenate([pack(encoder.apply_head(features, head)) for head in heads], axis=1)

    rows = []
    with progress.task(title, len(split)) as advance:
        for _, row in encoder.stream(
            split.paths, lambda path: (path, decode_for(read_bytes(path), preprocessing, name=str(path))[1]), encode
        ):
            if row is not None:
                rows.append(row)
                advance(1)
    return np.split(np.stack(rows), len(heads), axis=1)


def _untrained(checkpoint: Checkpoint) -> HashModel:
    training = {key: value for key, value in checkpoint.header.training.items() if key != "splits_sha256"}
    if not training:
        raise BadConfig("the checkpoint does not say how it was trained, so its untrained model cannot be rebuilt")
    with torch.random.fork_rng():
        return initial_model(parse_config(training, source="the checkpoint's configuration")).eval()


def _measure(
    encoder: Encoder,
    heads: Sequence[nn.Linear],
    *,
    query: Split,
    database: Split,
    ns: Sequence[int],
    normalizer: Normalizer,
    progress: Progress,
) -> tuple[Histograms, list[tuple[Score, ...]]]:
    """The histograms of the first hash layer, and the scores of each."""
    database_codes = encode_split(encoder, database, heads, progress, "encoding the database")
    query_codes = encode_split(encoder, query, heads, progress, "encoding the queries")
    n_bits = encoder.n_bits
    every, scores = [], []
    for xq, xb in zip(query_codes, database_codes, strict=True):
        found = histograms(xq, xb, query.labels, database.labels, n_bits=n_bits)
        searcher = Searcher(encoder, InMemory(xb, n_bits=n_bits))
        served = _as_served(searcher, xq, query.labels, database.labels, found, ns, normalizer)
        every.append(found)
        scores.append(
            tuple(
                score(found, n=n, normalizer=normalizer, as_served=value) for n, value in zip(ns, served, strict=True)
            )
        )
    return every[0], scores


def _as_served(
    searcher: Searcher,
    query_codes: Codes,
    query_labels: NDArray[np.uint8],
    database_labels: NDArray[np.uint8],
    found: Histograms,
    ns: Sequence[int],
    normalizer: Normalizer,
) -> list[float]:
    """mAP@N of the order in which the searcher returns images, for each N."""
    sums = np.zeros(len(ns))
    n_relevant = found.relevant.sum(axis=1)
    for start in range(0, len(query_codes), QUERIES_AT_ONCE):
        chunk = slice(start, start + QUERIES_AT_ONCE)
        ranking = np.stack([ids for _, ids in searcher.rank(query_codes[chunk], k=max(ns))])
        relevant = relevance(ranking, query_labels[chunk], database_labels)
        for i, n in enumerate(ns):
            sums[i] += average_precision_of_ranking(
                relevant[:, :n], n_relevant=n_relevant[chunk], normalizer=normalizer
            ).sum()
    return [float(value) for value in sums / len(query_codes)]


def _describe(encoder: Encoder) -> dict[str, Any]:
    return {
        "backbone": encoder.header.backbone,
        "preprocessing": encoder.header.preprocessing.as_dict(),
        "computed_in": f"{encoder.dtype} on {encoder.device}".removeprefix("torch."),
        "validation": encoder.header.scores,
    }
