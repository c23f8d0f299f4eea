"""The served truth: the query split through a running service, beside the library on the same collection."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadConfig, BadDataset, ForeignCodes
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.metrics import (
    Normalizer,
    average_precision_of_ranking,
    count_gains,
    effective_n,
    gains_of,
    histograms_of_ranking,
    remarks,
)
from hashseek.training.data.held_out_labels import LabelPart
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.code_lengths import load_candidates
from hashseek.training.evaluation.evaluation import (
    N_NEAREST,
    Evaluation,
    describe_data,
    evaluated_part,
    per_query,
    title_of,
)
from hashseek.training.evaluation.report import (
    Report,
    Scores,
    Served,
    score_all,
    score_ranking,
    values_of,
    values_of_ranking,
)
from hashseek.training.evaluation.report.examples import confusions, drawn, examples, worst
from hashseek.training.evaluation.report.markdown import served_lines
from hashseek.training.evaluation.service_client import Refused, ask_similar, ask_stats, ask_stored
from hashseek.training.evaluation.split_encoder import describe_model, usable
from hashseek.training.runs.progress import Progress

_SHOWN = 3  # examples in a sentence
NO_CODES = "How bits are used, and t-SNE: they need codes and outputs, which a service does not give."


@dataclass(frozen=True)
class Agreement:
    """What service and library gave; `n_images` are stored. `figures`: mAP@N of both by N."""

    served: Served
    n_queries: int
    n_images: int
    figures: dict[int, tuple[float, float]]
    evaluation: Evaluation

    @property
    def differences(self) -> list[str]:
        """A sentence for each query whose rankings differ."""
        return self.served.differences

    def as_markdown(self) -> str:
        """A table of the figures, and every difference."""
        report = self.evaluation.report
        lines = [
            f"# {self.served.url} beside the library",
            "",
            f"{self.n_images} stored images of checkpoint {report.fingerprint[:12]}, {self.served.ranks} ranks.",
            "",
            *served_lines(self.served, report.scores),
        ]
        if report.notes:
            lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
        return "\n".join(lines) + "\n"


Rankings = tuple[NDArray[np.int64], NDArray[np.int64]]


def check_service(
    url: str,
    checkpoint_path: Path,
    splits: Splits,
    *,
    data_name: str,
    labels: LabelPart | None = None,
    ns: Sequence[int | None] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    whole: bool = False,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    command: str = "",
    progress: Progress | None = None,
) -> Agreement:
    """Search a service with every query, rank the same images with the library, and report on the service's rankings.

    The service must hold the database split, each content once, as it stores them; equal distances go by its ids.
    Relevance is that of the splits on both sides.

    Args:
        url: of the service. checkpoint_path, splits, data_name, labels, ns, normalizer, seed, device, precision,
            command, progress: see `evaluate.evaluate`; `precision` has to be that of the service for codes to
            be equal to the bit.
        whole: ask for the ranking of the whole database if the service gives so many results. The report then has all
            that follows from distances; otherwise only what follows from the order of the first N.

    Raises:
        HashseekError: no service of this version answers, it has codes of another checkpoint, other images, or fewer
            results than N, or images are broken under on_error = "stop".
    """
    from hashseek.training.evaluation.evaluate import rankings  # late: it loads FAISS

    url = url.rstrip("/")
    progress = progress or Progress(quiet=True)
    candidates = load_candidates([checkpoint_path])
    checkpoint, header = candidates[0].checkpoint, candidates[0].header
    if header.preprocessing is None or splits.query.vectors is not None:
        raise BadConfig(
            "a service searches with images: --url needs a checkpoint and a data set of images, not vectors"
        )
    stats = ask_stats(url)
    _check_fingerprint(url, stats.fingerprint, header.fingerprint)
    splits, held_out, used = evaluated_part(candidates, splits, labels)
    query, every, notes = usable(splits, data_name, progress)
    ids, rows = _as_stored(url, every)
    database, unordered = every.take(rows), every.take(sorted(rows))
    if len(rows) < len(every):
        notes.append(
            f"{len(every) - len(rows)} database images are copies of others: a service stores each content once, so "
            "they count once"
        )
    notes += remarks(query.labels, database.labels, ns=ns, label_names=splits.label_names)
    limits = list(dict.fromkeys(effective_n(n, len(database)) for n in ns))
    k = _reach(url, query.paths[0], len(database), max(limits)) if whole else max(limits)
    given = _ask_all(url, query, ids, k=k, fingerprint=header.fingerprint, progress=progress)
    found = rankings(checkpoint, query, database, k=k, device=device, precision=precision, progress=progress)

    gains = gains_of(given[1], query.labels, database.labels)
    n_of_gain = count_gains(query.labels, database.labels)
    n_relevant = n_of_gain[:, 1:].sum(axis=1)
    of_ranking = partial(average_precision_of_ranking, n_relevant=n_relevant, normalizer=normalizer)
    ap = [of_ranking(gains[:, :n] > 0) for n in limits]
    ours = gains_of(found[1], query.labels, database.labels)
    library = {n: float(of_ranking(ours[:, :n] > 0).mean()) for n in limits}
    differences = _differences(query, database, given, found)
    served = Served(
        url,
        stats.version,
        stats.engine,
        ranks=k,
        equal=len(query) - len(differences),
        library=library,
        differences=differences,
    )

    about: dict[str, Any] = {"normalizer": normalizer, "ns": limits, "seed": seed}
    scores: Scores
    if k == len(database):
        counts = histograms_of_ranking(*given, query.labels, database.labels, n_bits=header.n_bits)
        scores = score_all(counts, query.labels, served=ap, **about)
        values = values_of(counts, query.labels, database.labels, splits.label_names, scores)
        missing = [NO_CODES]
    else:
        scores = score_ranking(gains, query.labels, n_of_gain=n_of_gain, **about)
        values = values_of_ranking(gains, n_relevant, query.labels, database.labels, splits.label_names, scores)
        missing = [NO_CODES, _cut(k, len(database))]
    at_main = scores.per_query[f"AP@{values['main_n']}"].expected
    show = partial(
        examples,
        query=query,
        database=database,
        names=splits.label_names,
        ids=given[1],
        distances=given[0],
        average_precision=at_main,
    )
    report = Report(
        title=f"{title_of(header, data_name)}, served",
        normalizer=normalizer,
        ties="expected" if k == len(database) else "as served",
        n_bits=header.n_bits,
        fingerprint=header.fingerprint,
        data=describe_data(
            splits,
            query,
            unordered,
            data_name=data_name,
            same_splits=header.training.get("splits_sha256") == splits.fingerprint,
            without_relevant=int((n_relevant == 0).sum()),
            chance_level=float((n_relevant / len(database)).mean()),
        ),
        model=describe_model(header, "the service"),
        labels_used=used,
        held_out=list(held_out),
        bits=None,
        served=served,
        missing=missing,
        notes=notes,
        seed=seed,
        command=command,
        confusions=confusions(query.labels, database.labels, splits.label_names, given[1][:, :N_NEAREST]),
        examples=show(drawn(len(query), seed=seed)),
        worst=show(worst(at_main, n_relevant)),
        **values,
    )
    table = per_query(query, splits.label_names, n_relevant, given[0][:, 0], scores, limits, ap)
    figures = {n: (float(values.mean()), library[n]) for n, values in zip(limits, ap, strict=True)}
    evaluation = Evaluation(report, table, {}, query.paths, database.paths)
    return Agreement(served, len(query), len(database), figures, evaluation)


def _cut(k: int, n_database: int) -> str:
    return (
        "Expectations and bounds over equal distances, distances of pairs, hash lookup, calibration, and curves beyond "
        f"rank {k}: the service gave the {k} nearest of {n_database} images, and these need all (HASHSEEK_MAX_K)."
    )


def _as_stored(url: str, database: Split) -> tuple[list[int], list[int]]:
    """Ids of the stored images, ascending, and the row of the database split that each one is."""
    row_of: dict[str, int] = {}
    for row, path in enumerate(database.paths):
        row_of.setdefault(hashlib.sha256(read_bytes(path)).hexdigest(), row)
    stored = ask_stored(url)
    held = {image.sha256 for image in stored}
    missing = [database.paths[row].name for sha256, row in row_of.items() if sha256 not in held]
    foreign = [image.path for image in stored if image.sha256 not in row_of]
    if missing or foreign:
        parts = [f"{_few(missing)} missing"] * bool(missing) + [f"{_few(foreign)} not in the split"] * bool(foreign)
        raise BadDataset(
            f"the collection of {url} is not the database split: {' and '.join(parts)}: index that split alone with "
            "`hashseek index add`"
        )
    return [image.id for image in stored], [row_of[image.sha256] for image in stored]


def _reach(url: str, path: Path, wanted: int, needed: int) -> int:
    """How many results to ask for: `wanted`, or `needed` where the service does not give so many."""
    if wanted > needed:
        try:
            ask_similar(url, path, wanted)
        except Refused:
            return needed
    return wanted


def _ask_all(url: str, query: Split, ids: Sequence[int], *, k: int, fingerprint: str, progress: Progress) -> Rankings:
    """(distances, rows) of the k nearest, (Q, k), as the service gives them; rows are positions in `ids`."""
    row_of = {image_id: row for row, image_id in enumerate(ids)}
    distances, rows = np.empty((len(query), k), np.int64), np.empty((len(query), k), np.int64)
    with progress.task("asking the service", len(query)) as advance:
        for place, path in enumerate(query.paths):
            answer = ask_similar(url, path, k)
            _check_fingerprint(url, answer.fingerprint, fingerprint)
            if len(answer.hits) != k or any(hit.id not in row_of for hit in answer.hits):
                raise BadDataset(
                    f"the service answered {path.name} with {len(answer.hits)} of {k} images, or with one that was not "
                    "stored before: evaluate while nobody changes the collection"
                )
            distances[place] = [hit.distance for hit in answer.hits]
            rows[place] = [row_of[hit.id] for hit in answer.hits]
            advance(1)
    return distances, rows


def _differences(query: Split, database: Split, served: Rankings, found: Rankings) -> list[str]:
    """A sentence for each query whose (distances, rows) differ."""
    unlike = (served[0] != found[0]) | (served[1] != found[1])

    def told(answer: Rankings, place: int, rank: int) -> str:
        distance, row = int(answer[0][place, rank]), int(answer[1][place, rank])
        return f"{database.paths[row].name} at {distance} bits"

    sentences = []
    for place in np.flatnonzero(unlike.any(axis=1)).tolist():
        rank = int(unlike[place].argmax())
        sentences.append(
            f"{query.paths[place].name}: {int(unlike[place].sum())} of {unlike.shape[1]} ranks differ, first rank "
            f"{rank + 1}: the service gives {told(served, place, rank)}, the library {told(found, place, rank)}"
        )
    return sentences


def _check_fingerprint(url: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise ForeignCodes(
            f"the service {url} has codes of checkpoint {theirs[:12]}, this one is {ours[:12]}: evaluate the "
            "checkpoint that it serves, or serve a collection of this one"
        )


def _few(names: Sequence[str]) -> str:
    """How many, and the first of them."""
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} images ({', '.join(names[:_SHOWN])}{more})"
