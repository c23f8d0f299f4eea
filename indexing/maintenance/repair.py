"""`index verify --repair`: rebuilds what can be derived, deletes orphaned rows, and reports remaining problems."""

import shlex
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from hashseek.indexing.catalog import Catalog, CatalogDamaged
from hashseek.indexing.catalog.database import Database, write_meta
from hashseek.indexing.catalog.integrity import repair_rows
from hashseek.indexing.catalog.records import Space
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.maintenance.optimize import delete_unneeded
from hashseek.indexing.maintenance.reencode import Reencoded, encode_missing
from hashseek.indexing.milvus_uri import refuse_milvus
from hashseek.indexing.printing import counted
from hashseek.retrieval.checkpoint import load_checkpoint, load_header
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import ForeignCodes, HashseekError
from hashseek.retrieval.files import write_atomically


@dataclass
class Repaired:
    """What a repair has done, as messages, and what it could not fix."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def repair(
    folder: Path, *, checkpoint: Path | None = None, allow_private: bool = False, **options: Unpack[EncoderOptions]
) -> Repaired:
    """Repair the collection in `folder` as far as possible.

    Args:
        folder: the folder of the collection.
        checkpoint: another copy of the checkpoint of one of its code spaces, if its own copy is lost.
        allow_private: also fetch images from URLs in private networks.
        options: where and how to encode images whose codes are missing.

    Raises:
        CatalogDamaged: SQLite cannot read the catalog.
        BadCollection: there is no collection, or no space or permission to write.
        ForeignCodes: `checkpoint` did not compute codes of the collection; nothing was done.
    """
    refuse_milvus(folder)
    path = folder / CATALOG
    if checkpoint is not None:
        _space_of(path, checkpoint)  # refuses a foreign one before anything is changed
    report = Repaired(_repair_catalog(path))
    with closing(Collection(folder)) as collection:
        rebuild = bool(report.done or collection.index.verify())
        if checkpoint is not None:
            load_checkpoint(checkpoint)  # checks that its weights are intact
            own, data = folder / _space_of(path, checkpoint).checkpoint, checkpoint.read_bytes()
            if not own.is_file() or own.read_bytes() != data:
                write_atomically(own, data)
                report.done.append(f"copied the checkpoint {checkpoint} to {own}")
        _encode_missing(collection, report, allow_private, options)
        if n_deleted := delete_unneeded(collection):
            report.done.append(f"deleted {n_deleted} files that no image needs")
        if rebuild:
            collection.build_index()
            report.done.append("rebuilt the index")
        else:
            collection.save_index()
        report.left += collection.verify()
    return report


def _space_of(path: Path, checkpoint: Path) -> Space:
    """The code space in the catalog at `path` whose codes `checkpoint` computed."""
    fingerprint = load_header(checkpoint).fingerprint
    with closing(Catalog(path, read_only=True)) as catalog:
        spaces = {space.fingerprint: space for space in catalog.spaces.all()}
    if fingerprint not in spaces:
        held = ", ".join(known[:12] for known in spaces)
        raise ForeignCodes(
            f"the collection {path.parent} holds codes of checkpoint {held}, not of {fingerprint[:12]}: pass a copy of "
            "the collection's own checkpoint"
        )
    return spaces[fingerprint]


def _repair_catalog(path: Path) -> list[str]:
    """Rebuild SQLite's indexes if they are damaged, then repair the rows; returns a message for each repair.

    Raises:
        CatalogDamaged: SQLite still finds the file damaged.
    """
    with closing(Database(path, read_only=False)) as database, database.transaction() as db:
        done = []
        if _integrity(db) != "ok":
            db.execute("REINDEX")
            if (reason := _integrity(db)) != "ok":
                raise CatalogDamaged(path, reason)
            done.append("rebuilt SQLite's indexes of the catalog")
        generation = database.generation(db) + 1
        done += repair_rows(db, generation)
        if done:
            write_meta(db, "generation", str(generation))
    return done


def _integrity(db: sqlite3.Connection) -> str:
    """The first thing that SQLite finds wrong, or `ok`."""
    return str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])


def _encode_missing(collection: Collection, report: Repaired, allow_private: bool, options: EncoderOptions) -> None:
    """Encode images that have no code, if their files exist."""
    space = collection.catalog.space
    state = Reencoded(space, collection.catalog.spaces.n_missing(space.id))
    if not state.total:
        return
    try:
        checkpoint = load_checkpoint(collection.checkpoint)
        if checkpoint.header.preprocessing is None:
            report.left.append(
                f"{counted(state.total, 'vector')} without a code cannot be encoded, as only codes are stored: add "
                f"the vectors again (`hashseek index add {shlex.quote(str(collection.folder))} --vectors FILE`)"
            )
            return
        encoder = Encoder(checkpoint, **options)
    except HashseekError as error:
        report.left.append(f"{state.total} images have no code and cannot be encoded: {error}")
        return
    for _ in encode_missing(collection, encoder, state, allow_private=allow_private):
        pass
    if state.encoded:
        report.done.append(f"encoded {state.encoded} images whose codes were missing")
    report.left += state.failed.values()
