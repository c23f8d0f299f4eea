"""What an evaluation found, as plain values that go to JSON and back."""

import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import Calibration, Normalizer

SCHEMA_VERSION = 3


@dataclass(frozen=True)
class Value:
    """A figure averaged over queries.

    `expected` over ties, `worst` and `best` over orders of ties; `low` to `high`: 95 % bootstrap interval of `expected`
    over queries; `macro`: mean over labels of the mean over the queries that carry the label.
    """

    expected: float
    worst: float
    best: float
    low: float
    high: float
    macro: float


@dataclass(frozen=True)
class Score:
    """The figures of one model at N.

    `as_served` is mAP@N in the order that search gives (ties by id); `tied` the share of the first N ranks, over
    queries, that go to the group of equal distances which rank N cuts.
    """

    n: int
    mean_average_precision: Value
    precision: Value
    recall: Value
    ndcg: Value
    acg: Value
    wap: Value
    tied: float
    as_served: float | None = None


@dataclass(frozen=True)
class Curves:
    """Precision and recall over rank (at `ns`) and over Hamming radius 0..K; null where nothing was retrieved.

    Lists over the radius are empty where rankings end before the database does. `precision_zero` counts a query that
    finds nothing as 0, `precision_skip` leaves it out; `empty` is their share.
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
class Label:
    """One label: how many queries and database images carry it, and figures over those queries (null without any)."""

    name: str
    queries: int
    database: int
    mean_average_precision: float | None
    precision: float | None


@dataclass(frozen=True)
class Distances:
    """Pairs at each Hamming distance 0..K, and the mean distance of relevant (`intra`) and other (`inter`) pairs."""

    relevant: list[int]
    irrelevant: list[int]
    intra: float | None
    inter: float | None


@dataclass(frozen=True)
class Bits:
    """How the bits of the database codes are used; see `hashseek.retrieval.metrics.BitStatistics`."""

    balance: list[float]
    constant: int
    mean_correlation: float
    max_correlation: float
    distinct: int
    most_common: int
    quantisation_error: float | None
    quantisation_angle: float | None


@dataclass(frozen=True)
class Confusion:
    """Of the irrelevant images found, the share where one with `returned` came for a query with `asked`.

    An image of several labels counts in parts. `lift`: how many times more often than if irrelevant images came at
    random.
    """

    asked: str
    returned: str
    share: float
    lift: float


@dataclass(frozen=True)
class Hit:
    """One of the nearest images of a query: distance in bits, labels shared with it, and their share of its labels."""

    name: str
    row: int
    distance: int
    labels: list[str]
    matched: list[str]
    share: float


@dataclass(frozen=True)
class Example:
    """A query with its nearest images in the order that search gives; `average_precision` is at the report's main N."""

    name: str
    row: int
    labels: list[str]
    average_precision: float
    hits: list[Hit]


@dataclass(frozen=True)
class Model:
    """Headline figures of a checkpoint on the queries and the database of the report.

    `method` is what trained it: loss and backbone. `cut_from` is the length of the nested code whose first bits these
    are.
    """

    method: str
    n_bits: int
    checkpoint: str
    fingerprint: str
    scores: list[Score]
    cut_from: int | None = None


@dataclass(frozen=True)
class Served:
    """The service whose rankings a report is made from, beside those of the library.

    `ranks`: how many of the nearest images each query was answered with. `equal`: queries for which the library gives
    the same ids and distances; `differences` has a sentence for each other one. `library`: mAP@N of the library.
    """

    url: str
    version: str
    engine: str
    ranks: int
    equal: int
    library: dict[int, float]
    differences: list[str]


@dataclass(frozen=True)
class Report:
    """Everything needed to judge and to repeat an evaluation.

    `main_n` is the N of the headline and of everything that is shown at one N. `model`, `data`, `seed`, `versions`,
    `command` and the fields beside them are the protocol certificate. A field that is null could not be had, and
    `missing` says why. `ties`: whether figures are expectations over the orders of equal distances, with bounds, or
    those of the one order that a service gave. `held_out` are labels that training never saw, and `labels_used` says
    which images and labels the figures are about, see `training.data.held_out_labels`. `models` are this checkpoint and
    others on the same queries and database.
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
    labels: list[Label]
    distances: Distances | None
    bits: Bits | None
    calibration: Calibration | None
    confusions: list[Confusion]
    examples: list[Example]
    worst: list[Example]
    gain: str = "exponential"
    ties: Literal["expected", "as served"] = "expected"
    labels_used: Literal["all", "seen", "held-out"] = "all"
    held_out: list[str] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    served: Served | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    baseline: list[Score] = field(default_factory=list)
    baseline_name: str = ""
    baseline_precision: list[float] = field(default_factory=list)
    seed: int = 0
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: software_versions())
    command: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def main(self) -> Score:
        """The scores at `main_n`."""
        return next(score for score in self.scores if score.n == self.main_n)

    def as_json(self) -> str:
        """The report as JSON."""
        return TypeAdapter(Report).dump_json(self, indent=2).decode() + "\n"


def load_report(path: Path) -> Report:
    """The report in a report.json.

    Raises:
        BadConfig: there is none, it is of another schema, or it is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadConfig(f"the report {path} cannot be read: {reason}") from None
    try:
        found = TypeAdapter(dict[str, Any]).validate_json(text).get("schema_version")
        if found != SCHEMA_VERSION:
            newer = isinstance(found, int) and found > SCHEMA_VERSION
            remedy = "upgrade hashseek" if newer else "run `hashseek evaluate` again"
            raise BadConfig(f"{path} has report schema {found}, but this hashseek reads {SCHEMA_VERSION}: {remedy}")
        return TypeAdapter(Report).validate_json(text)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        what = error.errors()[0]["msg"]
        raise BadConfig(f"{path} is not a report ({f'{where}: ' if where else ''}{what}): evaluate again") from None


def software_versions() -> dict[str, str]:
    """Versions of what computed the figures."""
    return {
        "hashseek": version("hashseek"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.machine()} {platform.system()}",
    }
