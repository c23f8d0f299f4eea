"""Data sets `voc2007` and `voc2012`: PASCAL Visual Object Classes, 20 labels, read from the official annotations."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import OnError
from hashseek.training.data.download import Archive, read_or_download
from hashseek.training.data.image_table import ImageTable, Incomplete, first_folder, prepared, read_lines, split_table
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import Splits

LABELS = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_HOST = "http://host.robots.ox.ac.uk/pascal/VOC"
ARCHIVES = {  # the checksums are those of torchvision
    2007: (
        Archive(f"{_HOST}/voc2007/VOCtrainval_06-Nov-2007.tar", "c52e279531787c972589f7e41ab4ae64"),
        Archive(f"{_HOST}/voc2007/VOCtest_06-Nov-2007.tar", "b6e924de25625d8de591ea690078ad9f"),
    ),
    2012: (Archive(f"{_HOST}/voc2012/VOCtrainval_11-May-2012.tar", "6cd6e144f989b92b3379bac3b3de84fd"),),
}
# The lists of training images and of queries; sizes of query, train and database.
_OFFICIAL = {2007: ("trainval", "test", (4952, 5011, 5011)), 2012: ("train", "val", (5823, 5717, 5717))}


def voc2007(*, root: str, download: bool = False, on_error: OnError = "stop") -> Splits:
    """PASCAL VOC 2007: trainval (5,011) is training set and database, test (4,952) has the queries; 20 labels.

    Args:
        root: the folder that holds `VOCdevkit`.
        download: fetch the official archives (0.9 GB) if images or annotations are missing.
        on_error: "stop" refuses missing images, "skip" leaves them out.

    Raises:
        BadDataset: images or annotations are missing or damaged.

    Source: HyP2 (Xu et al., ACM MM 2022), whose code has the same sets; objects marked difficult count.
    """
    return _official(expand(root), 2007, download=download, on_error=on_error)


def voc2012(*, root: str, download: bool = False, on_error: OnError = "stop") -> Splits:
    """PASCAL VOC 2012: train (5,717) is training set and database, val (5,823) has the queries; 20 labels.

    Args:
        root: the folder that holds `VOCdevkit`.
        download: fetch the official archive (2 GB) if images or annotations are missing.
        on_error: "stop" refuses missing images, "skip" leaves them out.

    Raises:
        BadDataset: images or annotations are missing or damaged.

    Source: HyP2 (Xu et al., ACM MM 2022), whose code has the same sets; objects marked difficult count.
    """
    return _official(expand(root), 2012, download=download, on_error=on_error)


def _official(root: Path, year: int, *, download: bool, on_error: OnError) -> Splits:
    train, query, published = _OFFICIAL[year]

    def read(mode: OnError) -> Splits:
        folder = first_folder(root, (f"VOCdevkit/VOC{year}", f"VOC{year}"), what=f"the official PASCAL VOC {year}")
        listed = folder / "ImageSets" / "Main"
        trained, asked = (read_lines(listed / f"{name}.txt", what=f"the list {name}.txt") for name in (train, query))
        table = _annotated(folder, [*trained, *asked])
        first = np.arange(len(trained))
        rows = {"train": first, "query": np.arange(len(trained), len(table.files)), "database": first}
        return split_table(
            table,
            rows,
            root=folder,
            source=f"VOC{year}",
            train_in_database=True,
            published=published,
            on_error=mode,
        )

    return read_or_download(read, ARCHIVES[year], root, download=download, on_error=on_error)


def _annotated(folder: Path, ids: Sequence[str]) -> ImageTable:
    """The images `ids` with the labels of all their objects, including difficult ones."""
    files = [folder / "Annotations" / f"{name}.xml" for name in ids]

    def build() -> ImageTable:
        labels = np.zeros((len(ids), len(LABELS)), np.uint8)
        for row, file in enumerate(files):
            labels[row] = _labels_of(file)
        return ImageTable(tuple(f"JPEGImages/{name}.jpg" for name in ids), labels, LABELS)

    return prepared("voc 1", files, build)


def _labels_of(file: Path) -> list[int]:
    try:
        objects = ET.parse(file).getroot().findall("object")
    except ET.ParseError as error:
        raise Incomplete(f"{file} is damaged ({error})") from None
    # Parts of an object (head, hand, foot) are nested deeper; their names are not labels.
    names = {found.findtext("name", "") for found in objects}
    unknown = names.difference(LABELS)
    if unknown:
        raise BadDataset(f"{file} has an object {min(unknown)!r}, which is not one of the 20 labels of VOC")
    return [int(label in names) for label in LABELS]
