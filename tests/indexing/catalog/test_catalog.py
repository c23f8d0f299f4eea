"""The catalog keeps what it acknowledged, whatever else is in the file, on the disk, or at work beside it."""

import os
import shutil
import sqlite3
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import pytest

from hashseek.indexing.catalog import Catalog, CatalogDamaged, CatalogReplaced, NewImage, SpaceRetired, create_catalog
from hashseek.indexing.catalog import catalog as catalog_module
from hashseek.indexing.catalog.database import Database
from hashseek.indexing.catalog.filters import Filter
from hashseek.retrieval.errors import BadCodes, BadCollection, BadConfig, UnknownImage
from support.collections import new_images, random_codes, sql, with_codes


@pytest.fixture
def path(tmp_path):
    """Of an empty catalog for 12 bits."""
    create_catalog(tmp_path / "catalog.sqlite", fingerprint="f" * 64, n_bits=12)
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path):
    opened = Catalog(path)
    yield opened
    opened.close()


def images(n, *, start=0, labels=()):
    return new_images(random_codes(np.random.default_rng(start), n, 12), start=start, labels=labels)


def test_a_record_is_read_as_it_was_stored(catalog):
    name = "/tmp/Bild 'höhle'\n%\";--.jpg"
    [(image_id, change)] = catalog.add(
        [
            NewImage(
                name, "ab" * 32, 50000, 3, 2**40, "image/avif", ("zoo", "Äpfel; 'x'", "zoo"), np.array([7, 8], np.uint8)
            )
        ]
    )
    stored = catalog.one(image_id)
    assert change == "added"
    assert (stored.path, stored.sha256, stored.media_type) == (name, "ab" * 32, "image/avif")
    assert (stored.width, stored.height, stored.bytes) == (50000, 3, 2**40)
    assert stored.labels == ("zoo", "Äpfel; 'x'")
    assert stored.added_at.endswith("Z")
    assert catalog.code_of(image_id).code.tolist() == [7, 8]


def test_the_same_content_is_stored_once_and_keeps_its_first_record(catalog):
    first, second = images(2)
    assert catalog.add([first, second, first]) == [(1, "added"), (2, "added"), (1, "known")]
    again = NewImage("/elsewhere.jpg", second.sha256, 1, 1, 1, "image/png", ("new",), second.code)
    assert catalog.add([again]) == [(2, "known")]
    assert catalog.one(2).path == second.path
    assert len(catalog) == 2


def test_removing_is_all_or_nothing(catalog):
    catalog.add(images(3, labels=("a",)))
    generation = catalog.generation()
    with pytest.raises(UnknownImage):
        catalog.remove([1, 99])
    assert len(catalog) == 3
    assert catalog.generation() == generation
    catalog.remove([1, 3])
    assert [image.id for image in catalog.page(after=0, limit=10)] == [2]
    assert catalog.label_counts() == {"a": 1}
    assert catalog.add(images(1, start=9)) == [(4, "added")]  # ids are never reused


@pytest.mark.parametrize("image_id", [-1, 7, 2**63])
def test_unknown_ids_of_any_size(catalog, image_id):
    catalog.add(images(1))
    changes = ({"labels": ["a"]}, {"attributes": {"n": 1}}, {})
    for ask in (catalog.one, catalog.code_of, *(partial(catalog.update, **change) for change in changes)):
        with pytest.raises(UnknownImage):
            ask(image_id)
    assert (catalog.label_counts(), catalog.generation()) == ({}, 1)


def test_pages_and_labels(catalog):
    catalog.add(images(3, labels=("a", "b")))
    catalog.add(images(3, start=3, labels=("b",)))
    assert [image.id for image in catalog.page(after=2, limit=2)] == [3, 4]
    assert catalog.ids_where(Filter(all_labels=("a",))).tolist() == [1, 2, 3]
    assert not len(catalog.ids_where(Filter(all_labels=("' OR 1=1 --",))))
    assert catalog.label_counts() == {"a": 3, "b": 6}


