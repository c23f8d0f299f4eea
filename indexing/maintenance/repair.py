"""`index verify --repair`: rebuilds what can be derived, deletes what belongs to nothing, and names what is left."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from hashseek.indexing.catalog import Catalog, CatalogDamaged, Finding, FindingKind
from hashseek.indexing.catalog.database import Database
from hashseek.indexing.catalog.integrity import repair_rows
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.maintenance.optimize import delete_unneeded
from hashseek.indexing.maintenance.reencode import Reencoded, encode_missing
from hashseek.retrieval.checkpoint import load_checkpoint, load_header
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import ForeignCodes, HashseekError
from hashseek.retrieval.files import write_atomically


@dataclass
class Repaired:
    """What a repair did, as messages, and what it could not fix."""

    done: list[str] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)


def repair(
    folder: Path,
    *,
    checkpoint: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    engine: str = "torch",
) -> Repaired:
    """Repair the collection in `folder` as far as possible.

    Args:
        folder: of the collection.
        checkpoint: another copy of its checkpoint, if its own copy is lost.
        device, precision, engine: to encode images whose codes are missing, see `Encoder`.

    Raises:
        CatalogDamaged: SQLite cannot read the catalog.
        BadCollection: there is no collection, or no space or permission to write.
        ForeignCodes: the collection has no codes of `checkpoint`; nothing was done.
    """
    path = folder / CATALOG
    if checkpoint is not None:
        _check_fingerprint(path, checkpoint)
    report = Repaired()
    _repair_catalog(path, report)
    with closing(Collection(folder, read_only=True)) as collection:  # a writer would delete an outdated manifest
        rebuild = any(finding.kind is FindingKind.SEARCH_INDEX for finding in collection.verify())
    with closing(Collection(folder)) as collection:
        if checkpoint is not None:
            _restore_checkpoints(collection, checkpoint, report)
        _encode_missing(collection, report, device, precision, engine)
        if n_deleted := delete_unneeded(collection):
            report.done.append(f"deleted {n_deleted} files that no image needs")
        if report.done or rebuild:
            collection.build_index(collection.kind)
            report.done.append("rebuilt the index")
        report.left += collection.verify()
    return report


def _check_fingerprint(path: Path, checkpoint: Path) -> None:
    """Refuse a checkpoint that computed none of the codes."""
    given = load_header(checkpoint)
    with closing(Catalog(path, read_only=True)) as catalog:
        spaces = catalog.spaces.all()
    if given.fingerprint not in {space.fingerprint for space in spaces}:
        held = " and ".join(f"{space.fingerprint[:12]} ({space.n_bits} bits)" for space in spaces)
        raise ForeignCodes(
            f"the collection {path.parent} holds codes of checkpoint {held}, and {checkpoint} is "
            f"{given.fingerprint[:12]} ({given.n_bits} bits): name a copy of the collection's own checkpoint"
        )


def _repair_catalog(path: Path, report: Repaired) -> None:
    """Rebuild SQLite's indexes if they are damaged, then repair the rows.

    Raises:
        CatalogDamaged: SQLite still finds the file damaged.
    """
    with closing(Database(path, read_only=False)) as database:
        with database.transaction() as db:
            if _integrity(db) != "ok":
                db.execute("REINDEX")
                if (reason := _integrity(db)) != "ok":
                    raise CatalogDamaged(path, reason)
                report.done.append("rebuilt SQLite's indexes of the catalog")
        with database.transaction() as db:
            generation = database.generation(db) + 1
            done = repair_rows(db, generation)
            if done:
                db.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (str(generation),))
            report.done += done


def _integrity(db: sqlite3.Connection) -> str:
    """The first thing that SQLite finds wrong, or `ok`."""
    return str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])


def _restore_checkpoints(collection: Collection, checkpoint: Path, report: Repaired) -> None:
    """Replace the copies of `checkpoint` that are missing or damaged."""
    given = load_checkpoint(checkpoint)
    for space in collection.catalog.spaces.all():
        path = collection.folder / space.checkpoint
        if space.fingerprint != given.header.fingerprint:
            continue
        try:
            load_checkpoint(path)
        except HashseekError:
            write_atomically(path, checkpoint.read_bytes())
            report.done.append(f"copied the checkpoint {checkpoint} to {path}")


def _encode_missing(collection: Collection, report: Repaired, device: str, precision: str, engine: str) -> None:
    """Encode images that have no code, if their files exist."""
    space = collection.catalog.space
    state = Reencoded(space, collection.catalog.spaces.n_missing(space.id))
    if not state.total:
        return
    try:
        encoder = Encoder(load_checkpoint(collection.checkpoint), device=device, precision=precision, engine=engine)
    except HashseekError as error:
        message = f"{state.total} images have no code and cannot be encoded: {error}"
        report.left.append(Finding(FindingKind.MISSING_CODE, message))
        return
    for _ in encode_missing(collection, encoder, state):
        pass
    if state.encoded:
        report.done.append(f"encoded {state.encoded} images whose codes were missing")
    report.left += [Finding(FindingKind.MISSING_CODE, message, i) for i, message in state.failed.items()]
