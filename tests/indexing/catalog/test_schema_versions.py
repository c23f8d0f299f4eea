"""A catalog of the first version opens, keeps everything, and is what a new one is."""

import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from hashseek.indexing.catalog import Catalog, attributes, create_catalog
from hashseek.indexing.catalog.filters import make_filter
from hashseek.indexing.catalog.schema import LATEST
from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.repair import Repaired, _mend_rows
from hashseek.retrieval.errors import BadCollection
from support.collections import new_images, random_codes

# What the first version wrote, word for word.
VERSION_1 = """
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
    INSERT INTO meta VALUES ('uuid', 'abc'), ('fingerprint', 'FINGERPRINT'), ('n_bits', '36'), ('generation', '7');
    PRAGMA application_id = 1213418289;
    PRAGMA user_version = 1;
"""


def old_catalog(path, codes):
    """Ids 1, 2, ... with these codes; then two more came and went."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(VERSION_1.replace("FINGERPRINT", "f" * 64))
    db.execute("BEGIN")
    for i, code in enumerate(codes):
        values = (f"{i:064x}", f"/nowhere/{i}.jpg", 10, 20, 30, "image/jpeg", "2026-01-01T00:00:00Z", code.tobytes())
        db.execute(
            "INSERT INTO images (sha256, path, width, height, bytes, media_type, added_at, code) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        db.execute("INSERT INTO image_labels VALUES ('a', ?)", (i + 1,))
        db.execute("INSERT INTO image_labels VALUES (?, ?)", (f"b{i % 3}", i + 1))
    n = len(codes)
    for image_id in (n + 1, n + 2):
        db.execute("INSERT INTO images VALUES (?, ?, '', 1, 1, 1, '', '', x'00')", (image_id, f"gone {image_id}"))
        db.execute("DELETE FROM images WHERE id = ?", (image_id,))
        db.execute("INSERT INTO removed VALUES (?, 7)", (image_id,))
    db.execute("COMMIT")
    db.close()


def schema(path):
    db = sqlite3.connect(path)
    rows = db.execute("SELECT type, name, tbl_name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
    columns = {name: db.execute(f"PRAGMA table_info({name})").fetchall() for kind, name, _ in rows if kind == "table"}
    keys = {name: db.execute(f"PRAGMA foreign_key_list({name})").fetchall() for name in columns}
    version = db.execute("PRAGMA user_version").fetchone()
    db.close()
    return sorted(rows), columns, keys, version


@pytest.mark.parametrize("n", [0, 1, 700])
@pytest.mark.parametrize("read_only", [False, True])
def test_an_old_catalog_keeps_everything(tmp_path, n, read_only):
    codes = random_codes(np.random.default_rng(n), n, 36)
    path = tmp_path / "catalog.sqlite"
    old_catalog(path, codes)
    catalog = Catalog(path, read_only=read_only)
    assert (catalog.uuid, catalog.fingerprint, catalog.n_bits, catalog.generation()) == ("abc", "f" * 64, 36, 7)
    assert (catalog.space.id, catalog.space.checkpoint, catalog.space.state) == (1, "checkpoint.safetensors", "ready")
    images = catalog.page(after=0, limit=n + 9)
    assert [(i.id, i.sha256, i.path) for i in images] == [(i + 1, f"{i:064x}", f"/nowhere/{i}.jpg") for i in range(n)]
    assert all(i.added_at == i.changed_at == "2026-01-01T00:00:00Z" for i in images)
    assert all((i.key, i.attributes, i.labels) == (None, {}, ("a", f"b{(i.id - 1) % 3}")) for i in images)
    changes = catalog.changes(after_id=0, after_generation=-1)
    assert np.array_equal(changes.codes, codes)
    assert changes.removed.tolist() == [n + 1, n + 2]
    assert catalog.engines() == ({"": n} if n else {})
    assert catalog.integrity_problems() == []
    catalog.close()
    writer = Catalog(path)
    [new] = new_images(np.zeros((1, 5), np.uint8), start=9999)
    assert writer.add([new]) == [(n + 3, "added")]  # ids of the past are not given again
    writer.remove([n + 3, *range(1, n + 1, 2)])
    assert len(writer) == n // 2
    assert writer.label_counts().get("a", 0) == n // 2
    assert writer.integrity_problems() == []
    writer.close()
    create_catalog(tmp_path / "new.sqlite", fingerprint="f" * 64, n_bits=36)
    assert schema(path) == schema(tmp_path / "new.sqlite")


def test_an_old_collection_goes_on_with_the_index_that_it_had(own_collection, caplog):
    """Its manifest did not name a space."""
    import json

    from hashseek.indexing.index.index_files import _checksum

    manifest = own_collection / "index" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["space"], content["checksum"]
    manifest.write_text(json.dumps(content | {"checksum": _checksum(content)}))
    collection = Collection(own_collection, read_only=True)
    assert not caplog.records
    assert collection.describe_index()["built"] == 12
    collection.close()


def test_several_who_open_an_old_catalog_at_once_bring_it_up_to_date_once(tmp_path):
    path = tmp_path / "catalog.sqlite"
    old_catalog(path, random_codes(np.random.default_rng(0), 500, 36))
    lengths, gate = [], threading.Barrier(6)

    def look(read_only):
        gate.wait()
        catalog = Catalog(path, read_only=read_only)
        lengths.append((len(catalog), catalog.generation()))
        catalog.close()

    threads = [threading.Thread(target=look, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [(500, 7)] * 6


def test_a_process_killed_while_it_brings_a_catalog_up_to_date_leaves_the_old_one(tmp_path, start):
    import signal

    path = tmp_path / "catalog.sqlite"
    old_catalog(path, random_codes(np.random.default_rng(0), 50, 36))
    killed = start(
        before=f"""