def test_changes_since_a_generation(catalog):
    added = images(4)
    catalog.add(added[:2])
    first = catalog.changes(after_id=0, after_generation=-1)
    assert first.ids.tolist() == [1, 2]
    assert np.array_equal(first.codes, [image.code for image in added[:2]])
    catalog.add(added[2:])
    catalog.remove([1, 4])
    since = catalog.changes(after_id=2, after_generation=first.generation)
    assert since.ids.tolist() == [3]
    assert sorted(since.removed.tolist()) == [1, 4]
    assert since.generation == catalog.generation()
    nothing = catalog.changes(after_id=3, after_generation=since.generation)
    assert len(nothing.ids) == len(nothing.removed) == 0


def test_a_failing_batch_stores_nothing(catalog):
    bad = NewImage("/x/\udcff.jpg", "cd" * 32, 1, 1, 1, "image/jpeg", (), np.zeros(2, np.uint8))
    with pytest.raises(UnicodeEncodeError):
        catalog.add([*images(3), bad])
    assert len(catalog) == 0
    assert catalog.generation() == 0
    assert catalog.add(images(1)) == [(1, "added")]


def test_closing_waits_for_the_statements_of_other_threads(catalog, path):  # ending these would crash Python
    closing = threading.Thread(target=catalog.close)
    with catalog._db.reading() as db:
        closing.start()
        closing.join(0.2)
        assert db.execute("SELECT 1").fetchone() == (1,)
    closing.join()
    with pytest.raises(BadCollection):
        catalog.label_counts()


def test_a_catalog_that_is_gone_is_named(path):
    with closing(Catalog(path, read_only=True)) as catalog, catalog._db.reading():  # another thread needs its own
        path.rename(path.with_name("away"))
        with ThreadPoolExecutor(1) as other, pytest.raises(BadCollection, match=path.name):
            other.submit(catalog.generation).result()


def test_a_read_only_catalog_refuses_changes(path):
    catalog = Catalog(path, read_only=True)
    for change in (lambda: catalog.add(images(1)), lambda: catalog.remove([1])):
        with pytest.raises(BadCollection):
            change()
    catalog.close()


def test_readers_do_not_wait_for_each_other(path):
    writer = Catalog(path)
    writer.add(images(5))
    database = Database(path, read_only=True)
    with database.snapshot() as slow:  # its result is not read to the end
        rows = slow.execute("SELECT id FROM images ORDER BY id")
        assert rows.fetchone() == (1,)
        writer.add(images(2, start=100))
        counts = []

        def count():
            with database.reading() as db:
                counts.append(db.execute("SELECT count(*) FROM images").fetchone()[0])

        others = [threading.Thread(target=count) for _ in range(20)]
        for other in others:
            other.start()
        for other in others:
            other.join(20)
        assert counts == [7] * 20
        database.close()  # what is being read is not ended
        assert len(rows.fetchall()) == 4
    with pytest.raises(BadCollection), database.reading():
        pass
    writer.close()
    assert not path.with_name("catalog.sqlite-wal").exists()  # every connection was closed


def test_a_reader_without_write_permission_sees_later_changes(path, start, tmp_path):
    """Runs in a process without root's right to write anywhere, which sees our changes while it looks on."""
    writer = Catalog(path)
    writer.add(images(1))
    writer.close()
    path.parent.chmod(0o555)
    reader = start(
        before=f"""
drop_rights()
import time
from pathlib import Path
from hashseek.indexing.catalog import Catalog
from hashseek.retrieval.errors import HashseekError
try: Catalog(Path({str(path)!r}))
except HashseekError as error: print(type(error).__name__)
catalog, seen = Catalog(Path({str(path)!r}), read_only=True), 0
while seen < 4:
    if len(catalog) != seen:
        seen = len(catalog)
        print(seen, flush=True)
    time.sleep(0.01)
sys.exit()
"""
    )
    for n in (2, 3, 4):
        while f"\n{n - 1}\n" not in reader.out:
            assert not reader.ended, reader.err
            time.sleep(0.02)
        if n != 3:  # once with a writer that stays open, once with one that comes and goes
            path.parent.chmod(0o755)
            writer = Catalog(path)
        writer.add(images(1, start=n))
        if n != 2:
            writer.close()
            path.parent.chmod(0o555)
    assert reader.wait() == 0, reader.err
    assert reader.out.splitlines() == ["BadCollection", "1", "2", "3", "4"]
    path.parent.chmod(0o755)


