"""`index add --vectors` and `search --vector`: vectors computed by another program."""

import shlex
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import typer

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.cli.output import Output, print_next
from hashseek.indexing.cli.stopping import stop_on_signals
from hashseek.indexing.collection import CATALOG, check_place
from hashseek.indexing.opening import open_for_adding
from hashseek.indexing.printing import counted
from hashseek.indexing.searcher import Searcher
from hashseek.indexing.vectors import check, fitted_checkpoint, read_array, read_entries, read_parquet, store
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.vectors import Vectors, check_vectors


def add_vectors(
    folder: Path,
    file: Path,
    ids: Path | None,
    *,
    bits: int,
    checkpoint: Path | None,
    keep_features: bool,
    labels: list[str],
) -> None:
    """Add the vectors of a file to the collection in `folder`, or to a new one whose hash layer is fitted to them."""
    started = time.monotonic()
    is_parquet = file.suffix.lower() == ".parquet"
    if is_parquet == (ids is not None):
        raise BadConfig(
            "a Parquet file has its ids in its column `id`: leave out --ids"
            if is_parquet
            else f"{file} has no ids: pass a file with one id per row (--ids ids.csv)"
        )
    output = Output()
    entries, notes = read_entries(ids or file)
    output.show(notes)
    if labels:
        entries = [replace(entry, labels=tuple(dict.fromkeys((*entry.labels, *labels)))) for entry in entries]
    vectors = read_parquet(file) if is_parquet else read_array(file)
    own = _own_checkpoint(folder) or checkpoint
    if own is None:
        check_place(folder)
    check(vectors, entries, header=None if own is None else load_header(own), name=str(file))
    with ExitStack() as stack:
        if own is None:
            checkpoint, fallback = stack.enter_context(fitted_checkpoint(vectors, bits))
            typer.echo(f"fitted {bits} bits to vectors of {vectors.shape[1]:,} numbers without labels")
            if fallback:
                typer.echo(
                    f"the hash layer is a random rotation, which needs more bits for the same quality: {fallback}, in "
                    "a new collection"
                )
        opened = stack.enter_context(open_for_adding(folder, checkpoint=checkpoint, keep_features=keep_features))
        encoder = Searcher.open(opened).vector_encoder
        stop = stack.enter_context(stop_on_signals())
        report = output.follow(stop.until_set(store(opened, encoder, vectors, entries)), len(vectors))
        opened.save_index()
        typer.echo(
            f"added {report.added}, updated {report.updated}, already stored {report.known}; {opened.place} holds "
            f"{counted(len(opened), 'vector')}; {time.monotonic() - started:.1f} s"
        )
        stop.exit_if_set()
        if own is None:
            print_next(opened.place, f"--of-key {shlex.quote(str(entries[0].key))}")


def _own_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the collection in `folder`; None if there is none yet."""
    if not (folder / CATALOG).is_file():
        return None
    with closing(Catalog(folder / CATALOG, read_only=True)) as catalog:
        return catalog.checkpoint


def read_queries(file: Path) -> Vectors:
    """The vectors (Q, D) of an `.npy` file with one vector or several rows.

    Raises:
        BadDataset: see `read_array` and `check_vectors`.
    """
    vectors = read_array(file)
    vectors = vectors[None] if vectors.ndim == 1 else vectors
    check_vectors(vectors, name=str(file))
    return vectors
