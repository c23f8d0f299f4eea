"""Data sets, one file each: name -> function giving `Splits(train, query, database)`.

Adding a data set is one function with keyword options and one line in `DATASETS`.
"""

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrieval.errors import BadConfig
from training.datasets.folder import expand, folder
from training.datasets.shapes import render_shapes
from training.datasets.splits import Split, Splits

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
    """The built-in data set, rendered on first use into `root` (see `training.datasets.shapes`)."""
    target = Path(expand(root))
    render_shapes(target, n_query=n_query, n_train=n_train, n_database=n_database, size=size, seed=seed)
    return folder(root=str(target))


DATASETS: dict[str, Callable[..., Splits]] = {
    "folder": folder,
    "shapes": shapes,
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
