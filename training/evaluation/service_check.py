"""Evaluate a running service: send it every query, and compare its rankings with those of the library."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hashseek.api.client import Client, ServiceError
from hashseek.retrieval.errors import BadConfig, BadDataset, ForeignCodes
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.metrics import count_gains, gains_of, histograms_of_ranking
from hashseek.training.data.splits import Splits
from hashseek.training.evaluation.assembly import (
    EvaluationOptions,
    EvaluationTask,
    Ranking,
    assemble,
    prepare,
)
from hashseek.training.evaluation.candidates import load_candidates
from hashseek.training.evaluation.report.folder import Evaluation
from hashseek.training.evaluation.report.measurements import Measurements, measure_histograms, measure_rankings
from hashseek.training.evaluation.report.schema import ServiceAgreement

_SHOWN = 3  # examples in a message
_SECONDS = 120  # to wait for a response


def evaluate_service(
    url: str, checkpoint_path: Path, splits: Splits, options: EvaluationOptions, *, whole: bool = False
) -> Evaluation:
    """Search a service with every query, rank the same images with the library, and report on the service's rankings.

    The service must store exactly the database split; it stores identical files once, so they count once. `served` of
    the report says how the two agree. Ties are in the order of the service's ids.

    Args:
        url: of the service.
        checkpoint_path: the checkpoint that it serves.
        splits: the data set.
        options: see `EvaluationOptions`; codes are equal only if the service computes with the same `precision`.
        whole: ask for the ranking of the whole database, if the service returns so many results. Then the report is
            as complete as that of the library, except for the codes; otherwise it is about the first N alone.

    Raises:
        HashseekError: no service of this version answers, it has codes of another checkpoint or other images, it
            returns fewer results than N, or images are broken and on_error = "stop".
    """
    from hashseek.training.evaluation.evaluate import rank_with_library  # loads FAISS

    candidates = load_candidates([checkpoint_path])
    header = candidates[0].header
    if header.preprocessing is None:
        raise BadConfig("a service searches with images, but this checkpoint encodes vectors: leave out --url")
    with Client(url, timeout=_SECONDS) as service:
        stats = service.stats()
        _check_fingerprint(service.url, stats.fingerprint, header.fingerprint)
        task, ids, rows = _match_stored_images(service, prepare(candidates, splits, options))
        k = max(task.ns)
        if whole and _returns(service, task.query.paths[0], len(task.database)):
            k = len(task.database)
        distances, found = _search_all(service, task, ids, k=k)
    of_library = rank_with_library(task, candidates[0].checkpoint, task.database.take(rows), k=k)
    as_served = _measure(task, distances, rows[found])
    library = _measure(task, of_library[0], rows[of_library[1]])
    differences = _differences(task, (distances, rows[found]), (of_library[0], rows[of_library[1]]))
    served = ServiceAgreement(
        service.url,
        stats.version,
        stats.engine,
        ranks=k,
        equal=len(task.query) - len(differences),
        library={score.n: score.as_served or 0.0 for score in library[0].scores},
        differences=differences,
    )
    notes = [*task.notes, "A service returns no codes, so how bits are used and t-SNE are missing."]
    if as_served[0].distances is None:
        notes.append(
            f"The service returned the {k} nearest of {len(task.database)} images (HASHSEEK_MAX_K), so everything that "
            "needs all of them is missing: bounds over ties, hash lookup, calibration, longer curves."
        )
    task = replace(task, notes=notes)
    return assemble(task, *as_served, computed_in=stats.engine or "the service", bits=None, served=served)


def _match_stored_images(service: Client, task: EvaluationTask) -> tuple[EvaluationTask, list[int], NDArray[np.int64]]:
    """The task without identical database images, the ids of the stored images, and the database row of each id."""
    row_of: dict[str, int] = {}
    for row, path in enumerate(task.database.paths):
        row_of.setdefault(hashlib.sha256(read_bytes(path)).hexdigest(), row)
    stored = list(service.images())
    held = {image.sha256 for image in stored}
    missing = [task.database.paths[row].name for sha256, row in row_of.items() if sha256 not in held]
    foreign = [image.path for image in stored if image.sha256 not in row_of]
    if missing or foreign:
        raise BadDataset(
            f"the collection of {service.url} is not the database split ({len(missing)} images missing"
            f"{_first(missing)}, {len(foreign)} not in the split{_first(foreign)}): index that split alone"
        )
    kept = sorted(row_of.values())
    notes = list(task.notes)
    if len(kept) < len(task.database):
        n = len(task.database) - len(kept)
        notes.append(
            f"{n} database images are copies of others: a service stores identical files once, so they count once"
        )
    position = {row: place for place, row in enumerate(kept)}
    rows = np.array([position[row_of[image.sha256]] for image in stored])
    return replace(task, database=task.database.take(kept), notes=notes), [image.id for image in stored], rows


def _returns(service: Client, path: Path, k: int) -> bool:
    """Whether the service returns k results."""
    try:
        service.search(path, k=k, rank="hamming")
    except ServiceError as error:
        if error.status is None:
            raise
        return False
    return True


def _search_all(
    service: Client, task: EvaluationTask, ids: Sequence[int], *, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(distances, places) of the k nearest images of each query, (Q, k); places are positions in `ids`."""
    place_of = {image_id: place for place, image_id in enumerate(ids)}
    distances, places = (np.empty((len(task.query), k), np.int64) for _ in range(2))
    with task.options.progress.task("asking the service", len(task.query)) as advance:
        for row, path in enumerate(task.query.paths):
            answer = service.search(path, k=k, rank="hamming")
            _check_fingerprint(service.url, answer.fingerprint, task.header.fingerprint)
            if len(answer.hits) != k or any(hit.id not in place_of for hit in answer.hits):
                raise BadDataset(
                    f"the collection of {service.url} changed during the evaluation: {path.name} got "
                    f"{len(answer.hits)} of {k} results, or one that was not stored before"
                )
            distances[row] = [hit.distance for hit in answer.hits]
            places[row] = [place_of[hit.id] for hit in answer.hits]
            advance(1)
    return distances, places


