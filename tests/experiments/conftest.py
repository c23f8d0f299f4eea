"""A comparison on a few rendered pictures and a small network."""

import json
from pathlib import Path

import pytest

from hashseek.training import configs
from hashseek.training.data.datasets.shapes import render_shapes


@pytest.fixture(scope="session")
def own() -> str:
    """By its path, it is a configuration of one's own, which has no foreign gallery."""
    return str(Path(configs.__file__).parent / "mirflickr25k_mobilenet_v2_tie_aware_48.toml")


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> tuple[str, ...]:
    root = tmp_path_factory.mktemp("shapes")
    render_shapes(root, n_query=8, n_train=40, n_database=20, size=32, seed=0)
    return (
        "data.name=folder",
        f"data.root={json.dumps(str(root))}",
        "model.backbone=squeezenet1_1",
        "model.weights=none",
        "model.size=32",
        "train.batch_size=15",
        "train.precision=fp32",
    )
