"""A small data set that the command-line tests share."""

from pathlib import Path

import pytest

from hashseek.training.data.datasets.shapes import render_shapes


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> Path:
    """The built-in data set: 8 queries, 40 training images, 20 in the database. Not to be written to."""
    root = tmp_path_factory.mktemp("shapes")
    render_shapes(root, n_query=8, n_train=40, n_database=20, size=48, seed=3)
    return root
