"""Data set `mirflickr`: MIRFLICKR-25000, 38 labels (24 topics, and `_r1` where 14 of them are what a picture shows)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import OnError, check_patterns, without_labels
from hashseek.training.data.download import Archive, read_or_download
from hashseek.training.data.image_table import (
    ImageTable,
    Incomplete,
    draw,
    first_folder,
    read_lines,
    split_table,
    with_remedy,
)
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import NameList, Rows, Seed, Splits, refuse_unused

LABELS = (
    *("animals", "baby", "baby_r1", "bird", "bird_r1", "car", "car_r1", "clouds", "clouds_r1", "dog", "dog_r1"),
    *("female", "female_r1", "flower", "flower_r1", "food", "indoor", "lake", "male", "male_r1", "night", "night_r1"),
    *("people", "people_r1", "plant_life", "portrait", "portrait_r1", "river", "river_r1", "sea", "sea_r1", "sky"),
    *("structures", "sunset", "transport", "tree", "tree_r1", "water"),
)
N_IMAGES = 25000
_ANNOTATIONS = "mirflickr25k_annotations_v080"
_HOST = "https://press.liacs.nl/mirflickr/mirflickr25k.v3b"
ARCHIVES = (
    Archive(f"{_HOST}/mirflickr25k.zip", "a23d0a8564ee84cda5622a6c2f947785"),  # as given on the authors' page
    Archive(f"{_HOST}/{_ANNOTATIONS}.zip", None, into=_ANNOTATIONS),
)
_PUBLISHED = {"hyp2": (1000, 4000, 19581), "deephash": (1000, 4000, 20000)}


def mirflickr(
    *,
    root: str,
    protocol: Literal["hyp2", "deephash"] = "hyp2",
    lists: str | None = None,
    n_query: int = 1000,
    n_train: int = 4000,
    split_seed: Seed = 0,
    drop_labels: NameList = (),
    download: bool = False,
    on_error: OnError = "stop",
) -> Splits:
    """MIRFLICKR-25000: 24,581 labelled images, 38 labels; 1,000 queries, 4,000 training images, 19,581 database.

    Args:
        root: folder with `mirflickr` (im1.jpg to im25000.jpg) and `mirflickr25k_annotations_v080`, as the official
            archives unpack.
        protocol: "hyp2" leaves out the 419 images without labels; "deephash" keeps them, with 20,000 in the database.
        lists: HyP2's repository, whose flickr.txt defines the splits; None draws them at random.
        n_query: queries of a random split.
        n_train: training images of a random split; the rest is its database.
        split_seed: seed of a random split.
        drop_labels: patterns of labels to leave out, such as `*_r1`.
        download: fetch the official archives (3.1 GB) if images or annotations are missing.
        on_error: "stop" refuses missing images, "skip" leaves them out.

    Raises:
        BadDataset: images, annotations or HyP2's files are missing or damaged.
        BadConfig: a random split with an empty part, or options of a random split where the splits are given.

    Source: Huiskes and Lew, ACM MIR 2008; HyP2 (Xu et al., ACM MM 2022), Table 2.
    """
    folder = expand(root)

    def read(mode: OnError) -> Splits:
        table = _annotated(folder)
        pictures = first_folder(folder, ("mirflickr", "images"), what="the pictures im1.jpg, ...")
        if drop_labels:
            table = _without_labels(table, drop_labels, folder)
        kept = np.flatnonzero(table.labels.any(axis=1)) if protocol == "hyp2" else np.arange(len(table.files))
        if lists is not None:
            why = f"{lists} defines the splits"
            refuse_unused(mirflickr, why, n_query=n_query, n_train=n_train, split_seed=split_seed)
            rows = {split: part[np.isin(part, kept)] for split, part in _read_hyp2(expand(lists), table).items()}
        else:
            drawn = draw(len(kept), n_query=n_query, n_train=n_train, seed=split_seed)
            rows = {split: kept[part] for split, part in drawn.items()}
        return split_table(
            table,
            rows,
            root=pictures,
            source="MIRFLICKR",
            published=_PUBLISHED[protocol],
            on_error=mode,
        )

    return read_or_download(read, ARCHIVES, folder, download=download, on_error=on_error)


def _annotated(root: Path) -> ImageTable:
    """All images with the labels of the official annotations: a file per label, an image number per line."""
    folder = first_folder(root, (_ANNOTATIONS, "annotations"), what="the annotations of MIRFLICKR")
    labels = np.zeros((N_IMAGES, len(LABELS)), np.uint8)
    for column, label in enumerate(LABELS):
        file = folder / f"{label}.txt"
        lines = read_lines(file, what="a file of annotations")
        numbers = [int(line) if line.isascii() and line.isdigit() else 0 for line in lines]
        bad = next((line for line, number in zip(lines, numbers, strict=True) if not 1 <= number <= N_IMAGES), None)
        if bad is not None:
            raise Incomplete(f"{file} has the line {bad!r}, not an image number from 1 to {N_IMAGES}")
        labels[np.array(numbers, np.int64) - 1, column] = 1
    return ImageTable(tuple(f"im{number}.jpg" for number in range(1, N_IMAGES + 1)), labels, LABELS)


def _read_hyp2(folder: Path, table: ImageTable) -> dict[str, Rows]:
    """HyP2's permutation: its first 1,000 numbers are the queries, the next 4,000 the training images."""
    images = folder / "data" / "flickr25k" / "img.txt"
    with with_remedy("set lists to the whole repository of HyP2; the data set lists reads train.txt, ..."):
        names = read_lines(images, what="HyP2's list of images")
        order_file = folder / "flickr.txt"
        text = " ".join(read_lines(order_file, what="HyP2's permutation"))
    row_of = {file: row for row, file in enumerate(table.files)}
    if unknown := [name for name in names if name not in row_of]:
        raise BadDataset(f"{images} lists {unknown[0]!r}, which is not an image of MIRFLICKR: correct it")
    try:
        order = np.array(json.loads(text), np.int64)
    except (ValueError, TypeError) as error:
        raise BadDataset(f"{order_file} is not a permutation of {len(names)} images: {error}") from None
    if not np.array_equal(np.sort(order), np.arange(len(names))):
        raise BadDataset(f"{order_file} is not a permutation of the {len(names)} images of {images}")
    rows = np.array([row_of[name] for name in names], np.int64)[order]
    return {"query": rows[:1000], "train": rows[1000:5000], "database": rows[5000:]}


def _without_labels(table: ImageTable, patterns: Sequence[str], source: Path) -> ImageTable:
    check_patterns(patterns, LABELS, source=source)
    names = without_labels(LABELS, patterns)
    return replace(table, labels=table.labels[:, [LABELS.index(name) for name in names]], label_names=names)
