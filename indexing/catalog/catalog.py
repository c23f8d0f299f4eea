"""The catalog: the SQLite file that holds everything a collection knows about its images.

It stores each image's path, key, content hash, size, labels and attributes, and its code in one or several code
spaces. The generation counts committed changes; together with the ids, which are never reused, it shows an index what
has changed since the index was built.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.catalog.attributes import Ids, fetch_ids
from hashseek.indexing.catalog.database import CatalogDamaged, Database, now, read_meta, write_meta
from hashseek.indexing.catalog.filters import Filter, ids_where
from hashseek.indexing.catalog.integrity import check_rows
from hashseek.indexing.catalog.records import (
    IMAGE_COLUMNS,
    MAX_KEY,
    Change,
    Changes,
    FileRecord,
    NewImage,
    StoredCode,
    StoredImage,
    check_attributes,
    check_described,
    check_labels,
    is_utf8,
    listed_ids,
    listed_texts,
    stored_image,
)
from hashseek.indexing.catalog.spaces import CodeSpaces, active_space, codes_of
from hashseek.indexing.catalog.storing import Storing
from hashseek.indexing.milvus_uri import refuse_milvus
from hashseek.retrieval.codes import Codes, check_n_bits, code_size
from hashseek.retrieval.errors import BadCodes, BadCollection, UnknownImage

_READ = 65_536  # codes that are Python objects at a time, which take 150 bytes each


class SpaceRetired(BadCollection):
    """The collection was switched to another code space since it was opened; reopened, it accepts new images."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(f"the collection {folder} was switched to another checkpoint after it was opened, and {what}")


