"""Snapshot and restore: a whole collection in one file, written while other processes search and change it.

A snapshot is an uncompressed tar, since images and codes hardly compress:

    snapshot.json       first: the format version
    files/              the images that the collection keeps, each named by the SHA-256 of its content
    *.safetensors       the checkpoints
    catalog.sqlite
    contents.json       last: number of images, and the SHA-256 of the catalog and the checkpoints

The index is not included: it is derived, and rebuilt when the snapshot is restored.
"""

import hashlib
import json
import os
import re
import shutil
import sqlite3
import tarfile
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.catalog.database import Database, now, write_meta
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.kept_files import FILES
from hashseek.indexing.maintenance.scratch import new_file, scratch_directory
from hashseek.indexing.milvus_uri import refuse_milvus
from hashseek.retrieval.checkpoint import check_intact
from hashseek.retrieval.errors import BadCheckpoint, BadCollection
from hashseek.retrieval.files import checksum_of, fsync_folder, sha256_of

FORMAT = 1
_FIRST, _LAST = "snapshot.json", "contents.json"
_KEPT = re.compile(rf"{FILES}/[0-9a-f]{{2}}/([0-9a-f]{{64}})(\.\w{{1,8}})?")
_CHECKPOINT = re.compile(r"[\w-][\w.-]*\.safetensors")
_MAX_JSON = 2**28  # bytes; about 100 for each missing file


@dataclass(frozen=True)
class Contents:
    """What a snapshot holds.

    Args:
        created_at: when it was made, in UTC.
        generation: the generation of the catalog.
        n_images: number of images in the catalog.
        lost: files and checkpoints that were already missing or damaged, and are not in the snapshot.
    """

    created_at: str
    generation: int
    n_images: int
    lost: tuple[str, ...]


def snapshot(collection: Collection, file: Path) -> Contents:
    """Write a consistent copy of all of `collection` to a new `file`; complete and durable when it returns.

    Searches continue. Writers wait only while the catalog, the checkpoints and the latest files are copied.

    Raises:
        BadCollection: the catalog cannot be copied.
        BadConfig: the file already exists, its folder does not, or there is no permission to write there.
        OSError: the disk is full; `file` does not exist then.
    """
    with new_file(file) as (out, scratch), tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        return _pack(collection, tar, scratch / CATALOG)


def restore(file: Path, folder: Path) -> Contents:
    """Restore the snapshot `file` into the new or empty `folder`: all of it, every byte checked, or nothing.

    Raises:
        BadCollection: `folder` is not empty, or `file` is not a snapshot, damaged, or of a newer Hashseek.
        BadConfig: there is no permission to write in the parent of `folder`.
        OSError: the disk is full; `folder` is unchanged then.
    """
    refuse_milvus(folder)
    parent = folder.absolute().parent
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise BadCollection(
            f"{folder} is not an empty folder: restore into a new one; to replace a collection, move its folder away "
            "and rename the new one"
        )
    if folder.is_dir() and (folder.is_mount() or folder.samefile(Path())):
        raise BadCollection(
            f"{folder} is a mount point or the current folder, which cannot be replaced: restore into a new folder"
        )
    if not parent.is_dir():
        raise BadCollection(f"there is no folder {folder.parent} to restore into: create it first")
    if not file.is_file():
        raise BadCollection(f"there is no snapshot {file}: check the path")
    with scratch_directory(parent) as scratch:
        restored = scratch / "collection"
        restored.mkdir()
        try:
            with tarfile.open(file, mode="r:") as tar:
                contents = _unpack(file, tar, restored)
        except tarfile.TarError as error:
            raise _damaged(file, str(error)) from None
        _check_files(file, restored, contents)
        # Two collections that diverge must not share what a service has computed.
        with closing(sqlite3.connect(restored / CATALOG)) as db, db:
            write_meta(db, "uuid", str(uuid.uuid4()))
            db.execute("DELETE FROM meta WHERE key = 'index'")  # the snapshot does not include it
        # A catalog with malformed codes gets no index: opening it reports the damage, and a repair fixes it.
        with suppress(BadCollection), closing(Collection(restored)) as collection:
            collection.save_index()
        for path in [*(path for path in restored.rglob("*") if path.is_dir()), restored]:
            fsync_folder(path)
        restored.rename(folder)  # succeeds only if `folder` does not exist or is empty
    fsync_folder(parent)
    return contents


def _check_files(file: Path, restored: Path, contents: Contents) -> None:
    """Check that all files of the catalog's images are there; delete files without an image."""
    present = {f"{path.relative_to(restored)}" for path in (restored / FILES).rglob("*") if path.is_file()}
    needed = {path for path, _ in _kept(restored / CATALOG)}
    if missing := needed - present - {*contents.lost}:
        raise _damaged(file, f"{min(missing)} is missing")
    for path in present - needed:  # of images that were removed while the snapshot was taken
        (restored / path).unlink()


