"""Metrics by label, and warnings about the labels of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Counts, Floats, Labels


@dataclass(frozen=True)
class PerLabel:
    """A metric by label, (C,): its mean over the queries with the label (NaN if there are none), and their number."""

    mean: Floats
    n_queries: Counts

    @property
    def macro(self) -> float:
        """Mean over the labels that occur in queries: rare labels count as much as common ones."""
        return float(self.mean[self.n_queries > 0].mean()) if (self.n_queries > 0).any() else 0.0


def per_label(values: Floats, query_labels: Labels) -> PerLabel:
    """A metric (Q,) by label of the queries, labels 0/1 (Q, C). Relevance is unchanged: sharing any label."""
    if len(values) != len(query_labels):
        raise BadCodes(f"{len(values)} values need as many rows of query labels, not {len(query_labels)}")
    n_queries = query_labels.sum(axis=0, dtype=np.int64)
    sums = values @ query_labels.astype(np.float64)
    return PerLabel(np.where(n_queries > 0, sums / np.maximum(n_queries, 1), np.nan), n_queries)


def remarks(
    query_labels: Labels,
    database_labels: Labels,
    *,
    ns: Sequence[int | None],
    label_names: Sequence[str],
) -> list[str]:
    """Warnings about an evaluation: an N larger than the database, labels without images.

    Args:
        query_labels: 0/1 (Q, C).
        database_labels: 0/1 (N, C).
        ns: the values of N for the metrics.
        label_names: C names.
    """
    found = [
        f"N = {n} is larger than the database of {len(database_labels)} images, so all of them count"
        for n in ns
        if n is not None and n > len(database_labels)
    ]
    in_queries, in_database = (np.asarray(labels.any(axis=0)) for labels in (query_labels, database_labels))
    for what, alone in (
        ("queries have labels that no database image has", in_queries & ~in_database),
        ("no query has these labels, so they are not evaluated", in_database & ~in_queries),
    ):
        if alone.any():
            found.append(f"{what}: {_listed(label_names, alone)}")
    for labels, split in ((query_labels, "queries"), (database_labels, "database images")):
        without = int((~labels.any(axis=1)).sum())
        if without:
            found.append(f"{without} {split} have no label and are relevant to nothing")
    return found


def _listed(names: Sequence[str], which: NDArray[np.bool_]) -> str:
    chosen = [name for name, listed in zip(names, which, strict=True) if listed]
    return ", ".join(chosen[:8]) + (f" and {len(chosen) - 8} more" if len(chosen) > 8 else "")
