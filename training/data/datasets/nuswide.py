"""Data set `nuswide`: NUS-WIDE, 81 labels or the 21 most frequent of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.label_files import OnError
from hashseek.training.data.image_table import (
    ImageTable,
    Incomplete,
    draw,
    draw_per_label,
    first_folder,
    prepared,
    read_lines,
    split_table,
    with_remedy,
)
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import Labels, Seed, Splits

_REMEDY = (
    "get Groundtruth, ImageList and ConceptsList from lms.comp.nus.edu.sg/research/NUS-WIDE.htm, request the "
    "images there, and put everything in root"
)


@with_remedy(_REMEDY)
def nuswide(
    *,
    root: str,
    n_labels: int = 21,
    n_query: int | None = None,
    n_train: int | None = None,
    split_seed: Seed = 0,
    train_in_database: bool = False,
    on_error: OnError = "stop",
) -> Splits:
    """NUS-WIDE: 195,834 images with the 21 most frequent labels (2,100 / 10,500 / rest), or all 81 labels.

    Args:
        root: folder with `Flickr` (or `images`), `Groundtruth`, `ImageList` and `ConceptsList`, as published.
        n_labels: use the most frequent 21 labels (or another number), or all 81; images with none are left out.
        n_query: queries; None: 100 per label (2,100), or 5,000 for more than 21 labels.
        n_train: training images; None: 500 per label (10,500), or 10,000 for more than 21 labels.
        split_seed: seed of the random split.
        train_in_database: training images are also in the database, as in DeepHash-pytorch.
        on_error: "stop" refuses missing images (many have left Flickr), "skip" leaves them out.

    Raises:
        BadDataset: images or labels are missing or damaged.
        BadConfig: n_labels, n_query or n_train outside its limits.

    Source: Chua et al., CIVR 2009; HyP2 (Xu et al., ACM MM 2022), Table 2.
    """
    folder = expand(root)
    table = _most_frequent(_annotated(folder), n_labels)
    per_label = n_labels <= 21
    n_query = (100 * n_labels if per_label else 5000) if n_query is None else n_query
    n_train = (500 * n_labels if per_label else 10000) if n_train is None else n_train
    sizes = {"n_query": n_query, "n_train": n_train, "seed": split_seed}
    if per_label:
        rows = draw_per_label(table.labels, **sizes)
    else:
        rows = draw(len(table.files), **sizes)
    pictures = first_folder(folder, ("Flickr", "images", "Images"), what="the pictures of NUS-WIDE")
    return split_table(
        _placed(table, pictures),
        rows,
        root=pictures,
        source="NUS-WIDE",
        train_in_database=train_in_database,
        published=(2100, 10500, 193734 if train_in_database else 183234) if n_labels == 21 else None,
        on_error=on_error,
    )


def _annotated(root: Path) -> ImageTable:
    """All images with all labels."""
    truth = first_folder(root, ("Groundtruth/AllLabels", "GroundTruth/AllLabels"), what="the labels of NUS-WIDE")
    images = first_folder(root, ("ImageList", "."), what="the list of images") / "Imagelist.txt"
    concepts = first_folder(root, ("ConceptsList", "."), what="the list of labels") / "Concepts81.txt"
    names = read_lines(concepts, what="the list of the 81 labels")
    columns = [truth / f"Labels_{name}.txt" for name in names]

    def build() -> ImageTable:
        files = tuple(file.replace("\\", "/") for file in read_lines(images, what="the list of images"))
        return ImageTable(files, np.stack([_read_column(file, len(files)) for file in columns], axis=1), tuple(names))

    return prepared("nuswide 1", [concepts, images, *columns], build)


def _read_column(file: Path, n_images: int) -> Labels:
    """One label of all images: a 0 or 1 per line."""
    digits = np.frombuffer(file.read_bytes().translate(None, b" \t\r\n"), np.uint8) - ord("0")
    if (digits > 1).any():
        raise Incomplete(f"{file} has lines other than 0 or 1")
    if len(digits) != n_images:
        raise Incomplete(f"{file} has {len(digits):,} lines for {n_images:,} images")
    return digits


def _most_frequent(table: ImageTable, n_labels: int) -> ImageTable:
    """The images with at least one of the `n_labels` most frequent labels, which keep their order."""
    if not 2 <= n_labels <= len(table.label_names):
        raise BadConfig(f"n_labels must be 2 to {len(table.label_names)}, got {n_labels}")
    counts = table.labels.sum(axis=0, dtype=np.int64)
    columns = np.sort(np.argsort(-counts, kind="stable")[:n_labels])
    labels = table.labels[:, columns]
    names = tuple(table.label_names[column] for column in columns)
    return ImageTable(table.files, labels, names).take(np.flatnonzero(labels.any(axis=1)))


def _placed(table: ImageTable, pictures: Path) -> ImageTable:
    """The table with paths below `pictures`: one folder per category, as published, or all images in one folder."""
    if (pictures / table.files[0].partition("/")[0]).is_dir():
        return table
    return replace(table, files=tuple(file.rpartition("/")[2] for file in table.files))
