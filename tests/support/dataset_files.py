"""Writes miniature data sets and reads splits, for the tests of data sets."""

import csv
import gzip
import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import pytest

from hashseek.training.data.datasets import cifar
from support.pictures import draw

DATA = os.environ.get("HASHSEEK_DATA", "")
N_IN_BATCH = 40  # of `write_cifar`
needs_data = pytest.mark.skipif(not DATA, reason="HASHSEEK_DATA does not name the folder of real data")


def picture(file: Path, seed: int) -> None:
    """A small JPEG that no other seed gives."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draw(seed, (24, 20)).save(file, "JPEG", quality=80)


def damage_file(path: Path, change: Callable[[str], str] | None) -> None:
    """Rewrite the text of a file with `change`; None deletes the file or folder."""
    if change is not None:
        path.write_text(change(path.read_text()), errors="surrogateescape")
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_tar(file: Path, members: dict[str, bytes], layout: int = tarfile.GNU_FORMAT) -> Path:
    """A tar of files by name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", format=layout) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def sizes(splits) -> tuple[int, int, int]:
    """Images in query, train and database."""
    return len(splits.query), len(splits.train), len(splits.database)


def names(split) -> list[str]:
    """File names of a split, in order."""
    return [path.name for path in split.paths]


def labels_of(splits, file: str) -> set[str]:
    """Names of the labels of one image."""
    for split in (splits.query, splits.train, splits.database):
        for path, row in zip(split.paths, split.labels, strict=True):
            if path.name == file:
                return {name for name, there in zip(splits.label_names, row, strict=True) if there}
    raise AssertionError(f"{file} is in no split")


def published_list(name: str) -> list[dict[str, str]]:
    """The rows (file, labels as numbers, split) of a list of a hashing paper."""
    with gzip.open(Path(DATA) / "hash_lists" / f"{name}.csv.gz", "rt") as lines:
        return list(csv.DictReader(lines))


def write_lists(folder: Path, rows: list[dict[str, str]], n_labels: int) -> None:
    """The rows as train.txt, test.txt and database.txt in the form of the repositories they are from."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "test": [], "database": []}
    for row in rows:
        has = set(row["labels"].split(";"))
        bits = " ".join("1" if str(column) in has else "0" for column in range(n_labels))
        lines[row["split"]].append(f"{row['file']} {bits}")
    for split, text in lines.items():
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in text))


def touch_all(root: Path, files: list[str]) -> None:
    """Names of one empty file: enough where only names count, and much quicker than files of their own."""
    for folder in {file.rpartition("/")[0] for file in files}:
        (root / folder).mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=root) as empty:
        for file in set(files):
            os.link(empty.name, root / file)


def write_cifar(root: Path) -> dict[str, np.ndarray]:
    """The six batches as Python 2 wrote them; the pixels (3, 32, 32) of each picture by name."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng, pixels = np.random.default_rng(0), {}
    for batch in cifar.BATCHES:
        data = rng.integers(0, 256, (N_IN_BATCH, 3072), dtype=np.uint8)
        labels = [i % 10 for i in range(N_IN_BATCH)]
        content = {b"batch_label": b"testing", b"labels": labels, b"data": data, b"filenames": [b"x.png"] * N_IN_BATCH}
        written = pickle.dumps(content, protocol=2).replace(b"numpy._core", b"numpy.core")
        (folder / batch).write_bytes(written)
        pixels |= {f"{cifar.LABELS[i % 10]}/{batch}-{i:05}.png": data[i].reshape(3, 32, 32) for i in range(N_IN_BATCH)}
    return pixels
