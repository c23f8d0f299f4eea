"""A table of image files and labels, its cache, and its splits; the data sets of published benchmarks use it."""

import io
import json
import logging
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.files import cached_file, write_atomically
from hashseek.retrieval.label_files import OnError, Problem
from hashseek.training.data.file_digests import digest_files
from hashseek.training.data.splits import NAMES, Labels, Rows, Split, Splits, join_splits

_log = logging.getLogger(__name__)
_FORMAT = 2  # increased whenever the stored form of a table changes


class Incomplete(BadDataset):
    """Files of the data set are missing or damaged; `with_remedy` adds a remedy, and a download would fix it."""


@contextmanager
def with_remedy(remedy: str) -> Iterator[None]:
    """Add a remedy to the message of an `Incomplete` data set.

    Raises:
        BadDataset: instead of `Incomplete`.
    """
    try:
        yield
    except Incomplete as error:
        raise BadDataset(f"{error}: {remedy}") from None


@dataclass(frozen=True)
class ImageTable:
    """The images of a data set before they are split: files below a folder, and multi-hot labels (n, C).

    `remarks` are pairs (file, reason) of images that were left out.
    """

    files: tuple[str, ...]
    labels: Labels
    label_names: tuple[str, ...]
    remarks: tuple[tuple[str, str], ...] = ()

    def take(self, rows: Rows) -> "ImageTable":
        """The images at `rows`, in that order."""
        return ImageTable(tuple(self.files[row] for row in rows), self.labels[rows], self.label_names, self.remarks)


def first_folder(root: Path, candidates: Sequence[str], *, what: str) -> Path:
    """The first of the folders `candidates` (below `root`) that exists.

    Raises:
        Incomplete: none exists; the message names `what` is missing.
    """
    for candidate in candidates:
        if (root / candidate).is_dir():
            return root / candidate
    if not root.is_dir():
        raise Incomplete(f"there is no folder {root} with {what}")
    raise Incomplete(f"the folder {root} does not hold {what} (looked for {', '.join(candidates)})")


