"""The tables of a catalog, as numbered migrations.

meta           what there is one of: uuid, generation (number of committed changes), space (the active one)
images         one row per image; `key` is the caller's own name for it, `attributes` a JSON object
image_labels   which image carries which label
spaces         code spaces: codes of one checkpoint each; one of them is active, others are built or kept
codes          the code of an image in a space, and the engine that made it
attribute_indexes  names of attributes that have an index, see `hashseek.indexing.catalog.attributes`
removed        ids that are gone, and since which generation
updated        ids whose code is another one, and since which generation
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from hashseek.indexing.catalog import attributes

APPLICATION_ID = 0x48534B31  # "HSK1"

# Migration number i leads to user_version i + 1. Old ones are never edited.
MIGRATIONS: tuple[str | Callable[[sqlite3.Connection], None], ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE images (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        sha256 TEXT NOT NULL UNIQUE,
        path TEXT NOT NULL,
        width INTEGER NOT NULL,
        height INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        media_type TEXT NOT NULL,
        added_at TEXT NOT NULL,
        code BLOB NOT NULL
    );
    CREATE TABLE image_labels (
        label TEXT NOT NULL,
        image_id INTEGER NOT NULL REFERENCES images(id) ON DELETE CASCADE,
        PRIMARY KEY (label, image_id)
    ) WITHOUT ROWID;
    CREATE INDEX image_labels_by_image ON image_labels(image_id);
    CREATE TABLE removed (image_id INTEGER PRIMARY KEY, generation INTEGER NOT NULL);
    CREATE INDEX removed_by_generation ON removed(generation);
    """,
    # A code leaves the image's row for a table that has one row per space. `codes` is in the order in which an index
    # reads it; a foreign key to images would need an index of its own to delete by, so a trigger deletes.
    """
    CREATE TABLE engines (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
    CREATE TABLE spaces (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL,
        n_bits INTEGER NOT NULL,
        checkpoint TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('building', 'ready')),
        created_at TEXT NOT NULL,
        calibration TEXT
    );
    INSERT INTO spaces (id, fingerprint, n_bits, checkpoint, state, created_at)
        SELECT 1, f.value, CAST(b.value AS INTEGER), 'checkpoint.safetensors', 'ready',
            strftime('%Y-%m-%dT%H:%M:%SZ', 'now')
        FROM meta AS f JOIN meta AS b ON f.key = 'fingerprint' AND b.key = 'n_bits';
    DELETE FROM meta WHERE key IN ('fingerprint', 'n_bits');
    INSERT INTO meta VALUES ('space', '1');
    CREATE TABLE codes (
        space_id INTEGER NOT NULL REFERENCES spaces(id) ON DELETE CASCADE,
        image_id INTEGER NOT NULL,
        code BLOB NOT NULL,
        engine INTEGER REFERENCES engines(id),
        PRIMARY KEY (space_id, image_id)
    ) WITHOUT ROWID;
    INSERT INTO codes SELECT 1, id, code, NULL FROM images ORDER BY id;
    CREATE TABLE images_2 (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        key TEXT,
        sha256 TEXT NOT NULL,
        path TEXT NOT NULL,
        width INTEGER NOT NULL,
        height INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        media_type TEXT NOT NULL,
        mtime_ns INTEGER,
        added_at TEXT NOT NULL,
        changed_at TEXT NOT NULL,
        attributes TEXT NOT NULL DEFAULT '{}'
    );
    INSERT INTO images_2 (id, sha256, path, width, height, bytes, media_type, added_at, changed_at)
        SELECT id, sha256, path, width, height, bytes, media_type, added_at, added_at FROM images ORDER BY id;
    DELETE FROM sqlite_sequence WHERE name = 'images_2';
    INSERT INTO sqlite_sequence (name, seq) SELECT 'images_2', seq FROM sqlite_sequence WHERE name = 'images';
    DROP TABLE images;
    ALTER TABLE images_2 RENAME TO images;
    CREATE UNIQUE INDEX images_by_key ON images(key) WHERE key IS NOT NULL;
    CREATE INDEX images_by_sha256 ON images(sha256);
    CREATE INDEX images_by_path ON images(path);
    CREATE TABLE updated (
        image_id INTEGER PRIMARY KEY REFERENCES images(id) ON DELETE CASCADE,
        generation INTEGER NOT NULL
    );
    CREATE INDEX updated_by_generation ON updated(generation);
    CREATE TRIGGER codes_go_with_their_image AFTER DELETE ON images BEGIN
        DELETE FROM codes WHERE space_id IN (SELECT id FROM spaces) AND image_id = OLD.id;
    END;
    """,
    attributes.create,
    # Filters by time read it alone. New images come at its end, so it costs next to nothing to keep.
    """
    CREATE INDEX images_by_added_at ON images(added_at);
    """,
)
LATEST = len(MIGRATIONS)


def create(db: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    """Create the tables in an empty database, complete or not at all.

    Args:
        meta: uuid, generation, and fingerprint and n_bits of the first code space.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        _run(db, MIGRATIONS[0])
        db.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        for script in MIGRATIONS[1:]:
            _run(db, script)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {LATEST}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def migrate(db: sqlite3.Connection) -> None:
    """Bring the tables up to date, complete or not at all."""
    db.execute("PRAGMA foreign_keys = OFF")  # dropping a table would delete what refers to its rows
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            # Read again: another process may have done it while this one waited.
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            for number in range(version, LATEST):
                _run(db, MIGRATIONS[number])
                db.execute(f"PRAGMA user_version = {number + 1}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    finally:
        db.execute("PRAGMA foreign_keys = ON")


def statements_of(version: int) -> list[tuple[str, str, str]]:
    """(kind, name, SQL) of all tables, indexes and triggers of a version, in the order of their making."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        for migration in MIGRATIONS[:version]:
            _run(db, migration)
        return db.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        ).fetchall()


def departures(db: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """(kind, name, SQL) of the indexes and triggers that are missing, or are not as the migrations made them."""
    there = {(kind, name): sql for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master")}
    wanted = [row for row in statements_of(LATEST) if row[0] != "table"]
    return [(kind, name, sql) for kind, name, sql in wanted if there.get((kind, name)) != sql]


def mend(db: sqlite3.Connection) -> Iterator[str]:
    """Make those indexes and triggers again, in a transaction of the caller's; what was done, in words."""
    for kind, name, sql in departures(db):
        db.execute(f"DROP {kind} IF EXISTS {name}")
        try:
            db.execute(sql)
        except sqlite3.IntegrityError:  # it would be unique, and in its absence something was stored twice
            continue
        yield f"made the {kind} {name} of the catalog again"


def _run(db: sqlite3.Connection, migration: str | Callable[[sqlite3.Connection], None]) -> None:
    if callable(migration):
        migration(db)
        return
    for statement in _statements(migration):
        db.execute(statement)


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; `executescript` would commit what is under way."""
    statement = ""
    for part in script.split(";")[:-1]:
        statement += f"{part};"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
