"""Holds labels out of training, to measure how well codes retrieve labels that training never saw.

Source: Sablayrolles, Douze, Usunier and Jégou, "How should we evaluate supervised hashing?", ICASSP 2017, who hold out
a quarter of the classes. Their images have one class; here an image may have several labels, so an image with any
held-out label is left out of training, and relevance is counted by the held-out labels alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from hashseek.retrieval.errors import BadConfig, BadDataset, suggest
from hashseek.training.data.splits import Split, Splits

LabelPart = Literal["all", "seen", "held-out"]


def choose_held_out(
    label_names: Sequence[str], held_out: Sequence[str] | float | None, *, seed: int = 0
) -> tuple[str, ...]:
    """The labels to hold out, in the order of `label_names`; none for None.

    Args:
        label_names: the labels of the data set.
        held_out: names, or a share of the labels to choose at random with `seed`.

    Raises:
        BadConfig: an unknown name, or fewer than two labels on either side.
    """
    if held_out is None:
        return ()
    if isinstance(held_out, int | float):
        n = round(held_out * len(label_names))
        drawn = np.random.default_rng((seed, 0x4E1D)).permutation(len(label_names))[:n]
        chosen = {label_names[column] for column in drawn.tolist()}
        asked = f"data.held_out = {held_out} of {len(label_names)} labels"
    else:
        for name in held_out:
            if name not in label_names:
                hint = suggest(name, label_names)
                raise BadConfig(f"data.held_out names {name!r}, which is not a label of the data set: {hint}")
        chosen = set(held_out)
        asked = f"data.held_out names {len(chosen)} of {len(label_names)} labels and"
    n_seen = len(label_names) - len(chosen)
    if min(len(chosen), n_seen) < 2:
        raise BadConfig(
            f"{asked} leaves {len(chosen)} held out and {n_seen} to learn: both must be at least 2, otherwise every "
            "image is relevant to every other"
        )
    return tuple(name for name in label_names if name in chosen)


def label_part(splits: Splits, held_out: Sequence[str], part: LabelPart) -> Splits:
    """The part of the splits that evaluates a model trained without the labels `held_out`.

    Training images with a held-out label are always removed. Queries and database depend on `part`:

    "all": unchanged. "seen": images without a held-out label, and the columns of the other labels; used for training.
    "held-out": images with a held-out label, and the columns of the held-out labels.

    The fingerprint stays that of the whole data set.

    Raises:
        BadDataset: the data set lacks one of the labels, or a split would be empty.
    """
    names = splits.label_names
    if part != "all" and (missing := [name for name in held_out if name not in names]):
        raise BadDataset(
            f"the labels {', '.join(held_out)} were held out of training, but the data set has no "
            f"{', '.join(missing)}: evaluate on one that has, or with --labels all"
        )
    is_held_out = np.array([name in held_out for name in names], dtype=bool)
    columns = {"all": np.ones_like(is_held_out), "seen": ~is_held_out, "held-out": is_held_out}[part]

    def keep(split: Split, title: str, *, carries: bool | None) -> Split:
        carried = split.labels[:, is_held_out].any(axis=1)
        rows = np.arange(len(split)) if carries is None else np.flatnonzero(carried == carries)
        if not len(rows):
            which = "has one" if carries else "lacks all"
            raise BadDataset(
                f"none of the {len(split)} {title} images {which} of the held-out labels {', '.join(held_out)}: hold "
                "out other labels (data.held_out)"
            )
        chosen = split.take(rows)
        return replace(chosen, labels=np.ascontiguousarray(chosen.labels[:, columns]))

    carries = {"all": None, "seen": False, "held-out": True}[part]
    return replace(
        splits,
        train=keep(splits.train, "training", carries=False),
        query=keep(splits.query, "query", carries=carries),
        database=keep(splits.database, "database", carries=carries),
        label_names=tuple(name for name, kept in zip(names, columns, strict=True) if kept),
    )


def training_splits(splits: Splits, held_out: Sequence[str]) -> Splits:
    """The splits for training: `label_part` "seen", after checking that the held-out part can be evaluated.

    Raises:
        BadDataset: see `label_part`.
    """
    if not held_out:
        return splits
    label_part(splits, held_out, "held-out")
    return label_part(splits, held_out, "seen")
