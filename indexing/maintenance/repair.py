"""Mending a collection: what is derived is made again, what belongs to nothing is dropped, the rest is named."""

import shutil
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from hashseek.indexing.catalog import Catalog, attributes, schema
from hashseek.indexing.catalog.database import Database
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.maintenance.attribute_indexes import choose_if_possible
from hashseek.indexing.maintenance.optimize import delete_unneeded
from hashseek.indexing.maintenance.reencode import Reencoded, encode_missing
from hashseek.indexing.maintenance.salvage import salvage
from hashseek.retrieval.checkpoint import load_checkpoint, load_header
from hashseek.retrieval.codes import code_size
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadCollection, ForeignCodes, HashseekError
from hashseek.retrieval.files import write_atomically

_ROOM = 2**16  # bytes, for the file through which processes share a catalog


@dataclass
class Repaired:
    """What was done, and what is left that could not be mended."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def repair(
    folder: Path,
    *,
    checkpoint: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    engine: str = "torch",
) -> Repaired:
    """Mend the collection in `folder` as far as possible.

    Args:
        folder: of the collection.
        checkpoint: another file of its checkpoint, if its own copy is lost.
        device, precision, engine: for images that must be encoded again, see `Encoder`.

    Raises:
        BadCollection: there is no collection, no room, or nothing of its catalog can be read.
        ForeignCodes: the collection has no codes of `checkpoint`; nothing was done.
    """
    _check_room(folder)
    if checkpoint is not None:
        _check_own(folder / CATALOG, checkpoint)
    report = Repaired()
    _mend_file(folder / CATALOG, report)
    _mend_rows(folder / CATALOG, report)
    with closing(Collection(folder, read_only=True)) as collection:  # the first to write removes what is stale
        is_stale = any("index" in problem for problem in collection.verify())
    with closing(Collection(folder)) as collection:
        if checkpoint is not None:
            _mend_checkpoint(collection, checkpoint, report)
        _mend_codes(collection, report, device, precision, engine)
        if n_deleted := delete_unneeded(collection):
            report.done.append(f"deleted {n_deleted} files that no image needs")
        if report.done or is_stale:
            collection.build_index(collection.kind)
            report.done.append("built the index again")
        report.left += collection.verify()
    return report


def _check_room(folder: Path) -> None:
    """Without room SQLite cannot open a catalog, which would then pass for a damaged one."""
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < _ROOM:
        raise BadCollection(f"{folder} has {free:,} bytes of room, and a repair needs {_ROOM:,}: make room first")


def _check_own(path: Path, checkpoint: Path) -> None:
    """Refuse a checkpoint that made none of the codes; of a catalog that cannot be read, that is found out later."""
    given = load_header(checkpoint)
    try:
        with closing(Catalog(path, read_only=True)) as catalog:
            spaces = catalog.spaces()
    except BadCollection:
        return
    if given.fingerprint not in {space.fingerprint for space in spaces}:
        held = " and ".join(f"{space.fingerprint[:12]} ({space.n_bits} bits)" for space in spaces)
        raise ForeignCodes(
            f"the collection {path.parent} holds codes of checkpoint {held}, and {checkpoint} is "
            f"{given.fingerprint[:12]} ({given.n_bits} bits): name a file of the collection's own checkpoint"
        )


def _mend_file(path: Path, report: Repaired) -> None:
    """Replace a catalog that SQLite cannot read or finds damaged."""
    try:
        with closing(Catalog(path)):  # which says if it is something else
            pass
        with closing(Database(path, read_only=True)) as database, database.reading() as db:
            reason = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if reason == "ok":
            return
    except BadCollection as error:
        if not any(word in str(error) for word in ("damaged", "malformed", "disk I/O error")):
            raise
        reason = str(error)
    saved = salvage(path)
    report.done.append(
        f"the catalog was damaged ({_said(reason)}): saved {saved.n_images} images, {saved.n_codes} of them "
        f"with their codes, into a new one; the damaged one is {saved.kept_as}"
    )


def _said(reason: str) -> str:
    """The first line of what SQLite says that is no heading, as `*** in database main ***` is."""
    return next((line for line in reason.splitlines() if line and not line.startswith("***")), reason)


def _mend_rows(path: Path, report: Repaired) -> None:
    """Make indexes and triggers again, drop rows that belong to nothing, and codes that no model can have made."""
    n_done = len(report.done)
    with closing(Database(path, read_only=False)) as database, database.transaction() as db:
        generation = database.generation(db) + 1
        report.done += schema.mend(db)
        for table, name in (("image_labels", "labels"), ("codes", "codes"), ("updated", "notes of changes")):
            n = db.execute(f"DELETE FROM {table} WHERE image_id NOT IN (SELECT id FROM images)").rowcount
            if n:
                report.done.append(f"dropped {n} {name} that belonged to no image")
        ids = attributes.damaged_ids(db)
        if ids:
            attributes.forget(db)
            db.executemany("UPDATE images SET attributes = '{}' WHERE id = ?", [(image_id,) for image_id in ids])
            listed = ", ".join(map(str, ids))
            report.done.append(f"emptied the attributes of {len(ids)} images, which could not be read: {listed}")
        if lacking := attributes.problems(db):
            attributes.forget(db)
            report.done += [f"made the indexes on attributes again: {problem}" for problem in lacking]
        n = db.execute("DELETE FROM codes WHERE space_id NOT IN (SELECT id FROM spaces)").rowcount
        for space_id, n_bits in db.execute("SELECT id, n_bits FROM spaces").fetchall():
            size = code_size(n_bits)
            highest = f"{0xFF >> (8 * size - n_bits):02X}"
            bad = (
                "FROM codes WHERE space_id = ? AND (typeof(code) != 'blob' OR length(code) != ? "
                "OR hex(substr(code, ?, 1)) > ?)"
            )
            values = (space_id, size, size, highest)
            db.execute(f"INSERT OR REPLACE INTO updated SELECT image_id, ? {bad}", (generation, *values))
            n += db.execute(f"DELETE {bad}", values).rowcount
        if n:
            report.done.append(f"dropped {n} malformed codes")
        if len(report.done) > n_done:
            db.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (str(generation),))
    if problem := choose_if_possible(path):
        report.left.append(problem)


def _mend_checkpoint(collection: Collection, checkpoint: Path, report: Repaired) -> None:
    """Copy `checkpoint` to where a space of its fingerprint lacks a sound one."""
    given = load_checkpoint(checkpoint)
    for space in collection.catalog.spaces():
        path = collection.folder / space.checkpoint
        if space.fingerprint != given.header.fingerprint:
            continue
        try:
            load_checkpoint(path)
        except HashseekError:
            write_atomically(path, checkpoint.read_bytes())
            report.done.append(f"copied the checkpoint {checkpoint} to {path}")


def _mend_codes(collection: Collection, report: Repaired, device: str, precision: str, engine: str) -> None:
    """Encode images that have no code, if their files are there."""
    space = collection.catalog.space
    state = Reencoded(space, collection.catalog.n_missing(space.id))
    if not state.total:
        return
    try:
        encoder = Encoder(load_checkpoint(collection.checkpoint), device=device, precision=precision, engine=engine)
    except HashseekError as error:
        report.left.append(f"{state.total} images have no code and cannot be encoded: {error}")
        return
    for _ in encode_missing(collection, encoder, state):
        pass
    if state.encoded:
        report.done.append(f"encoded {state.encoded} images whose codes were missing")
    report.left += [str(problem) for problem in state.lost.values()]
