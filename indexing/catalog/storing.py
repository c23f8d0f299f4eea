"""Stores images in the tables: each is added, updates the record with its key, or is already known."""

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from hashseek.indexing.catalog.attributes import MAX_INDEXED, add_indexes, indexed_paths, paths_of
from hashseek.indexing.catalog.records import Change, NewImage, placeholders, same_attributes
from hashseek.indexing.catalog.spaces import engine_id, insert_feature, note_update
from hashseek.indexing.remote import is_remote
from hashseek.indexing.uris import is_moved


@dataclass
class Storing:
    """One transaction that stores images whose codes belong to one space.

    Args:
        db: the connection, within the transaction.
        space_id: the space of the codes.
        generation: the one that the transaction creates.
        time: the time of the records.
        keep_features: also store features.
        folder: the folder of the collection.

    Attributes:
        replaced_ids: the images whose content was replaced so far.
    """

    db: sqlite3.Connection
    space_id: int
    generation: int
    time: str
    keep_features: bool
    folder: Path
    replaced_ids: set[int] = field(default_factory=set, init=False)
    _indexed: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._indexed = set(indexed_paths(self.db))
        self._engine_id = cache(partial(engine_id, self.db))

    def store(self, image: NewImage, attributes: str) -> tuple[int, Change]:
        """Store one image; `attributes` is the JSON text of its attributes. Returns its id and what changed."""
        return self._by_content(image, attributes) if image.key is None else self._by_key(image, attributes)

    def _by_content(self, image: NewImage, attributes: str) -> tuple[int, Change]:
        """Store an image unless its content is already stored; that record follows a file that was moved."""
        known = self.db.execute(
            "SELECT id, path, bytes, mtime_ns FROM images WHERE sha256 = ? ORDER BY path != ?, id LIMIT 1",
            (image.sha256, image.path),
        ).fetchone()
        if known is None:
            return self._insert(image, attributes), "added"
        image_id, path, size, mtime_ns = known
        self._give_code(image_id, image)
        if path == image.path:
            self._note_mtime(image_id, mtime_ns, image)
        elif is_moved(self._uri(path), self._uri(image.path), sha256=image.sha256, stamp=(size, mtime_ns)):
            self.db.execute(
                "UPDATE images SET path = ?, mtime_ns = ? WHERE id = ?", (image.path, image.mtime_ns, image_id)
            )
            self._note_change(image_id)
            return image_id, "updated"
        return image_id, "known"

    def _by_key(self, image: NewImage, attributes: str) -> tuple[int, Change]:
        """Store an image, or update the record that has its key."""
        known = self.db.execute("SELECT id, sha256, path, mtime_ns FROM images WHERE key = ?", (image.key,)).fetchone()
        gets_key = known is None and image.adopts
        if gets_key:
            known = self.db.execute(
                "UPDATE images SET key = ? WHERE id = (SELECT id FROM images WHERE sha256 = ? AND path = ? "
                "AND key IS NULL LIMIT 1) RETURNING id, sha256, path, mtime_ns",
                (image.key, image.sha256, image.path),
            ).fetchone()
        if known is None:
            return self._insert(image, attributes), "added"
        image_id, sha256, path, mtime_ns = known
        differs = gets_key or (path, sha256) != (image.path, image.sha256)
        if sha256 != image.sha256:
            self._replace(image_id, image)
        else:
            self._note_mtime(image_id, mtime_ns, image)
            self._give_code(image_id, image)
            if path != image.path:
                self.db.execute("UPDATE images SET path = ? WHERE id = ?", (image.path, image_id))
        differs |= self.describe(image_id, image.new_labels, None if image.new_attributes is None else attributes)
        if differs:
            self._note_change(image_id)
        return image_id, "updated" if differs else "known"

    def describe(self, image_id: int, labels: Sequence[str] | None, attributes: str | None) -> bool:
        """Replace labels and attributes (JSON text) that are given and differ; returns whether any did."""
        differs = False
        if labels is not None:
            old = self.db.execute("SELECT label FROM image_labels WHERE image_id = ?", (image_id,)).fetchall()
            if {row[0] for row in old} != set(labels):
                self.db.execute("DELETE FROM image_labels WHERE image_id = ?", (image_id,))
                self._label(image_id, labels)
                differs = True
        if attributes is not None:
            new = json.loads(attributes)
            [before] = self.db.execute("SELECT attributes FROM images WHERE id = ?", (image_id,)).fetchone()
            if not same_attributes(new, json.loads(before)):
                self.db.execute("UPDATE images SET attributes = ? WHERE id = ?", (attributes, image_id))
                self._index_attributes(new)
                differs = True
        if differs:
            self._note_change(image_id)
        return differs

    def _uri(self, path: str) -> str:
        """Where the file of a record with this path is; that of a kept file is relative to the folder."""
        return path if is_remote(path) else os.path.join(self.folder, path)  # noqa: PTH118

    def _note_change(self, image_id: int) -> None:
        self.db.execute("UPDATE images SET changed_at = ? WHERE id = ?", (self.time, image_id))

    def _index_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Create indexes for attributes that no stored image had before, as long as there is room."""
        paths = paths_of(attributes)
        if len(self._indexed) < MAX_INDEXED and not self._indexed.issuperset(paths):
            add_indexes(self.db, paths)
            self._indexed = set(indexed_paths(self.db))

    def _insert(self, image: NewImage, attributes: str) -> int:
        columns = (*_content(image), image.key, self.time, self.time, attributes)
        row = self.db.execute(
            "INSERT INTO images (sha256, path, width, height, bytes, media_type, mtime_ns, key, added_at, changed_at, "
            f"attributes) VALUES ({placeholders(columns)}) RETURNING id",
            columns,
        ).fetchone()
        image_id = int(row[0])
        self._index_attributes(image.attributes)
        self._insert_code(image_id, image)
        self._label(image_id, image.labels)
        return image_id

    def _replace(self, image_id: int, image: NewImage) -> None:
        """Store new content under the same key: the codes of the old content, in every space, are deleted."""
        self.db.execute(
            "UPDATE images SET sha256 = ?, path = ?, width = ?, height = ?, bytes = ?, media_type = ?, mtime_ns = ? "
            "WHERE id = ?",
            (*_content(image), image_id),
        )
        self.db.execute("DELETE FROM codes WHERE space_id IN (SELECT id FROM spaces) AND image_id = ?", (image_id,))
        self._insert_code(image_id, image)
        note_update(self.db, image_id, self.generation)
        self.replaced_ids.add(image_id)

    def _insert_code(self, image_id: int, image: NewImage) -> None:
        row = (self.space_id, image_id, image.code.tobytes(), self._engine_id(image.engine))
        self.db.execute("INSERT INTO codes VALUES (?, ?, ?, ?)", row)
        if self.keep_features:
            insert_feature(self.db, self.space_id, image_id, image.feature)

    def _give_code(self, image_id: int, image: NewImage) -> None:
        """Store the code of an image that has none, for example because a re-encoding could not read its file."""
        lacks = "SELECT 1 FROM codes WHERE space_id = ? AND image_id = ?"
        if self.db.execute(lacks, (self.space_id, image_id)).fetchone() is None:
            self._insert_code(image_id, image)
            note_update(self.db, image_id, self.generation)

    def _label(self, image_id: int, labels: Sequence[str]) -> None:
        self.db.executemany(
            "INSERT OR IGNORE INTO image_labels (label, image_id) VALUES (?, ?)",
            [(label, image_id) for label in labels],
        )

    def _note_mtime(self, image_id: int, mtime_ns: int | None, image: NewImage) -> None:
        """Store a file's new modification time, so that a file that was only touched is not read again."""
        if image.mtime_ns is not None and image.mtime_ns != mtime_ns:
            self.db.execute("UPDATE images SET mtime_ns = ? WHERE id = ?", (image.mtime_ns, image_id))


def _content(image: NewImage) -> tuple[object, ...]:
    """The columns that follow from an image's content and file."""
    size = image.width, image.height, image.bytes
    return image.sha256, image.path, *size, image.media_type, image.mtime_ns