def test_those_who_may_not_write_the_catalog_leave_no_files_that_its_owner_cannot_write(path, start):
    """In a folder that everybody may write, as on a shared disk."""
    with closing(Catalog(path)) as writer:
        writer.add(images(1))
    path.chmod(0o444)
    other = start(
        before=f"""
drop_rights()
from pathlib import Path
from hashseek.indexing.catalog import Catalog
from hashseek.retrieval.errors import BadCollection
print(len(Catalog(Path({str(path)!r}), read_only=True)), flush=True)
try: Catalog(Path({str(path)!r}))
except BadCollection as error: print(type(error).__name__, flush=True)
os._exit(0)  # without closing anything
"""
    )
    assert other.wait() == 0, other.err
    assert other.out.splitlines() == ["1", "BadCollection"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_umask_decides_who_may_write(tmp_path):
    """SQLite gives its files the permissions of the catalog, so that a group can share a collection."""
    before = os.umask(0o002)
    try:
        create_catalog(tmp_path / "new.sqlite", fingerprint="f" * 64, n_bits=12)
        with closing(Catalog(tmp_path / "new.sqlite")) as writer:
            writer.add(images(1))
            modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.glob("new.sqlite*")}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("new.sqlite", "new.sqlite-wal", "new.sqlite-shm"), "0o664")


def test_other_files_and_other_versions_are_refused(tmp_path, path):
    for name, content in (("text", b"no database at all" * 100), ("empty", b""), ("zero", b"\0"), ("missing", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(BadCollection) as caught:
            Catalog(tmp_path / name)
        assert isinstance(caught.value, CatalogDamaged) == (name == "text")
    foreign = tmp_path / "foreign.sqlite"
    sql(foreign, "CREATE TABLE songs (name)")
    with pytest.raises(BadCollection):
        Catalog(foreign)
    assert sql(foreign, "SELECT name FROM sqlite_master") == [("songs",)]
    for version in (4, 99):
        sql(path, f"PRAGMA user_version = {version}")
        with pytest.raises(BadCollection, match=f"version {version}"):
            Catalog(path)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM meta WHERE key = 'generation'",
        "UPDATE meta SET value = '1x' WHERE key = 'generation'",
        "INSERT INTO meta VALUES ('forgotten', '1x')",
        "DELETE FROM meta WHERE key = 'uuid'",
        "DELETE FROM meta WHERE key = 'space'",
        "DELETE FROM spaces",
        "UPDATE spaces SET n_bits = 0",
        "DROP TABLE codes",
        "UPDATE codes SET code = x'010203'",
        "UPDATE images SET sha256 = x'00'",
        "UPDATE images SET attributes = '{'",
        "INSERT INTO features VALUES (1, 1, x'0102'), (1, 2, x'01020304')",
        "INSERT INTO features VALUES (1, 1, x'01'), (1, 2, x'02')",
    ],
)
def test_missing_rows_and_tables_are_reported_as_damage(path, damage):
    writer = Catalog(path)
    writer.add(images(2))
    writer.close()
    sql(path, damage)

    def use():
        catalog = Catalog(path, read_only=True)
        try:
            catalog.generation()
            catalog.page(after=0, limit=1)
            catalog.changes(after_id=0, after_generation=-1)
            catalog.spaces.features_of([1, 2])
        finally:
            catalog.close()

    with pytest.raises(BadCollection):
        use()


def test_a_feature_that_a_flipped_bit_turned_into_text_is_read(path, catalog):
    catalog.add(images(2))
    sql(path, "INSERT INTO features VALUES (1, 1, x'4142'), (1, 2, 'AB')")
    found, features = catalog.spaces.features_of([1, 2])
    assert (sorted(found), features.tobytes()) == ([1, 2], b"ABAB")