def read_lines(path: Path, *, what: str) -> list[str]:
    """The lines of a text file, stripped, without empty ones.

    Raises:
        Incomplete: the file is missing, cannot be read, or is not text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise Incomplete(f"{what} is missing: there is no file {path}") from None
    except UnicodeDecodeError:
        raise Incomplete(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise Incomplete(f"{path} cannot be read ({error.strerror or error})") from None
    return [stripped for line in text.splitlines() if (stripped := line.strip())]


# --- the cache -----------------------------------------------------------------------------------------------


def prepared(kind: str, sources: Sequence[Path], build: Callable[[], ImageTable]) -> ImageTable:
    """The result of `build`, cached until a file in `sources` changes its size or modification time.

    Args:
        kind: name and version of the reader, part of the cache key.
        sources: all files that `build` reads.
        build: reads the table from them.

    Raises:
        Incomplete: a file in `sources` is missing.
    """
    missing = np.flatnonzero(absent(Path(), [str(source) for source in sources]))
    if len(missing):
        raise Incomplete(
            f"{len(missing):,} of {len(sources):,} files with labels are missing, for example {sources[missing[0]]}"
        )
    file = cached_file("datasets", kind, _FORMAT, digest_files(sources), suffix=".npz")
    stored = _load(file)
    if stored is not None:
        return stored
    table = build()
    try:
        write_atomically(file, _dump(table))
    except OSError as error:  # everything works without a cache, but more slowly
        _log.warning("%s cannot be written (%s): the data set will be read again each time", file, error)
    return table


def _dump(table: ImageTable) -> bytes:
    buffer = io.BytesIO()
    # JSON keeps file names that are not UTF-8: their bytes are escaped as surrogates.
    texts = json.dumps([table.files, table.label_names, table.remarks]).encode()
    np.savez(buffer, labels=np.packbits(table.labels, axis=1), texts=np.frombuffer(texts, np.uint8))
    return buffer.getvalue()


def _load(file: Path) -> ImageTable | None:
    try:
        content = io.BytesIO(file.read_bytes())  # given the path, NumPy leaves a damaged file open
        with np.load(content, allow_pickle=False) as stored:
            files, names, remarks = json.loads(stored["texts"].tobytes())
            labels = np.unpackbits(stored["labels"], axis=1, count=len(names))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        _log.warning("%s is damaged: the data set is read again", file)
        return None
    return ImageTable(tuple(files), labels, tuple(names), tuple((name, reason) for name, reason in remarks))


# --- splits --------------------------------------------------------------------------------------------------


def draw(n: int, *, n_query: int, n_train: int, seed: int) -> dict[str, Rows]:
    """Random rows of n images: queries, training images, and the rest as database.

    Raises:
        BadConfig: a split would be empty.
    """
    if n_query < 1 or n_train < 1 or n_query + n_train >= n:
        raise BadConfig(
            f"n_query {n_query} and n_train {n_train} of {n} images leave a split empty: both must be at least 1, and "
            f"together less than {n}"
        )
    order = np.random.default_rng(seed).permutation(n)
    return {
        "query": order[:n_query],
        "train": order[n_query : n_query + n_train],
        "database": order[n_query + n_train :],
    }


def draw_per_label(labels: Labels, *, n_query: int, n_train: int, seed: int) -> dict[str, Rows]:
    """Like `draw`, with equally many queries and training images for each label, rarest label first.

    An image is chosen for one of its labels and may have others.

    Raises:
        BadConfig: the numbers are not multiples of the number of labels, or a label has too few images.
    """
    n, n_labels = labels.shape
    if n_query < 1 or n_train < 1 or n_query % n_labels or n_train % n_labels:
        raise BadConfig(
            f"n_query {n_query} and n_train {n_train} must be multiples of the number of labels, {n_labels}: every "
            "label gets the same number"
        )
    order = np.random.default_rng(seed).permutation(n)
    free = np.ones(n, bool)
    parts: dict[str, list[Rows]] = {"query": [], "train": []}
    for column in np.argsort(labels.sum(axis=0, dtype=np.int64), kind="stable"):
        for split, wanted in (("query", n_query // n_labels), ("train", n_train // n_labels)):
            chosen = order[free[order] & (labels[order, column] == 1)][:wanted]
            if len(chosen) < wanted:
                raise BadConfig(
                    f"n_query {n_query} and n_train {n_train} need more images of a label than there are: only "
                    f"{int(labels[:, column].sum())} of {n} images have label number {column}"
                )
            free[chosen] = False
            parts[split].append(chosen)
    rows = {split: np.concatenate(chosen) for split, chosen in parts.items()}
    rows["database"] = order[free[order]]
    if not len(rows["database"]):
        raise BadConfig(f"n_query {n_query} and n_train {n_train} leave no image of {n} for the database: lower them")
    return rows


def split_table(
    table: ImageTable,
    rows: Mapping[str, Rows],
    *,
    root: Path,
    source: str,
    train_in_database: bool = False,
    published: tuple[int, int, int] | None = None,
    problems: Sequence[Problem] = (),
    on_error: OnError,
) -> Splits:
    """The splits of `table`, whose files lie below `root`.

    Args:
        table: files and labels.
        rows: rows of the table for each of query, train and database.
        root: the folder that the files are relative to.
        source: the data set's name in messages.
        train_in_database, published: see `join_splits`.
        problems: problems found earlier.
        on_error: "stop" refuses missing images, "skip" leaves them out.

    Raises:
        Incomplete: images are missing.
        BadDataset: see `join_splits`.
    """
    problems = list(problems)
    for split in NAMES:
        _refuse_repeats([table.files[row] for row in rows[split].tolist()], f"the {split} split of {source}")
    used = np.unique(np.concatenate([rows[split] for split in NAMES]))
    missing = used[absent(root, [table.files[row] for row in used])]
    if len(missing):
        example = f"for example {table.files[missing[0]]}"
        if len(missing) == len(used):
            raise Incomplete(f"none of the {len(used):,} images that {source} lists is in {root}, {example}")
        if on_error == "stop":
            raise Incomplete(
                f"{len(missing):,} of the {len(used):,} images that {source} lists are not in {root}, {example} "
                "(on_error = skip leaves them out)"
            )
        for row in missing.tolist():
            problems.append(Problem(source, f"the file {table.files[row]} does not exist", missing=True))
        rows = {split: rows[split][~np.isin(rows[split], missing)] for split in NAMES}
    images = Split(tuple(root / file for file in table.files), table.labels, table.files)
    return join_splits(
        {split: images.take(rows[split]) for split in NAMES},
        None,
        table.label_names,
        source=source,
        train_in_database=train_in_database,
        published=published,
        problems=problems,
        on_error=on_error,
    )


def absent(root: Path, files: Sequence[str]) -> NDArray[np.bool_]:
    """Which of `files` (below `root`) do not exist; folders are listed, because a `stat` per file takes minutes."""
    listed: dict[str, set[str]] = {}
    missing = np.zeros(len(files), bool)
    for row, file in enumerate(files):
        folder, _, name = file.rpartition("/")
        if folder not in listed:
            try:
                listed[folder] = set(os.listdir(root / folder))  # noqa: PTH208 - a hundred thousand names
            except OSError:
                listed[folder] = set()
        missing[row] = name not in listed[folder]
    return missing


def _refuse_repeats(files: Sequence[str], source: str) -> None:
    file, count = next(iter(Counter(files).most_common(1)), ("", 0))
    if count > 1:
        raise BadDataset(f"{source} lists the image {file} {count} times: list it once")
