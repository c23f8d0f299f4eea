"""Data set `cifar10`: 60,000 pictures of 32 x 32 pixels with one of 10 labels each, in DeepHash-pytorch's splits."""

import codecs
import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.files import cached_file, write_atomically
from hashseek.retrieval.tar_members import list_members, member_path
from hashseek.training.data.download import Archive, read_or_download
from hashseek.training.data.file_digests import digest_files
from hashseek.training.data.image_table import ImageTable, Incomplete, draw_per_label, prepared
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import NAMES, Seed, Split, Splits, join_splits, refuse_unused

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARCHIVE = Archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")
FOLDER = "cifar-10-batches-py"
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
SIZES = {  # query, train, database
    "cifar10": (1000, 5000, 54000),
    "cifar10-1": (1000, 5000, 59000),
    "cifar10-2": (10000, 50000, 50000),
}
# What a pickled array consists of; anything else in a pickle could run code.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # written by NumPy 2
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


def cifar10(
    *,
    root: str,
    protocol: Literal["cifar10", "cifar10-1", "cifar10-2"] = "cifar10-1",
    n_query: int | None = None,
    n_train: int | None = None,
    split_seed: Seed = 0,
    download: bool = False,
) -> Splits:
    """CIFAR-10: splits drawn from all 60,000 pictures, equally many of each label, as in DeepHash-pytorch.

    Args:
        root: folder with `cifar-10-batches-py`, the Python version as published.
        protocol: "cifar10" (1,000 queries, 5,000 training images, the other 54,000 as database), "cifar10-1" (the
            training images are also in the database: 59,000) or "cifar10-2" (10,000 queries; the other 50,000 are
            training set and database).
        n_query: another number of queries.
        n_train: another number of training images; not for "cifar10-2", which trains on the whole database.
        split_seed: seed of the split; DeepHash-pytorch draws a new one in each run.
        download: fetch the official archive (0.2 GB) if `cifar-10-batches-py` is missing.

    Raises:
        BadDataset: the files are missing or damaged.
        BadConfig: not enough images for the splits, or n_train for "cifar10-2".

    Source: Krizhevsky, Learning multiple layers of features from tiny images, 2009; DeepHash-pytorch, utils/tools.py.
    """
    if protocol == "cifar10-2":
        refuse_unused(cifar10, "cifar10-2 trains on the whole database", n_train=n_train)
    place = expand(root)

    def read(_: object) -> Splits:
        return _drawn(place / FOLDER, protocol, n_query=n_query, n_train=n_train, seed=split_seed)

    return read_or_download(read, [ARCHIVE], place, download=download, on_error="stop")


def _drawn(folder: Path, protocol: str, *, n_query: int | None, n_train: int | None, seed: int) -> Splits:
    tar = _as_tar(folder)
    table = prepared("cifar10 1", [tar], lambda: _table(tar))
    sizes = SIZES[protocol]
    n_query = sizes[0] if n_query is None else n_query
    if protocol == "cifar10-2":
        # All other images are training images, but drawing leaves some for the database: one of each label is drawn,
        # and the rest is added.
        rows = draw_per_label(table.labels, n_query=n_query, n_train=len(LABELS), seed=seed)
        rows["train"] = np.concatenate([rows["train"], rows["database"]])
    else:
        n_train = sizes[1] if n_train is None else n_train
        rows = draw_per_label(table.labels, n_query=n_query, n_train=n_train, seed=seed)
    paths = tuple(member_path(tar, file) for file in table.files)
    images = Split(paths, table.labels, tuple(file.partition("/")[2] for file in table.files))
    parts = {split: images.take(rows[split]) for split in NAMES}
    return join_splits(parts, None, LABELS, source="CIFAR-10", train_in_database=protocol != "cifar10", published=sizes)


def _as_tar(folder: Path) -> Path:
    """The pictures as `LABEL/BATCH-NUMBER.png` in a tar in the cache, because every image must be a file.

    Raises:
        Incomplete: a batch is missing or damaged.
        BadDataset: the tar cannot be written.
    """
    batches = [folder / name for name in BATCHES]
    missing = [batch.name for batch in batches if not batch.is_file()]
    if missing:
        raise Incomplete(f"{folder} does not hold {', '.join(missing)}")
    tar = cached_file("datasets", "cifar10", digest_files(batches), suffix=".tar")
    if tar.is_file():
        return tar
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for batch in batches:
            for name, picture in _pictures(batch):
                content = io.BytesIO()
                picture.save(content, "PNG", compress_level=1)
                member = tarfile.TarInfo(name)
                member.size = content.tell()
                content.seek(0)
                packed.addfile(member, content)
    try:
        write_atomically(tar, buffer.getbuffer())
    except OSError as error:
        raise BadDataset(
            f"{tar} cannot be written: {error.strerror or error}; free space or set HASHSEEK_CACHE"
        ) from None
    return tar


def _pictures(batch: Path) -> Iterator[tuple[str, Image.Image]]:
    try:
        content = _Unpickler(io.BytesIO(batch.read_bytes()), encoding="bytes").load()
        pixels = np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        names = [LABELS[label] for label in content[b"labels"]]
        pictures = [Image.fromarray(np.ascontiguousarray(rows)) for rows in pixels]
        yield from zip((f"{name}/{batch.name}-{i:05}.png" for i, name in enumerate(names)), pictures, strict=True)
    except OSError as error:
        raise Incomplete(f"{batch} cannot be read ({error.strerror or error})") from None
    except Exception as error:  # a damaged pickle raises dozens of types
        raise Incomplete(f"{batch} is not a batch of CIFAR-10 ({error})") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return _ALLOWED[module, name]


def _table(tar: Path) -> ImageTable:
    members = [(f"{member.offset}+{member.size}/{name}", name) for name, member in list_members(tar)]
    columns = [LABELS.index(name.partition("/")[0]) for _, name in members]
    return ImageTable(tuple(file for file, _ in members), np.eye(len(LABELS), dtype=np.uint8)[columns], LABELS)
