"""Dropout by (seed, epoch, row, view): what a row loses depends on nothing else."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from hashseek.training.loop.dropout import row_seeds, seed_by_row

ROWS = np.arange(400)


@pytest.fixture
def layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Dropout(0.3), nn.Dropout(0.3), StochasticDepth(0.3, "row")])


def dropped(layers: nn.ModuleList, number: int, rows=ROWS, **key) -> np.ndarray:
    """What the layer sets to 0 of ones (n, 4, 50); what it keeps is divided by 0.7."""
    seeds = seed_by_row(layers) if not hasattr(layers[0], "seeds") else layers[0].seeds
    seeds.now = row_seeds(rows, **{"seed": 1, "epoch": 2} | key)
    outputs = layers[number](torch.ones(len(seeds.now), 4, 50)).numpy()
    np.testing.assert_allclose(outputs[outputs != 0], 1 / 0.7, rtol=1e-6)
    return outputs == 0


def test_a_row_loses_the_same_in_every_batch_and_chunk(layers):
    whole = dropped(layers, 0)
    for rows in (ROWS[10:20], ROWS[::-1].copy()):
        assert np.array_equal(dropped(layers, 0, rows), whole[rows])
    assert np.array_equal(dropped(copy.deepcopy(layers), 0), whole)
    both = dropped(layers, 0, views=2)
    assert np.array_equal(both[:400], whole)
    assert not np.array_equal(both[400:], whole)


def test_units_rows_layers_views_epochs_and_seeds_are_drawn_independently_at_the_rate(layers):
    first = dropped(layers, 0)
    n = first.size  # 80,000 draws; 5 deviations around the expectation
    assert abs(first.mean() - 0.3) < 5 * np.sqrt(0.21 / n)
    others = [
        dropped(layers, 1),
        dropped(layers, 0, epoch=3),
        dropped(layers, 0, seed=2),
        dropped(layers, 0, views=2)[400:],
        np.roll(first, 1, axis=0),
        np.roll(first, 1, axis=2),
    ]
    for other in others:
        assert abs((first & other).mean() - 0.09) < 5 * np.sqrt(0.09 * 0.91 / n)


def test_stochastic_depth_drops_whole_rows(layers):
    found = dropped(layers, 2).reshape(400, -1)
    assert np.array_equal(found.all(axis=1), found.any(axis=1))
    assert abs(found[:, 0].mean() - 0.3) < 5 * np.sqrt(0.21 / 400)


def test_in_evaluation_nothing_is_dropped(layers):
    seed_by_row(layers)
    ones = torch.ones(400, 50)
    assert torch.equal(layers.eval()[0](ones), ones)
