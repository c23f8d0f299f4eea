"""The catalog keeps what it acknowledged, whatever else is in the file, on the disk, or at work beside it."""

import random
import shutil
import sqlite3
import threading
import time

import numpy as np
import pytest
from conftest import new_images, random_codes

from indexing import catalog as module
from indexing.catalog import Catalog, CatalogLocked, DiskFull, NewImage, create_catalog
from retrieval.errors import BadCollection, HashseekError, UnknownImage


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


def sql(path, statement, *arguments):
    db = sqlite3.connect(path)
    with db:
        rows = db.execute(statement, arguments).fetchall()
    db.close()
    return rows


def test_a_record_comes_back_as_it_was_stored(catalog):
    name = "/tmp/Bild 'höhle'\n%\";--.jpg"
    [(image_id, is_new)] = catalog.add(
        [
            NewImage(
                name, "ab" * 32, 50000, 3, 2**40, "image/avif", ("zoo", "Äpfel; 'x'", "zoo"), np.array([7, 8], np.uint8)
            )
        ]
    )
    stored = catalog.one(image_id)
    assert is_new
    assert (stored.path, stored.sha256, stored.media_type) == (name, "ab" * 32, "image/avif")
    assert (stored.width, stored.height, stored.bytes) == (50000, 3, 2**40)
    assert stored.labels == ("zoo", "Äpfel; 'x'")
    assert stored.added_at.endswith("Z")
    assert catalog.code(image_id).tolist() == [[7, 8]]


def test_the_same_content_is_stored_once_and_keeps_its_first_record(catalog):
    first, second = images(2)
    assert catalog.add([first, second, first]) == [(1, True), (2, True), (1, False)]
    again = NewImage("/elsewhere.jpg", second.sha256, 1, 1, 1, "image/png", ("new",), second.code)
    assert catalog.add([again]) == [(2, False)]
    assert catalog.one(2).path == second.path
    assert len(catalog) == 2
    assert catalog.known_hashes([second.sha256, "00", first.sha256]) == {first.sha256: 1, second.sha256: 2}


def test_an_id_is_never_given_twice(catalog):
    catalog.add(images(3))
    catalog.remove([3])
    assert catalog.add(images(1, start=9)) == [(4, True)]


def test_removing_is_all_or_nothing(catalog):
    catalog.add(images(3, labels=("a",)))
    generation = catalog.generation()
    with pytest.raises(UnknownImage, match="no image 99"):
        catalog.remove([1, 99])
    assert len(catalog) == 3
    assert catalog.generation() == generation
    catalog.remove([1, 3])
    assert [image.id for image in catalog.page(after=0, limit=10)] == [2]
    assert catalog.label_counts() == {"a": 1}


@pytest.mark.parametrize("image_id", [0, -1, 7, 2**63 - 1, 2**63, 10**30])
def test_unknown_ids_of_any_size_are_unknown(catalog, image_id):
    catalog.add(images(1))
    for ask in (catalog.one, catalog.code):
        with pytest.raises(UnknownImage, match=f"no image {image_id} "):
            ask(image_id)


def test_many_ids_at_once_come_in_the_order_asked_for(catalog):
    catalog.add(images(1203))
    ids = [*range(1203, 0, -1), 5000, 1]
    found = catalog.get(ids)
    assert [None if image is None else image.id for image in found] == [*range(1203, 0, -1), None, 1]
    assert len(catalog.known_hashes([f"{i:064x}" for i in range(1300)])) == 1203


def test_pages_and_labels(catalog):
    catalog.add(images(3, labels=("a", "b")))
    catalog.add(images(3, start=3, labels=("b",)))
    assert [image.id for image in catalog.page(after=2, limit=2)] == [3, 4]
    assert [image.id for image in catalog.page(after=1, limit=9, label="a")] == [2, 3]
    assert catalog.page(after=0, limit=9, label="' OR 1=1 --") == []
    assert catalog.label_counts() == {"a": 3, "b": 6}


def test_changes_are_what_came_and_went_since(catalog):
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


def test_a_failing_batch_leaves_nothing_behind(catalog):
    bad = NewImage("/x/\udcff.jpg", "cd" * 32, 1, 1, 1, "image/jpeg", (), np.zeros(2, np.uint8))
    with pytest.raises(UnicodeEncodeError):
        catalog.add([*images(3), bad])
    assert len(catalog) == 0
    assert catalog.generation() == 0
    assert catalog.add(images(1)) == [(1, True)]


def test_reading_only_refuses_every_change(path):
    catalog = Catalog(path, read_only=True)
    for change in (lambda: catalog.add(images(1)), lambda: catalog.remove([1])):
        with pytest.raises(BadCollection, match="for reading only"):
            change()
    catalog.close()


