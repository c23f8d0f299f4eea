"""Queries with their nearest images, the worst queries, and the labels that are mistaken for each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.metrics.rankings import Ids
from hashseek.training.evaluation.report.build import Labels
from hashseek.training.evaluation.report.schema import Confusion, Example, Hit

N_HITS = 10
# Queries that are compared with the whole database at a time.
_QUERIES = 64


class Labelled(Protocol):
    """Queries or database images: labels 0/1 (n, C), and a path that names each."""

    @property
    def labels(self) -> Labels:
        """0/1 (n, C)."""

    @property
    def paths(self) -> Sequence[Path]:
        """One for each."""


def examples(
    rows: Sequence[int],
    *,
    query: Labelled,
    database: Labelled,
    names: Sequence[str],
    ids: Ids,
    distances: NDArray[np.integer],
    average_precision: NDArray[np.float64],
) -> list[Example]:
    """The queries at `rows` with the first of their ranking, ids and distances (Q, n)."""
    made = []
    for row in rows:
        wanted = _names(query.labels[row], names)
        hits = []
        for item, distance in zip(ids[row, :N_HITS].tolist(), distances[row, :N_HITS].tolist(), strict=True):
            labels = _names(database.labels[item], names)
            matched = [label for label in wanted if label in labels]
            share = len(matched) / len(wanted) if wanted else 0.0
            hits.append(Hit(database.paths[item].name, item, distance, labels, matched, share))
        made.append(Example(query.paths[row].name, row, wanted, float(average_precision[row]), hits))
    return made


def drawn(n_queries: int, *, n: int = 8, seed: int = 0) -> list[int]:
    """Rows of queries to show, drawn at random: a fair sample, neither the best nor the worst."""
    chosen = np.random.default_rng((seed, 0xE8)).permutation(n_queries)[:n]
    return [int(row) for row in np.sort(chosen)]


def worst(average_precision: NDArray[np.float64], n_relevant: NDArray[np.integer], *, n: int = 6) -> list[int]:
    """Rows of the queries with the least AP among those for which something is relevant."""
    candidates = np.flatnonzero(n_relevant > 0)
    order = np.argsort(average_precision[candidates], kind="stable")
    return [int(row) for row in candidates[order[:n]]]


def confusions(
    query_labels: Labels, database_labels: Labels, names: Sequence[str], ids: Ids, *, n: int = 12
) -> list[Confusion]:
    """The pairs of labels (of a query, of an irrelevant image among its nearest `ids`) that occur most often.

    Each irrelevant hit counts 1, spread evenly over the pairs of its labels with those of the query.
    """
    asked, held = _spread(query_labels), _spread(database_labels)
    found = np.zeros((len(names), len(names)))
    by_chance = np.zeros_like(found)
    for start in range(0, len(query_labels), _QUERIES):
        chosen = slice(start, start + _QUERIES)
        unlike = (query_labels[chosen].astype(np.float32) @ database_labels.T.astype(np.float32) == 0).astype(
            np.float32
        )
        wrong = np.take_along_axis(unlike, ids[chosen], axis=1)
        returned = np.einsum("qn,qnc->qc", wrong, held[ids[chosen]])
        found += asked[chosen].T @ returned
        expected = unlike @ held
        scale = returned.sum(axis=1) / np.maximum(expected.sum(axis=1), 1e-12)
        by_chance += asked[chosen].T @ (expected * scale[:, None])
    total = found.sum()
    if not total:
        return []
    share, chance = found / total, by_chance / by_chance.sum()
    made = []
    for flat in np.argsort(-share, axis=None, kind="stable")[:n].tolist():
        a, b = divmod(flat, len(names))
        if share[a, b] > 0:
            lift = float(share[a, b] / chance[a, b])
            made.append(Confusion(names[a], names[b], float(share[a, b]), lift))
    return made


def _names(row: Labels, names: Sequence[str]) -> list[str]:
    return [names[i] for i in np.flatnonzero(row).tolist()]


def _spread(labels: Labels) -> NDArray[np.float32]:
    """Each row's weight 1 spread over its labels; nothing for a row without labels."""
    spread: NDArray[np.float32] = (labels / np.maximum(labels.sum(axis=1, keepdims=True), 1)).astype(np.float32)
    return spread
