"""The score that epochs are chosen by: validation images searched among training images, or among each other."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.batches import Source, TrainingData
from hashseek.training.loop import validation
from hashseek.training.loop.validation import validate, validation_part
from support.models import run_config

# Rows 0 to 2 are trained on, 3 to 5 validate.
CODES = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
LABELS = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0, 1], [1, 1]], np.uint8)


@pytest.mark.parametrize(
    ("database", "n", "expected"),
    [
        # Row 3 finds 0 (relevant), 1, 2 (relevant); row 4 finds 1 (relevant), 0, 2; row 5 finds 2, 1, 0, all relevant.
        ("training", 10, ((1 + 2 / 3) / 2 + 1 + 1) / 3),
        ("training", 1, 1),
        # Row 3 finds 4, then 5 (relevant); row 4 finds 3, then 5 (relevant); row 5 finds 4 and 3, both relevant.
        ("held-out", 10, (1 / 2 + 1 / 2 + 1) / 3),
        ("held-out", 1, 1 / 3),
    ],
)
def test_scores_worked_by_hand(database, n, expected):
    config = run_config(
        Path(), model={"backbone": "mlp:3-4", "n_bits": 4}, train={"val_n": n, "val_database": database}
    )
    source = Source(lambda *_: iter(()), lambda _, rows: iter([torch.from_numpy(2.0 * CODES[rows] - 1)]))
    data = TrainingData(source, LABELS, torch.zeros(6, 2), np.arange(3), np.arange(3, 6))
    model = HashModel(backbone="mlp:3-4", n_bits=4)
    model.head = torch.nn.Identity()
    assert validate(Fabric(accelerator="cpu", devices=1), config, model, data) == pytest.approx(expected)
    assert not model.training


def test_a_part_of_many_training_images_is_searched_and_no_image_that_validates(monkeypatch):
    monkeypatch.setattr(validation, "MAX_DATABASE", 2)
    config, encoded = run_config(Path(), model={"backbone": "mlp:3-4", "n_bits": 4}), []

    def features(_, rows):
        encoded.append(rows.tolist())
        yield torch.from_numpy(2.0 * CODES[rows] - 1)

    data = TrainingData(Source(lambda *_: iter(()), features), LABELS, torch.zeros(6, 2), np.arange(3, 6), np.arange(3))
    model = HashModel(backbone="mlp:3-4", n_bits=4)
    model.head = torch.nn.Identity()
    validate(Fabric(accelerator="cpu", devices=1), config, model, data)
    queries, database = encoded
    assert queries == [0, 1, 2]
    assert len(database) == 2
    assert set(database) < {3, 4, 5}


def test_one_image_can_neither_be_trained_on_nor_searched_among_itself():
    def part(**train):
        return validation_part(10, run_config(Path(), train=train))

    with pytest.raises(BadDataset, match="not 1;"):
        part(val_fraction=0.9)
    assert len(part(val_fraction=0.1)[1]) == 1
    with pytest.raises(BadDataset, match="leaves 1"):
        part(val_fraction=0.1, val_database="held-out")
    fit_rows, val_rows = part(val_fraction=0.2, val_database="held-out")
    assert sorted([*fit_rows, *val_rows]) == list(range(10))