from pathlib import Path
import hashseek.indexing.catalog.schema
original, seen = hashseek.indexing.catalog.schema._statements, []
def statements(script):
    for statement in original(script):
        seen.append(statement)
        if "DROP TABLE images" in statement:
            yield statement
            os.kill(os.getpid(), signal.SIGKILL)
        yield statement
hashseek.indexing.catalog.schema._statements = statements
from hashseek.indexing.catalog import Catalog
Catalog(Path({str(path)!r}))
"""
    )
    assert killed.wait() == -signal.SIGKILL
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert db.execute("SELECT count(*) FROM images").fetchone() == (50,)
    db.close()
    catalog = Catalog(path)
    assert len(catalog) == 50
    catalog.close()


def test_a_full_disk_leaves_the_old_catalog_and_says_so(small_disk):
    path = small_disk / "catalog.sqlite"
    old_catalog(path, random_codes(np.random.default_rng(0), 1000, 36))
    before = schema(path)
    (small_disk / "filler").write_bytes(bytes(500_000))
    with pytest.raises(BadCollection, match=r"could not be brought to version \d+, it was left as it is.*free some"):
        Catalog(path)
    assert schema(path) == before


def test_an_old_catalog_where_nobody_may_write_is_refused_with_the_remedy(tmp_path, start):
    path = tmp_path / "collection" / "catalog.sqlite"
    path.parent.mkdir()
    old_catalog(tmp_path / "old.sqlite", random_codes(np.random.default_rng(0), 5, 36))
    shutil.copy(tmp_path / "old.sqlite", path)
    path.parent.chmod(0o555)
    path.chmod(0o444)
    looked = start(
        before=f"""
drop_rights()
from pathlib import Path
from hashseek.indexing.catalog import Catalog
from hashseek.retrieval.errors import HashseekError
try: Catalog(Path({str(path)!r}), read_only=True)
except HashseekError as error: print(error)
sys.exit()
"""
    )
    assert looked.wait() == 0, looked.err
    assert f"catalog version 1 and could not be brought to version {LATEST}" in looked.out
    assert "check that you may write to the folder" in looked.out
    path.parent.chmod(0o755)


def second_version(path):
    """Make a catalog of today one of the second version, which had no indexes on attributes and times."""
    db = sqlite3.connect(path)
    with db:
        db.execute("DROP INDEX images_by_added_at")
        attributes.forget(db)
        db.execute("DROP TABLE attribute_indexes")
        db.execute("DELETE FROM meta WHERE key = 'attributes_beyond'")
        db.execute("DELETE FROM sqlite_sequence WHERE name = 'attribute_indexes'")
        db.execute("PRAGMA user_version = 2")
    db.close()


def described(path, n):
    create_catalog(path, fingerprint="f" * 64, n_bits=12)
    images = new_images(random_codes(np.random.default_rng(0), n, 12))
    with closing(Catalog(path)) as catalog:
        catalog.add(
            [replace(image, attributes={"n": i, "rare" if i == 3 else "often": "x"}) for i, image in enumerate(images)]
        )
    second_version(path)


def test_attributes_of_the_second_version_get_their_indexes(tmp_path):
    path = tmp_path / "catalog.sqlite"
    described(path, 50)
    with closing(Catalog(path, read_only=True)) as catalog:
        with catalog._db.reading() as db:
            assert attributes.known_paths(db) == {'$."n"', '$."often"', '$."rare"'}
        assert catalog.ids_where(make_filter(where=["n>=48"])).tolist() == [49, 50]
        assert catalog.ids_where(make_filter(where=["rare=x"])).tolist() == [4]
        assert catalog.integrity_problems() == []


def test_damaged_attributes_of_the_second_version_do_not_stop_it_from_being_opened_and_mended(tmp_path):
    path = tmp_path / "catalog.sqlite"
    described(path, 5)
    db = sqlite3.connect(path)
    with db:
        db.execute("UPDATE images SET attributes = '{torn' WHERE id = 2")
    db.close()
    Catalog(path).close()
    report = Repaired()
    _mend_rows(path, report)
    assert report.done == ["emptied the attributes of 1 images, which could not be read: 2"]
    with closing(Catalog(path, read_only=True)) as catalog:
        with catalog._db.reading() as reader:
            assert attributes.known_paths(reader) == {'$."n"', '$."often"', '$."rare"'}
        assert catalog.ids_where(make_filter(where=["n<=2"])).tolist() == [1, 3]


def test_times_of_an_old_catalog_get_an_index_and_are_found_by_it_whatever_the_clock_did(tmp_path):
    path = tmp_path / "catalog.sqlite"
    old_catalog(path, random_codes(np.random.default_rng(0), 90, 36))
    db = sqlite3.connect(path)
    with db:  # the clock goes back twice
        db.execute("UPDATE images SET added_at = printf('2026-01-%02dT00:00:00Z', 1 + id % 30)")
    db.close()
    with closing(Catalog(path)) as catalog:
        asked = []
        catalog._db._reader.set_trace_callback(asked.append)
        found = catalog.ids_where(make_filter(added_after="2026-01-29", added_before="2026-01-31")).tolist()
        everything = catalog.ids_where(make_filter(added_after="2026-01-01")).tolist()
        catalog._db._reader.set_trace_callback(None)
        assert found == [28, 29, 58, 59, 88, 89]
        assert everything == list(range(1, 91))
        queries = [query for query in asked if "added_at" in query]
        assert len(queries) == 2
        with catalog._db.reading() as db:
            plans = [str(db.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()) for query in queries]
        assert all("SEARCH images USING COVERING INDEX images_by_added_at" in plan for plan in plans)
