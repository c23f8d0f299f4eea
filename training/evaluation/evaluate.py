"""Evaluation: encode query and database splits, rank them with the searcher, and report figures that hold.

The only module of `training` that reaches into `indexing`: figures must come from the code that serves.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hashseek.indexing.calibration import check_same_codes, store_calibration
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.collection import CATALOG
from hashseek.indexing.index.hamming_index import Distances, Ids
from hashseek.indexing.searcher import InMemory, Searcher
from hashseek.retrieval.checkpoint import Checkpoint
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import (
    Histograms,
    Normalizer,
    average_precision_of_ranking,
    effective_n,
    histograms,
    precision_curve,
    relevance,
    remarks,
)
from hashseek.training.data.held_out_labels import LabelPart
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.code_lengths import Candidate, load_candidates, method_of, on_one_backbone
from hashseek.training.evaluation.evaluation import (
    N_NEAREST,
    Evaluation,
    describe_data,
    evaluated_part,
    per_query,
    title_of,
)
from hashseek.training.evaluation.report import Model, Part, Report, Scores, chance, score_all, values_of
from hashseek.training.evaluation.report.build import bits
from hashseek.training.evaluation.report.examples import confusions, drawn, examples, worst
from hashseek.training.evaluation.report.folder import Points
from hashseek.training.evaluation.report.projection import project
from hashseek.training.evaluation.split_encoder import (
    SplitEncoder,
    check_kind,
    random_head,
    titled,
    untrained,
    usable,
)
from hashseek.training.runs.progress import Progress

Baseline = Literal["none", "random-directions", "untrained"]
BASELINES: dict[Baseline, str] = {
    "none": "",
    "random-directions": "The same backbone with random hash directions",
    "untrained": "The same model before training",
}

# Rankings are as long as the largest N times the queries ranked at once: so many places are held at a time.
PLACES_AT_ONCE = 2**22


@dataclass(frozen=True)
class _Ranked:
    """The searcher's own order: AP@N (Q,) for each N, and the nearest of each query, ids and distances (Q, n)."""

    average_precision: list[NDArray[np.float64]]
    ids: NDArray[np.int64]
    distances: NDArray[np.int64]