def _measure(
    task: EvaluationTask, distances: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[Measurements, Ranking]:
    """Measure rankings: with bounds over ties if they are of the whole database, otherwise in their order."""
    query, database, options = task.query.labels, task.database.labels, task.options
    gains = gains_of(rows, query, database)
    n_of_gain = count_gains(query, database)
    ap = task.average_precision(gains > 0, n_of_gain[:, 1:].sum(axis=1))
    if rows.shape[1] == len(task.database):
        found = histograms_of_ranking(distances, rows, query, database, n_bits=task.header.n_bits)
        measured = measure_histograms(
            found, query, ns=task.ns, normalizer=options.normalizer, as_served=ap, seed=options.seed
        )
    else:
        measured = measure_rankings(
            gains, query, n_of_gain=n_of_gain, ns=task.ns, normalizer=options.normalizer, seed=options.seed
        )
    return measured, Ranking(distances, rows, ap)


def _differences(
    task: EvaluationTask,
    served: tuple[NDArray[np.int64], NDArray[np.int64]],
    library: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> list[str]:
    """A sentence for each query with different (distances, rows)."""
    differs = (served[0] != library[0]) | (served[1] != library[1])
    sentences = []
    for query in np.flatnonzero(differs.any(axis=1)).tolist():
        rank = int(differs[query].argmax())
        one, other = (
            f"{task.database.paths[int(rows[query, rank])].name} at {int(distances[query, rank])} bits"
            for distances, rows in (served, library)
        )
        sentences.append(
            f"{task.query.paths[query].name}: {int(differs[query].sum())} of {differs.shape[1]} ranks differ, first at "
            f"rank {rank + 1}: the service returns {one}, the library {other}"
        )
    return sentences


def _check_fingerprint(url: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise ForeignCodes(
            f"the service {url} has codes of checkpoint {theirs[:12]}, not of {ours[:12]}: evaluate the checkpoint "
            "that it serves"
        )


def _first(names: Sequence[str]) -> str:
    return f": {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}" if names else ""
