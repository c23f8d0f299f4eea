"""A collection that follows its folders: new, growing, changed, unusable and deleted files."""

import errno
import hashlib
import os
import shutil
import tarfile

import numpy as np
import pytest

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.collection import FILES, open_or_create
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.ingest.sources import find_sources
from hashseek.indexing.ingest.uris import is_there
from hashseek.indexing.ingest.watching import Watch
from hashseek.indexing.searcher import Searcher
from support.pictures import draw


class Follower:
    """A collection, what it watches, and what a round of it does."""

    def __init__(self, collection, folder):
        self.collection, self.folder = collection, folder
        self.encoder = Searcher.open(collection, device="cpu").encoder
        self.watch = self.watching(folder)

    def watching(self, *folders, **options):
        return Watch(self.collection.catalog, folders, ignore=self.collection.folder / FILES, **options)

    def look(self):
        """(added, updated, known, skipped) of one round."""
        outcome = (0, 0, 0, 0)
        for report in ingest(self.collection, self.encoder, self.watch.changes()):
            self.watch.settle(report)
            outcome = (report.added, report.updated, report.known, report.skipped)
        return outcome

    def files(self):
        page = self.collection.catalog.page(after=0, limit=100)
        return {os.path.relpath(image.path, os.path.realpath(self.folder)): image.id for image in page}


@pytest.fixture
def follower(tmp_path, checkpoint):
    folder = tmp_path / "watched"
    folder.mkdir()
    collection = open_or_create(tmp_path / "collection", checkpoint=checkpoint)
    yield Follower(collection, folder)
    collection.close()


def save(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(seed).save(path)
    return path


NOTHING = (0, 0, 0, 0)


def test_new_and_changed_files_are_taken_when_they_rest(follower):
    save(follower.folder / "a.png", 1)
    save(follower.folder / "sub" / "ü\n.png", 2)
    assert follower.look() == NOTHING  # they might still be growing
    assert follower.look() == (2, 0, 0, 0)
    assert follower.look() == NOTHING
    before = follower.files()
    save(follower.folder / "a.png", 3)
    assert (follower.look(), follower.look(), follower.look()) == (NOTHING, (0, 1, 0, 0), NOTHING)
    assert follower.files() == before  # the record stays, and its id
    os.utime(follower.folder / "a.png")
    assert (follower.look(), follower.look(), follower.look()) == (NOTHING, (0, 0, 1, 0), NOTHING)
    assert follower.collection.verify() == []


def test_a_file_that_grows_is_left_until_its_size_rests(follower, tmp_path):
    content = save(tmp_path / "whole.png", 1).read_bytes()
    for end in range(1000, len(content), 1000):
        (follower.folder / "a.png").write_bytes(content[:end])
        assert follower.look() == NOTHING
    (follower.folder / "a.png").write_bytes(content)
    assert (follower.look(), follower.look()) == (NOTHING, (1, 0, 0, 0))


def test_a_file_long_at_rest_is_taken_at_once(follower, monkeypatch):
    save(follower.folder / "a.png", 1)
    monkeypatch.setattr("hashseek.indexing.ingest.watching._SETTLED", -1.0)
    assert follower.look() == (1, 0, 0, 0)


def test_an_unusable_file_is_said_once_and_taken_when_it_was_mended(follower):
    (follower.folder / "a.png").write_bytes(b"no image")
    assert [follower.look() for _ in range(4)] == [NOTHING, (0, 0, 0, 1), NOTHING, NOTHING]
    save(follower.folder / "a.png", 1)
    assert [follower.look() for _ in range(3)] == [NOTHING, (1, 0, 0, 0), NOTHING]


def test_two_files_of_one_content_are_two_images(follower):
    shutil.copy(save(follower.folder / "a.png", 1), follower.folder / "b.png")
    follower.look()
    assert follower.look() == (2, 0, 0, 0)
    (follower.folder / "a.png").unlink()
    assert follower.watch.deleted() == []
    assert follower.watch.deleted() == [follower.files()["a.png"]]


def test_images_added_before_are_known_and_updated_when_they_change(follower):
    path = save(follower.folder / "a.png", 1)
    keyed = save(follower.folder / "b.png", 2)
    said = {"labels": ("cat",), "attributes": {"n": 1}}
    list(ingest(follower.collection, follower.encoder, [ImageSource(path, **said), ImageSource(keyed, key="mine")]))
    assert [follower.look() for _ in range(3)] == [NOTHING] * 3
    save(path, 3)
    save(keyed, 4)
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 2, 0, 0), NOTHING]
    assert follower.files() == {"a.png": 1, "b.png": 2}
    catalog = follower.collection.catalog
    assert catalog.by_key("mine").id == 2
    record = catalog.one(1)
    assert (record.key, record.labels, record.attributes) == (os.path.realpath(path), ("cat",), {"n": 1})


