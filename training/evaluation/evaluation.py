"""What an evaluation by the library and one by a service have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.checkpoint import Header
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import Figure
from hashseek.training.data.held_out_labels import LabelPart, label_part
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.code_lengths import Candidate, held_out_of_all
from hashseek.training.evaluation.report import Report, Scores
from hashseek.training.evaluation.report.folder import Points, query_columns, write_report
from hashseek.training.evaluation.split_overlaps import digest, overlaps

# So many of the nearest images of each query tell which labels are taken for each other.
N_NEAREST = 50


@dataclass(frozen=True)
class Evaluation:
    """A report, and what its page and tables show beyond it."""

    report: Report
    per_query: dict[str, list[Any]]
    points: Points = field(repr=False)
    query_paths: tuple[Path, ...] = field(repr=False)
    database_paths: tuple[Path, ...] = field(repr=False)

    def write(self, folder: Path) -> list[Path]:
        """Write the folder of the report; gives the files, the page first."""
        return write_report(
            folder,
            self.report,
            per_query=self.per_query,
            points=self.points,
            query_paths=self.query_paths,
            database_paths=self.database_paths,
        )


def evaluated_part(
    candidates: Sequence[Candidate], splits: Splits, labels: LabelPart | None
) -> tuple[Splits, tuple[str, ...], LabelPart]:
    """The part of the splits that the figures are about, the labels held out of training, and which part it is.

    Raises:
        BadConfig: a part is asked for where no label was held out, or not the same of all candidates.
        BadDataset: see `label_part`.
    """
    held_out = held_out_of_all(candidates)
    if not held_out:
        if labels not in (None, "all"):
            raise BadConfig(
                f"--labels {labels} needs a checkpoint that was trained without some labels (data.held_out), and "
                f"{candidates[0].name} was trained with all"
            )
        return splits, (), "all"
    used = labels or "held-out"
    return label_part(splits, held_out, used), held_out, used


def describe_data(
    splits: Splits,
    query: Split,
    database: Split,
    *,
    data_name: str,
    same_splits: bool,
    without_relevant: int,
    chance_level: float,
) -> dict[str, Any]:
    """The data set, for the certificate."""
    return {
        "data_set": data_name,
        "queries": len(query),
        "database": len(database),
        "labels": len(splits.label_names),
        "splits_sha256": splits.fingerprint,
        "query_sha256": digest(query),
        "database_sha256": digest(database),
        "same_splits_as_in_training": same_splits,
        "overlaps": overlaps(splits),
        "queries_without_a_relevant_item": without_relevant,
        "chance_(share_of_relevant_pairs)": chance_level,
    }


def title_of(header: Header, data_name: str) -> str:
    """What a report on it is called."""
    return f"{header.backbone}, {header.n_bits} bits, on {data_name}"


def per_query(
    query: Split,
    names: Sequence[str],
    n_relevant: NDArray[np.int64],
    nearest: NDArray[np.int64],
    scores: Scores,
    ns: Sequence[int],
    as_served: Sequence[NDArray[np.float64]],
) -> dict[str, list[Any]]:
    """The table per query: AP, precision and nDCG, and AP@N (Q,) in the order of search for each N."""
    kept: dict[str, Figure] = {
        name: figure for name, figure in scores.per_query.items() if name.startswith(("AP", "precision", "nDCG"))
    }
    return query_columns(
        [path.name for path in query.paths],
        [[names[i] for i in np.flatnonzero(row).tolist()] for row in query.labels],
        n_relevant,
        nearest,
        kept,
        {f"AP@{n}": values for n, values in zip(ns, as_served, strict=True)},
    )
