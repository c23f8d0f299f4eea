"""How an image gets into the tables: added, updated in place, or known already."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field

from hashseek.indexing.catalog.attributes import index_new, known_paths, paths_of
from hashseek.indexing.catalog.records import Change, NewImage, check_attributes, check_key, same_attributes
from hashseek.indexing.catalog.spaces import engine_id, note_update


@dataclass
class Storing:
    """One transaction that stores images whose codes belong to one space.

    Args:
        space_id: of their codes.
        generation: that the transaction makes.
        time: that the records will name.
    """

    db: sqlite3.Connection
    space_id: int
    generation: int
    time: str
    _engines: dict[str, int | None] = field(default_factory=dict)
    _indexed: set[str] | None = field(default_factory=set)

    def __post_init__(self) -> None:
        self._indexed = known_paths(self.db)

    def store(self, image: NewImage, attributes: str) -> tuple[int, Change]:
        """Store one image; `attributes` is its attributes' text."""
        if image.key is None:
            known = self.db.execute(
                "SELECT id, path, mtime_ns FROM images WHERE sha256 = ? ORDER BY id LIMIT 1", (image.sha256,)
            ).fetchone()
            if known is None:
                return self._insert(image, attributes), "added"
            image_id, path, mtime_ns = known
            if path == image.path:
                self._note_mtime(int(image_id), mtime_ns, image)
            self._give_code(int(image_id), image)
            return int(image_id), "known"
        known = self.db.execute(
            "SELECT id, sha256, path, mtime_ns, attributes FROM images WHERE key = ?", (image.key,)
        ).fetchone()
        if known is None:
            return self._insert(image, attributes), "added"
        image_id, sha256, path, mtime_ns, old_attributes = known
        if sha256 == image.sha256:
            self._note_mtime(image_id, mtime_ns, image)
            self._give_code(image_id, image)
            differs = path != image.path
            if differs:
                self.db.execute("UPDATE images SET path = ? WHERE id = ?", (image.path, image_id))
        else:
            differs = True
            self._replace(image_id, image)
        differs |= self._describe(image_id, image, attributes, old_attributes)
        if not differs:
            return image_id, "known"
        self.db.execute("UPDATE images SET changed_at = ? WHERE id = ?", (self.time, image_id))
        return image_id, "updated"

    def _index_attributes(self, image: NewImage) -> None:
        """Index names that no image had before this one, whose attributes are stored."""
        if self._indexed is None or not image.attributes:
            return
        new = paths_of(image.attributes) - self._indexed
        if new:
            index_new(self.db, sorted(new))
            self._indexed = known_paths(self.db)

    def _insert(self, image: NewImage, attributes: str) -> int:
        engine = self._engine_of(image)
        row = self.db.execute(
            "INSERT INTO images (key, sha256, path, width, height, bytes, media_type, mtime_ns, added_at, changed_at, "
            "attributes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (
                image.key,
                image.sha256,
                image.path,
                image.width,
                image.height,
                image.bytes,
                image.media_type,
                image.mtime_ns,
                self.time,
                self.time,
                attributes,
            ),
        ).fetchone()
        image_id = int(row[0])
        self._index_attributes(image)
        self.db.execute(
            "INSERT INTO codes VALUES (?, ?, ?, ?)", (self.space_id, image_id, image.code.tobytes(), engine)
        )
        self._label(image_id, image.labels)
        return image_id

    def _replace(self, image_id: int, image: NewImage) -> None:
        """Other content under the same key: codes of the old content, in whichever space, are worth nothing."""
        engine = self._engine_of(image)
        self.db.execute(
            "UPDATE images SET sha256 = ?, path = ?, width = ?, height = ?, bytes = ?, media_type = ?, mtime_ns = ? "
            "WHERE id = ?",
            (
                image.sha256,
                image.path,
                image.width,
                image.height,
                image.bytes,
                image.media_type,
                image.mtime_ns,
                image_id,
            ),
        )
        self.db.execute("DELETE FROM codes WHERE space_id IN (SELECT id FROM spaces) AND image_id = ?", (image_id,))
        self.db.execute(
            "INSERT INTO codes VALUES (?, ?, ?, ?)", (self.space_id, image_id, image.code.tobytes(), engine)
        )
        note_update(self.db, image_id, self.generation)

    def _give_code(self, image_id: int, image: NewImage) -> None:
        """Its code for an image that has none, as after a change of models that could not read its file."""
        lacks = "SELECT 1 FROM codes WHERE space_id = ? AND image_id = ?"
        if self.db.execute(lacks, (self.space_id, image_id)).fetchone() is None:
            row = (self.space_id, image_id, image.code.tobytes(), self._engine_of(image))
            self.db.execute("INSERT INTO codes VALUES (?, ?, ?, ?)", row)
            note_update(self.db, image_id, self.generation)

    def _describe(self, image_id: int, image: NewImage, attributes: str, old_attributes: str) -> bool:
        """Set labels and attributes where some are given and they are others; whether any were."""
        differs, labels = False, image.labels
        if labels:
            old = self.db.execute("SELECT label FROM image_labels WHERE image_id = ?", (image_id,)).fetchall()
            if {row[0] for row in old} != set(labels):
                self.db.execute("DELETE FROM image_labels WHERE image_id = ?", (image_id,))
                self._label(image_id, labels)
                differs = True
        if attributes != "{}" and not _is_same(attributes, old_attributes):
            self.db.execute("UPDATE images SET attributes = ? WHERE id = ?", (attributes, image_id))
            self._index_attributes(image)
            differs = True
        return differs

    def _label(self, image_id: int, labels: Sequence[str]) -> None:
        self.db.executemany(
            "INSERT OR IGNORE INTO image_labels (label, image_id) VALUES (?, ?)",
            [(label, image_id) for label in labels],
        )

    def _note_mtime(self, image_id: int, mtime_ns: int | None, image: NewImage) -> None:
        """A file that was only touched: the next look at its time need not read it again."""
        if image.mtime_ns is not None and image.mtime_ns != mtime_ns:
            self.db.execute("UPDATE images SET mtime_ns = ? WHERE id = ?", (image.mtime_ns, image_id))

    def _engine_of(self, image: NewImage) -> int | None:
        """The engine's number; a code that was taken over from equal content keeps the engine that made it."""
        if not image.engine:
            # CROSS JOIN: from the few images to their codes, whatever SQLite guesses about sizes.
            row = self.db.execute(
                "SELECT c.engine FROM images AS i CROSS JOIN codes AS c ON c.space_id = ? AND c.image_id = i.id "
                "WHERE i.sha256 = ? AND c.code = ? LIMIT 1",
                (self.space_id, image.sha256, image.code.tobytes()),
            ).fetchone()
            return None if row is None else row[0]
        if image.engine not in self._engines:
            self._engines[image.engine] = engine_id(self.db, image.engine)
        return self._engines[image.engine]


def _is_same(text: str, old_text: str) -> bool:
    """Whether two texts of attributes say the same; an old one that is damaged says nothing."""
    try:
        return same_attributes(json.loads(text), json.loads(old_text))
    except (ValueError, RecursionError):
        return False


def check_new(images: Sequence[NewImage]) -> list[str]:
    """The text of each image's attributes, if all images can be stored.

    Raises:
        BadConfig: a key or attributes are beyond their limits.
    """
    for image in images:
        if image.key is not None:
            check_key(image.key)
    return [check_attributes(image.attributes) if image.attributes else "{}" for image in images]
