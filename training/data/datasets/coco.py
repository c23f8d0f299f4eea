"""Data set `coco`: MS-COCO 2014 or 2017, 80 labels: the categories of the objects in an image."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import OnError
from hashseek.training.data.download import Archive, read_or_download
from hashseek.training.data.image_table import ImageTable, Incomplete, draw, first_folder, prepared, split_table
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import Seed, Splits, refuse_unused

_HOST = "http://images.cocodataset.org"
# Checksums as widely published; two different ones are published for train2014.zip, so it has none here.
ARCHIVES = {
    2014: (
        Archive(f"{_HOST}/annotations/annotations_trainval2014.zip", "0a379cfc70b0e71301e0f377548639bd"),
        Archive(f"{_HOST}/zips/train2014.zip", None),
        Archive(f"{_HOST}/zips/val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3"),
    ),
    2017: (
        Archive(f"{_HOST}/annotations/annotations_trainval2017.zip", "f4bbac642086de4f52a3fdda2de5fa2c"),
        Archive(f"{_HOST}/zips/train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2"),
        Archive(f"{_HOST}/zips/val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80"),
    ),
}
_OFFICIAL = {2014: (40137, 82081, 82081), 2017: (4952, 117266, 117266)}  # query, train, database: images with objects
# Outlines of objects are most of an annotation file, and nothing here needs them.
_OUTLINE = re.compile(rb'("segmentation"\s*:\s*)(?:\[[\[\]\d\s.,eE+-]*\]|\{[^{}]*\})')


def coco(
    *,
    root: str,
    year: Literal[2014, 2017] = 2014,
    protocol: Literal["hashing", "official"] = "hashing",
    n_query: int = 5000,
    n_train: int = 10000,
    split_seed: Seed = 0,
    train_in_database: bool = False,
    download: bool = False,
    on_error: OnError = "stop",
) -> Splits:
    """MS-COCO 2014 or 2017: 122,218 images with objects, 80 labels; 5,000 queries, 10,000 training images, the rest.

    Args:
        root: folder with `annotations`, `train2014` and `val2014` (or 2017), as the official archives unpack.
        year: year of the data set; both have the same images in different official splits.
        protocol: "hashing" pools and splits all images; "official" has train as training set and database, val as
            queries.
        n_query: queries of a random split.
        n_train: training images of a random split; the rest is its database.
        split_seed: seed of a random split.
        train_in_database: training images are also in the database.
        download: fetch the official archives (19 GB) if images or annotations are missing.
        on_error: "stop" refuses missing images, "skip" leaves them out.

    Raises:
        BadDataset: images or annotations are missing or damaged.
        BadConfig: an impossible split, or options of a random split without one.

    Source: Lin et al., ECCV 2014; HashNet (Cao et al., ICCV 2017).
    """
    folder = expand(root)
    if protocol == "official":
        why = "the protocol official defines the splits"
        refuse_unused(coco, why, n_query=n_query, n_train=n_train, split_seed=split_seed)

    def read(mode: OnError) -> Splits:
        pictures = first_folder(folder, ("images", "."), what=f"MS-COCO {year}")
        table = _annotated(folder, year)
        published = (5000, 10000, 117218 if train_in_database else 107218)
        if protocol == "official":
            published = _OFFICIAL[year]
            is_train = np.array([file.startswith("train") for file in table.files])
            rows = {"train": np.flatnonzero(is_train), "query": np.flatnonzero(~is_train)}
            rows["database"] = rows["train"]
        else:
            rows = draw(len(table.files), n_query=n_query, n_train=n_train, seed=split_seed)
        return split_table(
            table,
            rows,
            root=pictures,
            source=f"COCO {year}",
            train_in_database=train_in_database or protocol == "official",
            published=published,
            on_error=mode,
        )

    return read_or_download(read, ARCHIVES[year], folder, download=download, on_error=on_error)


def _annotated(root: Path, year: int) -> ImageTable:
    """All images that have an object, of train and then of val."""
    parts = {f"{part}{year}": root / "annotations" / f"instances_{part}{year}.json" for part in ("train", "val")}

    def build() -> ImageTable:
        tables = [_read_instances(file, folder) for folder, file in parts.items()]
        if tables[0].label_names != tables[1].label_names:
            raise BadDataset(f"the annotations in {root / 'annotations'} have different categories for train and val")
        files = tuple(file for table in tables for file in table.files)
        return ImageTable(files, np.concatenate([table.labels for table in tables]), tables[0].label_names)

    return prepared("coco 1", list(parts.values()), build)


def _read_instances(file: Path, folder: str) -> ImageTable:
    """The images of one annotation file that have an object, with labels in the order of the categories' ids."""
    try:
        content: dict[str, Any] = json.loads(_OUTLINE.sub(rb"\g<1>0", file.read_bytes()))
        names = {category["id"]: category["name"] for category in content["categories"]}
        files = {image["id"]: image["file_name"] for image in content["images"]}
        pairs = [(found["image_id"], found["category_id"]) for found in content["annotations"]]
        column = {category: index for index, category in enumerate(sorted(names))}
        row = {image: index for index, image in enumerate(files)}
        labels = np.zeros((len(files), len(names)), np.uint8)
        labels[[row[image] for image, _ in pairs], [column[category] for _, category in pairs]] = 1
    except json.JSONDecodeError as error:
        raise Incomplete(f"{file} is truncated or not JSON ({error.msg} at byte {error.pos:,})") from None
    except UnicodeDecodeError as error:
        raise Incomplete(f"{file} is damaged: it is not UTF-8 at byte {error.start:,}") from None
    except (KeyError, TypeError) as error:
        raise Incomplete(f"{file} is not a COCO instances file (it lacks {error})") from None
    table = ImageTable(
        tuple(f"{folder}/{name}" for name in files.values()), labels, tuple(names[key] for key in sorted(names))
    )
    return table.take(np.flatnonzero(labels.any(axis=1)))