def _pack(collection: Collection, tar: tarfile.TarFile, copy: Path) -> Contents:
    _pack_json(tar, _FIRST, {"hashseek_snapshot": FORMAT})
    done: set[str] = set()
    # First without keeping writers waiting. A missing file may belong to an image that was removed just now.
    _pack_files(tar, collection.folder, collection.catalog.path, done)
    sums = {}
    with collection.catalog.exclusive():  # nothing is added, removed or dropped now
        collection.catalog.copy_to(copy)
        lost = _pack_files(tar, collection.folder, copy, done)
        with closing(Catalog(copy, read_only=True)) as frozen:
            generation, n_images = frozen.generation(), len(frozen)
            names = sorted({space.checkpoint for space in frozen.spaces.all()})
        for name in names:
            try:
                check_intact(collection.folder / name)
            except BadCheckpoint:
                lost.append(name)
            else:
                sums[name] = _pack_file(tar, collection.folder / name, name)
    sums[CATALOG] = _pack_file(tar, copy, CATALOG)
    contents = Contents(now(), generation, n_images, tuple(sorted(lost)))
    last = {**vars(contents), "sha256": sums}
    _pack_json(tar, _LAST, last | {"checksum": checksum_of(last)})
    return contents


def _kept(catalog: Path) -> list[tuple[str, str]]:
    """(path in the folder, SHA-256) of the files that the collection keeps, by ascending path."""
    with closing(Database(catalog, read_only=True)) as database, database.reading() as db:
        query = "SELECT DISTINCT path, sha256 FROM images WHERE path > ? AND path < ? ORDER BY path"
        found = db.execute(query, (f"{FILES}/", f"{FILES}0"))  # "0" comes after "/"
        return [(path, sha256) for path, sha256 in found if _KEPT.fullmatch(path)]


def _pack_files(tar: tarfile.TarFile, folder: Path, catalog: Path, done: set[str]) -> list[str]:
    """Append the kept files that are not in `done`, and add them there; returns those that are missing or damaged."""
    lost = []
    for path, sha256 in _kept(catalog):
        if path in done:
            continue
        file = _open_intact(folder / path, sha256)
        if file is None:
            lost.append(path)
        else:
            with file:
                _append(tar, file, path)
            done.add(path)
    return lost


def _open_intact(path: Path, sha256: str) -> BinaryIO | None:
    """The file, read to its end; None if it is missing, cannot be read or has other content."""
    try:
        file = path.open("rb")
        if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
            return file
        file.close()
    except OSError:
        pass
    return None


def _pack_file(tar: tarfile.TarFile, path: Path, name: str) -> str:
    """Append a file; returns its SHA-256."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        _append(tar, file, name)
    return sha256


def _append(tar: tarfile.TarFile, file: BinaryIO, name: str) -> None:
    """Append a file that has been read to its end."""
    member = tarfile.TarInfo(name)
    member.size = file.tell()
    file.seek(0)
    tar.addfile(member, file)


def _pack_json(tar: tarfile.TarFile, name: str, content: dict[str, Any]) -> None:
    data = json.dumps(content, indent=2).encode()
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))


def _unpack(file: Path, tar: tarfile.TarFile, folder: Path) -> Contents:
    first = tar.next()
    version = _json(file, tar, first).get("hashseek_snapshot") if first and first.name == _FIRST else None
    if not isinstance(version, int):
        raise BadCollection(f"{file} is not a snapshot: use a file written by `hashseek index snapshot`")
    if version > FORMAT:
        raise BadCollection(
            f"{file} has snapshot format {version}, but this Hashseek reads up to {FORMAT}: update Hashseek"
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
            raise _damaged(file, f"{member.name!r} does not belong in it")
        sums[member.name] = _unpack_file(tar, member, folder)
    if last.get("checksum") != checksum_of(last):
        raise _damaged(file, "its end is missing or has been changed")
    for name, found in sums.items():
        kept = _KEPT.fullmatch(name)
        if found != (kept[1] if kept else last["sha256"].get(name)):
            raise _damaged(file, f"the content of {name} has changed")
    if missing := [name for name in last["sha256"] if name not in sums]:
        raise _damaged(file, f"{missing[0]} is missing")
    return Contents(last["created_at"], last["generation"], last["n_images"], tuple(last["lost"]))


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> str:
    """Write a member into `folder` and sync it; returns its SHA-256."""
    source = tar.extractfile(member)
    assert source is not None  # it is a regular file
    path = folder / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    return sha256_of(path)


def _json(file: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    source = tar.extractfile(member) if member.isreg() and member.size <= _MAX_JSON else None
    try:
        content = json.loads(source.read()) if source is not None else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _damaged(file, f"{member.name} cannot be read")
    return content


def _damaged(file: Path, reason: str) -> BadCollection:
    return BadCollection(f"the snapshot {file} is damaged or truncated: {reason}; use another one")
