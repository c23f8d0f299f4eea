"""What adding images would do to a catalog: the rules of the real thing, and nothing is written to the catalog."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from hashseek.indexing.catalog import Catalog, Change, NewImage
from hashseek.indexing.catalog.database import Database, DiskFull, now
from hashseek.indexing.catalog.schema import create_tables
from hashseek.indexing.catalog.storing import Storing, check_new
from hashseek.indexing.ingest.loading import Trusted
from hashseek.indexing.kept_files import with_kept_path

_SPACE = 1  # of the codes in the temporary database, whatever it is in the catalog
_COLUMNS = "id, key, sha256, path, width, height, bytes, media_type, mtime_ns, added_at, changed_at, attributes"
_COPY = f"INSERT OR IGNORE INTO images ({_COLUMNS}) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 1))})"


class Rehearsal:
    """A temporary database that has the records which a run would touch, as the run would leave them.

    A record is copied from the catalog when the first image comes that would meet it; then `Storing` decides, as it
    would in the catalog, and gives the ids that it would give there. What others store meanwhile is not looked at.
    """

    def __init__(self, catalog: Catalog | None) -> None:
        """Begin over `catalog` as it is; over an empty one if it is None.

        Raises:
            BadCollection: the catalog cannot be read.
        """
        self._space_id = _SPACE if catalog is None else catalog.space.id
        # SQLite puts a database without a name into a file of its own when it grows: memory stays as it is.
        self._db = sqlite3.connect("", isolation_level=None)
        create_tables(self._db)
        self._db.execute("INSERT INTO spaces VALUES (1, '', 0, '', 'ready', '', NULL)")
        self._db.execute("PRAGMA journal_mode = OFF")  # what is thrown away in the end is never rolled back
        self._db.execute("BEGIN")
        self._last_id = 0  # in the catalog: above it are those that would be added
        self._catalog: Database | None = None
        try:
            if catalog is not None:
                self._catalog = Database(catalog.path, read_only=True)
            for row in self._asked("SELECT seq FROM sqlite_sequence WHERE name = 'images'"):
                self._last_id = int(row[0])
            self._db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('images', ?)", (self._last_id,))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Throw the temporary database away."""
        self._db.close()
        if self._catalog is not None:
            self._catalog.close()

    def add(self, images: Sequence[NewImage]) -> list[tuple[int, Change]]:
        """(id, what would become of it) for each image, after all that came before it.

        Raises:
            BadConfig: a key or attributes are beyond their limits.
            BadCollection: the catalog cannot be read.
            DiskFull: there is no room for the temporary database.
        """
        texts = check_new(images)
        outcome: list[tuple[int, Change]] = []
        try:
            storing = Storing(self._db, _SPACE, 0, now())
            for image, text in zip(images, texts, strict=True):
                self._bring(image)
                outcome.append(storing.store(self._under_kept_path(image), text))
        except sqlite3.OperationalError as error:
            raise DiskFull(
                f"the temporary database of the dry run answered {str(error)!r}: free some space, or name a folder "
                "that has it in SQLITE_TMPDIR"
            ) from None
        return outcome

    def labels_of(self, ids: Sequence[int]) -> list[set[str]]:
        """The labels that each of these images, which `add` named, would have."""
        query = "SELECT label FROM image_labels WHERE image_id = ?"
        return [{str(row[0]) for row in self._db.execute(query, (image_id,))} for image_id in ids]

    def touched(self, found: Sequence[Trusted]) -> list[bool]:
        """Of each file that is as its record says, whether the run may have changed that record before."""
        return [self._sha256_of(one.record.id) is not None for one in found]

    def _under_kept_path(self, image: NewImage) -> NewImage:
        """The image as `Collection.add` would store it, whose folder may keep files of its own."""
        if self._catalog is None:
            return image
        row = self._db.execute("SELECT path, sha256 FROM images WHERE key = ?", (image.key,)).fetchone()
        return with_kept_path(self._catalog.path.parent, image, row)

    def _bring(self, image: NewImage) -> None:
        """Copy the record that decides what becomes of an image, unless it is here."""
        if image.key is not None:
            for (image_id,) in self._asked("SELECT id FROM images WHERE key = ?", image.key):
                self._copy(image_id)
            return
        query = "SELECT id FROM images WHERE sha256 = ? AND id > ? AND id <= ? ORDER BY id LIMIT 1"
        after = -1
        # Wanted is the first one that still has this content: the run may have given others to those before it.
        while found := self._asked(query, image.sha256, after, self._last_id):
            [(after,)] = found
            if self._copy(after) or self._sha256_of(after) == image.sha256:
                return

    def _copy(self, image_id: int) -> bool:
        """Copy a record of the catalog; False if it is here already, or came after the run began, or is gone."""
        if image_id > self._last_id or self._sha256_of(image_id) is not None:
            return False
        copied = 0
        for row in self._asked(f"SELECT {_COLUMNS} FROM images WHERE id = ?", image_id):
            copied = self._db.execute(_COPY, row).rowcount
        if copied:
            labels = self._asked("SELECT label, image_id FROM image_labels WHERE image_id = ?", image_id)
            self._db.executemany("INSERT INTO image_labels (label, image_id) VALUES (?, ?)", labels)
            query = "SELECT image_id, code FROM codes WHERE space_id = ? AND image_id = ?"
            codes = self._asked(query, self._space_id, image_id)
            self._db.executemany(f"INSERT INTO codes (space_id, image_id, code) VALUES ({_SPACE}, ?, ?)", codes)
        return copied > 0

    def _sha256_of(self, image_id: int) -> str | None:
        """The content that an image would have; None if it is not here."""
        row = self._db.execute("SELECT sha256 FROM images WHERE id = ?", (image_id,)).fetchone()
        return None if row is None else str(row[0])

    def _asked(self, query: str, *arguments: int | str) -> list[tuple[Any, ...]]:
        """What the catalog answers."""
        if self._catalog is None:
            return []
        with self._catalog.reading() as db:
            return db.execute(query, arguments).fetchall()
