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


def test_the_fingerprint_tells_to_which_split_an_image_belongs():
    def fingerprint(*train: int, label: int = 1) -> str:
        rows = {"train": train, "query": sorted({*range(4)} - {*train}), "database": range(4, 6)}
        images = Split(tuple(Path(f"{row}.png") for row in range(6)), np.full((6, 2), label, np.uint8), tuple("012345"))
        return join_splits({name: images.take(rows[name]) for name in NAMES}, None, "ab", source="mine").fingerprint

    assert fingerprint(0, 1) == fingerprint(0, 1)
    assert len({fingerprint(0, 1), fingerprint(0, 2), fingerprint(0, 1, 2), fingerprint(0, 1, label=0)}) == 4


@pytest.mark.parametrize("other", ["train", "database"])
@pytest.mark.parametrize("train_in_database", [False, True])
def test_a_query_is_in_no_other_split(other, train_in_database):
    labels = np.eye(2, dtype=np.uint8)
    files = {name: [f"{name} 0", f"{name} 1"] for name in NAMES}
    files[other][1] = "query 0"
    parts = {name: Split(tuple(map(Path, files[name])), labels, tuple(files[name])) for name in NAMES}
    with pytest.raises(BadDataset):
        join_splits(parts, None, ("a", "b"), source="mine", train_in_database=train_in_database)
