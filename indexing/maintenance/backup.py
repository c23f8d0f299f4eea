"""Snapshot and restore: a whole collection in one file, taken while other processes search and change it.

A snapshot is a tar, not compressed, since pictures and codes are as short as they get:

    snapshot.json       first: that it is a snapshot, and of which version
    files/              what the collection keeps of its images; each is named by the SHA-256 of its content
    *.safetensors       the checkpoints
    catalog.sqlite
    contents.json       last: how many images, and the SHA-256 of all that is not named by its own

The index is not in it: it is derived, and built again when the snapshot is restored.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import sqlite3
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from hashseek.indexing.catalog import Catalog, explained
from hashseek.indexing.catalog.database import Database
from hashseek.indexing.collection import CATALOG, FILES, Collection
from hashseek.indexing.maintenance.scratch import workplace
from hashseek.retrieval.errors import BadCollection
from hashseek.retrieval.files import fsync_folder

log = logging.getLogger("hashseek")

FORMAT = 1
_FIRST, _LAST = "snapshot.json", "contents.json"
_KEPT = re.compile(rf"{FILES}/[0-9a-f]{{2}}/([0-9a-f]{{64}})(\.\w{{1,8}})?")
_CHECKPOINT = re.compile(r"[\w-][\w.-]*\.safetensors")
_CHUNK = 2**20
_PAGE = 1000
_LONGEST_JSON = 2**28  # bytes; it names what was lost, some 100 bytes each


@dataclass(frozen=True)
class Contents:
    """What a snapshot holds.

    Args:
        created_at: UTC.
        origin: tells apart collections of different beginnings; a restored one has that of the one it was taken from.
        generation: of the catalog, at the moment that the snapshot shows.
        n_images: images of the catalog.
        lost: files and checkpoints that were already missing or damaged, so that no snapshot can hold them.
    """

    created_at: str
    origin: str
    generation: int
    n_images: int
    lost: tuple[str, ...]


def snapshot(collection: Collection, file: Path) -> Contents:
    """Write all of `collection` to a new `file`, as of one moment; complete and durable when it returns.

    Searches go on meanwhile. Writers wait only while catalog, checkpoints and what came since the files are copied.

    Raises:
        BadCollection: there is such a file already, or the catalog cannot be copied.
        BadConfig: there is no right to write beside `file`.
        OSError: no room; there is no `file` then.
    """
    if file.exists() or file.is_symlink():
        raise BadCollection(f"{file} exists already: name a new file, or delete it first")
    if not file.parent.is_dir():
        raise BadCollection(f"there is no folder {file.parent} for the snapshot: create it first")
    with workplace(file.parent) as place:
        with (place / "packed").open("wb") as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
                contents = _pack(collection, tar, place / CATALOG)
            out.flush()
            os.fsync(out.fileno())
        (place / "packed").rename(file)
    fsync_folder(file.parent)
    return contents


def restore(file: Path, folder: Path) -> Contents:
    """Make the collection in the snapshot `file` anew in `folder`: all of it, every byte checked, or nothing.

    Raises:
        BadCollection: `folder` is not empty, or `file` is no snapshot, damaged, or of a newer Hashseek.
        BadConfig: there is no right to write beside `folder`.
        OSError: no room; `folder` is as it was.
    """
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise BadCollection(
            f"{folder} is not an empty folder: name a new one, or take an existing collection back with --over"
        )
    if not folder.absolute().parent.is_dir():
        raise BadCollection(f"there is no folder {folder.parent} to restore into: create it first")
    with workplace(folder.absolute().parent) as place:
        built = place / "collection"
        built.mkdir()
        contents = unpack(file, built)
        _build_index(built)
        for made in [*(path for path in built.rglob("*") if path.is_dir()), built]:
            fsync_folder(made)
        built.rename(folder)  # succeeds over an empty folder, and over nothing else
    fsync_folder(folder.absolute().parent)
    return contents


def _build_index(folder: Path) -> None:
    """Write the index, or every command that only reads would build it for itself, with a warning.

    Of a catalog that holds what it cannot hold there is none: whoever opens it is told, and a repair mends it.
    """

    def is_news(record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and folder in record.args)  # that it has no index is no surprise

    log.addFilter(is_news)
    try:
        with suppress(BadCollection), closing(Collection(folder)) as collection:
            collection.save_index()
    finally:
        log.removeFilter(is_news)


def unpack(file: Path, folder: Path) -> Contents:
    """Unpack the snapshot `file` into the empty `folder`, every byte checked; the catalog gets an identity of its own.

    Raises:
        BadCollection: it is no snapshot, damaged, or of a newer Hashseek.
    """
    if not file.is_file():
        raise BadCollection(f"there is no snapshot {file}: correct the path")
    try:
        with tarfile.open(file, mode="r:") as tar:
            contents = _unpack(file, tar, folder)
    except tarfile.TarError as error:
        raise _damaged(file, str(error)) from None
    present = {f"{path.relative_to(folder)}" for path in (folder / FILES).rglob("*") if path.is_file()}
    with closing(Catalog(folder / CATALOG)) as catalog:  # brings an older version up to date
        if (len(catalog), catalog.generation()) != (contents.n_images, contents.generation):
            raise _damaged(file, "its catalog is not the one it was made of")
        missing = [name for name in _checkpoint_names(catalog) if not (folder / name).is_file()]
    for kept, _ in _kept(folder / CATALOG):
        missing += [kept] if kept not in present else []
        present.discard(kept)
    if unexpected := {*missing} - {*contents.lost}:
        raise _damaged(file, f"{min(unexpected)} is not in it")
    for path in present:  # of images that were removed while the snapshot was taken
        (folder / path).unlink()
    # Two collections that go different ways may not take each other's index for their own.
    with closing(sqlite3.connect(folder / CATALOG)) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'uuid'", (str(uuid.uuid4()),))
        db.execute("INSERT OR REPLACE INTO meta VALUES ('origin', ?)", (contents.origin,))
    return contents


def origin_of(path: Path) -> str:
    """What the catalog at `path` and all that were ever restored from snapshots of it have in common."""
    with closing(Database(path, read_only=True)) as database, database.reading() as db:
        found = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('uuid', 'origin')").fetchall())
    return str(found.get("origin", found["uuid"]))


def _pack(collection: Collection, tar: tarfile.TarFile, copy: Path) -> Contents:
    _pack_json(tar, _FIRST, {"hashseek_snapshot": FORMAT})
    done: set[str] = set()
    # First without holding up anybody. A file that is missing may have been removed just now: the second look tells.
    _pack_files(tar, collection.folder, collection.catalog.path, done)
    sums = {}
    with collection.catalog.exclusive():  # nothing is added, removed or dropped meanwhile
        copy_catalog(collection.catalog.path, copy)
        lost = _pack_files(tar, collection.folder, copy, done)
        with closing(Catalog(copy, read_only=True)) as frozen:
            generation, n_images = frozen.generation(), len(frozen)
            names = _checkpoint_names(frozen)
        for name in names:
            try:
                sums[name] = _pack_file(tar, collection.folder / name, name)
            except FileNotFoundError:
                lost.append(name)
    sums[CATALOG] = _pack_file(tar, copy, CATALOG)
    created_at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    contents = Contents(created_at, origin_of(copy), generation, n_images, tuple(sorted(lost)))
    last = {**vars(contents), "sha256": sums}
    _pack_json(tar, _LAST, last | {"checksum": _checksum(last)})
    return contents


def copy_catalog(source: Path, copy: Path) -> None:
    """Copy a catalog that others use, as of one moment, to one file without companions."""
    with (
        closing(Database(source, read_only=True)) as database,
        database.reading() as db,
        explained(copy),
        closing(sqlite3.connect(copy)) as target,
    ):
        db.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")


def _checkpoint_names(catalog: Catalog) -> list[str]:
    return sorted({space.checkpoint for space in catalog.spaces()})


def _kept(catalog: Path) -> Iterator[tuple[str, str]]:
    """(path in the folder, SHA-256) of the files that the collection itself keeps, ascending."""
    after, end = f"{FILES}/", f"{FILES}0"  # "0" comes after "/"
    with closing(Database(catalog, read_only=True)) as database:
        while True:
            with database.reading() as db:
                page = db.execute(
                    "SELECT DISTINCT path, sha256 FROM images WHERE path > ? AND path < ? ORDER BY path LIMIT ?",
                    (after, end, _PAGE),
                ).fetchall()
            if not page:
                return
            yield from page
            after = page[-1][0]


def _pack_files(tar: tarfile.TarFile, folder: Path, catalog: Path, done: set[str]) -> list[str]:
    """Append the kept files that are not in `done`, and put them there; those that are missing or damaged."""
    lost = []
    for path, sha256 in _kept(catalog):
        if path in done:
            continue
        try:
            sound = _pack_file(tar, folder / path, path) == sha256
        except FileNotFoundError:
            sound = False
        if sound:
            done.add(path)
        else:
            lost.append(path)
    return lost


def _pack_file(tar: tarfile.TarFile, path: Path, name: str) -> str:
    """Append a file; its SHA-256."""
    with path.open("rb") as file:
        member = tarfile.TarInfo(name)
        member.size = os.fstat(file.fileno()).st_size
        reader = _Hashing(file)
        tar.addfile(member, reader)
    return reader.sha256.hexdigest()


def _pack_json(tar: tarfile.TarFile, name: str, content: dict[str, Any]) -> None:
    data = json.dumps(content, indent=2).encode()
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))


class _Hashing:
    """A file that is hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def _unpack(file: Path, tar: tarfile.TarFile, folder: Path) -> Contents:
    first = tar.next()
    version = _json(file, tar, first).get("hashseek_snapshot") if first and first.name == _FIRST else None
    if not isinstance(version, int):
        raise BadCollection(f"{file} is not a snapshot: name a file that `hashseek index snapshot` wrote")
    if version > FORMAT:
        raise BadCollection(
            f"{file} has snapshot format {version}, this Hashseek reads up to {FORMAT}: update Hashseek"
        )
    sums: dict[str, str] = {}
    last: dict[str, Any] = {}
    for member in tar:
        if member.name == _FIRST:
            continue
        if member.name == _LAST:
            last = _json(file, tar, member)
            continue
        if (
            member.type != tarfile.REGTYPE
            or member.issparse()
            or member.size < 0
            or not (member.name == CATALOG or _KEPT.fullmatch(member.name) or _CHECKPOINT.fullmatch(member.name))
        ):
            raise _damaged(file, f"{member.name!r} does not belong into it")
        sums[member.name] = _unpack_file(tar, member, folder)
    if last.get("checksum") != _checksum({key: value for key, value in last.items() if key != "checksum"}):
        raise _damaged(file, "its end is missing or changed")
    lost = {*last["lost"]}
    for name, found in sums.items():
        kept = _KEPT.fullmatch(name)
        if name in lost:
            (folder / name).unlink()
        elif found != (kept[1] if kept else last["sha256"].get(name)):
            raise _damaged(file, f"{name} in it is not what it was")
    if missing := [name for name in last["sha256"] if name not in sums]:
        raise _damaged(file, f"{missing[0]} is not in it")
    return Contents(last["created_at"], last["origin"], last["generation"], last["n_images"], tuple(last["lost"]))


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> str:
    """Write a member into `folder`, durable but for the folder's entry; its SHA-256."""
    source = tar.extractfile(member)
    assert source is not None  # it is a regular file
    path = folder / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    reader = _Hashing(source)  # type: ignore[arg-type]  # it only reads
    with path.open("wb") as target:
        shutil.copyfileobj(reader, target, _CHUNK)
        target.flush()
        os.fsync(target.fileno())
    return reader.sha256.hexdigest()


def _json(file: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    source = tar.extractfile(member) if member.isreg() and member.size <= _LONGEST_JSON else None
    try:
        content = json.loads(source.read()) if source is not None else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _damaged(file, f"{member.name} in it cannot be read")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _damaged(file: Path, reason: str) -> BadCollection:
    return BadCollection(f"the snapshot {file} is damaged or cut short: {reason}; use another one")
