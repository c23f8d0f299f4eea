"""The order of ties of published code: that of the quicksort of NumPy, which is written out here."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.metrics import average_precision_of_ranking
from hashseek.training.evaluation.assembly import EvaluationOptions
from hashseek.training.evaluation.evaluate import evaluate, hyp2_order
from hashseek.training.evaluation.report.markdown import as_markdown
from support.vector_models import VECTOR_SPLITS, save_vector_model


def quicksort(values: list[int]) -> list[int]:
    """The order of `aquicksort` in NumPy: the median of three is the pivot, and up to 16 values are inserted."""
    order, waiting = list(range(len(values))), [(0, len(values) - 1)]

    def swap(a: int, b: int) -> None:
        order[a], order[b] = order[b], order[a]

    def value(at: int) -> int:
        return values[order[at]]

    while waiting:
        left, right = waiting.pop()
        while right - left > 15:
            middle = left + (right - left) // 2
            for a, b in ((left, middle), (middle, right), (left, middle)):
                if value(b) < value(a):
                    swap(a, b)
            pivot, i, j = value(middle), left, right - 1
            swap(middle, j)
            while True:
                i += 1
                while value(i) < pivot:
                    i += 1
                j -= 1
                while pivot < value(j):
                    j -= 1
                if i >= j:
                    break
                swap(i, j)
            swap(i, right - 1)
            if i - left < right - i:
                waiting.append((i + 1, right))
                right = i - 1
            else:
                waiting.append((left, i - 1))
                left = i + 1
        for place in range(left + 1, right + 1):
            while place > left and value(place) < value(place - 1):
                swap(place, place - 1)
                place -= 1
    return order


def codes_at(distances: list[int]) -> np.ndarray:
    """Codes of 8 bits at these distances from zero."""
    return pack(np.where(np.arange(8) < np.array(distances)[:, None], 1.0, -1.0))


@pytest.mark.parametrize("n", [3, 16, 17, 60, 1000])
def test_ties_are_in_the_order_of_a_quicksort(n):
    distances = np.random.default_rng(n).integers(0, 5, n).tolist()
    found = hyp2_order(codes_at([0])[0], codes_at(distances)).tolist()
    assert found == quicksort(distances)
    if n > 16:
        assert found != sorted(range(n), key=distances.__getitem__)


def test_average_precision_worked_out_by_hand():
    """Of 18 equal values, row 8 is the pivot and keeps its place; 1 and 15, 2 and 14, ..., 7 and 9 change places."""
    order = hyp2_order(codes_at([0])[0], codes_at([3] * 18))
    assert order.tolist() == [0, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 16, 17]
    relevant = np.isin(order, [15, 14, 17])[None]  # at ranks 2, 3 and 18; the first 10 ranks count
    found = average_precision_of_ranking(relevant[:, :10], n_relevant=np.array([3]), normalizer="retrieved")
    assert found == pytest.approx([(1 / 2 + 2 / 3) / 2])


def test_the_report_has_the_figure_beside_ours(tmp_path):
    checkpoint = save_vector_model(tmp_path / "model", 3)
    options = EvaluationOptions("v", ns=(5, 20), protocol="hyp2", normalizer="relevant")
    report = evaluate(checkpoint, VECTOR_SPLITS, options, n_points=0).report
    query, database = VECTOR_SPLITS.query, VECTOR_SPLITS.database
    model = load_checkpoint(checkpoint).model.eval()
    queries, stored = (model(torch.from_numpy(split.vectors)).detach().numpy() > 0 for split in (query, database))
    for n in (5, 20):
        scores, served = [], []
        for bits, labels in zip(queries, query.labels, strict=True):
            order = quicksort((bits != stored).sum(axis=1).tolist())[:n]
            hits = [rank for rank, row in enumerate(order, 1) if (labels & database.labels[row]).any()]
            scores.append(np.mean([i / rank for i, rank in enumerate(hits, 1)]) if hits else 0)
            by_row = np.argsort((bits != stored).sum(axis=1), kind="stable")
            relevant = (labels & database.labels[by_row]).any(axis=1)
            served.append((relevant * relevant.cumsum() / np.arange(1, 51))[:n].sum() / max(relevant.sum(), 1))
        assert next(score for score in report.scores if score.n == n).as_served == pytest.approx(np.mean(served)), (
            "by its own normalizer"
        )
        found = next(score for score in report.rankings if (score.rank, score.n) == ("hyp2", n))
        assert found.mean_average_precision == pytest.approx(np.mean(scores))
    assert "every fifth epoch" in as_markdown(report)
    assert all(score.rank != "hyp2-best" for score in report.rankings)
    plain = evaluate(checkpoint, VECTOR_SPLITS, replace(options, protocol=None), n_points=0).report
    assert "hyp2" not in as_markdown(plain)


def test_the_best_of_several_checkpoints_is_chosen_at_each_n(tmp_path):
    checkpoints = [save_vector_model(tmp_path / f"model-{seed}", 3, seed=seed) for seed in range(3)]
    options = EvaluationOptions("v", ns=(5, 20), protocol="hyp2")

    def figures(report, rank):
        return {score.n: score.mean_average_precision for score in report.rankings if score.rank == rank}

    alone = [figures(evaluate(one, VECTOR_SPLITS, options, n_points=0).report, "hyp2") for one in checkpoints]
    first, *others = checkpoints
    together = evaluate(first, VECTOR_SPLITS, options, others=others, n_points=0).report
    assert figures(together, "hyp2") == alone[0]
    assert figures(together, "hyp2-best") == {n: max(found[n] for found in alone) for n in (5, 20)}
    assert len({found[20] for found in alone}) == 3
    best = max(range(3), key=lambda seed: alone[seed][20])
    left, *rest = (checkpoints[seed] for seed in range(3) if seed != best)
    other_runs = [save_vector_model(tmp_path / "other", 3, seed=best, training={"loss": {"name": "dsh"}})]
    other_runs.append(save_vector_model(tmp_path / "longer", 12, seed=best))
    apart = evaluate(left, VECTOR_SPLITS, options, others=[*rest, *other_runs], n_points=0).report
    assert figures(apart, "hyp2-best")[20] == max(found[20] for found in alone if found != alone[best])
    assert figures(evaluate(left, VECTOR_SPLITS, options, others=other_runs, n_points=0).report, "hyp2-best") == {}
