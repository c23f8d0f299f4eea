"""Prepares an evaluation, and assembles its report.

An evaluation calls `prepare`, ranks the database, measures the rankings, and calls `assemble`. The check of a service
calls `prepare` too.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.checkpoint import Header
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import Normalizer, average_precision_of_ranking, effective_n, remarks
from hashseek.training.data.broken_images import without_broken
from hashseek.training.data.datasets import SOURCES
from hashseek.training.data.file_digests import equal_files
from hashseek.training.data.held_out_labels import LabelPart, label_part
from hashseek.training.data.splits import Split, Splits, check_labelled
from hashseek.training.evaluation.candidates import Candidate, method_of
from hashseek.training.evaluation.report.examples import confusions, examples, random_queries, worst_queries
from hashseek.training.evaluation.report.folder import Evaluation
from hashseek.training.evaluation.report.measurements import Measurements, label_scores
from hashseek.training.evaluation.report.projection import Points
from hashseek.training.evaluation.report.schema import EvaluationReport, Example
from hashseek.training.evaluation.split_encoder import check_kind, check_trained_on, describe_model
from hashseek.training.losses import LOSSES, loss_class
from hashseek.training.progress import Progress, lines_of

DEFAULT_NS = (10, 100, 1000, 5000)
# How many of the nearest images of each query are searched for confused labels.
N_NEAREST = 50


@dataclass(frozen=True)
class EvaluationOptions:
    """How to evaluate.

    Attributes:
        data_name: the name of the data set in the report.
        data_set: its name in `DATASETS`, for its reference; None: it has none.
        ns: the N of mAP@N and the other metrics; None, or more than the database size, means all of it.
        normalizer: see `hashseek.retrieval.metrics.average_precision`.
        labels: which images and labels to evaluate on if labels were held out of training, see `label_part`; None
            means "held-out" for such a checkpoint, and "all" otherwise.
        protocol: whose evaluation to add to ours, see `hyp2_order`.
        seed: seed of the bootstrap, the example queries, t-SNE and random hash layers.
        device, precision: see `Encoder`.
        command: recorded in the report.
        progress: shows progress bars and notes.
        as_trained: the splits are those of the training; refuse others, whose queries may have been trained on.
    """

    data_name: str
    ns: Sequence[int | None] = DEFAULT_NS
    normalizer: Normalizer = "retrieved"
    labels: LabelPart | None = None
    protocol: Literal["hyp2"] | None = None
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    command: str = ""
    data_set: str | None = None
    as_trained: bool = False
    progress: Progress = field(default_factory=lambda: Progress(quiet=True), repr=False)


@dataclass(frozen=True)
class EvaluationTask:
    """What is evaluated: a checkpoint, splits without broken queries and database images, and the values of N."""

    options: EvaluationOptions
    header: Header
    splits: Splits
    held_out: tuple[str, ...]
    labels_used: LabelPart
    notes: list[str]

    @property
    def ns(self) -> list[int]:
        """The values of N, none of them larger than the database."""
        return list(dict.fromkeys(effective_n(n, len(self.splits.database)) for n in self.options.ns))

    def average_precision(
        self, hits: NDArray[np.bool_], n_relevant: NDArray[np.int64], normalizer: Normalizer | None = None
    ) -> list[NDArray[np.float64]]:
        """AP (Q,) at each N of rankings in which `hits` (Q, n) are relevant."""
        normalizer = normalizer or self.options.normalizer
        return [
            average_precision_of_ranking(hits[:, :n], n_relevant=n_relevant, normalizer=normalizer) for n in self.ns
        ]


def prepare(candidates: Sequence[Candidate], splits: Splits, options: EvaluationOptions) -> EvaluationTask:
    """Check that the candidates can be evaluated on the splits, and leave out broken images.

    Raises:
        HashseekError: other splits than in training, if they should be the same; a data set without labels;
            images although a checkpoint encodes vectors, or vice versa; broken images with on_error = "stop"; or
            `labels` for checkpoints without held-out labels.
    """
    check_labelled(splits)
    first = candidates[0]
    other_splits = []
    for each in candidates:
        check_kind(each.header, splits, name=each.name)
        found = check_trained_on(each.header, splits, name=each.name, refuse=options.as_trained)
        other_splits += found if each.cut_from is None else []
    held_out = first.held_out
    labels_used: LabelPart = (options.labels or "held-out") if held_out else "all"
    if held_out:
        splits = label_part(splits, held_out, labels_used)
    elif options.labels not in (None, "all"):
        raise BadConfig(
            f"--labels {options.labels} needs a checkpoint with held-out labels (data.held_out), but {first.name} was "
            "trained with all labels"
        )
    splits = without_broken(splits, ("query", "database"), source=options.data_name)
    options.progress.problems(splits.problems, [])
    notes = [*lines_of(splits.problems), *other_splits]
    return EvaluationTask(options, first.header, splits, held_out, labels_used, notes)


def assemble(
    task: EvaluationTask,
    found: Measurements,
    *,
    computed_in: str,
    points: Points,
    **fields: Any,
) -> Evaluation:
    """The report and its tables.

    Args:
        task: what `prepare` returned.
        found: measured on the rankings.
        computed_in: the engine, device and precision that computed the codes.
        points: what `project` returned.
        fields: further fields of the report.
    """
    options, header, query, database = task.options, task.header, task.splits.query, task.splits.database
    names, ranking = task.splits.label_names, found.ranking
    ap = found.per_query[f"AP@{found.main_n}"].expected

    def show(rows: Sequence[int]) -> list[Example]:
        return examples(rows, query, database, names, ranking, ap)

    report = EvaluationReport(
        title=f"{method_of(header)}, {header.n_bits} bits, on {options.data_name}",
        scores=found.scores,
        main_n=found.main_n,
        normalizer=options.normalizer,
        n_bits=header.n_bits,
        fingerprint=header.fingerprint,
        data=_describe_data(task, found.n_relevant),
        model=describe_model(header, computed_in),
        labels_used=task.labels_used,
        held_out=list(task.held_out),
        curves=found.curves,
        labels=label_scores(found, query.labels, database.labels, names),
        distances=found.distances,
        calibration=found.calibration,
        confusions=confusions(query.labels, database.labels, names, ranking.rows[:, :N_NEAREST]),
        examples=show(random_queries(len(query), seed=options.seed)),
        worst=show(worst_queries(ap, found.n_relevant)),
        notes=[*task.notes, *remarks(query.labels, database.labels, ns=options.ns, label_names=names)],
        sources=_sources(header, options.data_set),
        seed=options.seed,
        command=options.command,
        **fields,
    )
    images = query.vectors is None
    return Evaluation(
        report,
        _per_query(task, found),
        points,
        query.paths if images else (),
        database.paths if images else (),
    )


def _sources(header: Header, data_set: str | None) -> dict[str, str]:
    """The references of the losses and of the data set, by name, where Hashseek knows them."""
    named = [str((header.training.get(part) or {}).get("name")) for part in ("loss", "partner")]
    found = {name: loss_class(name).source for name in named if name in LOSSES}
    return found | ({data_set: SOURCES[data_set]} if data_set in SOURCES else {})


def _describe_data(task: EvaluationTask, n_relevant: NDArray[np.int64]) -> dict[str, Any]:
    """The data set, for the protocol."""
    splits, query, database = task.splits, task.splits.query, task.splits.database
    return {
        "data_set": task.options.data_name,
        "queries": len(query),
        "database": len(database),
        "labels": len(splits.label_names),
        "splits_sha256": splits.fingerprint,
        "query_sha256": hash_split(query),
        "database_sha256": hash_split(database),
        "same_splits_as_in_training": task.header.training.get("splits_sha256") == splits.fingerprint,
        "overlaps": overlaps(splits),
        "queries_without_a_relevant_item": int((n_relevant == 0).sum()),
        "chance_(share_of_relevant_pairs)": float((n_relevant / len(database)).mean()),
    }


def overlaps(splits: Splits) -> dict[str, int]:
    """How many images two splits have in common: the same file, or a byte-for-byte copy of a query."""
    files = {name: set(getattr(splits, name).paths) for name in ("query", "train", "database")}
    counts = {
        f"{one}_and_{other}": len(files[one] & files[other])
        for one, other in (("query", "train"), ("query", "database"), ("train", "database"))
    }
    if splits.query.vectors is None:
        groups = equal_files(set().union(*files.values()), to=files["query"])
        copies = set().union(*groups) - files["query"]
        counts |= {f"copies_of_queries_in_{name}": len(copies & files[name]) for name in ("train", "database")}
    return counts


def hash_split(split: Split) -> str:
    """SHA-256 of the file names and labels in their order; the folder of the files does not matter."""
    found = hashlib.sha256()
    for path, labels in zip(split.paths, split.labels, strict=True):
        found.update(path.name.encode(errors="surrogateescape") + b"\t" + labels.tobytes() + b"\n")
    return found.hexdigest()


def _per_query(task: EvaluationTask, found: Measurements) -> dict[str, list[Any]]:
    """The table per query: AP, precision and nDCG with their bounds, and AP in the order of search."""
    query, names = task.splits.query, task.splits.label_names
    columns: dict[str, list[Any]] = {
        "query": [path.name for path in query.paths],
        "labels": [";".join(names[i] for i in np.flatnonzero(row).tolist()) for row in query.labels],
        "relevant_in_database": found.n_relevant.tolist(),
        "nearest_distance": found.ranking.distances[:, 0].tolist(),
    }
    as_served = {f"AP@{n}": values for n, values in zip(task.ns, found.ranking.average_precision, strict=True)}
    for name, values in found.per_query.items():
        if name.startswith(("AP", "precision", "nDCG")):
            columns[name] = values.expected.tolist()
            columns[f"{name}_worst"] = values.worst.tolist()
            columns[f"{name}_best"] = values.best.tolist()
        if name in as_served:
            columns[f"{name}_as_served"] = as_served[name].tolist()
    return columns
