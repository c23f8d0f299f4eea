"""What epochs and settings are chosen by: the validation part searched among training images, or among itself."""

import numpy as np
import pytest
from lightning_fabric import Fabric

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import parse_config
from hashseek.training.data.batches import Source
from hashseek.training.loop.validation import validate, validation_part

# Rows 0 to 2 are trained on, 3 to 5 validate.
CODES = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
LABELS = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [0, 1], [1, 1]], np.uint8)


def config(**train):
    content = {
        "data": {"name": "scene"},
        "model": {"backbone": "mlp:3-4", "n_bits": 4},
        "train": {"device": "cpu", "val_n": 10, **train},
    }
    return parse_config(content, source="test")


def score(**train):
    source = Source(batches=lambda *_: iter(()), encode=lambda _, rows: (2 * CODES[rows] - 1).astype(np.float32))
    fabric = Fabric(accelerator="cpu", devices=1)
    model = HashModel(backbone="mlp:3-4", n_bits=4)
    return validate(fabric, source, model, LABELS, np.arange(3), np.arange(3, 6), config(**train))


def test_queries_among_training_images_worked_by_hand():
    # Row 3 finds 0 (relevant), 1, 2 (relevant); row 4 finds 1 (relevant), 0, 2; row 5 finds 2, 1 and 0, all relevant.
    assert score() == pytest.approx(((1 + 2 / 3) / 2 + 1 + 1) / 3)


def test_queries_among_themselves_worked_by_hand_without_their_own_image():
    # Row 3 finds 4, then 5 (relevant); row 4 finds 3, then 5 (relevant); row 5 finds 4 and 3, both relevant.
    assert score(val_database="held-out") == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)


def test_one_image_cannot_be_searched_in_itself():
    assert len(validation_part(10, config(val_fraction=0.1))[1]) == 1
    with pytest.raises(BadDataset, match="val_fraction 0.1 of 10 training images leaves 1: raise it"):
        validation_part(10, config(val_fraction=0.1, val_database="held-out"))
    fit_rows, val_rows = validation_part(10, config(val_fraction=0.2, val_database="held-out"))
    assert sorted([*fit_rows, *val_rows]) == list(range(10))
