"""Data sets of a folder of pictures: `folder` with labels, in a list or as subfolders, and `pictures` without any."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hashseek.retrieval.errors import BadConfig, BadDataset, suggest
from hashseek.retrieval.images import SUFFIXES
from hashseek.retrieval.label_files import (
    SPLITS,
    Item,
    LabelFile,
    OnError,
    Problem,
    check_patterns,
    find_label_file,
    read_label_file,
    refuse,
    without_labels,
)
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import (
    NameList,
    Seed,
    Share,
    Splits,
    check_label_names,
    group_items,
    join_splits,
    refuse_unused,
    unlabelled_splits,
)


def folder(
    *,
    root: str,
    split_column: str = "split",
    ignore_columns: NameList = (),
    drop_labels: NameList = (),
    labels: NameList | None = None,
    on_error: OnError = "stop",
    query_fraction: Share = 0.1,
    train_fraction: Share = 0.5,
    split_seed: Seed = 0,
) -> Splits:
    """A folder of images with a label file, or with one subfolder per class.

    Without a label file the name of a subfolder is the label of its images: `root/CLASS/...`, or `root/train/CLASS/...`
    and `root/test/CLASS/...`. If there are training images and queries but no database, the training images are the
    database, as in the protocol of PASCAL VOC.

    Args:
        root: the folder, or the label file itself; `$NAME` is taken from the environment.
        split_column: column of a label file with the split: train, query (also test, val) or database (also
            retrieval).
        ignore_columns: columns of a label file to ignore; other unknown columns are reported.
        drop_labels: patterns of labels to leave out, such as `*_r1`; images without any other label are left out, too.
        labels: keep only these labels, in this order; None keeps all that occur, sorted.
        on_error: "stop" refuses a label file with problems and broken images, "skip" leaves them out.
        query_fraction: without splits, the share of the images that become queries.
        train_fraction: without splits, the share that become training images; the rest is the database.
        split_seed: seed of a random split.

    Raises:
        BadDataset: no images or labels, bad lines under "stop", an empty split, or a label that never occurs.
        BadConfig: fractions that leave a split empty, options of a random split where there are splits, a
            `split_column` that does not exist, or columns where there is no label file.
    """
    place = expand(root)
    source = find_label_file(place)
    if source is None:
        if split_column != "split" or ignore_columns:
            raise BadConfig(
                f"split_column = {split_column!r} and ignore_columns = {list(ignore_columns)} are for a label file, "
                f"but {place} has none: leave them out"
            )
        found = _read_class_folders(place)
    else:
        found = read_label_file(source, split_column=split_column, ignore_columns=ignore_columns)
    if found.problems and on_error == "stop":
        refuse(found.source, found.problems)
    items, problems = found.items, list(found.problems)
    if not items:
        first = f"; the first problem: {problems[0]}" if problems else ": add one line per image"
        raise BadDataset(f"{found.source} has no line that can be used{first}")
    items = _drop_labels(items, drop_labels, found.source)
    if labels is not None:
        items = tuple(_keep_labels(items, labels, str(found.source)))
    names = list(labels) if labels is not None else sorted({label for item in items for label in item.labels})
    check_label_names(names, source=str(found.source))
    if all(item.split is None for item in items):
        if split_column != "split":
            raise BadConfig(
                f"{found.source} has no split in a column {split_column!r}: correct split_column, or leave it out"
            )
        items = tuple(_split(items, query_fraction=query_fraction, train_fraction=train_fraction, seed=split_seed))
    elif any(item.split is None for item in items):
        unsplit = next(item for item in items if item.split is None)
        raise BadDataset(
            f"{found.source} line {unsplit.line} has no split, but other lines do: fill the column {split_column}, or "
            "remove it"
        )
    else:
        why = f"{found.source} has a split for each image"
        drawn = {"query_fraction": query_fraction, "train_fraction": train_fraction, "split_seed": split_seed}
        refuse_unused(folder, why, **drawn)
    train_in_database = {item.split for item in items} == {"train", "query"}
    if train_in_database:
        items += tuple(replace(item, split="database") for item in items if item.split == "train")
        reason = "no image is in the database split: queries are searched in the training images"
        problems.append(Problem(str(found.source), reason, skipped=False))
    return join_splits(
        *group_items(items, names),
        names,
        source=str(found.source),
        train_in_database=train_in_database,
        problems=problems,
        on_error=on_error,
    )


def pictures(*, root: str, on_error: OnError = "stop") -> Splits:
    """Every image below a folder except hidden ones, without labels: for losses that use none.

    All images are training images. There are no queries and no database, so nothing can be evaluated.

    Args:
        root: the folder; `$NAME` is taken from the environment.
        on_error: "stop" refuses broken images, "skip" leaves them out.

    Raises:
        BadDataset: there is no such folder, or it has no images.
    """
    place = expand(root)
    if not place.is_dir():
        raise BadDataset(f"there is no folder {place}: check the path")
    found = [path for path in _images(place, "**/*") if path.is_file()]
    if not found:
        raise BadDataset(f"the folder {place} has no images ({', '.join(sorted(SUFFIXES))})")
    items = [Item(path, path.relative_to(place).as_posix(), (), "train") for path in found]
    return unlabelled_splits(items, on_error=on_error)


def _images(folder: Path, pattern: str) -> list[Path]:
    """The images below a folder that match a pattern, sorted, without hidden files and folders."""

    def is_visible(path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(folder).parts)

    return sorted(path for path in folder.glob(pattern) if path.suffix.lower() in SUFFIXES and is_visible(path))


def _read_class_folders(root: Path) -> LabelFile:
    """The images in `root/CLASS/` or `root/SPLIT/CLASS/`, without hidden files and folders."""

    def folders_of(folder: Path) -> list[Path]:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))

    folders = [path for path in folders_of(root) if _images(path, "**/*")]
    # A class may also be called "train": a split has its images in folders of classes.
    splits = [path for path in folders if path.name.lower() in SPLITS and not _images(path, "*")]
    has_splits = bool(splits) and len(splits) == len(folders)
    if splits and not has_splits:
        others = ", ".join(path.name for path in folders if path not in splits)
        raise BadDataset(
            f"{root} has the split {splits[0].name} and other folders with images ({others:.200}): move those into a "
            "split, or out of the data set"
        )
    parents = folders if has_splits else [root]
    loose = [path for place in dict.fromkeys((root, *parents)) for path in _images(place, "*")]
    problems = [Problem(str(path), "the image is not in the folder of a class") for path in loose]
    items = []
    for parent in parents:
        split = SPLITS[parent.name.lower()] if has_splits else None
        for class_folder in folders_of(parent):
            for path in _images(class_folder, "**/*"):
                items.append(Item(path, path.relative_to(root).as_posix(), (class_folder.name,), split))
    classes = sorted({item.labels[0] for item in items})
    if len(classes) < 2:
        found = f"images of only one class, {classes[0]!r}" if classes else "no subfolders with images"
        raise BadDataset(
            f"the folder {root} has no labels.csv, no labels.jsonl and {found}: add a list of its images with their "
            "labels, or sort the images into one subfolder per class; to train without labels, set data.name=pictures "
            "and loss.name=bihalf"
        )
    return LabelFile(root, tuple(items), tuple(problems))


def _drop_labels(items: Sequence[Item], patterns: Sequence[str], source: Path) -> tuple[Item, ...]:
    """The items without labels that match a pattern; those without any other label are left out."""
    check_patterns(patterns, {label for item in items for label in item.labels}, source=source)
    kept = (replace(item, labels=without_labels(item.labels, patterns)) for item in items)
    return tuple(item for item in kept if item.labels)


def _keep_labels(items: Sequence[Item], labels: Sequence[str], source: str) -> list[Item]:
    occurring = {label for item in items for label in item.labels}
    for label in labels:
        if label not in occurring:
            raise BadDataset(f"the label {label!r} never occurs in {source}: {suggest(label, sorted(occurring))}")
    wanted = set(labels)
    kept = [replace(item, labels=tuple(name for name in item.labels if name in wanted)) for item in items]
    return [item for item in kept if item.labels]


def _split(items: Sequence[Item], *, query_fraction: float, train_fraction: float, seed: int) -> list[Item]:
    n_query, n_train = round(len(items) * query_fraction), round(len(items) * train_fraction)
    if n_query < 1 or n_train < 1 or n_query + n_train >= len(items):
        raise BadConfig(
            f"query_fraction {query_fraction} and train_fraction {train_fraction} of {len(items)} images leave a split "
            "empty: both must be above 0, together below 1, and there must be enough images"
        )
    # Sorted by name first, so that the split does not depend on the order of the list.
    by_name = sorted(items, key=lambda item: item.file)
    order = np.random.default_rng(seed).permutation(len(items))
    split = np.full(len(items), "database", dtype=object)
    split[order[:n_query]] = "query"
    split[order[n_query : n_query + n_train]] = "train"
    return [replace(item, split=str(name)) for item, name in zip(by_name, split, strict=True)]
