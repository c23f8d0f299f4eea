"""The catalog: an SQLite file that is the truth about a collection.

It holds every image's path, key, content hash, size, labels and attributes, and its code in one code space or several.
The generation counts committed changes; together with the ids, which are never given twice, it tells an index what it
has missed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import attributes, spaces
from hashseek.indexing.catalog.attributes import Ids
from hashseek.indexing.catalog.database import Database, damaged, now
from hashseek.indexing.catalog.filters import Chosen, Filter, choose, ids_where
from hashseek.indexing.catalog.records import Change, Changes, NewImage, OfFile, Space, StoredImage, check_key
from hashseek.indexing.catalog.schema import departures
from hashseek.indexing.catalog.storing import Storing, check_new
from hashseek.retrieval.codes import Codes, check_n_bits, code_size
from hashseek.retrieval.errors import BadCodes, BadCollection, BadConfig, UnknownImage


class SpaceRetired(BadCollection):
    """The collection has switched to another code space since it was opened; opened again, it takes new images."""


class Catalog:
    """An open catalog. Safe to use from several threads; other processes may read and write the same file.

    Reads have a connection of their own, so that they never wait for a writer, here or elsewhere. `space` is the code
    space that was active when the catalog was opened: codes are read from it and written to it.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open an existing catalog and bring its schema up to date.

        Raises:
            BadCollection: missing, not a Hashseek catalog, damaged, or written by a newer Hashseek.
        """
        self.path = path
        self._db = Database(path, read_only=read_only)
        try:
            with self._db.reading() as db:
                row = db.execute("SELECT value FROM meta WHERE key = 'uuid'").fetchone()
            if row is None:
                raise damaged(path, "its table meta has no uuid")
            self.uuid = str(row[0])
            self.space = self.active_space()
            self.fingerprint = self.space.fingerprint
            self.n_bits = check_n_bits(self.space.n_bits)
        except (BadCodes, ValueError) as error:
            self.close()
            raise damaged(path, f"its code space says: {error}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # ------------------------------------------------------------ images

    def generation(self) -> int:
        """How many changes were committed."""
        with self._db.reading() as db:
            return self._db.generation(db)

    def __len__(self) -> int:
        with self._db.reading() as db:
            return int(db.execute("SELECT count(*) FROM images").fetchone()[0])

    def add(self, images: Sequence[NewImage]) -> list[tuple[int, Change]]:
        """Store images in one transaction; (id, what became of it) for each. Durable when it returns.

        Without a key, content decides: an image whose content is there keeps its record ("known"). With a key, the key
        decides: a new key is a new record ("added"), though its content may be there under another; a key that is
        there gets the new content, path, labels and attributes in its record ("updated"), as far as they are given and
        differ. An id stays the same as long as its record is there.

        Raises:
            BadConfig: a key or attributes are beyond their limits; nothing is stored.
            SpaceRetired: the codes belong to a space that is no longer the active one; nothing is stored.
        """
        texts = check_new(images)
        with self._db.writing() as (db, generation):
            active = spaces.active_space(db)
            if active is None or active.id != self.space.id:
                raise SpaceRetired(
                    f"the collection {self.path.parent} has switched to other codes since it was opened, and takes no "
                    f"more of checkpoint {self.fingerprint[:12]}: nothing was stored, try again"
                )
            storing = Storing(db, self.space.id, generation, now())
            return [storing.store(image, text) for image, text in zip(images, texts, strict=True)]

    def remove(self, ids: Sequence[int], *, missing_ok: bool = False) -> None:
        """Forget images, all or none; with `missing_ok`, those of them that are there.

        Raises:
            UnknownImage: an id is not in the catalog.
        """
        with self._db.writing() as (db, generation):
            for image_id in ids:
                if db.execute("DELETE FROM images WHERE id = ?", (image_id,)).rowcount == 0:
                    if missing_ok:
                        continue
                    raise UnknownImage(f"there is no image {image_id} in the collection")
                db.execute("INSERT OR REPLACE INTO removed VALUES (?, ?)", (image_id, generation))

    def records_of(self, paths: Sequence[str]) -> dict[str, list[OfFile]]:
        """The records that name each of those paths that have any, in the order of their ids."""
        has_code = f"EXISTS (SELECT 1 FROM codes WHERE space_id = {int(self.space.id)} AND image_id = images.id)"
        query = f"SELECT path, id, key, bytes, mtime_ns, {has_code} FROM images WHERE path IN ({{}}) ORDER BY id"
        found: dict[str, list[OfFile]] = {}
        for path, *record in self._looked_up(query, paths):
            found.setdefault(str(path), []).append(OfFile(*record))
        return found

    def give_keys(self, keys: Mapping[str, str]) -> None:
        """Give records without a key the key of their path: the last record of each path gets it, the others go.

        A path's earlier records are of content that is no longer there. If its key is taken, all of them go.

        Args:
            keys: path -> key.

        Raises:
            BadConfig: a key is beyond its limits; nothing is changed.
        """
        for key in keys.values():
            check_key(key)
        with self._db.writing() as (db, generation):
            for path, key in keys.items():
                query = "SELECT id FROM images WHERE path = ? AND key IS NULL ORDER BY id"
                ids = [int(row[0]) for row in db.execute(query, (path,))]
                if ids and db.execute("SELECT 1 FROM images WHERE key = ?", (key,)).fetchone() is None:
                    db.execute("UPDATE images SET key = ? WHERE id = ?", (key, ids.pop()))
                db.executemany("DELETE FROM images WHERE id = ?", [(image_id,) for image_id in ids])
                gone = [(image_id, generation) for image_id in ids]
                db.executemany("INSERT OR REPLACE INTO removed VALUES (?, ?)", gone)

    def get(self, ids: Sequence[int]) -> list[StoredImage | None]:
        """Records by id, in that order; None for an id that is not there."""
        found: dict[int, StoredImage] = {}
        with self._db.reading() as db:
            for chunk in _chunks([int(i) for i in ids]):
                rows = db.execute(f"{_SELECT} WHERE id IN ({_marks(chunk)})", chunk)
                found.update((row[0], _stored(row)) for row in rows)
        return [found.get(int(i)) for i in ids]

    def one(self, image_id: int) -> StoredImage:
        """The record of one image.

        Raises:
            UnknownImage: it is not in the catalog.
        """
        # An id beyond 64 bits cannot be stored, and SQLite would refuse to compare it.
        found = self.get([image_id])[0] if 0 <= image_id < 2**63 else None
        if found is None:
            raise UnknownImage(f"there is no image {image_id} in the collection")
        return found

    def by_key(self, key: str) -> StoredImage:
        """The record of the image with this key.

        Raises:
            UnknownImage: there is none.
        """
        known = self.known_keys([key])
        found = self.get([known[key]])[0] if known else None
        if found is None:
            raise UnknownImage(f"there is no image with the key {key!r} in the collection")
        return found

    def code(self, image_id: int) -> Codes:
        """Packed code (1, code_size) of one image.

        Raises:
            UnknownImage: it is not in the catalog, or has no code in this space.
        """
        self.one(image_id)
        with self._db.reading() as db:
            row = db.execute(
                "SELECT code FROM codes WHERE space_id = ? AND image_id = ?", (self.space.id, image_id)
            ).fetchone()
        if row is None:  # removed since, or its code is still to be computed
            raise UnknownImage(
                f"there is no image {image_id} with a code of checkpoint {self.fingerprint[:12]} in the collection"
            )
        return self._codes([row[0]])

    def codes_of_equals(self, ids: Sequence[int], *, space_id: int) -> list[tuple[int, NDArray[np.uint8], str]]:
        """(id, code, engine or "") of those images of which another with the same content has a code in a space."""
        query = (
            "SELECT c.code, coalesce(e.name, '') FROM images AS own JOIN images AS other ON other.sha256 = own.sha256 "
            "CROSS JOIN codes AS c ON c.space_id = ? AND c.image_id = other.id "
            "LEFT JOIN engines AS e ON e.id = c.engine WHERE own.id = ? LIMIT 1"
        )
        with self._db.reading() as db:
            rows = [(image_id, db.execute(query, (space_id, image_id)).fetchone()) for image_id in ids]
        return [(image_id, np.frombuffer(row[0], np.uint8), str(row[1])) for image_id, row in rows if row is not None]

    def code_of_hash(self, sha256: str) -> NDArray[np.uint8] | None:
        """Packed code (code_size,) of this content, if an image with it is stored: it need not be encoded again."""
        with self._db.reading() as db:
            row = db.execute(  # CROSS JOIN: from the few images to their codes, whatever SQLite guesses about sizes
                "SELECT c.code FROM images AS i CROSS JOIN codes AS c ON c.space_id = ? AND c.image_id = i.id "
                "WHERE i.sha256 = ? LIMIT 1",
                (self.space.id, sha256),
            ).fetchone()
        return None if row is None else self._codes([row[0]])[0]

    def page(self, *, after: int, limit: int, label: str | None = None) -> list[StoredImage]:
        """At most `limit` records with ids above `after`, ascending; with `label`, only those that carry it."""
        where = "WHERE id > ?" + (
            "" if label is None else " AND id IN (SELECT image_id FROM image_labels WHERE label = ?)"
        )
        arguments: list[Any] = [after] if label is None else [after, label]
        with self._db.reading() as db:
            rows = db.execute(f"{_SELECT} {where} ORDER BY id LIMIT ?", [*arguments, limit]).fetchall()
        return [_stored(row) for row in rows]

    def known_hashes(self, hashes: Sequence[str]) -> dict[str, int]:
        """Ids of those content hashes that are stored; of several with one content, the lowest."""
        query = "SELECT sha256, min(id) FROM images WHERE sha256 IN ({}) GROUP BY sha256"
        return {str(sha256): int(image_id) for sha256, image_id in self._looked_up(query, hashes)}

    def known_keys(self, keys: Sequence[str]) -> dict[str, int]:
        """Ids of those keys that are stored."""
        query = "SELECT key, id FROM images WHERE key IN ({})"
        return {str(key): int(image_id) for key, image_id in self._looked_up(query, keys)}

    def known_files(self, paths: Sequence[str]) -> dict[str, tuple[int, int | None, int]]:
        """(size in bytes, mtime_ns when it was read or None, id) of those paths that are stored.

        A file whose content changed without a key has several records: its last is given.
        """
        query = "SELECT path, bytes, mtime_ns, max(id) FROM images WHERE path IN ({}) GROUP BY path"
        return {
            str(path): (int(n_bytes), None if mtime_ns is None else int(mtime_ns), int(image_id))
            for path, n_bytes, mtime_ns, image_id in self._looked_up(query, paths)
        }

    def ids_where(self, chosen: Filter) -> Ids:
        """Ids (ascending) of the images that a filter lets through, read as of one moment.

        Raises:
            BadConfig: the filter has a condition that cannot be asked.
        """
        with self._db.snapshot() as db:
            return ids_where(db, chosen)

    def choose(self, chosen: Filter) -> Chosen:
        """What a filter lets through, or leaves out, read as of one moment.

        Raises:
            BadConfig: the filter has a condition that cannot be asked.
        """
        with self._db.snapshot() as db:
            return choose(db, chosen)

    def label_counts(self) -> dict[str, int]:
        """Number of images per label, by name."""
        with self._db.reading() as db:
            rows = db.execute("SELECT label, count(*) FROM image_labels GROUP BY label ORDER BY label").fetchall()
        return {str(label): int(count) for label, count in rows}

    def changes(self, *, after_id: int, after_generation: int) -> Changes:
        """What a view misses that knows the ids up to `after_id` as of `after_generation`, read as of one moment."""
        space_id = self.space.id
        with self._db.snapshot() as db:
            generation = self._db.generation(db)
            if after_generation < self._db.forgotten(db):  # what was removed since is not known any more
                after_id, after_generation = 0, -1
            updated = db.execute(
                "SELECT u.image_id, c.code FROM updated AS u "
                "LEFT JOIN codes AS c ON c.space_id = ? AND c.image_id = u.image_id "
                "WHERE u.generation > ? AND u.image_id <= ? ORDER BY u.image_id",
                (space_id, after_generation, after_id),
            ).fetchall()
            rows = [row for row in updated if row[1] is not None]
            rows += db.execute(
                "SELECT image_id, code FROM codes WHERE space_id = ? AND image_id > ? ORDER BY image_id",
                (space_id, after_id),
            ).fetchall()
            removed = db.execute("SELECT image_id FROM removed WHERE generation > ?", (after_generation,)).fetchall()
        codes = self._codes([code for _, code in rows])
        gone = [*updated, *removed]
        ids = np.fromiter((image_id for image_id, _ in rows), np.int64, len(rows))
        removed_ids = np.fromiter((row[0] for row in gone), np.int64, len(gone))
        return Changes(generation, ids, codes, removed_ids, whole=after_id == 0)

    def integrity_problems(self) -> list[str]:
        """What SQLite's own check of the file finds, and rows that belong to nothing; empty if all is well."""
        with self._db.snapshot() as db:  # what is compared belongs to one moment, though others write
            found = [str(row[0]) for row in db.execute("PRAGMA integrity_check").fetchall()]
            if found != ["ok"]:
                return [f"SQLite: {problem}" for problem in found]
            orphans: dict[str, int] = {}
            for row in db.execute("PRAGMA foreign_key_check").fetchall():
                orphans[row[0]] = orphans.get(row[0], 0) + 1
            (n_codes,) = db.execute(
                "SELECT count(*) FROM codes WHERE image_id NOT IN (SELECT id FROM images)"
            ).fetchone()
            n_missing = spaces.n_missing(db, self.space)
            altered = [f"{kind} {name}" for kind, name, _ in departures(db)]
            shared = db.execute(_SHARED_KEYS).fetchone() if "index images_by_key" in altered else (0, "")
            of_attributes = attributes.problems(db)
        problems = [
            f"SQLite: {n} rows of {_TABLES.get(table, table)} belong to nothing" for table, n in orphans.items()
        ]
        problems += [f"the {one} of the catalog is missing, or was altered" for one in altered]
        if shared[0]:
            problems.append(
                f"{shared[0]} keys belong to several images each, as {shared[1]!r} does: remove all but one of them"
            )
        problems += of_attributes
        if n_codes:
            problems.append(f"{n_codes} codes belong to no image")
        if n_missing:
            problems.append(f"{n_missing} images have no code, so that no search finds them")
        return problems

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every other writer out, of other processes too, while something is done that rests on the catalog."""
        with self._db.transaction():
            yield

    def paths_in_use(self, paths: Iterable[str]) -> set[str]:
        """Those of the paths that an image points to."""
        return {str(row[0]) for row in self._looked_up("SELECT path FROM images WHERE path IN ({})", list(paths))}

    # ------------------------------------------------------------ code spaces

    def active_space(self) -> Space:
        """The code space that is active now; `self.space` was when the catalog was opened.

        Raises:
            BadCollection: the catalog names none, so it is damaged.
        """
        with self._db.reading() as db:
            active = spaces.active_space(db)
        if active is None:
            raise damaged(self.path, "it names no code space")
        return active

    def is_current(self) -> bool:
        """Whether what was opened is what would be opened now: the same file, and the same active space."""
        return self._db.is_in_place() and self.active_space().id == self.space.id

    def spaces(self) -> list[Space]:
        """Every code space, in the order of their making."""
        with self._db.reading() as db:
            return spaces.all_spaces(db)

    def begin_space(self, fingerprint: str, n_bits: int, checkpoint: str) -> Space:
        """A new, empty space for codes of another checkpoint, which lies in the folder under the name `checkpoint`."""
        check_n_bits(n_bits)
        with self._db.transaction() as db:
            return spaces.begin_space(db, fingerprint, n_bits, checkpoint)

    def add_codes(
        self,
        space_id: int,
        codes: Sequence[tuple[int, NDArray[np.uint8], str]],
        *,
        hashes: Sequence[str] | None = None,
    ) -> int:
        """Give images their codes in a space, in one transaction; the number stored. Durable when it returns.

        Args:
            space_id: of the codes.
            codes: (id, packed code (code_size,), engine or "") of each; an id that has gone is left out.
            hashes: the content hash of each that was encoded; an image that has other content by now is left out.

        Raises:
            BadConfig: there is no such space.
            BadCodes: a code is not of the space's width.
        """
        with self._db.writing() as (db, generation):
            space = spaces.one_space(db, space_id)
            return spaces.add_codes(db, space, codes, hashes=hashes, generation=generation)

    def missing_in(self, space_id: int, after: int, limit: int) -> list[StoredImage]:
        """At most `limit` records with ids above `after` that have no code in a space, ascending."""
        missing = "NOT EXISTS (SELECT 1 FROM codes WHERE space_id = ? AND image_id = images.id)"
        with self._db.reading() as db:
            rows = db.execute(
                f"{_SELECT} WHERE id > ? AND {missing} ORDER BY id LIMIT ?", (after, space_id, limit)
            ).fetchall()
        return [_stored(row) for row in rows]

    def n_missing(self, space_id: int) -> int:
        """How many images have no code in a space."""
        with self._db.reading() as db:
            return spaces.n_missing(db, spaces.one_space(db, space_id))

    def switch_space(self, space_id: int, *, allow_missing: bool = False) -> None:
        """Make a space the active one. Whoever has the collection open stays on the space that it was opened on.

        Raises:
            BadConfig: there is no such space.
            BadCollection: an image has no code in it, and `allow_missing` is False.
        """
        with self._db.writing() as (db, _):
            spaces.switch_space(db, spaces.one_space(db, space_id), allow_missing=allow_missing)

    def drop_space(self, space_id: int) -> None:
        """Forget a space and its codes; its checkpoint's file stays.

        Raises:
            BadConfig: there is no such space, or it is the active one.
        """
        with self._db.transaction() as db:
            spaces.drop_space(db, spaces.one_space(db, space_id))

    def codes_of(self, ids: Sequence[int], *, space_id: int | None = None) -> dict[int, tuple[NDArray[np.uint8], str]]:
        """(packed code (code_size,), engine or "") of those images that have one, in this space or another."""
        found: dict[int, tuple[NDArray[np.uint8], str]] = {}
        with self._db.reading() as db:
            for chunk in _chunks([int(i) for i in ids]):
                found |= spaces.codes_of(db, self.space.id if space_id is None else space_id, chunk)
        return found

    def engines(self) -> dict[str, int]:
        """Number of codes of this space per engine that made them; "" for those of which that is not known."""
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT coalesce(name, ''), count(*) FROM codes LEFT JOIN engines ON engines.id = codes.engine "
                "WHERE space_id = ? GROUP BY codes.engine ORDER BY 1",
                (self.space.id,),
            ).fetchall()
        return {str(name): int(count) for name, count in rows}

    def index_kind(self) -> str | None:
        """The kind of index that `set_index_kind` kept; None if nothing."""
        with self._db.reading() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'index_kind'").fetchone()
        return None if row is None else str(row[0])

    def set_index_kind(self, kind: str) -> None:
        """Keep the kind of index that the collection is to have, whatever becomes of the index itself."""
        if kind != self.index_kind():
            with self._db.transaction() as db:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('index_kind', ?)", (kind,))

    def calibration(self) -> Any | None:
        """What `set_calibration` kept for this space; None if nothing."""
        with self._db.reading() as db:
            row = db.execute("SELECT calibration FROM spaces WHERE id = ?", (self.space.id,)).fetchone()
        return None if row is None or row[0] is None else json.loads(row[0])

    def set_calibration(self, value: Any | None) -> None:
        """Keep a JSON value with this space, which says what its distances mean.

        Raises:
            BadConfig: it cannot be written as JSON.
        """
        try:
            text = None if value is None else json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadConfig(f"a calibration is a JSON value, and this cannot be written as one: {error}") from None
        with self._db.transaction() as db:
            db.execute("UPDATE spaces SET calibration = ? WHERE id = ?", (text, self.space.id))

    # ------------------------------------------------------------

    def _looked_up(self, query: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        with self._db.reading() as db:
            for chunk in _chunks(list(dict.fromkeys(values))):
                rows += db.execute(query.format(_marks(chunk)), chunk)
        return rows

    def _codes(self, blobs: Sequence[bytes]) -> Codes:
        size = code_size(self.n_bits)
        if not all(isinstance(blob, bytes) and len(blob) == size for blob in blobs):
            raise damaged(self.path, f"a code has not the {size} bytes of {self.n_bits} bits")
        return np.frombuffer(b"".join(blobs), np.uint8).reshape(-1, size)


_TABLES = {"image_labels": "labels"}
_COLUMNS = (
    "id, path, sha256, width, height, bytes, media_type, added_at, key, attributes, changed_at, "
    "(SELECT json_group_array(label) FROM (SELECT label FROM image_labels WHERE image_id = images.id ORDER BY label))"
)
_SELECT = f"SELECT {_COLUMNS} FROM images"
_SHARED_KEYS = (
    "SELECT count(*), min(key) FROM (SELECT key FROM images WHERE key IS NOT NULL GROUP BY key HAVING count(*) > 1)"
)


def _stored(row: tuple[Any, ...]) -> StoredImage:
    image_id, path, sha256, width, height, n_bytes, media_type, added_at, key, attributes, changed_at, labels = row
    try:
        said = tuple(json.loads(labels)), added_at, key, json.loads(attributes), changed_at
        if not (isinstance(path, str) and isinstance(sha256, str)):
            raise TypeError
    except (ValueError, TypeError):
        raise BadCollection(
            f"what is stored of image {image_id} is damaged: mend it with `hashseek index verify --repair`"
        ) from None
    return StoredImage(image_id, path, sha256, width, height, n_bytes, media_type, *said)


def _chunks(values: list[Any]) -> Iterator[list[Any]]:
    """Some at a time: SQLite limits the number of placeholders."""
    for start in range(0, len(values), 500):
        yield values[start : start + 500]


def _marks(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))
