"""Evaluate checkpoints: encode the query and database splits, rank them with the index, and report the metrics.

This is the only module of `training` that imports `indexing`: a report has to measure the code that serves.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.calibration import store_calibration
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.collection import CATALOG, check_checkpoint
from hashseek.indexing.index.hamming_index import HammingIndex, Ids, build_index
from hashseek.retrieval.checkpoint import Checkpoint
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import HashseekError
from hashseek.retrieval.hash_layers import fit_hash_layer
from hashseek.retrieval.metrics import Normalizer, bit_statistics, gains_of, histograms
from hashseek.retrieval.models.fully_connected import FullyConnected, head_of
from hashseek.retrieval.scores import asymmetric_scores, best, cosines
from hashseek.training.data.broken_images import without_broken
from hashseek.training.data.splits import Rows, Splits
from hashseek.training.evaluation.assembly import N_NEAREST, EvaluationOptions, EvaluationTask, assemble, prepare
from hashseek.training.evaluation.candidates import Candidate, load_candidates, method_names
from hashseek.training.evaluation.report.folder import Evaluation
from hashseek.training.evaluation.report.measurements import Measurements, Ranking, measure_histograms
from hashseek.training.evaluation.report.projection import Points, project
from hashseek.training.evaluation.report.schema import ComparedModel, EvaluationReport, RankingScore
from hashseek.training.evaluation.split_encoder import EncodedSplit, SplitEncoder

# ITQ is fitted to at most this many training images: more make little difference (docs/explanation/unsupervised.md).
N_FITTED = 4000

# Rankings are as long as the largest N. This many of their ranks are found at the same time.
RANKS_PER_BLOCK = 2**22
# Number of cosines of query and database images in memory at the same time.
SCORES_PER_BLOCK = 2**25


@dataclass(frozen=True)
class _EncodedData:
    """Both splits by one model."""

    encoder: SplitEncoder
    query: EncodedSplit
    database: EncodedSplit

    @property
    def n_bits(self) -> int:
        return int(self.query.outputs.shape[1])


def evaluate(
    checkpoint_path: Path,
    splits: Splits,
    options: EvaluationOptions,
    *,
    others: Sequence[Path] = (),
    lengths: bool = False,
    baseline: bool = False,
    n_points: int = 1000,
) -> Evaluation:
    """Evaluate a checkpoint on the query and database splits.

    Args:
        checkpoint_path: the checkpoint that the report is about.
        splits: the data set.
        options: see `EvaluationOptions`.
        others: further checkpoints; the report compares their scores on the same splits.
        lengths: also compare the shorter codes of nested checkpoints.
        baseline: also evaluate the same backbone with a hash layer that ITQ fits to its features of training images
            without labels; a note if that is not possible.
        n_points: number of database images in the t-SNE; 0 leaves it out.

    Raises:
        HashseekError: a checkpoint cannot be read, the checkpoints cannot be evaluated together, images are broken and
            on_error = "stop", or the data set does not fit the checkpoint.
    """
    candidates = load_candidates([checkpoint_path, *others], lengths=lengths)
    task = prepare(candidates, splits, options)
    checkpoint, *compared = [each.checkpoint for each in candidates]
    encoder = _encoder(task, checkpoint)
    itq = _itq_head(task, encoder) if baseline else None
    model = _encode(task, encoder)
    found = _measure(task, model)
    fields: dict[str, Any] = {}
    if itq is not None:
        measured = _measure(task, _encode(task, encoder, head=itq))
        fields = {
            "baseline": measured.scores,
            "baseline_name": "ITQ on the same features",
            "baseline_precision": measured.curves.precision,
            "baseline_recall": measured.curves.recall,
        }
    authors = [_authors_scores(task, model, found)] if options.protocol else []
    if len(candidates) > 1:
        scores = [found.scores]
        for other in compared:
            encoded = _encode(task, _encoder(task, other))
            measured = _measure(task, encoded)
            scores.append(measured.scores)
            authors += [_authors_scores(task, encoded, measured)] if options.protocol else []
        methods = method_names([each.header for each in candidates])
        fields["models"] = [
            ComparedModel(method, each.header.n_bits, each.name, each.header.fingerprint, rows, each.cut_from)
            for method, each, rows in zip(methods, candidates, scores, strict=True)
        ]
    database = model.database
    return assemble(
        task,
        found,
        computed_in=model.encoder.computed_in,
        points=_project(task, database, n_points),
        bits=bit_statistics(database.codes, n_bits=model.n_bits, outputs=database.outputs),
        rankings=sorted([*_rankings(task, model, found), *_with_best(candidates, authors)], key=lambda score: score.n),
        **fields,
    )


def rank_with_library(task: EvaluationTask, checkpoint: Checkpoint, *, k: int) -> tuple[Rows, Rows]:
    """(distances, rows) of the k nearest images of each query, (Q, k), in the order of search (ties by row)."""
    data = _encode(task, _encoder(task, checkpoint))
    distances, rows = _index(data).search(data.query.codes, k=k)
    return distances.astype(np.int64), rows


def check_calibrates(collection: Path, checkpoint: Path) -> None:
    """Raise `HashseekError` unless the collection exists and has codes of this checkpoint."""
    with closing(Catalog(collection / CATALOG)) as catalog:
        check_checkpoint(catalog, checkpoint)


def keep_calibration(collection: Path, checkpoint: Path, report: EvaluationReport) -> None:
    """Store the calibration in a report about a checkpoint in a collection of that checkpoint.

    Raises:
        HashseekError: there is no such collection, or it has codes of another checkpoint.
    """
    data = report.data
    with closing(Catalog(collection / CATALOG)) as catalog:
        check_checkpoint(catalog, checkpoint)
        store_calibration(
            catalog,
            report.calibration,
            source=f"hashseek evaluate on {data['data_set']}, queries {data['query_sha256'][:12]}",
            labels=[label.name for label in report.labels],
            n_images=data["database"],
        )


def _encoder(task: EvaluationTask, checkpoint: Checkpoint) -> SplitEncoder:
    return SplitEncoder(checkpoint, device=task.options.device, precision=task.options.precision)


def _encode(task: EvaluationTask, encoder: SplitEncoder, *, head: FullyConnected | None = None) -> _EncodedData:
    """Both splits, by the checkpoint's head or another one."""
    progress = task.options.progress
    query = encoder.encode(task.splits.query, progress, "encoding the queries", head=head)
    database = encoder.encode(task.splits.database, progress, "encoding the database", head=head)
    return _EncodedData(encoder, query, database)