class Catalog:
    """An open catalog. Safe to use from several threads; other processes may read and write the same file.

    Reads never wait for a writer. `space` is the code space that was active when the catalog was opened: codes are
    read from it and written to it. `spaces` has all code spaces.
    """

    in_folder = True

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open an existing catalog.

        Raises:
            BadCollection: missing, not a Hashseek catalog, damaged, or written by another version of Hashseek.
            BadConfig: the collection is in Milvus.
        """
        refuse_milvus(path.parent)
        self.path = path
        self.folder = path.parent  # of the collection; of a copy for a dry run, that of the original
        self._db = Database(path, read_only=read_only)
        try:
            with self._db.reading() as db:
                uuid = read_meta(db, "uuid")
                self.keeps_features = read_meta(db, "keep_features") is not None
            if uuid is None:
                raise CatalogDamaged(path, "its table meta has no uuid")
            self.uuid = uuid
            self.spaces = CodeSpaces(self._db)
            self.space = self.spaces.own
            self.fingerprint = self.space.fingerprint
            self.n_bits = check_n_bits(self.space.n_bits)
            self._has_code = f"EXISTS (SELECT 1 FROM codes WHERE space_id = {self.space.id} AND image_id = images.id)"
        except (BadCodes, TypeError) as error:
            self.close()
            raise CatalogDamaged(path, f"its code space is invalid: {error}") from None
        except BaseException:
            self.close()
            raise

    @property
    def place(self) -> str:
        """The folder of the collection."""
        return str(self.folder)

    @property
    def checkpoint(self) -> Path:
        """The collection's copy of the checkpoint of its codes."""
        return self.folder / self.space.checkpoint

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __len__(self) -> int:
        with self._db.reading() as db:
            return int(db.execute("SELECT count(*) FROM images").fetchone()[0])

    def generation(self) -> int:
        """The number of committed changes."""
        with self._db.reading() as db:
            return self._db.generation(db)

    def is_current(self) -> bool:
        """Whether reopening the catalog would change nothing: the same file, with the same active code space."""
        return self._db.is_in_place() and self.spaces.active().id == self.space.id

    def exclusive(self) -> AbstractContextManager[object]:
        """Keep all other writers out, including those of other processes."""
        return self._db.transaction()

    def copy_to(self, copy: Path) -> None:
        """Copy the catalog to a single new file, in a consistent state, while others may use it."""
        self._db.copy_to(copy)

    def verify(self) -> tuple[list[str], bool]:
        """What is wrong with the file and its rows, and whether all records and codes can be read, see `check_rows`."""
        with self._db.snapshot() as db:
            return check_rows(db, self.space)

    # ------------------------------------------------------------ changing images

    def add(self, images: Sequence[NewImage]) -> list[tuple[int, Change]]:
        """Store images in one transaction; returns (id, what changed) for each. Durable when it returns.

        Without a key, the content decides: an image with the content of a stored one keeps that record ("known"), which
        gets the image's path if its own file is gone ("updated").
        With a key, the key decides: a new key makes a new record ("added"), even if its content is stored under
        another key, or goes to a record that the image `adopts` ("updated"); a known key gets the new content, path,
        labels and attributes ("updated"), if they are given and differ. A record keeps its id.

        Raises:
            BadConfig: a key or attributes exceed their limits, or a feature is missing in a collection that keeps them;
                nothing is stored.
            SpaceRetired: the codes belong to a space that is no longer active; nothing is stored.
        """
        texts = [check_described(image.labels, image.key, image.attributes) for image in images]
        with self._db.writing() as (db, generation):
            active = active_space(db)
            if active is None or active.id != self.space.id:
                own = self.fingerprint[:12]
                raise SpaceRetired(
                    self.folder, f"no longer accepts codes of checkpoint {own}: this change was not stored, try again"
                )
            storing = Storing(db, self.space.id, generation, now(), self.keeps_features, self.folder)
            outcome = [storing.store(image, text) for image, text in zip(images, texts, strict=True)]
            self._forget_decisions(db, storing.replaced_ids)
            return outcome

    def update(
        self, image_id: int, *, labels: Sequence[str] | None = None, attributes: Mapping[str, Any] | None = None
    ) -> StoredImage:
        """Replace the labels or the attributes of an image, or both; returns its record.

        Raises:
            UnknownImage: it is not stored.
            BadConfig: labels or attributes exceed their limits; nothing is changed.
        """
        check_labels(labels or ())
        text = None if attributes is None else check_attributes(attributes)
        with self._db.writing() as (db, generation):
            self.one(image_id)
            storing = Storing(db, self.space.id, generation, now(), self.keeps_features, self.folder)
            storing.describe(image_id, labels, text)
        return self.one(image_id)

    def remove(self, ids: Sequence[int], *, missing_ok: bool = False) -> None:
        """Remove images, all or none; with `missing_ok`, ids that are not stored are ignored.

        Raises:
            UnknownImage: an id is not stored.
        """
        with self._db.writing() as (db, generation):
            wanted = listed_ids(ids)
            of_these = "FROM images WHERE id IN (SELECT value FROM json_each(?))"
            if not missing_ok:
                known = {row[0] for row in db.execute(f"SELECT id {of_these}", (wanted,))}
                for image_id in ids:
                    if image_id not in known:
                        raise UnknownImage(f"there is no image {image_id} in the collection")
            db.execute(f"INSERT OR REPLACE INTO removed SELECT id, ? {of_these}", (generation, wanted))
            db.execute(f"DELETE {of_these}", (wanted,))

    def give_keys(self, keys: Mapping[int, str]) -> None:
        """Assign keys (by id) to records; keys that are too long or used by another record are skipped."""
        fitting = [(key, image_id) for image_id, key in keys.items() if len(key) <= MAX_KEY]
        if fitting:
            with self._db.writing() as (db, _):
                db.executemany("UPDATE OR IGNORE images SET key = ? WHERE id = ?", fitting)

    # ------------------------------------------------------------ reading images

    def get(self, ids: Sequence[int]) -> list[StoredImage | None]:
        """Records by id, in that order; None for an id that is not stored."""
        query = f"SELECT {IMAGE_COLUMNS} FROM images WHERE id IN (SELECT value FROM json_each(?))"
        with self._db.reading() as db:
            found = {row[0]: stored_image(row) for row in db.execute(query, (listed_ids(ids),))}
        return [found.get(int(i)) for i in ids]

    def one(self, image_id: int) -> StoredImage:
        """The record of one image.

        Raises:
            UnknownImage: it is not stored.
        """
        [found] = self.get([image_id])
        if found is None:
            raise UnknownImage(f"there is no image {image_id} in the collection")
        return found

    def by_key(self, key: str) -> StoredImage:
        """The record of the image with this key.

        Raises:
            UnknownImage: there is none.
        """
        known = self.ids_by_key([key]) if is_utf8(key) else {}
        found = self.get([known[key]])[0] if known else None
        if found is None:
            raise UnknownImage(f"there is no image with the key {key[:80]!r} in the collection")
        return found

    def page(self, *, after: int, limit: int, offset: int = 0) -> list[StoredImage]:
        """At most `limit` records with ids above `after`, by ascending id, after skipping the first `offset`."""
        query = f"SELECT {IMAGE_COLUMNS} FROM images WHERE id > ? ORDER BY id LIMIT ? OFFSET ?"
        with self._db.reading() as db:
            return [stored_image(row) for row in db.execute(query, (after, limit, offset)).fetchall()]

    def by_content(self, sha256: str) -> tuple[StoredImage, StoredCode] | None:
        """Record and code of an image with this content, which need not be encoded again; None if there is no code.

        If several records have this content, it is the one with the lowest id.
        """
        query = f"SELECT {IMAGE_COLUMNS} FROM images WHERE sha256 = ? AND {self._has_code} ORDER BY id LIMIT 1"
        with self._db.snapshot() as db:  # the image may get other content, and with it another code
            row = db.execute(query, (sha256,)).fetchone()
            if row is None:
                return None
            stored = stored_image(row)
            return stored, codes_of(db, self.space.id, [stored.id])[stored.id]

    def ids_by_key(self, keys: Sequence[str]) -> dict[str, int]:
        """The ids of these keys; keys that are not stored are left out."""
        query = "SELECT key, id FROM images WHERE key IN (SELECT value FROM json_each(?))"
        with self._db.reading() as db:
            return dict(db.execute(query, (listed_texts(keys),)).fetchall())

    def records_by_path(self, paths: Sequence[str]) -> dict[str, FileRecord]:
        """The record of each of these paths that has one; if there are several, the last."""
        wanted = "path IN (SELECT value FROM json_each(?)) ORDER BY id"
        query = f"SELECT path, id, key, bytes, mtime_ns, {self._has_code} FROM images WHERE {wanted}"
        with self._db.reading() as db:
            return {path: FileRecord(*record) for path, *record in db.execute(query, (listed_texts(paths),))}

    def label_counts(self) -> dict[str, int]:
        """Number of images per label, by name."""
        with self._db.reading() as db:
            rows = db.execute("SELECT label, count(*) FROM image_labels GROUP BY label ORDER BY label").fetchall()
        return {str(label): int(count) for label, count in rows}

    def ids_where(self, among: Filter) -> Ids:
        """Ids (ascending) of the images that pass a filter."""
        with self._db.snapshot() as db:
            return ids_where(db, among)

    # ------------------------------------------------------------ codes, for the index

    def code_of(self, image_id: int) -> StoredCode:
        """The code of one image.

        Raises:
            UnknownImage: it is not stored, or has no code in this space.
            SpaceRetired: it has none because the space is no longer active.
        """
        found = self.spaces.codes_of([image_id])
        if not found:
            self.one(image_id)  # it is not stored, or its code is still to be computed
            if not self.is_current():  # the codes may have been dropped
                own = self.fingerprint[:12]
                raise SpaceRetired(self.folder, f"the codes of checkpoint {own} were deleted: try again")
            raise UnknownImage(f"image {image_id} has no code of checkpoint {self.fingerprint[:12]} in the collection")
        return found[image_id]

    def changes(self, *, after_id: int, after_generation: int) -> Changes:
        """The changes since `after_generation`, for an index that holds the ids up to `after_id`."""
        space_id = self.space.id
        with self._db.snapshot() as db:
            generation = self._db.generation(db)
            # `optimize` deletes the list of earlier removals and updates: an older index has to read everything.
            if after_generation < self._db.number(db, "forgotten", default="0"):
                after_id = 0
            updated = db.execute(
                "SELECT u.image_id, c.code FROM updated AS u "
                "LEFT JOIN codes AS c ON c.space_id = ? AND c.image_id = u.image_id "
                "WHERE u.generation > ? AND u.image_id <= ? ORDER BY u.image_id",
                (space_id, after_generation, after_id),
            ).fetchall()
            parts = [self._entries([row for row in updated if row[1] is not None])]
            query = "SELECT image_id, code FROM codes WHERE space_id = ? AND image_id > ? ORDER BY image_id"
            added = db.execute(query, (space_id, after_id))
            while rows := added.fetchmany(_READ):
                parts.append(self._entries(rows))
            removed = fetch_ids(db, "SELECT image_id AS i FROM removed WHERE generation > ?", [after_generation])
        ids, codes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        removed_ids = np.concatenate([np.array([row[0] for row in updated], np.int64), removed])
        return Changes(generation, ids, codes, removed_ids, is_complete=after_id == 0)

    def all_codes(self) -> Changes:
        """All images that have a code, and their codes."""
        return self.changes(after_id=0, after_generation=-1)

    def index_kind(self) -> str:
        """The kind of index that the collection should have, see `hashseek.indexing.index.hamming_index`."""
        with self._db.reading() as db:
            return read_meta(db, "index_kind") or "exact"

    def set_index_kind(self, kind: str) -> None:
        """Store the kind of index that the collection should have."""
        if kind != self.index_kind():
            with self._db.transaction() as db:
                write_meta(db, "index_kind", kind)

    def saved_index(self) -> str | None:
        """The description of the index on disk, see `hashseek.indexing.index.index_files`; None if there is none."""
        with self._db.reading() as db:
            return read_meta(db, "index")

    def set_saved_index(self, description: str) -> None:
        """Store the description of the index on disk. Durable when it returns."""
        with self._db.transaction() as db:
            write_meta(db, "index", description)

    def forget_changes(self, generation: int) -> None:
        """Delete the list of removals and updates up to a generation.

        An index older than that reads all codes again at its next search, see `changes`.
        """
        with self._db.transaction() as db:
            n = db.execute("DELETE FROM removed WHERE generation <= ?", (generation,)).rowcount
            n += db.execute("DELETE FROM updated WHERE generation <= ?", (generation,)).rowcount
            if n:
                write_meta(db, "forgotten", str(generation))

    # ------------------------------------------------------------ decisions about near-duplicates

    def kept_groups(self) -> list[list[int]]:
        """Groups of near-duplicates that a user decided to keep in full; ids of removed images stay in them."""
        with self._db.reading() as db:
            groups: list[list[int]] = json.loads(read_meta(db, "kept_groups") or "[]")
        return groups

    def keep_group(self, group: Sequence[int]) -> None:
        """Remember that all images of a group are to be kept; a group within a kept one adds nothing.

        Raises:
            UnknownImage: an id is not stored; nothing is remembered.
        """
        with self._db.transaction() as db:
            for image_id in group:
                self.one(image_id)
            kept = self.kept_groups()
            if not any(set(group) <= set(other) for other in kept):
                write_meta(db, "kept_groups", json.dumps([*kept, sorted(group)]))

    def _forget_decisions(self, db: sqlite3.Connection, replaced: set[int]) -> None:
        """Remove replaced images from the kept groups, since nobody has decided about the new pictures."""
        kept = self.kept_groups() if replaced else []
        if not replaced.isdisjoint(chain.from_iterable(kept)):
            left = [[image_id for image_id in group if image_id not in replaced] for group in kept]
            write_meta(db, "kept_groups", json.dumps([group for group in left if len(group) > 1]))

    def _entries(self, rows: Sequence[tuple[int, bytes]]) -> tuple[Ids, Codes]:
        """Ids and codes of rows (id, code)."""
        ids, codes = [image_id for image_id, _ in rows], [code for _, code in rows]
        size = code_size(self.n_bits)
        if not all(isinstance(code, bytes) and len(code) == size for code in codes):
            raise CatalogDamaged(self.path, f"a code of {self.n_bits} bits does not have {size} bytes")
        return np.array(ids, np.int64), np.frombuffer(b"".join(codes), np.uint8).reshape(-1, size)