def test_special_characters_in_the_path(tmp_path, path):
    odd = tmp_path / "a?mode=memory#b %20\nü" / "catalog.sqlite"
    odd.parent.mkdir()
    shutil.copy(path, odd)
    catalog = Catalog(odd)
    assert catalog.add(images(1)) == [(1, "added")]
    catalog.close()
    assert sql(odd, "SELECT count(*) FROM images") == [(1,)]


# ---------------------------------------------------------------- keys, attributes, files


def image(content=0, *, key=None, code=(1, 2), **fields):
    """An image whose content hash is `content`."""
    base = NewImage(
        f"/photos/{content}.jpg", f"{content:064x}", 10, 20, 30, "image/jpeg", (), np.array(code, np.uint8), key
    )
    return replace(base, **fields)


def test_images_with_keys_are_updated_in_place(catalog, monkeypatch):
    monkeypatch.setattr(catalog_module, "now", lambda: "2026-01-01T00:00:00Z")
    first = image(1, key="a/ü 1", labels=("cat",), attributes={"n": 1, "deep": {"x": [1, None]}}, engine="e1")
    assert catalog.add([first, first]) == [(1, "added"), (1, "known")]
    stored = catalog.by_key("a/ü 1")
    assert (stored.key, stored.attributes) == ("a/ü 1", {"n": 1, "deep": {"x": [1, None]}})
    monkeypatch.setattr(catalog_module, "now", lambda: "2026-01-02T00:00:00Z")

    # nothing new, or nothing at all: known
    assert catalog.add([image(1, key="a/ü 1", labels=("cat",)), image(1, key="a/ü 1")]) == [(1, "known")] * 2
    assert catalog.one(1) == stored
    # other labels or attributes: updated, and nothing else
    assert catalog.add([image(1, key="a/ü 1", labels=("dog", "old"))]) == [(1, "updated")]
    assert catalog.add([image(1, key="a/ü 1", attributes={"n": 2})]) == [(1, "updated")]
    assert catalog.one(1) == replace(
        stored, labels=("dog", "old"), attributes={"n": 2}, changed_at="2026-01-02T00:00:00Z"
    )
    # other content: the same record, another code
    other = image(2, key="a/ü 1", code=(5, 6), width=77, media_type="image/png", mtime_ns=5, engine="e2")
    assert catalog.add([other]) == [(1, "updated")]
    now = catalog.one(1)
    assert (now.id, now.sha256, now.path, now.width, now.media_type) == (
        1,
        f"{2:064x}",
        "/photos/2.jpg",
        77,
        "image/png",
    )
    assert (now.labels, now.attributes, now.added_at) == (("dog", "old"), {"n": 2}, "2026-01-01T00:00:00Z")
    assert catalog.code_of(1).code.tolist() == [5, 6]
    assert catalog.spaces.engines() == {"e2": 1}
    assert catalog.label_counts() == {"dog": 1, "old": 1}
    # the same content elsewhere: the record follows
    assert catalog.add([replace(other, path="/moved.jpg")]) == [(1, "updated")]
    assert catalog.one(1).path == "/moved.jpg"
    # another key, the same content: another record; no key: the content decides, of several records the path
    assert catalog.add([image(2, key="b", engine="e2"), image(2, labels=("x",))]) == [(2, "added"), (2, "known")]
    assert catalog.by_content(f"{2:064x}")[0].id == 1
    assert catalog.ids_by_key(["b", "c", "a/ü 1"]) == {"a/ü 1": 1, "b": 2}
    assert catalog.spaces.engines() == {"e2": 2}
    catalog.remove([1])
    assert catalog.ids_by_key(["a/ü 1"]) == {}
    assert catalog.add([first]) == [(3, "added")]
    with pytest.raises(UnknownImage):
        catalog.by_key("unknown")
    assert catalog.verify() == ([], True)


def test_keys_are_given_unless_they_are_too_long_or_taken(catalog):
    catalog.add([image(1), image(2), image(3), image(4, key="taken")])
    catalog.give_keys({1: "x" * 512, 2: "x" * 513, 3: "taken"})
    assert [stored.key for stored in catalog.page(after=0, limit=9)] == ["x" * 512, None, None, "taken"]


