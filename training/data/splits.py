"""The three splits of a retrieval data set."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.label_files import Item, OnError, Problem

Labels = NDArray[np.uint8]
Rows = NDArray[np.int64]
# Types of options, with their limits.
Seed = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
NameList = Annotated[Sequence[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]

NAMES = ("train", "query", "database")


@dataclass(frozen=True)
class Split:
    """Images of one split with their multi-hot labels (n, C), 0/1, and the line or file that each comes from.

    A data set of feature vectors has `vectors` (n, D) instead of images; its `paths` name the file and the row.
    """

    paths: tuple[Path, ...]
    labels: Labels
    where: tuple[str, ...]
    vectors: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Sequence[int] | Rows) -> "Split":
        """The images at `rows`, in that order."""
        index = np.asarray(rows, dtype=np.int64)
        return Split(
            tuple(self.paths[i] for i in index),
            self.labels[index],
            tuple(self.where[i] for i in index),
            None if self.vectors is None else self.vectors[index],
        )


@dataclass(frozen=True)
class Splits:
    """train, query and database of one protocol. `fingerprint` is a SHA-256 over their file names and labels."""

    train: Split
    query: Split
    database: Split
    label_names: tuple[str, ...]
    fingerprint: str
    problems: tuple[Problem, ...] = ()
    on_error: OnError = "stop"


def group_items(items: Sequence[Item], label_names: Sequence[str]) -> tuple[dict[str, Split], dict[str, list[str]]]:
    """The splits of items that all have one, and the file names of each split, for `join_splits`."""
    column = {name: index for index, name in enumerate(label_names)}
    parts, files = {}, {}
    for split in NAMES:
        chosen = [item for item in items if item.split == split]
        labels = np.zeros((len(chosen), len(label_names)), np.uint8)
        for row, item in enumerate(chosen):
            labels[row, [column[label] for label in item.labels]] = 1
        where = tuple(f"line {item.line} ({item.file})" if item.line else item.file for item in chosen)
        parts[split] = Split(tuple(item.path for item in chosen), labels, where)
        files[split] = [item.file for item in chosen]
    return parts, files


def join_splits(
    parts: Mapping[str, Split],
    files: Mapping[str, Sequence[str]] | None,
    label_names: Sequence[str],
    *,
    source: str,
    train_in_database: bool = False,
    published: tuple[int, int, int] | None = None,
    problems: Sequence[Problem] = (),
    on_error: OnError = "stop",
) -> Splits:
    """Check the three splits against each other and compute their fingerprint.

    Args:
        parts: query, train and database.
        files: for each split, the names of its images relative to the data set, for the fingerprint; None: `where`.
        label_names: one per column of the labels.
        source: the data set's name in messages.
        train_in_database: training images are also in the database; those that are missing there are added to it.
            Otherwise, none may be there. Queries never may.
        published: published sizes of query, train and database; other sizes are reported in a note.
        problems: problems found while reading.
        on_error: whether images that turn out to be broken later are skipped.

    Raises:
        BadDataset: a split is empty, there are fewer than two labels, or an image is in two splits.
    """
    check_label_names(label_names, source=source)
    files = {split: parts[split].where for split in NAMES} if files is None else files
    for split in NAMES:
        if not len(parts[split]):
            raise BadDataset(f"{source} has no image in its {split} split: train, query and database all need images")
        if not np.isin(parts[split].labels, (0, 1)).all():
            raise BadDataset(f"the labels of the {split} split of {source} must be 0 or 1: correct the data set")
    if train_in_database:
        parts, files = _with_training_images(parts, files)
    _check_overlap(parts, source=source, train_in_database=train_in_database)
    problems = [*problems, *_notes_on_sizes(parts, source=source, published=published)]
    if parts["train"].labels.sum(axis=0).max() <= 1:
        reason = "no two training images share a label: nothing can be learned"
        problems.append(Problem(source, reason, skipped=False))
    return Splits(
        **parts,
        label_names=tuple(label_names),
        fingerprint=_fingerprint(parts, files, label_names),
        problems=tuple(problems),
        on_error=on_error,
    )


def unlabelled_splits(items: Sequence[Item], *, on_error: OnError) -> Splits:
    """The splits of training images without labels: no queries, no database, C = 0."""
    parts, files = group_items(items, ())
    return Splits(**parts, label_names=(), fingerprint=_fingerprint(parts, files, ()), problems=(), on_error=on_error)


def _with_training_images(
    parts: Mapping[str, Split], files: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Split], dict[str, Sequence[str]]]:
    """Parts and files, with the training images that the database lacks added in front of it."""
    train, database = parts["train"], parts["database"]
    known = set(database.paths)
    rows = [row for row, path in enumerate(train.paths) if path not in known]
    added = train.take(rows)
    whole = Split(
        added.paths + database.paths, np.concatenate([added.labels, database.labels]), added.where + database.where
    )
    named = [files["train"][row] for row in rows] + list(files["database"])
    return {**parts, "database": whole}, {**files, "database": named}


def _notes_on_sizes(
    parts: Mapping[str, Split], *, source: str, published: tuple[int, int, int] | None
) -> list[Problem]:
    """Notes on images without labels, and on splits that differ in size from the published ones."""
    notes = []
    bare = {split: int((~parts[split].labels.any(axis=1)).sum()) for split in NAMES}
    if any(bare.values()):
        text = ", ".join(f"{count:,} of {split}" for split, count in bare.items() if count)
        notes.append(
            Problem(source, f"images without a label are kept, but are relevant to no query: {text}", skipped=False)
        )
    if published is not None:
        for split, count in zip(("query", "train", "database"), published, strict=True):
            if len(parts[split]) != count:
                reason = f"{len(parts[split]):,} images in its {split} split, but the published one has {count:,}"
                notes.append(Problem(source, f"{reason}: results are not comparable", skipped=False))
    return notes


def _check_overlap(parts: Mapping[str, Split], *, source: str, train_in_database: bool) -> None:
    queries, training = set(parts["query"].paths), set(parts["train"].paths)
    shared = {("query", "train"): queries & training}
    shared["query", "database"] = queries.intersection(parts["database"].paths)
    if not train_in_database:
        shared["train", "database"] = training.intersection(parts["database"].paths)
    for (one, other), paths in shared.items():
        if not paths:
            continue
        found = f"{len(paths)} images of {source} are in the {one} and in the {other} split, for example {min(paths)}"
        remedy = "remove them from one of the two" + (", or set train_in_database = true" if one == "train" else "")
        raise BadDataset(f"{found}: {remedy}")


def _fingerprint(parts: Mapping[str, Split], files: Mapping[str, Sequence[str]], label_names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    texts: dict[bytes, str] = {}  # many images have the same labels
    for split in NAMES:
        for file, row in zip(files[split], parts[split].labels, strict=True):
            key = row.tobytes()
            if key not in texts:
                texts[key] = ";".join(sorted(label_names[column] for column in np.flatnonzero(row).tolist()))
            digest.update(f"{split}\t{file}\t{texts[key]}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def check_label_names(label_names: Sequence[str], *, source: str) -> None:
    """Raise `BadDataset` unless there are at least two labels, all of them UTF-8 (folders may have other names)."""
    for name in label_names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise BadDataset(f"the label {name!r} of {source} is not UTF-8: rename it") from None
    if len(label_names) < 2:
        found = f"only one label ({label_names[0]!r})" if label_names else "no labels"
        raise BadDataset(f"{source} has {found}: training needs at least two, to learn which images are similar")


def check_labelled(splits: Splits) -> None:
    """Raise `BadDataset` if the data set has no labels, and so nothing to score by."""
    if not splits.label_names:
        raise BadDataset("the data set has no labels, so nothing is relevant to a query: evaluate on one with labels")


def refuse_unused(data_set: Callable[..., Splits], why: str, **options: Any) -> None:
    """Raise `BadConfig` if an option of a data set that has no effect here was changed from its default.

    Args:
        data_set: the function, whose signature has the defaults.
        why: why they have no effect.
        options: the values of such options.
    """
    parameters = inspect.signature(data_set).parameters
    for name, value in options.items():
        if value != parameters[name].default:
            raise BadConfig(f"{name} is {value!r}, but {why}: leave {name} out")


def never_in_training(splits: Splits) -> list[str]:
    """Labels that occur in query or database but in no training image: the model cannot learn them."""
    missing = splits.train.labels.sum(axis=0) == 0
    return [name for name, absent in zip(splits.label_names, missing, strict=True) if absent]