def _itq_head(task: EvaluationTask, encoder: SplitEncoder) -> FullyConnected | None:
    """A hash layer that ITQ fits to training images without their labels; None, and a note, if that is impossible."""
    options, train = task.options, task.splits.train
    try:
        rows = np.random.default_rng(options.seed).permutation(len(train))[:N_FITTED]
        chosen = replace(task.splits, train=train.take(np.sort(rows)))
        train = without_broken(chosen, ("train",), source=options.data_name).train
        features = encoder.encode(train, options.progress, "encoding training images for ITQ").features
        n_bits = task.header.n_bits
        layer = fit_hash_layer(features.astype(np.float32), n_bits=n_bits, method="itq", seed=options.seed)
        return head_of("normalized", {"weight": layer.weight, "bias": layer.bias})
    except HashseekError as error:
        task.notes.append(f"there is no baseline because ITQ could not be fitted: {error}")
        return None


def _measure(task: EvaluationTask, model: _EncodedData) -> Measurements:
    query, database = model.query, model.database
    found = histograms(
        query.codes,
        database.codes,
        query.labels,
        database.labels,
        n_bits=model.n_bits,
        graded=True,
        device=task.options.device,
    )
    ranking = _rank(task, model, found.n_relevant)
    options = task.options
    return measure_histograms(
        found, ranking, query.labels, ns=task.ns, normalizer=options.normalizer, seed=options.seed
    )


def _index(model: _EncodedData) -> HammingIndex:
    """An index of the database as a collection has it; an id is a row."""
    return build_index(model.database.codes, np.arange(len(model.database)), n_bits=model.n_bits)