def test_stored_content_is_found_with_its_code(catalog):
    def found():
        stored, code = catalog.by_content(f"{1:064x}")
        return stored.id, code.code.tolist()

    assert catalog.by_content(f"{1:064x}") is None
    catalog.add([image(1, key="a", code=(3, 4)), image(1, key="b", code=(3, 4))])
    assert found() == (1, [3, 4])
    catalog.remove([1])
    assert found() == (2, [3, 4])
    catalog.add([image(2, key="b", code=(9, 9))])
    assert catalog.by_content(f"{1:064x}") is None


def test_stored_content_never_gets_the_code_of_the_content_that_replaces_it(catalog):
    contents = [image(n, key="k", code=(n, n)) for n in (1, 2)]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [catalog.add([contents[n % 2]]) for n in range(300)])
        while not writing.done():
            for one in contents:
                found = catalog.by_content(one.sha256)
                assert found is None or found[1].code.tolist() == one.code.tolist()
        assert writing.result()[-1] == [(1, "updated")]


def test_records_by_path_have_size_and_time(catalog):
    catalog.add([image(1, mtime_ns=2**61), image(2), image(3, path="/photos/1.jpg", bytes=31, mtime_ns=7)])

    def known(*paths):
        records = catalog.records_by_path(paths)
        return {path: (r.id, r.bytes, r.mtime_ns, bool(r.has_code)) for path, r in records.items()}

    assert known("/photos/1.jpg", "/photos/2.jpg", "/photos/9.jpg") == {
        "/photos/1.jpg": (3, 31, 7, True),
        "/photos/2.jpg": (2, 30, None, True),
    }
    before = catalog.one(2)
    assert catalog.add([image(2, mtime_ns=11)]) == [(2, "known")]  # touched: its time is noted, nothing else changes
    assert catalog.one(2) == before
    assert catalog.add([image(2, path="/copy.jpg", mtime_ns=12)]) == [(2, "known")]
    assert known("/photos/2.jpg", "/copy.jpg") == {"/photos/2.jpg": (2, 30, 11, True)}


@pytest.mark.parametrize(
    "fields",
    [
        {"key": ""},
        {"key": "a\0b"},
        {"key": "x" * 513},
        {"key": "\udcff"},
        {"attributes": {"x": "y" * 16_400}},
        {"attributes": {"x": float("nan")}},
        {"attributes": {"x": [2**63]}},
        {"attributes": {"x": "\ud800"}},
        {"attributes": [1]},
        {"attributes": {"a": [{2.5: 1}]}},
        {"attributes": {"x": reduce(lambda inner, _: [inner], range(5000), [])}},
    ],
)
def test_keys_and_attributes_have_limits_and_a_batch_beyond_them_stores_nothing(catalog, fields):
    with pytest.raises(BadConfig) as caught:
        catalog.add([image(1), image(2, **fields)])
    assert "\n" not in str(caught.value)
    assert len(catalog) == 0
    at_the_limit = {"key": "ü" * 512, "attributes": {"x": "y" * (16_384 - 8)}}
    assert catalog.add([image(3, **at_the_limit)]) == [(1, "added")]
    assert catalog.one(1).attributes == at_the_limit["attributes"]


# ---------------------------------------------------------------- code spaces


def filled(catalog, n=5):
    catalog.add([image(i, code=(i, 0), engine="torch") for i in range(n)])


