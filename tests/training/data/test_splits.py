"""What every data set is checked for, whoever wrote it."""

from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadDataset
from hashseek.training.data.splits import NAMES, Split, join_splits


def test_labels_other_than_0_and_1_are_refused_before_training():
    def joined(value: int):
        parts = {
            name: Split((Path(f"{name}.png"),), np.array([[1, value if name == "query" else 0]], np.uint8), (name,))
            for name in NAMES
        }
        return join_splits(parts, None, ("a", "b"), source="mine")

    assert joined(1).query.labels.tolist() == [[1, 1]]
    with pytest.raises(BadDataset, match="query .*mine"):
        joined(2)