def _rank(task: EvaluationTask, model: _EncodedData, n_relevant: Rows) -> Ranking:
    """Rank as the service does, with the index."""
    query, database, index = model.query, model.database, _index(model)
    k = min(max(*task.ns, N_NEAREST), len(database))
    block, parts = max(1, RANKS_PER_BLOCK // k), []
    for start in range(0, len(query), block):
        chosen = slice(start, start + block)
        distances, rows = index.search(query.codes[chosen], k=k)
        hits = gains_of(rows, query.labels[chosen], database.labels) > 0
        parts.append((distances[:, :N_NEAREST].astype(np.int64), rows[:, :N_NEAREST].copy(), hits))
    nearest, rows, hits = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Ranking(nearest, rows, task.average_precision(hits, n_relevant))


def _rankings(task: EvaluationTask, model: _EncodedData, found: Measurements) -> list[RankingScore]:
    """All rankings of the whole database, at each N."""
    query, database = model.query, model.database
    rows, block = np.arange(len(database)), max(1, SCORES_PER_BLOCK // len(database))
    blocks = (query.features[start : start + block] for start in range(0, len(query), block))
    scores = {
        "asymmetric": (asymmetric_scores(database.codes, outputs) for outputs in query.outputs),
        "float": (of_query for features in blocks for of_query in cosines(database.features, features)),
    }
    rankings = [
        RankingScore("hamming", score.n, score.mean_average_precision.expected, score.precision.expected)
        for score in found.scores
    ]
    for rank, of_queries in scores.items():
        order = (best(of_query, rows, max(task.ns)) for of_query in of_queries)
        rankings += _scores(task, model, found, rank, order)
    return rankings


def _authors_scores(task: EvaluationTask, model: _EncodedData, found: Measurements) -> list[RankingScore]:
    """What the evaluation code of HyP2 prints for these codes, at each N."""
    order = (hyp2_order(code, model.database.codes)[: max(task.ns)] for code in model.query.codes)
    return _scores(task, model, found, "hyp2", order, normalizer="retrieved")


def hyp2_order(query: Codes, database: Codes) -> Ids:
    """Rows of the database (N,) by Hamming distance to one code, ties as in HyP2's code: `np.argsort(distances)`.

    NumPy's default is a quicksort, whose order of ties follows from the order of the database but is meaningless. The
    authors sort 32-bit floats, for which newer versions of NumPy use other algorithms on some processors. 16-bit
    integers are still sorted by the algorithm of the paper's time, so the order is the same everywhere.

    Args:
        query: one packed code, (code_size,).
        database: packed codes (N, code_size).

    Source: JerryXu0129/HyP2-Loss; the same lines are in HashNet and DeepHash-pytorch.
    """
    distances = np.bitwise_count(database ^ query).sum(axis=1, dtype=np.int16)
    return np.argsort(distances, kind="quicksort")


def _with_best(candidates: Sequence[Candidate], authors: list[list[RankingScore]]) -> list[RankingScore]:
    """The authors' figures for the first checkpoint, and if there are several of its run, the best of these."""
    if not authors:
        return []
    runs = [(each.header.training, each.header.n_bits) for each in candidates]
    of_run = [scores for run, scores in zip(runs, authors, strict=True) if run == runs[0]]
    best_ones = [max(of_n, key=lambda one: one.mean_average_precision) for of_n in zip(*of_run, strict=True)]
    return [*authors[0], *(replace(one, rank="hyp2-best") for one in best_ones if len(of_run) > 1)]


def _scores(
    task: EvaluationTask,
    model: _EncodedData,
    found: Measurements,
    rank: str,
    order: Iterable[Ids],
    normalizer: Normalizer | None = None,
) -> list[RankingScore]:
    """Scores of a ranking at each N; `order` has the first rows for each query."""
    ranked = zip(order, model.query.labels, strict=True)
    hits = np.stack([gains_of(rows[None], labels[None], model.database.labels)[0] > 0 for rows, labels in ranked])
    values = task.average_precision(hits, found.n_relevant, normalizer)
    return [
        RankingScore(rank, n, float(ap.mean()), float(hits[:, :n].mean()))
        for n, ap in zip(task.ns, values, strict=True)
    ]


def _project(task: EvaluationTask, database: EncodedSplit, n_points: int) -> Points:
    names, seed = task.splits.label_names, task.options.seed
    with task.options.progress.task("computing t-SNE", 1) as advance:
        points = project(database.outputs, database.labels, names, n_points=n_points, seed=seed)
        advance(1)
    return points
