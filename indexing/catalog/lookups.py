"""Finding records by content hash, key or path. `Catalog.lookup` is a `Lookups`."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hashseek.indexing.catalog.database import Database
from hashseek.indexing.catalog.records import FileRecord, Space, StoredCode, in_chunks, placeholders


class Lookups:
    """Look-ups in an open catalog; codes are those of `space`."""

    def __init__(self, database: Database, space: Space) -> None:
        self._db = database
        self._space_id = space.id

    def ids_by_hash(self, hashes: Sequence[str]) -> dict[str, int]:
        """Ids of the stored ones among these content hashes; the lowest id if several images have one content."""
        query = "SELECT sha256, min(id) FROM images WHERE sha256 IN ({}) GROUP BY sha256"
        return {str(sha256): int(image_id) for sha256, image_id in self._rows(query, hashes)}

    def ids_by_key(self, keys: Sequence[str]) -> dict[str, int]:
        """Ids of the stored ones among these keys."""
        query = "SELECT key, id FROM images WHERE key IN ({})"
        return {str(key): int(image_id) for key, image_id in self._rows(query, keys)}

    def records_by_path(self, paths: Sequence[str]) -> dict[str, FileRecord]:
        """The record of each of these paths that has one; the last of several."""
        has_code = f"EXISTS (SELECT 1 FROM codes WHERE space_id = {self._space_id} AND image_id = images.id)"
        query = f"SELECT path, id, key, bytes, mtime_ns, {has_code} FROM images WHERE path IN ({{}}) ORDER BY id"
        return {str(path): FileRecord(*record) for path, *record in self._rows(query, paths)}

    def stored_paths(self, paths: Iterable[str]) -> set[str]:
        """Those of the paths that an image has."""
        return {str(row[0]) for row in self._rows("SELECT path FROM images WHERE path IN ({})", list(paths))}

    def code_by_hash(self, sha256: str) -> StoredCode | None:
        """The code of a content that is stored already: it need not be encoded again."""
        with self._db.reading() as db:
            row = db.execute(  # CROSS JOIN: from the few images to their codes, whatever SQLite estimates
                "SELECT c.code, coalesce(e.name, ''), f.feature FROM images AS i "
                "CROSS JOIN codes AS c ON c.space_id = ? AND c.image_id = i.id "
                "LEFT JOIN engines AS e ON e.id = c.engine "
                "LEFT JOIN features AS f ON f.space_id = c.space_id AND f.image_id = c.image_id "
                "WHERE i.sha256 = ? LIMIT 1",
                (self._space_id, sha256),
            ).fetchone()
        if row is None:
            return None
        code, engine, feature = row
        kept = None if feature is None else np.frombuffer(feature, np.float16)
        return StoredCode(np.frombuffer(code, np.uint8), str(engine), kept)

    def _rows(self, query: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        with self._db.reading() as db:
            for chunk in in_chunks(list(dict.fromkeys(values))):
                rows += db.execute(query.format(placeholders(chunk)), chunk)
        return rows
