"""Figures by label, and what a reader must know about the labels of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Counts, Floats, Labels


@dataclass(frozen=True)
class PerLabel:
    """A figure by label: its mean over the queries that carry the label (NaN if none does), and their number, (C,)."""

    mean: Floats
    n_queries: Counts

    @property
    def macro(self) -> float:
        """Mean over the labels that some query carries: rare labels count as much as common ones."""
        return float(self.mean[self.n_queries > 0].mean()) if (self.n_queries > 0).any() else 0.0


def per_label(values: Floats, query_labels: Labels) -> PerLabel:
    """A figure (Q,) by label of the queries, labels 0/1 (Q, C). Relevance stays what it is: sharing any label."""
    if len(values) != len(query_labels):
        raise BadCodes(f"{len(values)} values of queries need as many rows of labels, not {len(query_labels)}")
    n_queries = query_labels.sum(axis=0, dtype=np.int64)
    sums = values @ query_labels.astype(np.float64)
    return PerLabel(np.where(n_queries > 0, sums / np.maximum(n_queries, 1), np.nan), n_queries)


def remarks(
    query_labels: Labels,
    database_labels: Labels,
    *,
    ns: Sequence[int | None] = (),
    label_names: Sequence[str] = (),
) -> list[str]:
    """What is unusual about an evaluation, one sentence each: an N beyond the database, labels without images.

    Args:
        query_labels: 0/1 (Q, C). database_labels: 0/1 (N, C). ns: the N of the figures.
        label_names: C names; numbers are used where there are none.
    """
    names = list(label_names) or [str(i) for i in range(query_labels.shape[1])]
    found = [
        f"N = {n} exceeds the database of {len(database_labels)} images; figures are over all of it"
        for n in ns
        if n is not None and n > len(database_labels)
    ]
    asked, held = (labels.sum(axis=0, dtype=np.int64) > 0 for labels in (query_labels, database_labels))
    if (asked & ~held).any():
        found.append(f"no image of the database has the label {_listed(names, asked & ~held)}, which queries carry")
    if (held & ~asked).any():
        found.append(f"no query has the label {_listed(names, held & ~asked)}, so the figures say nothing about it")
    for labels, split in ((query_labels, "queries"), (database_labels, "database images")):
        without = int((labels.sum(axis=1) == 0).sum())
        if without:
            found.append(f"{without} {split} have no label and are relevant to nothing")
    return found


def _listed(names: Sequence[str], which: NDArray[np.bool_]) -> str:
    chosen = [name for name, listed in zip(names, which, strict=True) if listed]
    return ", ".join(chosen[:8]) + (f" and {len(chosen) - 8} more" if len(chosen) > 8 else "")
