"""Check a running service: send it every query, and compare its rankings with those of the library."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hashseek.api.client import Client
from hashseek.retrieval.errors import BadConfig, BadDataset, ForeignCodes
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.metrics import gains_of
from hashseek.training.data.splits import Rows, Splits
from hashseek.training.evaluation.assembly import EvaluationOptions, EvaluationTask, prepare
from hashseek.training.evaluation.candidates import load_candidates
from hashseek.training.evaluation.report.markdown import section_as_markdown
from hashseek.training.evaluation.report.sections import Section
from hashseek.training.report_format import Table

_SHOWN = 3  # examples in a message
_SECONDS = 120  # to wait for a response


@dataclass(frozen=True)
class ServiceAgreement:
    """How well the rankings of a service agree with those of the library.

    `ranks`: how many results each query asked for. `equal`: how many queries have the same ids and distances in both;
    `differences` describes each of the others in a line. `mean_ap`: mAP of the service and of the library at N.
    """

    url: str
    version: str
    ranks: int
    equal: int
    mean_ap: dict[int, tuple[float, float]]
    differences: list[str]
    notes: list[str]

    def as_markdown(self) -> str:
        """mAP@N of both, and every difference."""
        rows = [[str(n), f"{a:.6f}", f"{b:.6f}", f"{a - b:+.6f}"] for n, (a, b) in self.mean_ap.items()]
        text = (
            f"{self.url}, hashseek {self.version}: {self.equal} of "
            f"{self.equal + len(self.differences)} queries have the same ranking (ids and distances of the first "
            f"{self.ranks})."
        )
        table = Table(["N", "mAP@N, service", "mAP@N, library", "difference"], rows)
        return section_as_markdown(Section("served", "Service and library", text, [table], self.differences)).strip()


def check_service(url: str, checkpoint_path: Path, splits: Splits, options: EvaluationOptions) -> ServiceAgreement:
    """Search a service with every query, and rank the same images with the library.

    The service must store exactly the database split; it stores identical files once, so they count once. Ties are in
    the order of the service's ids.

    Args:
        url: the URL of the service.
        checkpoint_path: the checkpoint that it serves.
        splits: the data set.
        options: see `EvaluationOptions`; codes are equal only if the service computes with the same `precision`.

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
        distances, places = _search_all(service, task, ids, k=k)
    served = distances, rows[places]
    in_their_order = _with_database(task, rows)
    distances, places = rank_with_library(in_their_order, candidates[0].checkpoint, k=k)
    library = distances, rows[places]
    differences = _differences(task, served, library)
    mean_ap = zip(_mean_ap(task, served[1]), _mean_ap(task, library[1]), strict=True)
    return ServiceAgreement(
        service.url,
        stats.version,
        ranks=k,
        equal=len(task.splits.query) - len(differences),
        mean_ap=dict(zip(task.ns, mean_ap, strict=True)),
        differences=differences,
        notes=task.notes,
    )


def _match_stored_images(service: Client, task: EvaluationTask) -> tuple[EvaluationTask, list[int], Rows]:
    """The task without identical database images, the ids of the stored images, and the database row of each id."""
    row_of: dict[str, int] = {}
    for row, path in enumerate(task.splits.database.paths):
        row_of.setdefault(hashlib.sha256(read_bytes(path)).hexdigest(), row)
    stored = list(service.images())
    held = {image.sha256 for image in stored}
    missing = [task.splits.database.paths[row].name for sha256, row in row_of.items() if sha256 not in held]
    foreign = [image.path for image in stored if image.sha256 not in row_of]
    if missing or foreign:
        raise BadDataset(
            f"the collection of {service.url} is not the database split ({len(missing)} images missing"
            f"{_first(missing)}, {len(foreign)} not in the split{_first(foreign)}): index only that split"
        )
    kept = sorted(row_of.values())
    notes = list(task.notes)
    if len(kept) < len(task.splits.database):
        n = len(task.splits.database) - len(kept)
        notes.append(
            f"{n} database images are copies of others: a service stores identical files once, so each counts once"
        )
    position = {row: place for place, row in enumerate(kept)}
    rows = np.array([position[row_of[image.sha256]] for image in stored])
    return replace(_with_database(task, kept), notes=notes), [image.id for image in stored], rows


def _with_database(task: EvaluationTask, rows: Sequence[int] | Rows) -> EvaluationTask:
    """The task with only the database images at `rows`."""
    return replace(task, splits=replace(task.splits, database=task.splits.database.take(rows)))


def _search_all(service: Client, task: EvaluationTask, ids: Sequence[int], *, k: int) -> tuple[Rows, Rows]:
    """(distances, places) of the k nearest images of each query, (Q, k); places are positions in `ids`."""
    place_of = {image_id: place for place, image_id in enumerate(ids)}
    distances, places = (np.empty((len(task.splits.query), k), np.int64) for _ in range(2))
    with task.options.progress.task("querying the service", len(task.splits.query)) as advance:
        for row, path in enumerate(task.splits.query.paths):
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


def _mean_ap(task: EvaluationTask, rows: Rows) -> list[float]:
    """mAP at each N of rankings of database images, (Q, k)."""
    query, database = task.splits.query.labels, task.splits.database.labels
    n_relevant = np.array([int(database[:, labels > 0].any(axis=1).sum()) for labels in query])
    return [float(ap.mean()) for ap in task.average_precision(gains_of(rows, query, database) > 0, n_relevant)]


def _differences(task: EvaluationTask, served: tuple[Rows, Rows], library: tuple[Rows, Rows]) -> list[str]:
    """A line for each query with different (distances, rows)."""
    names = [path.name for path in task.splits.database.paths]
    differs = (served[0] != library[0]) | (served[1] != library[1])
    sentences = []
    for query in np.flatnonzero(differs.any(axis=1)).tolist():
        rank = int(differs[query].argmax())
        one, other = (
            f"{names[int(rows[query, rank])]} at distance {int(distances[query, rank])}"
            for distances, rows in (served, library)
        )
        sentences.append(
            f"{task.splits.query.paths[query].name}: {int(differs[query].sum())} of {differs.shape[1]} ranks differ, "
            f"first at rank {rank + 1}: the service returns {one}, the library {other}"
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
