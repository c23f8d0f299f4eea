"""Data sets of feature vectors: an npz file with arrays X (n, D), Y (n, C) 0/1, label_names (C,) and optionally split
(n,): "train" or "test" for each row, or "none" for all.

The query split is the official test part; the training part is both training split and database, as usual for such
small data sets. Vectors are not standardised.
"""

import hashlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadConfig, BadDataset, first_line
from hashseek.retrieval.vectors import check_vectors
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import Seed, Share, Split, Splits, check_label_names, refuse_unused

HOME = "$HASHSEEK_DATA/vectors"


def scene(*, root: str = HOME) -> Splits:
    """Scene (Boutell et al., 2004): 2,407 pictures as 294 colour moments, 6 labels; 1,211 train, 1,196 query.

    Args:
        root: the folder that holds scene.npz.
    """
    return vectors(path=f"{root}/scene.npz")


def yeast(*, root: str = HOME) -> Splits:
    """Yeast (Elisseeff and Weston, 2001): 2,417 genes as 103 numbers, 14 labels; 1,500 train, 917 query.

    Args:
        root: the folder that holds yeast.npz.
    """
    return vectors(path=f"{root}/yeast.npz")


def emotions(*, root: str = HOME) -> Splits:
    """Emotions (Trohidis et al., 2008): 593 pieces of music as 72 numbers, 6 labels; a random split.

    Args:
        root: the folder that holds emotions.npz.
    """
    return vectors(path=f"{root}/emotions.npz")


def cal500(*, root: str = HOME) -> Splits:
    """CAL500 (Turnbull et al., 2008): 502 songs as 68 numbers, 174 labels; a random split.

    Args:
        root: the folder that holds CAL500.npz.
    """
    return vectors(path=f"{root}/CAL500.npz")


def vectors(*, path: str, query_fraction: Share = 0.3, split_seed: Seed = 0) -> Splits:
    """Your own npz file: X (n, D), Y (n, C) of 0 and 1, label_names, and optionally split.

    Args:
        path: the file; `$NAME` is taken from the environment.
        query_fraction: share of the rows that become queries if the file has no split.
        split_seed: seed of a random split.

    Raises:
        BadDataset: no such file, not an npz, an array missing, of a wrong shape or with wrong values, or an empty part.
        BadConfig: a fraction that leaves a split empty, options of a random split for a file with an official one,
            or an unset variable in `path`.
    """
    file = expand(path)
    x, y, names, split = _read(file)
    if split is not None:
        why = f"{file} has an official split"
        refuse_unused(vectors, why, query_fraction=query_fraction, split_seed=split_seed)
    is_query = _drawn(len(x), query_fraction, split_seed, file) if split is None else split == "test"
    parts = {"train": np.flatnonzero(~is_query), "query": np.flatnonzero(is_query)}
    digest = hashlib.sha256()
    for array in (x, y, is_query):
        digest.update(np.ascontiguousarray(array).tobytes())
    digest.update("\n".join(names).encode())
    made = {
        part: Split(
            tuple(file.with_name(f"{file.name}#{row}") for row in rows),
            y[rows],
            tuple(f"row {row} of {file.name}" for row in rows),
            x[rows],
        )
        for part, rows in parts.items()
    }
    return Splits(made["train"], made["query"], made["train"], names, digest.hexdigest())


def _read(
    file: Path,
) -> tuple[NDArray[np.float32], NDArray[np.uint8], tuple[str, ...], NDArray[np.str_] | None]:
    """X, Y, label names, and the split or None, all checked."""
    if not file.is_file():
        raise BadDataset(f"there is no file {file}: use an npz file with X, Y and label_names")
    try:
        # Opened here, because numpy does not close a damaged archive.
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in ("X", "Y", "label_names", "split") if name in arrays}
    except (BadZipFile, EOFError, ValueError, OSError, AttributeError, TypeError) as error:
        raise BadDataset(
            f"{file} is not an npz file of plain arrays ({first_line(error)}): write it with numpy.savez"
        ) from None
    for name in ("X", "Y", "label_names"):
        if name not in found:
            raise BadDataset(f"{file} has no array {name}: it needs X (n, D), Y (n, C) and label_names (C,)")
    x, y, names = found["X"], found["Y"], tuple(str(name) for name in found["label_names"].ravel())
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or y.shape[1] != len(names) or x.size == 0:
        raise BadDataset(
            f"the arrays of {file} do not match: X is {x.shape}, Y is {y.shape}, and there are {len(names)} label "
            "names; X must be (n, D), Y (n, C)"
        )
    check_label_names(names, source=str(file))
    check_vectors(x, name=f"X of {file}")
    if not np.isin(y, (0, 1)).all():
        raise BadDataset(f"Y of {file} has {y[~np.isin(y, (0, 1))][0]}: labels must be 0 or 1")
    return x.astype(np.float32), y.astype(np.uint8), names, _official(found.get("split"), len(x), file)


def _official(split: NDArray[Any] | None, n: int, file: Path) -> NDArray[np.str_] | None:
    """The checked split of n rows; None if there is no split, or it is "none" for every row."""
    if split is None:
        return None
    split = split.astype(str)
    values = sorted(set(split.ravel().tolist()))
    if values == ["none"]:
        return None
    if split.shape != (n,) or values != ["test", "train"]:
        raise BadDataset(
            f"split of {file} must be train or test for each of the {n} rows, and both must occur; it has shape "
            f"{split.shape} and the values {', '.join(values[:5])}"
        )
    return split


def _drawn(n: int, query_fraction: float, seed: int, file: Path) -> NDArray[np.bool_]:
    """Which of n rows become queries."""
    n_query = round(n * query_fraction)
    if not 1 <= n_query < n:
        raise BadConfig(
            f"query_fraction {query_fraction} of the {n} rows of {file} leaves a split empty: it must be between "
            "0 and 1"
        )
    is_query = np.zeros(n, dtype=bool)
    is_query[np.random.default_rng(seed).permutation(n)[:n_query]] = True
    return is_query