def test_a_file_that_was_only_touched_or_whose_time_is_unknown_keeps_what_is_said_of_it(follower):
    path = save(follower.folder / "a.png", 1)
    list(ingest(follower.collection, follower.encoder, [ImageSource(path, labels=("cat",), attributes={"n": 1})]))
    with follower.collection.catalog._db.transaction() as db:  # as after an import
        db.execute("UPDATE images SET mtime_ns = NULL")
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 0, 1, 0), NOTHING]
    os.utime(path)
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 0, 1, 0), NOTHING]
    record = follower.collection.catalog.one(1)
    assert (record.labels, record.attributes) == (("cat",), {"n": 1})


def test_of_several_records_of_a_file_that_changes_one_stays(follower):
    path = save(follower.folder / "a.png", 1)
    for seed in (1, 2, 3):  # as `index add` leaves them where content has no key
        save(path, seed)
        list(ingest(follower.collection, follower.encoder, [ImageSource(path)]))
    save(follower.folder / "b.png", 4)
    list(ingest(follower.collection, follower.encoder, [ImageSource(follower.folder / "b.png")] * 2))
    twice = ImageSource(follower.folder / "b.png", key="mine")
    list(ingest(follower.collection, follower.encoder, [twice]))
    assert len(follower.collection) == 5
    save(path, 5)
    save(follower.folder / "b.png", 6)
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 2, 0, 0), NOTHING]
    assert follower.files() == {"a.png": 3, "b.png": 5}
    assert follower.collection.verify() == []


def test_a_process_that_dies_before_the_content_is_stored_leaves_one_record(follower):
    path = save(follower.folder / "a.png", 1)
    list(ingest(follower.collection, follower.encoder, [ImageSource(path, labels=("cat",))]))
    save(path, 2)
    follower.look()
    assert len(list(follower.watch.changes())) == 1  # handed out, and never stored
    again = Follower(follower.collection, follower.folder)
    assert [again.look() for _ in range(3)] == [NOTHING, (0, 1, 0, 0), NOTHING]
    assert again.files() == {"a.png": 1}
    assert again.collection.catalog.one(1).labels == ("cat",)


def test_a_hidden_folder_that_is_named_is_looked_at_though_its_parent_is_named_too(follower):
    save(follower.folder / "a.png", 1)
    save(follower.folder / ".hidden" / "b.png", 2)
    save(follower.folder / ".hidden" / "sub" / "c.png", 3)
    hidden = follower.folder / ".hidden"
    follower.watch = follower.watching(hidden / "sub", hidden, follower.folder)
    assert [follower.look() for _ in range(3)] == [NOTHING, (3, 0, 0, 0), NOTHING]


def test_labels_for_all_go_beside_those_that_an_image_has(follower):
    path = save(follower.folder / "a.png", 1)
    list(ingest(follower.collection, follower.encoder, [ImageSource(path, labels=("cat",))]))
    save(follower.folder / "b.png", 2)
    follower.watch = follower.watching(follower.folder, labels=["new", "cat", "new"])
    assert [follower.look() for _ in range(3)] == [NOTHING, (1, 0, 0, 0), NOTHING]
    save(path, 3)
    save(follower.folder / "b.png", 4)
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 2, 0, 0), NOTHING]
    catalog = follower.collection.catalog
    assert [catalog.one(1).labels, catalog.one(2).labels] == [("cat", "new"), ("cat", "new")]


def test_an_image_that_has_no_code_gets_one_though_its_file_rests(follower):
    path = save(follower.folder / "a.png", 1)
    list(ingest(follower.collection, follower.encoder, [ImageSource(path)]))
    code = follower.collection.catalog.code(1)
    with follower.collection.catalog._db.transaction() as db:
        db.execute("DELETE FROM codes")
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 0, 1, 0), NOTHING]
    assert (follower.collection.catalog.code(1) == code).all()
    with follower.collection.catalog._db.transaction() as db:
        db.execute("DELETE FROM codes")
    path.write_bytes(b"no image")
    assert [follower.look() for _ in range(4)] == [NOTHING, (0, 0, 0, 1), NOTHING, NOTHING]