def test_a_folder_that_cannot_be_written_is_read_and_a_writer_elsewhere_is_noticed(path, start, tmp_path):
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
from indexing.catalog import Catalog
from retrieval.errors import HashseekError
try: Catalog(Path({str(path)!r}))
except HashseekError as error: print(error)
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
    assert "check that you may write to the folder" in reader.out.splitlines()[0]
    assert reader.out.splitlines()[1:] == ["1", "2", "3", "4"]
    path.parent.chmod(0o755)


def test_another_writer_makes_changes_wait_and_then_fail_but_never_reads(path, monkeypatch):
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.2)
    catalog = Catalog(path)
    catalog.add(images(1))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    failures = []

    def add():
        try:
            catalog.add(images(1, start=5))
        except CatalogLocked as error:
            failures.append(str(error))

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    assert len(catalog) == catalog.generation() == 1
    assert time.monotonic() - started < 10
    for thread in threads:
        thread.join()
    assert len(failures) == 3
    assert all("another process has been writing" in failure for failure in failures)
    other.execute("ROLLBACK")
    other.close()
    assert catalog.add(images(1, start=5)) == [(2, True)]
    catalog.close()


def test_a_full_disk_loses_the_batch_and_nothing_else(small_disk):
    path = small_disk / "catalog.sqlite"
    create_catalog(path, fingerprint="f" * 64, n_bits=12)
    catalog = Catalog(path)
    stored = 0

    def fill():
        nonlocal stored
        for stored in range(0, 100_000, 100):
            catalog.add(images(100, start=stored, labels=("a rather long label " * 5,)))

    with pytest.raises(DiskFull, match="free some space"):
        fill()
    assert stored
    assert len(catalog) == stored
    assert catalog.integrity_problems() == []
    catalog.close()
    reopened = Catalog(path)
    assert len(reopened) == stored
    reopened.close()


def test_files_that_are_no_catalog_are_named_as_what_they_are(tmp_path, path):
    with pytest.raises(BadCollection, match="there is no collection"):
        Catalog(tmp_path / "missing")
    text = tmp_path / "text"
    text.write_text("no database at all" * 100)
    with pytest.raises(BadCollection, match="damaged"):
        Catalog(text)
    for empty in (b"", b"\0"):
        text.write_bytes(empty)
        with pytest.raises(BadCollection):
            Catalog(text)
    foreign = tmp_path / "foreign.sqlite"
    sql(foreign, "CREATE TABLE songs (name)")
    with pytest.raises(BadCollection, match="not a Hashseek catalog"):
        Catalog(foreign)
    sql(path, "PRAGMA user_version = 99")
    with pytest.raises(BadCollection, match=r"version 99.*update Hashseek"):
        Catalog(path)
    assert sql(foreign, "SELECT name FROM sqlite_master") == [("songs",)]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM meta",
        "DELETE FROM meta WHERE key = 'generation'",
        "DELETE FROM meta WHERE key = 'uuid'",
        "UPDATE meta SET value = 'many' WHERE key = 'n_bits'",
        "UPDATE meta SET value = '0' WHERE key = 'n_bits'",
        "DROP TABLE meta",
        "DROP TABLE images",
        "UPDATE images SET code = x'010203'",
    ],
)
def test_a_catalog_with_a_hole_is_damaged_not_a_crash(path, damage):
    writer = Catalog(path)
    writer.add(images(2))
    writer.close()
    sql(path, damage)

    def use():
        catalog = Catalog(path, read_only=True)
        try:
            catalog.generation()
            catalog.changes(after_id=0, after_generation=-1)
        finally:
            catalog.close()

    with pytest.raises(BadCollection):
        use()


def test_flipped_bits_and_cut_ends_are_noticed_or_harmless_and_never_a_crash(path, tmp_path):
    writer = Catalog(path)
    writer.add(images(300, labels=("a", "b")))
    writer.close()
    content, rng = path.read_bytes(), random.Random(0)
    torn = tmp_path / "torn.sqlite"
    refused = 0
    for trial in range(150):
        damaged = bytearray(content)
        if trial < 20:
            del damaged[rng.randrange(len(damaged)) :]
        else:  # a third of them in the header and the schema
            place = rng.randrange(4096 if trial % 3 == 0 else len(damaged))
            damaged[place] ^= 1 << rng.randrange(8)
        torn.write_bytes(damaged)
        try:
            catalog = Catalog(torn, read_only=True)
        except HashseekError:
            refused += 1
            continue
        try:
            catalog.changes(after_id=0, after_generation=-1)
            catalog.page(after=0, limit=1000, label="a")
            catalog.label_counts()
            catalog.integrity_problems()
        except HashseekError:
            refused += 1
        finally:
            catalog.close()
    assert refused > 20


def test_a_catalog_may_lie_at_an_odd_place(tmp_path, path):
    odd = tmp_path / "a?mode=memory#b %20\nü" / "catalog.sqlite"
    odd.parent.mkdir()
    shutil.copy(path, odd)
    catalog = Catalog(odd)
    assert catalog.add(images(1)) == [(1, True)]
    catalog.close()
    assert sql(odd, "SELECT count(*) FROM images") == [(1,)]