def evaluate(
    checkpoint_path: Path,
    splits: Splits,
    *,
    data_name: str,
    others: Sequence[Path] = (),
    lengths: bool = False,
    labels: LabelPart | None = None,
    ns: Sequence[int | None] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    baseline: Baseline = "none",
    n_points: int = 1000,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    command: str = "",
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a checkpoint on the query and database splits.

    Args:
        checkpoint_path: a Hashseek checkpoint; the report is about it.
        splits: the whole data set. data_name: what to call it in the report.
        others: further checkpoints, of which the report has headline figures on the same splits.
        lengths: also those of the shorter codes of nested checkpoints.
        labels: which images and labels the figures are about where labels were held out of training, see `label_part`;
            None: "held-out" there, else "all".
        ns: the N of mAP@N and the other figures; None, or more than the database holds, means all of it.
        normalizer: see `hashseek.retrieval.metrics.average_precision`.
        baseline: also evaluate, in the same run, "random-directions": the same backbone with a random hash layer
            (drawn with `seed`), or "untrained": the model as it was before its first training step.
        n_points: database images in the t-SNE; 0 leaves it out.
        seed: of the random hash layer, the bootstrap, the t-SNE and the queries that are shown.
        device, precision: see `Encoder`.
        command: recorded in the report.
        progress: where to show the way.

    Raises:
        HashseekError: a bad checkpoint, checkpoints that cannot be evaluated together, broken images under on_error =
            "stop", images where the checkpoint encodes vectors (or the other way round), or N < 1.
    """
    for n in ns:
        effective_n(n, 1)
    if n_points < 0:
        raise BadConfig(f"the number of points in the t-SNE must be at least 0 (none), not {n_points}")
    progress = progress or Progress(quiet=True)
    candidates = load_candidates([checkpoint_path, *others], lengths=lengths)
    checkpoint, header = candidates[0].checkpoint, candidates[0].header
    for each in candidates:
        check_kind(each.header, splits, name="this checkpoint" if each is candidates[0] else each.name)
    splits, held_out, used = evaluated_part(candidates, splits, labels)
    query, database, notes = usable(splits, data_name, progress)
    notes += remarks(query.labels, database.labels, ns=ns, label_names=splits.label_names)
    notes += _trained_elsewhere(candidates, splits)

    heads: list[nn.Module] = []
    if baseline == "random-directions":
        heads = [random_head(header.head, checkpoint.model.n_features, header.n_bits, seed=seed)]
    elif baseline == "untrained":
        before = Checkpoint(untrained(checkpoint), header)
    encode = partial(_encode, query=query, database=database, device=device, precision=precision, progress=progress)
    model, *encoders = encode([each.checkpoint for each in candidates], on_one_backbone(candidates), heads)

    limits = list(dict.fromkeys(effective_n(n, len(database)) for n in ns))
    measure = partial(_measure, ns=limits, normalizer=normalizer, seed=seed, device=device)
    q, db = model.query, model.database
    found, ranked, scores = measure(model)
    values = values_of(found, q.labels, db.labels, splits.label_names, scores)
    if baseline != "none":
        of_baseline = encoders.pop() if heads else encode([before], [[0]], [])[0]
        counts, _, measured = measure(of_baseline)
        curve = precision_curve(counts, values["curves"].ns).expected.mean(axis=0)
        values |= {
            "baseline": measured.scores,
            "baseline_name": BASELINES[baseline],
            "baseline_precision": curve.tolist(),
        }
    if len(candidates) > 1:
        rows = [scores.scores, *(measure(other)[2].scores for other in encoders)]
        values["models"] = [_row(each, made) for each, made in zip(candidates, rows, strict=True)]

    ap = scores.per_query[f"AP@{values['main_n']}"].expected
    show = partial(
        examples,
        query=q,
        database=db,
        names=splits.label_names,
        ids=ranked.ids,
        distances=ranked.distances,
        average_precision=ap,
    )
    report = Report(
        title=title_of(header, data_name),
        normalizer=normalizer,
        n_bits=header.n_bits,
        fingerprint=header.fingerprint,
        data=describe_data(
            splits,
            query,
            database,
            data_name=data_name,
            same_splits=header.training.get("splits_sha256") == splits.fingerprint,
            without_relevant=found.without_relevant,
            chance_level=chance(found),
        ),
        model=model.encoder.describe(),
        labels_used=used,
        held_out=list(held_out),
        bits=bits(db, n_bits=header.n_bits),
        notes=notes,
        seed=seed,
        command=command,
        confusions=confusions(q.labels, db.labels, splits.label_names, ranked.ids),
        examples=show(drawn(len(query), seed=seed)),
        worst=show(worst(ap, found.n_relevant)),
        **values,
    )
    points: Points = {}
    if n_points:
        with progress.task("placing images by t-SNE", 1) as advance:
            points = project(db, splits.label_names, n_bits=header.n_bits, n_points=n_points, seed=seed)
            advance(1)
    images = query.vectors is None
    return Evaluation(
        report,
        per_query=per_query(
            query,
            splits.label_names,
            found.n_relevant,
            ranked.distances[:, 0],
            scores,
            limits,
            ranked.average_precision,
        ),
        points=points,
        query_paths=query.paths if images else (),
        database_paths=database.paths if images else (),
    )


def rankings(
    checkpoint: Checkpoint,
    query: Split,
    database: Split,
    *,
    k: int,
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(distances, rows) of the k nearest, (Q, k), in the order that search gives: equal distances by ascending row."""
    progress = progress or Progress(quiet=True)
    encoder = SplitEncoder(checkpoint, device=device, precision=precision)
    q, db = (
        encoder.encode(split, [checkpoint.model.head], progress, title)[0] for split, title in titled(query, database)
    )
    found = _ranker(encoder.encoder, db, n_bits=checkpoint.header.n_bits)(q.codes, k=k)
    return np.stack([row for row, _ in found]).astype(np.int64), np.stack([row for _, row in found]).astype(np.int64)


def check_calibrates(collection: Path, fingerprint: str) -> None:
    """Raise `HashseekError` unless there is a collection whose codes are of the checkpoint with this fingerprint."""
    with closing(Catalog(collection / CATALOG)) as catalog:
        check_same_codes(catalog, fingerprint)


def keep_calibration(collection: Path, report: Report) -> None:
    """Keep the calibration of a report with a collection of the same checkpoint.

    Raises:
        HashseekError: no such collection, codes of another checkpoint, or a report without a calibration.
    """
    if report.calibration is None:
        raise BadConfig("this report has no calibration to keep: it was made from rankings that a service cut off")
    data = report.data
    with closing(Catalog(collection / CATALOG)) as catalog:
        check_same_codes(catalog, report.fingerprint)
        store_calibration(
            catalog,
            report.calibration,
            source=f"hashseek evaluate on {data['data_set']}, queries {data['query_sha256'][:12]}",
            labels=[label.name for label in report.labels],
            n_images=data["database"],
        )


@dataclass(frozen=True)
class _Encoded:
    """Queries and database by one model."""

    encoder: SplitEncoder
    query: Part
    database: Part
    n_bits: int


def _encode(
    checkpoints: Sequence[Checkpoint],
    groups: Sequence[Sequence[int]],
    heads: Sequence[nn.Module],
    *,
    query: Split,
    database: Split,
    device: str,
    precision: str,
    progress: Progress,
) -> list[_Encoded]:
    """Both splits by each checkpoint, and last by further heads on the backbone of the first.

    Checkpoints of one group have the same backbone, which sees the images once.
    """
    made: dict[int, _Encoded] = {}
    for group in groups:
        first = checkpoints[group[0]]
        encoder = SplitEncoder(first, device=device, precision=precision)
        places, of_group = list(group), [checkpoints[place].model.head for place in group]
        if 0 in group:
            places += range(len(checkpoints), len(checkpoints) + len(heads))
            of_group += heads
        parts = [encoder.encode(split, of_group, progress, title) for split, title in titled(query, database)]
        for place, q, db in zip(places, *parts, strict=True):
            made[place] = _Encoded(encoder, q, db, q.outputs.shape[1])
    return [made[place] for place in sorted(made)]


def _trained_elsewhere(candidates: Sequence[Candidate], splits: Splits) -> list[str]:
    """A note for each checkpoint that says it was trained on other splits."""
    notes = []
    for each in candidates:
        trained_on = each.header.training.get("splits_sha256", splits.fingerprint)
        if each.cut_from is None and trained_on != splits.fingerprint:
            name = "the checkpoint" if each is candidates[0] else each.name
            notes.append(f"{name} was trained on other splits than these: query images may have been seen in training")
    return notes


def _row(candidate: Candidate, scores: list[Any]) -> Model:
    header = candidate.header
    return Model(
        method_of(candidate), header.n_bits, candidate.name, header.fingerprint, scores, cut_from=candidate.cut_from
    )


def _measure(
    model: _Encoded,
    *,
    ns: Sequence[int],
    normalizer: Normalizer,
    seed: int,
    device: str,
) -> tuple[Histograms, _Ranked, Scores]:
    """Counts, the searcher's own order, and the scores of one model."""
    query, database = model.query, model.database
    found = histograms(
        query.codes,
        database.codes,
        query.labels,
        database.labels,
        n_bits=model.n_bits,
        graded=True,
        device=device,
    )
    ranked = _rank(model, found.n_relevant, ns=ns, normalizer=normalizer)
    scores = score_all(found, query.labels, ns=ns, normalizer=normalizer, served=ranked.average_precision, seed=seed)
    return found, ranked, scores


def _ranker(encoder: Encoder | None, database: Part, *, n_bits: int) -> Callable[..., list[tuple[Distances, Ids]]]:
    """The searcher's ranking; a model of vectors has no encoder, and its codes are searched alone."""
    codes = InMemory(database.codes, n_bits=n_bits)
    return codes.search if encoder is None else Searcher(encoder, codes).rank


def _rank(model: _Encoded, n_relevant: NDArray[np.int64], *, ns: Sequence[int], normalizer: Normalizer) -> _Ranked:
    """Rank as the service does, by the searcher."""
    query, database = model.query, model.database
    rank = _ranker(model.encoder.encoder, database, n_bits=model.n_bits)
    average_precision: list[list[NDArray[np.float64]]] = [[] for _ in ns]
    nearest = []
    k = min(max(*ns, N_NEAREST), len(database))
    at_once = max(1, PLACES_AT_ONCE // k)
    for start in range(0, len(query), at_once):
        chosen = slice(start, start + at_once)
        found = rank(query.codes[chosen], k=k)
        ids = np.stack([row for _, row in found])
        distances = np.stack([row for row, _ in found])
        relevant = relevance(ids, query.labels[chosen], database.labels)
        for made, n in zip(average_precision, ns, strict=True):
            made.append(
                average_precision_of_ranking(relevant[:, :n], n_relevant=n_relevant[chosen], normalizer=normalizer)
            )
        nearest.append((ids[:, :N_NEAREST], distances[:, :N_NEAREST]))
    return _Ranked(
        [np.concatenate(made) for made in average_precision],
        np.concatenate([ids for ids, _ in nearest]),
        np.concatenate([distances for _, distances in nearest]).astype(np.int64),
    )