def test_building_switching_and_dropping_a_code_space(catalog, path):
    filled(catalog)
    space = catalog.spaces.begin("e" * 64, 20, "other.safetensors")
    assert (space.id, space.state, catalog.spaces.active().id) == (2, "building", 1)
    gone, code = with_codes(catalog, {4: (4, 4, 1)})[0]
    new = with_codes(catalog, {i: (i, i, 1) for i in (1, 2, 3)}, "openvino")
    assert catalog.spaces.add_codes(2, [*new, (replace(gone, id=99), code)]) == 3
    assert [i.id for i in catalog.spaces.missing(2, after=0, limit=10)] == [4, 5]
    assert [i.id for i in catalog.spaces.missing(2, after=4, limit=10)] == [5]
    generation = catalog.generation()
    with pytest.raises(BadCollection):
        catalog.spaces.switch(2)
    assert (catalog.spaces.active().id, catalog.generation()) == (1, generation)
    catalog.remove([5])
    # a code of content that was replaced meanwhile is not taken
    assert catalog.spaces.add_codes(2, [(replace(gone, sha256="another"), code)]) == 0
    assert catalog.spaces.add_codes(2, [(gone, code)]) == 1
    catalog.spaces.switch(2)
    assert not catalog.is_current()

    opened = Catalog(path)
    assert (opened.fingerprint, opened.n_bits, opened.space.checkpoint) == ("e" * 64, 20, "other.safetensors")
    assert opened.changes(after_id=0, after_generation=-1).codes.tolist() == [[i, i, 1] for i in range(1, 5)]
    assert opened.spaces.engines() == {"": 1, "openvino": 3}
    assert catalog.spaces.engines() == {"torch": 4}
    assert catalog.code_of(1).code.tolist() == [0, 0]  # opened earlier: still the old codes
    with pytest.raises(SpaceRetired):
        catalog.add([image(77)])
    assert opened.add([image(77, code=(1, 1, 1))]) == [(6, "added")]
    assert [i.id for i in opened.spaces.missing(1, after=0, limit=10)] == [6]
    with pytest.raises(BadConfig):
        opened.spaces.drop(2)
    with pytest.raises(BadConfig):
        opened.spaces.switch(3)
    opened.spaces.switch(1, allow_missing=1)
    opened.spaces.drop(2)
    assert [space.id for space in catalog.spaces.all()] == [1]
    assert sql(path, "SELECT DISTINCT space_id FROM codes") == [(1,)]
    assert catalog.spaces.begin("d" * 64, 12, "x").id == 3  # never an id of the past
    assert catalog.verify() == (["1 images have no code, so searches do not find them"], True)
    opened.close()


def test_new_content_deletes_the_codes_in_every_space(catalog):
    catalog.add([image(1, key="a"), image(2, key="b")])
    catalog.spaces.begin("e" * 64, 12, "x")
    catalog.spaces.add_codes(2, with_codes(catalog, {1: (0, 0), 2: (0, 0)}))
    assert catalog.spaces.n_missing(2) == 0
    catalog.add([image(3, key="a")])
    assert [i.id for i in catalog.spaces.missing(2, after=0, limit=10)] == [1]
    catalog.remove([2])
    assert catalog.verify() == ([], True)


def test_codes_of_another_width_are_refused(catalog):
    filled(catalog)
    for code in ((0, 0, 0), (0, 0x10)):
        with pytest.raises(BadCodes):
            catalog.spaces.add_codes(1, with_codes(catalog, {1: code}))


def test_an_updated_code_is_a_change(catalog):
    catalog.add([image(i, key=f"k{i}", code=(i, 0)) for i in range(4)])
    seen = catalog.changes(after_id=0, after_generation=-1)
    catalog.add([image(9, key="k1", code=(99, 0)), image(10, key="k9", code=(10, 0))])
    since = catalog.changes(after_id=4, after_generation=seen.generation)
    assert (since.ids.tolist(), since.codes.tolist(), since.removed.tolist()) == ([2, 5], [[99, 0], [10, 0]], [2])
    catalog.spaces.add_codes(1, with_codes(catalog, {3: (7, 7)}, "torch"))
    again = catalog.changes(after_id=5, after_generation=since.generation)
    assert (again.ids.tolist(), again.codes.tolist(), again.removed.tolist()) == ([3], [[7, 7]], [3])
    catalog.remove([2])
    last = catalog.changes(after_id=4, after_generation=seen.generation)
    assert (last.ids.tolist(), sorted(last.removed.tolist())) == ([3, 5], [2, 3])


def test_a_calibration_is_kept_with_its_space(catalog, path):
    catalog.spaces.set_calibration("of the first")
    catalog.spaces.begin("e" * 64, 20, "other.safetensors")
    catalog.spaces.switch(2)
    with closing(Catalog(path)) as second:
        assert second.spaces.calibration() is None
        second.spaces.set_calibration("of the second")
        assert second.spaces.calibration() == "of the second"
        second.spaces.switch(1)
    with closing(Catalog(path, read_only=True)) as first:
        assert first.spaces.calibration() == "of the first"


