"""Drawn pictures that the tests of the training loop share."""

from pathlib import Path

import pytest

from hashseek.training.data.datasets.shapes import render_shapes


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in data set: 10 queries, 60 training images, 20 in the database. Not to be written to."""
    root = tmp_path_factory.mktemp("shapes")
    render_shapes(root, n_query=10, n_train=60, n_database=20, size=48, seed=1)
    return root


@pytest.fixture(scope="session")
def few_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 6, 40 and 6 pictures, which are smaller."""
    root = tmp_path_factory.mktemp("few-shapes")
    render_shapes(root, n_query=6, n_train=40, n_database=6, size=32, seed=2)
    return root
