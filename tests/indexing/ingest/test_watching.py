"""A collection that follows its folders: new, growing, changed, unusable and deleted files."""

import errno
import hashlib
import os
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.collection import open_or_create
from hashseek.indexing.ingest import watching
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.ingest.sources import find_sources
from hashseek.indexing.ingest.watching import Watch
from hashseek.indexing.kept_files import FILES
from hashseek.indexing.searcher import Searcher
from hashseek.indexing.uris import is_moved, is_there
from support.collections import outcome
from support.dataset_files import write_tar
from support.pictures import png, save

NOTHING = (0, 0, 0, 0)


class Follower:
    """A collection and a watch over a folder."""

    def __init__(self, collection, folder, **options):
        self.collection, self.folder = collection, folder
        self.encoder = Searcher.open(collection, device="cpu").encoder
        self.watch = Watch(collection.catalog, [folder], ignore=collection.folder / FILES, **options)

    def add(self, *sources):
        """Add sources as `index add` does without --watch."""
        list(ingest(self.collection, self.encoder, sources))

    def look(self):
        """(added, updated, known, skipped) of one round."""
        done = NOTHING
        for report in ingest(self.collection, self.encoder, self.watch.changes()):
            self.watch.settle(report)
            done = outcome(report)
        return done

    def rounds(self, n=2):
        return [self.look() for _ in range(n)]

    def files(self):
        page = self.collection.catalog.page(after=0, limit=100)
        return {os.path.relpath(image.path, os.path.realpath(self.folder)): image.id for image in page}

    def change(self, sql):
        with self.collection.catalog._db.transaction() as db:
            db.execute(sql)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Files count as complete at once, and every round looks for deleted files."""
    monkeypatch.setattr(watching, "_SETTLED", -1.0)
    monkeypatch.setattr(watching, "_REST", 0)


@pytest.fixture
def follower(tmp_path, checkpoint):
    folder = tmp_path / "watched"
    folder.mkdir()
    collection = open_or_create(tmp_path / "collection", checkpoint=checkpoint)
    yield Follower(collection, folder)
    collection.close()


def test_new_and_changed_files_are_added_when_they_stop_changing(follower, monkeypatch):
    save(follower.folder / "a.png", 1)
    monkeypatch.setattr(watching, "_SETTLED", 60.0)
    assert follower.look() == NOTHING
    monkeypatch.setattr(watching, "_SETTLED", -1.0)
    shutil.copy(follower.folder / "a.png", follower.folder / "ü\n.png")  # the same content is another image
    assert follower.rounds() == [(2, 0, 0, 0), NOTHING]
    before = follower.files()
    save(follower.folder / "a.png", 3)
    assert follower.rounds() == [(0, 1, 0, 0), NOTHING]
    assert follower.files() == before  # the record stays, and its id
    os.utime(follower.folder / "a.png")
    assert follower.rounds() == [(0, 0, 1, 0), NOTHING]
    assert follower.collection.verify() == []


def test_a_file_of_a_disk_whose_clock_is_ahead_is_added_without_delay(follower, monkeypatch):
    save(follower.folder / "a.png", 1)
    monkeypatch.setattr(watching, "_SETTLED", 60.0)
    monkeypatch.setattr(watching, "time", SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic))
    assert follower.rounds() == [(1, 0, 0, 0), NOTHING]


def test_an_unusable_file_is_reported_once_and_added_when_it_was_fixed(follower):
    (follower.folder / "a.png").write_bytes(b"no image")
    assert follower.rounds(3) == [(0, 0, 0, 1), NOTHING, NOTHING]
    save(follower.folder / "a.png", 1)
    assert follower.rounds() == [(1, 0, 0, 0), NOTHING]


def test_images_that_were_added_before_keep_their_records(follower):
    path, keyed = save(follower.folder / "a.png", 1), save(follower.folder / "b.png", 2)
    follower.add(ImageSource(path, labels=("cat",), attributes={"n": 1}), ImageSource(keyed, key="mine"))
    assert follower.look() == NOTHING
    follower.change("UPDATE images SET mtime_ns = NULL WHERE id = 1")  # as after an import
    assert follower.rounds() == [(0, 0, 1, 0), NOTHING]
    follower.change("DELETE FROM codes WHERE image_id = 1")
    assert follower.rounds() == [(0, 0, 1, 0), NOTHING]
    save(path, 3)
    save(keyed, 4)
    assert len(list(follower.watch.changes())) == 2  # this process dies before they are stored
    follower = Follower(follower.collection, follower.folder, labels=["new", "new"])
    save(follower.folder / "c.png", 5)
    assert follower.rounds() == [(1, 2, 0, 0), NOTHING]
    assert follower.files() == {"a.png": 1, "b.png": 2, "c.png": 3}
    records = follower.collection.catalog.page(after=0, limit=3)
    assert [record.key for record in records[:2]] == [os.path.realpath(path), "mine"]
    assert [record.labels for record in records] == [("cat",), (), ("new",)]
    assert records[0].attributes == {"n": 1}


def test_of_several_records_of_a_file_the_last_is_updated(follower):
    path = follower.folder / "a.png"
    for seed in (1, 2):  # `index add` leaves one record for each content
        follower.add(ImageSource(save(path, seed)))
    save(path, 5)
    assert follower.rounds() == [(0, 1, 0, 0), NOTHING]
    assert follower.collection.catalog.by_key(os.path.realpath(path)).id == 2


@pytest.mark.parametrize(("error", "there"), [(errno.EIO, True), (errno.EACCES, True), (errno.ELOOP, False)])
def test_a_file_counts_as_deleted_only_if_that_is_certain(error, there, monkeypatch):
    def fail(_):
        raise OSError(error, "no")

    monkeypatch.setattr("pathlib.Path.stat", fail)
    assert is_there("/photos/a.png") is there
    # A copy elsewhere does not become the image while the first file cannot be read.
    assert not is_moved("/photos/a.png", "/backup/a.png", sha256="", stamp=(1, 1))


def test_the_collection_s_own_files_are_not_watched(tmp_path, checkpoint):
    folder = tmp_path / "watched"
    collection = open_or_create(folder / "collection", checkpoint=checkpoint)
    follower = Follower(collection, folder)
    data = save(tmp_path / "upload.png", 1).read_bytes()
    sha256, code = hashlib.sha256(data).hexdigest(), np.zeros(6, np.uint8)
    collection.add_with_file(NewImage("", sha256, 64, 64, len(data), "image/png", (), code), data, suffix=".png")
    save(folder / "a.png", 2)
    assert follower.rounds() == [(1, 0, 0, 0), NOTHING]
    collection.close()


def test_files_count_as_deleted_when_they_are_missing_in_two_rounds(follower, tmp_path):
    elsewhere = save(tmp_path / "elsewhere.png", 9)
    write_tar(follower.folder / "a.tar", {"packed.png": png(10)})
    follower.add(ImageSource(elsewhere), *find_sources([follower.folder / "a.tar"]))
    elsewhere.unlink()  # not in a folder that is watched
    for seed in range(4):
        save(follower.folder / "sub" / f"{seed}.png", seed)
    follower.look()
    files = follower.files()
    assert (follower.watch.deleted(), follower.watch.deleted()) == ([], [])
    (follower.folder / "sub" / "1.png").unlink()
    (follower.folder / "sub" / "2.png").rename(follower.folder / "away.png")
    follower.look()
    assert follower.watch.deleted() == []
    save(follower.folder / "sub" / "1.png", 1)  # some programs save by deleting and writing
    assert follower.watch.deleted() == [files["sub/2.png"]]
    follower.collection.remove([files["sub/2.png"]])
    assert (follower.look(), follower.watch.deleted()) == ((0, 0, 1, 0), [])
    packed, *others = sorted(set(follower.files()) - {"../elsewhere.png"})
    assert packed.startswith("a.tar::")
    assert others == ["away.png", "sub/0.png", "sub/1.png", "sub/3.png"]


def test_a_file_that_is_written_again_just_before_the_removal_keeps_its_image(follower, monkeypatch):
    path = save(follower.folder / "a.png", 1)
    save(follower.folder / "b.png", 2)
    follower.look()
    catalog = follower.collection.catalog

    def get_later(ids, get=catalog.get):
        if ids:
            save(path, 1)
        return get(ids)

    path.unlink()
    monkeypatch.setattr(catalog, "get", get_later)
    assert (follower.watch.deleted(), follower.watch.deleted()) == ([], [])
    assert path.exists()


def test_a_folder_without_images_counts_as_a_disk_that_is_not_mounted(follower):
    save(follower.folder / "a.png", 1)
    follower.look()
    follower.folder.rename(follower.folder.with_name("unmounted"))
    for is_empty in (False, True):
        if is_empty:
            follower.folder.mkdir()
        for _ in range(3):
            follower.look()
            assert follower.watch.deleted() == []
    assert list(follower.files()) == ["a.png"]