def test_every_record_of_a_file_that_changes_is_updated(follower):
    path = save(follower.folder / "a.png", 1)
    list(ingest(follower.collection, follower.encoder, [ImageSource(path, ("cat",), key="K1")]))
    list(ingest(follower.collection, follower.encoder, [ImageSource(path, ("dog",), key="K2")]))
    save(path, 2)
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 2, 0, 0), NOTHING]
    catalog = follower.collection.catalog
    assert catalog.one(1).sha256 == catalog.one(2).sha256
    assert [catalog.by_key("K1").labels, catalog.by_key("K2").labels] == [("cat",), ("dog",)]
    path.write_bytes(b"no image")
    assert [follower.look() for _ in range(4)] == [NOTHING, (0, 0, 0, 2), NOTHING, NOTHING]
    save(path, 3)
    assert [follower.look() for _ in range(3)] == [NOTHING, (0, 2, 0, 0), NOTHING]


@pytest.mark.parametrize(("error", "there"), [(errno.EIO, True), (errno.EACCES, True), (errno.ELOOP, False)])
def test_an_image_is_gone_only_where_its_file_is_known_to_be(error, there, monkeypatch):
    def fail(_):
        raise OSError(error, "no")

    monkeypatch.setattr("pathlib.Path.stat", fail)
    assert is_there("/photos/a.png") is there


def test_what_the_collection_itself_keeps_is_not_watched(tmp_path, checkpoint):
    folder = tmp_path / "watched"
    collection = open_or_create(folder / "collection", checkpoint=checkpoint)
    follower = Follower(collection, folder)
    data = save(tmp_path / "upload.png", 1).read_bytes()
    sha256, code = hashlib.sha256(data).hexdigest(), np.zeros(6, np.uint8)
    collection.add_with_file(NewImage("", sha256, 64, 64, len(data), "image/png", (), code), data, suffix=".png")
    save(folder / "a.png", 2)
    assert [follower.look() for _ in range(3)] == [NOTHING, (1, 0, 0, 0), NOTHING]
    assert collection.catalog.one(1).key is None
    collection.close()


def test_deleted_files_are_gone_after_two_looks_and_only_what_is_deleted(follower, tmp_path):
    elsewhere = save(tmp_path / "elsewhere.png", 9)
    with tarfile.open(follower.folder / "a.tar", "w") as packed:
        packed.add(save(tmp_path / "packed.png", 10), "packed.png")
    sources = [ImageSource(elsewhere), *find_sources([follower.folder / "a.tar"])]
    list(ingest(follower.collection, follower.encoder, sources))
    elsewhere.unlink()  # not in a folder that is watched
    for seed in range(4):
        save(follower.folder / "sub" / f"{seed}.png", seed)
    follower.look(), follower.look()
    files = follower.files()
    assert (follower.watch.deleted(), follower.watch.deleted()) == ([], [])
    (follower.folder / "sub" / "1.png").unlink()
    (follower.folder / "sub" / "2.png").rename(follower.folder / "away.png")
    follower.look()
    assert follower.watch.deleted() == []
    save(follower.folder / "sub" / "1.png", 1)  # as programs do that save by deleting and writing anew
    assert follower.watch.deleted() == [files["sub/2.png"]]
    follower.collection.remove([files["sub/2.png"]])
    assert (follower.look(), follower.watch.deleted()) == ((1, 0, 0, 0), [])
    packed, *others = sorted(set(follower.files()) - {"../elsewhere.png"})
    assert packed.startswith("a.tar::")
    assert others == ["away.png", "sub/0.png", "sub/1.png", "sub/3.png"]


def test_an_empty_folder_is_taken_for_a_disk_that_is_not_there(follower):
    save(follower.folder / "a.png", 1)
    follower.look(), follower.look()
    follower.folder.rename(follower.folder.with_name("unmounted"))
    for _ in range(3):
        follower.look()
        assert follower.watch.deleted() == []
    follower.folder.mkdir()
    for _ in range(3):
        follower.look()
        assert follower.watch.deleted() == []
    assert list(follower.files()) == ["a.png"]