def test_a_replaced_catalog_file_refuses_changes(catalog, path, tmp_path):
    filled(catalog)
    shutil.copy(path, tmp_path / "restored")
    (tmp_path / "restored").replace(path)
    with pytest.raises(CatalogReplaced):
        catalog.add([image(50)])
    assert not catalog.is_current()
    path.unlink()
    with pytest.raises(CatalogReplaced):
        catalog.remove([1])


def test_reading_all_codes_does_not_make_an_object_of_each(path):
    n = 2**18
    numbers = f"WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < {n})"
    sql(
        path,
        f"{numbers} INSERT INTO codes SELECT 1, n, char(48 + n % 10) || 'a', NULL FROM i",
        "UPDATE codes SET code = CAST(code AS BLOB)",
    )
    with closing(Catalog(path)) as catalog:
        tracemalloc.start()
        read = catalog.all_codes()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    np.testing.assert_array_equal(read.ids, np.arange(1, n + 1))
    np.testing.assert_array_equal(read.codes[:, 0], 48 + read.ids % 10)
    assert peak < 100 * n  # objects alone would take 150 bytes each


def test_a_catalog_on_a_full_disk_is_read(small_disk):
    path = small_disk / "catalog.sqlite"
    create_catalog(path, fingerprint="f" * 64, n_bits=12)
    with closing(Catalog(path)) as writer:
        writer.add(images(5))
    with (small_disk / "fill").open("wb", buffering=0) as fill, suppress(OSError):
        while fill.write(b"x" * 4096):
            pass
    with closing(Catalog(path, read_only=True)) as catalog:
        assert len(catalog) == 5
        assert catalog.verify() == ([], True)
        (small_disk / "fill").unlink()
        with closing(Catalog(path)) as writer:
            writer.add(images(2, start=9))
            assert len(catalog) == 7


@pytest.mark.parametrize("read_only", [True, False])
def test_a_transaction_without_write_ahead_log_that_a_power_cut_interrupted_is_undone(path, tmp_path, read_only):
    """The first connection that writes turns the log on, itself in a transaction that has a rollback journal."""
    cut = tmp_path / "cut"
    cut.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")  # so that the transaction reaches the file before its end
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO meta VALUES (?, ?)", [(f"key {i}", "value" * 100) for i in range(1000)])
        for file in path, path.with_name("catalog.sqlite-journal"):
            shutil.copy(file, cut)
    with closing(Catalog(cut / path.name, read_only=read_only)) as catalog:
        assert catalog.verify() == ([], True)
    assert sql(cut / path.name, "SELECT count(*) FROM meta WHERE key LIKE 'key %'") == [(0,)]


def test_codes_of_all_spaces_are_verified(path, catalog):
    catalog.add(images(2))
    other = catalog.spaces.begin("a" * 64, 9, "other.safetensors")
    catalog.spaces.add_codes(other.id, with_codes(catalog, {1: [1, 0], 2: [2, 0]}))
    assert catalog.verify() == ([], True)
    sql(path, f"UPDATE codes SET code = x'00' WHERE space_id = {other.id} AND image_id = 2")
    [problem], readable = catalog.verify()
    assert (problem.count("image 2"), readable) == (1, False)


def test_a_reader_that_lacks_file_handles_does_not_ignore_a_writer(path, monkeypatch):
    """Reading the file as immutable, it would see a torn state when the writer checkpoints."""
    connect = sqlite3.connect
    with closing(Catalog(path)), closing(Catalog(path, read_only=True)) as catalog, ExitStack() as stack:
        stack.enter_context(catalog._db.reading())  # the next one needs a connection of its own

        def without_handles(place, **options):
            if "immutable" in place:
                return connect(place, **options)
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error

        monkeypatch.setattr(sqlite3, "connect", without_handles)
        with pytest.raises(BadCollection):
            len(catalog)
