"""Collections of vectors computed by another program: reads vectors and ids, fits a hash layer, stores codes.

Only codes are stored (and features, if the collection keeps them), never the vectors. The record of a vector has its id
as the key, an empty path, and the hash of its float32 numbers.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.catalog.records import VECTOR_TYPE, check_described, check_labels
from hashseek.indexing.fitting import all_alike, fit_head, sample, saved
from hashseek.indexing.ingest.batch import IngestReport, encode
from hashseek.indexing.ingest.manifests import ImageSource, described, load_pyarrow, rows_of
from hashseek.indexing.opening import Store
from hashseek.retrieval.checkpoint import Header
from hashseek.retrieval.codes import check_n_bits
from hashseek.retrieval.encoder import VectorEncoder
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.label_files import Problem
from hashseek.retrieval.vectors import Vectors, as_float32, check_vectors

BATCH = 1024  # rows of a transaction
VECTOR, IDS = "vector", ("id", "key")  # columns


def make_entries(
    ids: Sequence[str],
    labels: Sequence[Sequence[str]] | None,
    attributes: Sequence[Mapping[str, Any]] | None,
) -> list[ImageSource]:
    """A source for each id, which becomes its key, with its labels and attributes.

    Raises:
        BadDataset: their numbers differ.
    """
    for name, values in (("labels", labels), ("attributes", attributes)):
        if values is not None and len(values) != len(ids):
            raise BadDataset(f"there are {len(ids):,} ids but {len(values):,} {name}: list one for each id, in order")
    labels = [()] * len(ids) if labels is None else labels
    attributes = [{}] * len(ids) if attributes is None else attributes
    for of_id in labels:
        check_labels(of_id)
    given = zip(ids, labels, attributes, strict=True)
    return [ImageSource("", tuple(of_id), key=str(one), attributes=own) for one, of_id, own in given]


# ---------------------------------------------------------------- reading


def read_array(path: Path) -> Vectors:
    """The array of an `.npy` file, memory-mapped.

    Raises:
        BadDataset: it cannot be read, or is not an array of plain numbers.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise BadDataset(f"there is no file {path}: correct the path") from None
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "not a complete .npy file of numbers"
        raise BadDataset(f"{path} cannot be read ({reason}): write it with numpy.save") from None
    if not isinstance(found, np.ndarray):
        found.close()
        raise BadDataset(f"{path} holds several arrays: save only the vectors, with numpy.save")
    return found


def read_parquet(path: Path) -> Vectors:
    """The column `vector` of a Parquet file, whose rows are lists of numbers of equal length.

    Raises:
        BadDataset: there is no such column, or a row has no vector, or one of another length. The message counts rows
            from 0.
    """
    pa = load_pyarrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            if VECTOR not in file.schema_arrow.names:
                raise BadDataset(f"{path} has no column `{VECTOR}`: it must hold lists of numbers")
            column = file.read(columns=[VECTOR]).column(0)
        missing = np.flatnonzero(column.is_null().to_numpy())
        lengths = pa.compute.list_value_length(column).fill_null(0).to_numpy()
    except (pa.ArrowException, OSError) as error:
        raise BadDataset(f"{path} is not a valid Parquet file with lists in the column `{VECTOR}`: {error}") from None
    if len(missing):
        raise BadDataset(f"row {missing[0]} (counted from 0) of {path} has no vector: add one or leave the row out")
    odd = np.flatnonzero(lengths != lengths[:1])
    if len(odd):
        raise BadDataset(
            f"row {odd[0]} (counted from 0) of {path} has a vector of {lengths[odd[0]]:,} numbers, the first row has "
            f"{lengths[0]:,}: correct it or leave it out"
        )
    found: Vectors = pa.compute.list_flatten(column).to_numpy().reshape(len(lengths), -1 if len(lengths) else 0)
    return found


