"""The values of an evaluation report, and reading and writing of report.json.

`hashseek evaluate` fills an `EvaluationReport`; the page, the Markdown file and `hashseek compare` show it.
"""

import json
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import BitStatistics, Calibration, Normalizer
from hashseek.training.data.held_out_labels import LabelPart

SCHEMA_VERSION = 4


@dataclass(frozen=True)
class MeanValue:
    """The mean of a metric over queries.

    `expected` over ties, `worst` and `best` over orders of ties; `low` to `high`: 95 % bootstrap interval of `expected`
    over queries; `macro`: mean over labels of the mean over the queries with the label.
    """

    expected: float
    worst: float
    best: float
    low: float
    high: float
    macro: float


@dataclass(frozen=True)
class Score:
    """The metrics of one model at N.

    `as_served` is mAP@N in the order of search (ties by ascending id). `tied` is the share of the first N
    ranks, over queries, that belong to the group of ties cut by rank N.
    """

    n: int
    mean_average_precision: MeanValue
    precision: MeanValue
    recall: MeanValue
    ndcg: MeanValue
    acg: MeanValue
    wap: MeanValue
    tied: float
    as_served: float


@dataclass(frozen=True)
class RankingScore:
    """Mean AP@N and precision@N of one order of the whole database.

    `rank` is "hamming" (expected over ties), "asymmetric" (the query's real outputs with the stored bits) or "float"
    (the cosine of the features), the latter two with ties in the order of the database; or "hyp2", by distance with the
    order of ties and the normalizer of that paper's code; or "hyp2-best", its best among the checkpoints of a run.
    """

    rank: str
    n: int
    mean_average_precision: float
    precision: float


@dataclass(frozen=True)
class Curves:
    """Precision and recall over rank (at `ns`) and over Hamming radius 0..K; null where nothing was retrieved.

    `precision_zero` counts a query that finds nothing as 0, `precision_skip` leaves it out, and `empty` is the share of
    such queries.
    """

    ns: list[int]
    precision: list[float]
    precision_worst: list[float]
    precision_best: list[float]
    recall: list[float]
    precision_zero: list[float]
    precision_skip: list[float | None]
    radius_recall: list[float]
    empty: list[float]


@dataclass(frozen=True)
class LabelScore:
    """How many queries and database images have a label, and the means over these queries (null without any)."""

    name: str
    queries: int
    database: int
    mean_average_precision: float | None
    precision: float | None


@dataclass(frozen=True)
class Distances:
    """Number of pairs at each Hamming distance 0..K, and the mean distance of relevant (`intra`) and other pairs."""

    relevant: list[int]
    irrelevant: list[int]
    intra: float | None
    inter: float | None


@dataclass(frozen=True)
class Confusion:
    """Of the irrelevant images found, the share with the label `returned` for queries with the label `asked`.

    An image with several labels is split evenly between them. `lift`: how many times more often than if irrelevant
    images were returned at random.
    """

    asked: str
    returned: str
    share: float
    lift: float


@dataclass(frozen=True)
class ExampleHit:
    """One of the nearest images of an example query.

    `row` is its position in the database, `distance` is in bits, `matched` are the labels it shares with the query, and
    `share` is their share of the query's labels.
    """

    name: str
    row: int
    distance: int
    labels: list[str]
    matched: list[str]
    share: float


@dataclass(frozen=True)
class Example:
    """A query with its nearest images in the order of search; `average_precision` is at the headline N."""

    name: str
    row: int
    labels: list[str]
    average_precision: float
    hits: list[ExampleHit]


@dataclass(frozen=True)
class ComparedModel:
    """The scores of one of several checkpoints on the queries and the database of the report.

    `method` is the loss and the backbone it was trained with, numbered where other settings differ. `cut_from` is the
    full length of a nested code if these are its first bits.
    """

    method: str
    n_bits: int
    checkpoint: str
    fingerprint: str
    scores: list[Score]
    cut_from: int | None = None

    @property
    def name(self) -> str:
        """The checkpoint's file, and which bits of a nested code were used."""
        cut = "" if self.cut_from is None else f", first {self.n_bits} of {self.cut_from} bits"
        return f"{self.checkpoint}{cut}"


@dataclass(frozen=True, repr=False)
class EvaluationReport:
    """Everything needed to judge and to repeat an evaluation.

    `main_n` is the N of the headline and of everything shown at a single N. `data`, `model`, `seed`, `versions` and
    `command` are the protocol; `notes` are warnings. `held_out` are labels that were never used in training, and
    `labels_used` is which images and labels were used, see `training.data.held_out_labels`.
    `models` are this and other checkpoints on the same queries and database. `rankings` are other orders by the same
    model. `sources` are the references of losses and data set, by name.
    """

    title: str
    scores: list[Score]
    main_n: int
    normalizer: Normalizer
    n_bits: int
    fingerprint: str
    data: dict[str, Any]
    model: dict[str, Any]
    curves: Curves
    labels: list[LabelScore]
    distances: Distances
    bits: BitStatistics
    calibration: Calibration
    confusions: list[Confusion]
    examples: list[Example]
    worst: list[Example]
    gain: Literal["exponential"] = "exponential"
    ties: Literal["expected"] = "expected"
    labels_used: LabelPart = "all"
    held_out: list[str] = field(default_factory=list)
    models: list[ComparedModel] = field(default_factory=list)
    rankings: list[RankingScore] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    baseline: list[Score] = field(default_factory=list)
    baseline_name: str = ""
    baseline_precision: list[float] = field(default_factory=list)
    baseline_recall: list[float] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: software_versions())
    command: str = ""
    schema_version: int = SCHEMA_VERSION

    def __repr__(self) -> str:  # all fields would fill many pages
        return f"<EvaluationReport: {self.title}, mAP@{self.main_n} {self.main.mean_average_precision.expected:.4f}>"

    @property
    def main(self) -> Score:
        """The scores at `main_n`."""
        return self.at_main_n(self.scores)

    def at_main_n(self, scores: list[Score]) -> Score:
        """The element of `scores` at `main_n`."""
        return next(score for score in scores if score.n == self.main_n)

    def as_json(self) -> str:
        """The report as JSON. As in the report, file names that are not UTF-8 have surrogates."""
        content = TypeAdapter(EvaluationReport).dump_python(self, mode="json")
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def load_report(path: Path) -> EvaluationReport:
    """Read a report.json.

    Raises:
        BadConfig: the file cannot be read, has another schema version, or is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadConfig(f"cannot read the report {path}: {reason}") from None
    try:
        found = TypeAdapter(dict[str, Any]).validate_json(text).get("schema_version")
        if found != SCHEMA_VERSION:
            newer = isinstance(found, int) and found > SCHEMA_VERSION
            remedy = "update Hashseek" if newer else "run `hashseek evaluate` again"
            raise BadConfig(f"{path} has report schema {found}, but this Hashseek reads {SCHEMA_VERSION}: {remedy}")
        return TypeAdapter(EvaluationReport).validate_json(text)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        what = error.errors()[0]["msg"]
        raise BadConfig(f"{path} is not a report ({f'{where}: ' if where else ''}{what}): evaluate again") from None


def software_versions() -> dict[str, str]:
    """Versions of the software that computed the metrics."""
    return {
        **{name: version(name) for name in ("hashseek", "torch", "numpy")},
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
    }
