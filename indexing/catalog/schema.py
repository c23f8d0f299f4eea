"""The tables of a catalog.

meta               single values: uuid, generation (number of committed changes), space (id of the active code space),
                   keep_features (set if features are kept), index_kind, forgotten (the last generation whose removals
                   and updates `optimize` has deleted);
                   index (JSON): the index on disk, see `hashseek.indexing.index.index_files`;
                   kept_groups (JSON): groups of near-duplicates of which all are kept, as lists of ids
images             one row per image; `key` is the caller's own name for it, `attributes` a JSON object
image_labels       which image has which label
spaces             code spaces: codes of one checkpoint each; one is active, others are being built or kept
codes              the code of an image in a space, and the engine that computed it
features           the features of an image in a space: float16, length 1; for every code if meta has keep_features
engines            names of the engines that computed codes
attribute_indexes  attributes that have an index, see `hashseek.indexing.catalog.attributes`
removed            ids of removed images, and the generation that removed them
updated            ids of images whose code changed, and the generation that changed it

There is one version and no migration: a catalog of another version is refused when it is opened.
"""

import sqlite3

APPLICATION_ID = 0x48534B31  # "HSK1"
VERSION = 6

# `codes` is stored in the order in which an index reads it. A foreign key from it to `images` would need an index of
# its own for every deletion, so a trigger deletes instead. `images_by_added_at` costs little: new images come last.
# `features` keeps its row id: long rows are read twice as fast then.
STATEMENTS = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE images (
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
    )""",
    "CREATE UNIQUE INDEX images_by_key ON images(key) WHERE key IS NOT NULL",
    "CREATE INDEX images_by_sha256 ON images(sha256)",
    "CREATE INDEX images_by_path ON images(path)",
    "CREATE INDEX images_by_added_at ON images(added_at)",
    """CREATE TABLE image_labels (
        label TEXT NOT NULL,
        image_id INTEGER NOT NULL REFERENCES images(id) ON DELETE CASCADE,
        PRIMARY KEY (label, image_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX image_labels_by_image ON image_labels(image_id)",
    "CREATE TABLE engines (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    """CREATE TABLE spaces (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL,
        n_bits INTEGER NOT NULL,
        checkpoint TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('building', 'ready')),
        created_at TEXT NOT NULL,
        calibration TEXT
    )""",
    """CREATE TABLE codes (
        space_id INTEGER NOT NULL REFERENCES spaces(id) ON DELETE CASCADE,
        image_id INTEGER NOT NULL,
        code BLOB NOT NULL,
        engine INTEGER REFERENCES engines(id),
        PRIMARY KEY (space_id, image_id)
    ) WITHOUT ROWID""",
    """CREATE TRIGGER delete_codes_with_image AFTER DELETE ON images BEGIN
        DELETE FROM codes WHERE space_id IN (SELECT id FROM spaces) AND image_id = OLD.id;
    END""",
    """CREATE TABLE features (
        space_id INTEGER NOT NULL,
        image_id INTEGER NOT NULL,
        feature BLOB NOT NULL,
        PRIMARY KEY (space_id, image_id),
        FOREIGN KEY (space_id, image_id) REFERENCES codes(space_id, image_id) ON DELETE CASCADE
    )""",
    "CREATE TABLE attribute_indexes (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL UNIQUE)",
    "CREATE TABLE removed (image_id INTEGER PRIMARY KEY, generation INTEGER NOT NULL)",
    "CREATE INDEX removed_by_generation ON removed(generation)",
    """CREATE TABLE updated (
        image_id INTEGER PRIMARY KEY REFERENCES images(id) ON DELETE CASCADE,
        generation INTEGER NOT NULL
    )""",
    "CREATE INDEX updated_by_generation ON updated(generation)",
)


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables in an empty database, within the caller's transaction."""
    for statement in STATEMENTS:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")