def read_entries(path: Path) -> tuple[list[ImageSource], list[Problem]]:
    """The ids of vectors, as keys, with their labels and attributes, and notes on labels that were corrected.

    A .txt file has one id per line; any other list has a column `id` or `key`.

    Raises:
        BadDataset: the file or a line cannot be read, or has no id.
    """
    entries: list[ImageSource] = []
    notes: list[Problem] = []
    for found in rows_of(path, one_of=IDS, beside=VECTOR):
        if isinstance(found, Problem):
            raise BadDataset(f"{found}: correct it")
        line, row = found
        where = f"{path.name} line {line}"
        try:
            of_row, entry = described("", row, where=where, beside={VECTOR})
        except ValueError as error:
            raise BadDataset(f"{where}: it {error}") from None
        if entry.key is None:
            raise BadDataset(f"{where}: it has no id")
        entries.append(entry)
        notes += of_row
    return entries, notes


def check(
    vectors: Vectors, entries: Sequence[ImageSource], *, header: Header | None = None, name: str = "the vectors"
) -> None:
    """Refuse bad vectors and entries before anything is stored.

    Args:
        vectors: (N, D).
        entries: one for each vector.
        header: the header of the checkpoint that will encode them; None if one is to be fitted to them.
        name: the array's name in messages.

    Raises:
        BadDataset: see `check_vectors`; the numbers of vectors and ids differ, an id occurs twice, or an id, labels or
            attributes exceed their limits. The message names the first such row, counted from 0.
        BadCheckpoint: the checkpoint encodes images.
    """
    width = None if header is None else header.vector_width()
    check_vectors(vectors, width=width, name=name, nonzero=header is None or header.head == "normalized")
    if len(entries) != len(vectors):
        raise BadDataset(
            f"there are {len(vectors):,} vectors but {len(entries):,} ids: list one id for each row (the first line of "
            "a .txt file is also an id)"
        )
    rows: dict[str | None, int] = {}
    for row, entry in enumerate(entries):
        if entry.key in rows:
            raise BadDataset(
                f"rows {rows[entry.key]} and {row} (counted from 0) have the same id {entry.key!r:.80}: leave one out"
            )
        rows[entry.key] = row
        try:
            check_described(entry.labels, entry.key, entry.attributes)
        except BadConfig as error:
            raise BadDataset(f"row {row} (counted from 0): {error}") from None


# ---------------------------------------------------------------- fitting and storing


@contextmanager
def fitted_checkpoint(vectors: Vectors, n_bits: int) -> Iterator[tuple[Path, str]]:
    """A checkpoint whose hash layer is fitted to the vectors (N, D), to a random 20,000 of them if there are more.

    Yields:
        (its file, which is deleted afterwards; why the layer was not fitted by ITQ, empty if it was).

    Raises:
        BadDataset: the vectors are all identical in direction.
    """
    check_n_bits(n_bits)
    features = as_float32(vectors[sample(len(vectors))])
    if all_alike(features):
        raise BadDataset(
            f"all {len(vectors):,} vectors have the same direction, and fitting a hash layer needs different ones: add "
            "others, or pass a checkpoint (--checkpoint)"
        )

    from hashseek.retrieval.models.hash_model import HashModel

    model = HashModel(backbone=f"mlp:{vectors.shape[1]}", n_bits=n_bits, head="normalized").eval()
    record, reason = fit_head(model, features, what="vectors")
    with saved(model, None, record | {"n_vectors": len(features)}) as (path, _):
        yield path, reason


def store(
    collection: Store, encoder: VectorEncoder, vectors: Vectors, entries: Sequence[ImageSource]
) -> Iterator[IngestReport]:
    """Store the codes of vectors (N, D), in batches; yields the running report after each committed one.

    An id that is stored gets the new content, labels and attributes. Call `check` before.
    """
    report = IngestReport()
    for start in range(0, len(vectors), BATCH):
        rows = as_float32(vectors[start : start + BATCH])
        encoded = zip(rows, encode(encoder, rows), entries[start : start + BATCH], strict=True)
        images = [
            NewImage(
                path="",
                sha256=hashlib.sha256(row.tobytes()).hexdigest(),
                width=0,
                height=0,
                bytes=row.nbytes,
                media_type=VECTOR_TYPE,
                labels=entry.labels,
                key=entry.key,
                attributes=entry.attributes,
                **code._asdict(),
            )
            for row, code, entry in encoded
        ]
        report = report.plus(IngestReport.of(collection.add(images)))
        yield report
