"""The order of ties of published code: that of the quicksort of NumPy."""

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


def codes_at(distances: list[int]) -> np.ndarray:
    """Codes of 8 bits at these distances from zero."""
    return pack(np.where(np.arange(8) < np.array(distances)[:, None], 1.0, -1.0))


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
    queries, stored = (pack(model(torch.from_numpy(split.vectors)).detach().numpy()) for split in (query, database))
    for n in (5, 20):
        scores = []
        for code, labels in zip(queries, query.labels, strict=True):
            hits = [
                rank
                for rank, row in enumerate(hyp2_order(code, stored)[:n], 1)
                if (labels & database.labels[row]).any()
            ]
            scores.append(np.mean([i / rank for i, rank in enumerate(hits, 1)]) if hits else 0)
        found = next(score for score in report.rankings if (score.rank, score.n) == ("hyp2", n))
        assert found.mean_average_precision == pytest.approx(np.mean(scores))
    assert "every fifth epoch" in as_markdown(report)
    assert all(score.rank != "hyp2-best" for score in report.rankings)
    assert "hyp2" not in as_markdown(evaluate(checkpoint, VECTOR_SPLITS, replace(options, protocol=None)).report)


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
