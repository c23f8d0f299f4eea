"""Data set `mirflickr`: MIRFLICKR-25000, 38 labels (24 topics, and `_r1` where 14 of them are what a picture shows)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import (
    OnError,
    Problem,
    check_patterns,
    parse_labels,
    parse_split,
    read_rows,
    without_labels,
)
from hashseek.training.data.datasets.folder import expand
from hashseek.training.data.datasets.lists import NAMES_OF_LISTS, read_list
from hashseek.training.data.download import Archive, read_or_download
from hashseek.training.data.image_table import (
    Incomplete,
    Table,
    draw,
    first_folder,
    prepared,
    read_lines,
    rows_of,
    split_table,
    with_remedy,
)
from hashseek.training.data.splits import NAMES, Rows, Splits, refuse_unused

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

Listed = Mapping[str, Sequence[str]]  # split -> files


def mirflickr(
    *,
    root: str,
    protocol: Literal["hyp2", "deephash"] = "hyp2",
    lists: str | None = None,
    n_query: int = 1000,
    n_train: int = 4000,
    split_seed: int = 0,
    drop_labels: Sequence[str] = (),
    download: bool = False,
    on_error: OnError = "stop",
) -> Splits:
    """MIRFLICKR-25000: 24,581 labelled images, 38 labels; 1,000 queries, 4,000 training images, 19,581 database.

    Args:
        root: folder with `mirflickr` (im1.jpg to im25000.jpg) and `mirflickr25k_annotations_v080`, as the official
            archives unpack; or with `images` and a `labels.csv` with columns file, labels, split and deephash_split.
        protocol: "hyp2" leaves out the 419 images without labels; "deephash" keeps them, with 20,000 in the database.
        lists: the images of each split: a CSV file with the columns file and split (for deephash: deephash_split), a
            folder with train.txt, test.txt, database.txt (DeepHash-pytorch), or HyP2's repository (its flickr.txt).
            None: the columns of labels.csv, or else a random split of the sizes n_query and n_train.
        n_query: queries of a random split.
        n_train: training images of a random split; the rest is its database.
        split_seed: seed of a random split.
        drop_labels: patterns of labels to leave out, such as `*_r1`.
        download: fetch the official archives (3.1 GB) if images or annotations are missing.
        on_error: "stop" refuses missing images, "skip" leaves them out.

    Raises:
        BadDataset: images, annotations or lists are missing or damaged.
        BadConfig: a random split with an empty part, or options of a random split where the splits are given.

    Source: Huiskes and Lew, ACM MIR 2008; HyP2 (Xu et al., ACM MM 2022), Table 2; DeepHash-pytorch, data/mirflickr.
    """
    folder = Path(expand(root))

    def read(mode: OnError) -> Splits:
        own_list = folder / "labels.csv"
        listed: Listed | None = None
        if own_list.is_file():
            table, listed = _read_csv(own_list, protocol)
            pictures = folder
        else:
            table = _annotated(folder)
            pictures = first_folder(folder, ("mirflickr", "images"), what="the pictures im1.jpg, ...")
        if lists is not None:
            listed = _read_assignment(Path(expand(lists)), protocol)
        if drop_labels:
            table = _without_labels(table, drop_labels, folder)
        if listed is not None:
            why = f"{lists or own_list} defines the splits"
            refuse_unused(mirflickr, why, n_query=n_query, n_train=n_train, split_seed=split_seed)
            rows, problems = rows_of(table, listed, source=str(folder), on_error=mode)
        else:
            candidates = _labelled(table) if protocol == "hyp2" else np.arange(len(table.files))
            drawn = draw(len(candidates), n_query=n_query, n_train=n_train, seed=split_seed)
            rows, problems = {split: candidates[drawn[split]] for split in NAMES}, []
        if protocol == "hyp2":
            rows = {split: rows[split][np.isin(rows[split], _labelled(table))] for split in NAMES}
        return split_table(
            table,
            rows,
            root=pictures,
            source="MIRFLICKR",
            published=_PUBLISHED[protocol],
            problems=problems,
            on_error=mode,
        )

    return read_or_download(read, ARCHIVES, folder, download=download, on_error=on_error)


def _annotated(root: Path) -> Table:
    """All images with the labels of the official annotations: a file per label, an image number per line."""
    folder = first_folder(root, (_ANNOTATIONS, "annotations"), what="the annotations of MIRFLICKR")
    files = [folder / f"{label}.txt" for label in LABELS]

    def build() -> Table:
        labels = np.zeros((N_IMAGES, len(LABELS)), np.uint8)
        for column, file in enumerate(files):
            lines = read_lines(file, what="a file of annotations")
            numbers = [int(line) if line.isascii() and line.isdigit() else 0 for line in lines]
            bad = next((line for line, number in zip(lines, numbers, strict=True) if not 1 <= number <= N_IMAGES), None)
            if bad is not None:
                raise Incomplete(f"{file} has the line {bad!r}, not an image number from 1 to {N_IMAGES}")
            labels[np.array(numbers, np.int64) - 1, column] = 1
        return Table(tuple(f"im{number}.jpg" for number in range(1, N_IMAGES + 1)), labels, LABELS)

    return prepared("mirflickr 1", files, build)


def _read_assignment(path: Path, protocol: str) -> Listed:
    """The files of each split."""
    if path.is_file():
        return _read_csv(path, protocol)[1]
    if (path / "flickr.txt").is_file():
        return _read_hyp2(path)
    listed = {}
    for split in NAMES:
        file = path / NAMES_OF_LISTS[split]
        table, problems = read_list(file)
        if problems:
            raise BadDataset(f"{problems[0]} (in {path}): correct the list")
        if len(table.label_names) != len(LABELS):
            raise BadDataset(f"{file} has {len(table.label_names)} labels, but MIRFLICKR has 38: use its lists")
        listed[split] = table.files
    return listed


def _read_csv(file: Path, protocol: str) -> tuple[Table, Listed]:
    """All images with their labels, and the files of each split, from the columns file, labels and (deephash_)split."""
    listed: dict[str, list[str]] = {split: [] for split in NAMES}
    files, labels = [], []
    for row in read_rows(file, one_of=("file",), errors="strict"):
        if isinstance(row, Problem):
            raise BadDataset(f"{file}: {row}")
        line, values = row
        column = "deephash_split" if protocol == "deephash" and "deephash_split" in values else "split"
        split, _ = parse_split(values.get(column))
        if split is None or not values.get("file"):
            raise BadDataset(f"{file} line {line} lacks a file, or a valid split in the column {column}: correct it")
        found, _ = parse_labels(values.get("labels"))
        if unknown := [label for label in found if label not in LABELS]:
            raise BadDataset(f"{file} line {line} has {unknown[0]!r}, which is not a label of MIRFLICKR: correct it")
        listed[split].append(values["file"])
        files.append(values["file"])
        labels.append([label in found for label in LABELS])
    return Table(tuple(files), np.array(labels, np.uint8).reshape(-1, len(LABELS)), LABELS), listed


def _read_hyp2(folder: Path) -> Listed:
    """HyP2's permutation: its first 1,000 numbers are the queries, the next 4,000 the training images."""
    images = folder / "data" / "flickr25k" / "img.txt"
    with with_remedy("use the whole repository of HyP2"):
        names = read_lines(images, what="HyP2's list of images")
    try:
        order = np.array(json.loads((folder / "flickr.txt").read_text()), np.int64)
    except (ValueError, TypeError) as error:
        raise BadDataset(f"{folder / 'flickr.txt'} is not a permutation of {len(names)} images: {error}") from None
    if not np.array_equal(np.sort(order), np.arange(len(names))):
        raise BadDataset(f"{folder / 'flickr.txt'} is not a permutation of the {len(names)} images of {images}")
    parts = {"query": order[:1000], "train": order[1000:5000], "database": order[5000:]}
    return {split: [names[row] for row in rows] for split, rows in parts.items()}


def _without_labels(table: Table, patterns: Sequence[str], source: Path) -> Table:
    check_patterns(patterns, LABELS, source=source)
    names = without_labels(LABELS, patterns)
    return replace(table, labels=table.labels[:, [LABELS.index(name) for name in names]], label_names=names)


def _labelled(table: Table) -> Rows:
    return np.flatnonzero(table.labels.any(axis=1))
