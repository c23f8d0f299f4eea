"""Data sets, one file each: name -> function giving `Splits(train, query, database)`.

Adding a data set is one function with keyword options and one line in `DATASETS`.
"""

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hashseek.retrieval.errors import BadConfig
from hashseek.training.data.datasets.coco import coco
from hashseek.training.data.datasets.folder import expand, folder
from hashseek.training.data.datasets.lists import lists
from hashseek.training.data.datasets.mirflickr import mirflickr
from hashseek.training.data.datasets.nuswide import nuswide
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.datasets.shards import shards
from hashseek.training.data.datasets.vectors import cal500, emotions, scene, yeast
from hashseek.training.data.datasets.vectors import vectors as any_vectors
from hashseek.training.data.datasets.voc import voc2007, voc2012
from hashseek.training.data.splits import Split, Splits

__all__ = ["DATASETS", "Split", "Splits", "build_splits", "shapes"]


def shapes(
    *,
    root: str = ".demo/shapes",
    n_query: int = 400,
    n_train: int = 3000,
    n_database: int = 3600,
    size: int = 160,
    seed: int = 0,
) -> Splits:
    """The built-in set: scenes of simple things, 18 labels, rendered on first use.

    Args:
        root: folder that the pictures and their list are rendered into.
        n_query: queries.
        n_train: training images.
        n_database: images of the database.
        size: pixels a side.
        seed: another one, other pictures.

    Raises:
        BadDataset: `root` holds something else.
    """
    target = Path(expand(root))
    render_shapes(target, n_query=n_query, n_train=n_train, n_database=n_database, size=size, seed=seed)
    return folder(root=str(target))


DATASETS: dict[str, Callable[..., Splits]] = {
    "shapes": shapes,
    "folder": folder,
    "lists": lists,
    "shards": shards,
    "voc2007": voc2007,
    "voc2012": voc2012,
    "mirflickr": mirflickr,
    "nuswide": nuswide,
    "coco": coco,
    "scene": scene,
    "yeast": yeast,
    "emotions": emotions,
    "cal500": cal500,
    "vectors": any_vectors,
}


def build_splits(name: str, **options: Any) -> Splits:
    """The splits of data set `name`.

    Raises:
        BadConfig: unknown data set, or unknown or missing option.
        BadDataset: the data are missing or inconsistent.
    """
    if name not in DATASETS:
        raise BadConfig(f"there is no data set {name!r}: choose one of {', '.join(DATASETS)}")
    parameters = inspect.signature(DATASETS[name]).parameters
    for option in options:
        if option not in parameters:
            close = difflib.get_close_matches(option, parameters, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(parameters)}"
            raise BadConfig(f"the data set {name!r} has no option {option!r}: {hint}")
    for option, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise BadConfig(f"the data set {name!r} needs the option {option!r}")
    return DATASETS[name](**options)
