"""Example queries with their nearest images, the worst queries, and confused labels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hashseek.training.data.splits import Labels, Split
from hashseek.training.evaluation.report.measurements import Ranking
from hashseek.training.evaluation.report.schema import Confusion, Example, ExampleHit

N_RANDOM, N_WORST, N_HITS = 6, 4, 10
# Queries per block: each is compared with the whole database.
_QUERIES = 64


def random_queries(n_queries: int, *, seed: int) -> list[int]:
    """Rows of queries chosen at random: a fair sample, neither the best nor the worst."""
    chosen = np.random.default_rng((seed, 0xE8)).permutation(n_queries)[:N_RANDOM]
    return sorted(chosen.tolist())


def worst_queries(average_precision: NDArray[np.float64], n_relevant: NDArray[np.integer]) -> list[int]:
    """Rows of the queries with the lowest AP, among those with something relevant in the database."""
    candidates = np.flatnonzero(n_relevant > 0)
    order = np.argsort(average_precision[candidates], kind="stable")
    chosen: list[int] = candidates[order[:N_WORST]].tolist()
    return chosen


def examples(
    rows: Sequence[int],
    query: Split,
    database: Split,
    names: Sequence[str],
    ranking: Ranking,
    average_precision: NDArray[np.float64],
) -> list[Example]:
    """The queries at `rows` with their nearest images; `ranking` and `average_precision` are those of all queries."""

    def labels_of(row: Labels) -> list[str]:
        return [names[i] for i in np.flatnonzero(row).tolist()]

    made = []
    for row in rows:
        wanted = labels_of(query.labels[row])
        hits = []
        nearest, distances = ranking.rows[row, :N_HITS].tolist(), ranking.distances[row, :N_HITS].tolist()
        for item, distance in zip(nearest, distances, strict=True):
            labels = labels_of(database.labels[item])
            matched = [label for label in wanted if label in labels]
            share = len(matched) / len(wanted) if wanted else 0.0
            hits.append(ExampleHit(database.paths[item].name, item, distance, labels, matched, share))
        made.append(Example(query.paths[row].name, row, wanted, float(average_precision[row]), hits))
    return made


def confusions(
    query_labels: Labels, database_labels: Labels, names: Sequence[str], ids: NDArray[np.int64], *, n: int = 12
) -> list[Confusion]:
    """The most frequent pairs of labels (of a query, of an irrelevant image among its nearest `ids`).

    Each irrelevant hit counts 1, split evenly over the pairs of its labels with those of the query.
    """
    asked, held = _split_evenly(query_labels), _split_evenly(database_labels)
    found = np.zeros((len(names), len(names)))
    by_chance = np.zeros_like(found)
    for start in range(0, len(query_labels), _QUERIES):
        chosen = slice(start, start + _QUERIES)
        shared = query_labels[chosen].astype(np.float32) @ database_labels.T.astype(np.float32)
        irrelevant = (shared == 0).astype(np.float32)
        wrong = np.take_along_axis(irrelevant, ids[chosen], axis=1)
        returned = np.einsum("qn,qnc->qc", wrong, held[ids[chosen]])
        found += asked[chosen].T @ returned
        expected = irrelevant @ held
        scale = returned.sum(axis=1) / np.maximum(expected.sum(axis=1), 1e-12)
        by_chance += asked[chosen].T @ (expected * scale[:, None])
    if not found.any():
        return []
    share, chance = found / found.sum(), by_chance / by_chance.sum()
    made = []
    for flat in np.argsort(-share, axis=None, kind="stable")[:n].tolist():
        a, b = divmod(flat, len(names))
        if share[a, b] > 0:
            made.append(Confusion(names[a], names[b], float(share[a, b]), float(share[a, b] / chance[a, b])))
    return made


def _split_evenly(labels: Labels) -> NDArray[np.float32]:
    """A weight of 1 for each row, split evenly over its labels; zeros for a row without labels."""
    weights: NDArray[np.float32] = (labels / np.maximum(labels.sum(axis=1, keepdims=True), 1)).astype(np.float32)
    return weights
