"""A collection finds exactly what its catalog holds, whatever happened to its index, its folder, or beside it."""

import hashlib
import json
import re
import shutil
import sqlite3
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest

from hashseek.indexing.catalog import CatalogLocked, CatalogReplaced, DiskFull, NewImage
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import Collection, check_place, open_or_create
from hashseek.indexing.index import collection_index, hamming_index, index_files, segments
from hashseek.indexing.ingest.batch import IngestReport
from hashseek.indexing.maintenance.exchange import export
from hashseek.indexing.opening import open_for_adding
from hashseek.retrieval.errors import BadCheckpoint, BadCollection, BadConfig, ForeignCodes, UnknownImage
from hashseek.retrieval.files import locked
from support import hamming_oracle as hamming
from support.collections import (
    code_collection,
    file_of,
    import_export,
    index_folder,
    new_images,
    random_codes,
    sql,
    with_codes,
)


def check(collection, truth, queries, ks=(1, 5, 10**30)):
    """Compare with the oracle over `truth`, a dict id -> code."""
    ids = np.array(sorted(truth), np.int64)
    codes = np.array([truth[i] for i in ids], np.uint8).reshape(len(ids), queries.shape[1])
    assert len(collection) == len(ids)
    view = collection.index.current()
    assert np.array_equal(view.ids, ids)
    assert np.array_equal(view.codes_of(ids[::-1]), codes[::-1])
    for k in (*ks, max(len(ids), 1)):
        distances, positions = hamming.search(queries, codes, k=k)
        for row, found in enumerate(collection.search(queries, k=k)):
            assert np.array_equal(found[0], distances[row])
            assert np.array_equal(found[1], ids[positions[row]])
        radius = collection.n_bits // 3
        for row, found in enumerate(collection.search(queries, k=k, max_distance=radius)):
            assert np.array_equal(found[1], ids[positions[row]][distances[row] <= radius])
        for among in (Filter(ids=tuple(ids.tolist())), Filter(no_labels=("none has it",))):  # all, and no others
            for row, found in enumerate(collection.search(queries, k=k, among=among)):
                assert np.array_equal(found[1], ids[positions[row]])


def kinds(collection):
    """What the problems that `verify` finds are about."""
    starts = {"the index ": "index", "the file ": "file", "the checkpoint ": "checkpoint"}
    return {next(kind for start, kind in starts.items() if one.startswith(start)) for one in collection.verify()}


def add(collection, truth, codes, *, start):
    outcome = collection.add([replace(image, key=image.sha256) for image in new_images(codes, start=start)])
    assert all(change == "added" for _, change in outcome)
    truth.update((image_id, code) for (image_id, _), code in zip(outcome, codes, strict=True))


@pytest.mark.parametrize(("n_bits", "fresh_limit"), [(1, 4096), (12, 7), (36, 4096), (48, 7), (1024, 20)])
def test_any_history_of_changes_gives_what_the_oracle_gives(n_bits, fresh_limit, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FRESH_LIMIT", fresh_limit)
    rng = np.random.default_rng(n_bits)
    queries = random_codes(rng, 3, n_bits)
    collection, beside, truth, start = code_collection(tmp_path, n_bits=n_bits), None, {}, 0
    check(collection, truth, queries)
    for _ in range(40):
        action = rng.choice(["add", "add", "update", "remove", "save", "reopen", "beside", "merge"])
        if action == "add":
            n = int(rng.integers(1, 9))
            add(collection, truth, random_codes(rng, n, n_bits, 3), start=start)
            start += n
        elif action == "update" and truth:
            image_id = int(rng.choice(sorted(truth)))
            truth[image_id] = random_codes(rng, 1, n_bits)[0]
            [image] = new_images(truth[image_id][None], start=start)
            updated = replace(image, key=collection.catalog.one(image_id).key)
            assert collection.add([updated]) == [(image_id, "updated")]
            start += 1
        elif action == "remove" and truth:
            gone = rng.choice(sorted(truth), min(len(truth), int(rng.integers(1, 5))), replace=False).tolist()
            collection.remove(gone)
            for image_id in gone:
                del truth[image_id]
        elif action == "save":
            collection.save_index()
        elif action == "merge":
            (beside or collection).merge_segments()
        elif action == "reopen":
            collection.close()
            collection = Collection(tmp_path)
        elif beside is None:
            beside = Collection(tmp_path, read_only=True)
        check(collection, truth, queries)
        if beside is not None:
            check(beside, truth, queries)
    assert kinds(collection) <= {"file", "checkpoint"}
    collection.close()
    if beside is not None:
        beside.close()


def test_changes_during_a_merge_are_found_before_and_after(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FRESH_LIMIT", 10)
    rng = np.random.default_rng(3)
    collection, truth, queries = code_collection(tmp_path, n_bits=36), {}, random_codes(rng, 3, 36)
    add(collection, truth, random_codes(rng, 30, 36, 6), start=0)
    collection.save_index()
    add(collection, truth, random_codes(rng, 20, 36, 6), start=30)
    merge = collection_index.merge

    def slow(view, kind):
        add(collection, truth, random_codes(rng, 4, 36, 6), start=50)
        for image_id in (3, 33, 52):
            collection.remove([image_id])
            del truth[image_id]
        check(collection, truth, queries)
        assert collection.describe_index()["built"] == 30
        return merge(view, kind)

    monkeypatch.setattr(collection_index, "merge", slow)
    collection.merge_segments()
    monkeypatch.setattr(collection_index, "merge", merge)
    described = collection.describe_index()
    assert [described[key] for key in ("built", "fresh", "removed")] == [50, 3, 2]
    check(collection, truth, queries)
    assert "index" not in kinds(collection)
    collection.close()


@pytest.fixture
def saved(tmp_path):
    """(folder, truth, queries): a built index of 30 images, then 5 added and 3 removed that it does not know."""
    rng = np.random.default_rng(5)
    folder, truth = tmp_path / "saved", {}
    collection = code_collection(folder, n_bits=36)
    add(collection, truth, random_codes(rng, 30, 36, 6), start=0)
    collection.save_index()
    add(collection, truth, random_codes(rng, 5, 36, 6), start=30)
    collection.remove([3, 17, 31])
    for image_id in (3, 17, 31):
        del truth[image_id]
    collection.close()
    return folder, truth, random_codes(rng, 3, 36)


def test_an_outdated_index_is_used_without_a_warning(saved, caplog):
    folder, truth, queries = saved
    collection = Collection(folder)
    assert collection.describe_index()["built"] == 30
    check(collection, truth, queries)
    assert not caplog.records
    collection.close()


DAMAGES = {
    "deleted": lambda path, content: path.unlink(),
    "cut": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "text": lambda path, content: path.write_bytes(b"[1, 2, 3]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["distinct.bin", "rows.bin", "ids.bin"])
def test_a_damaged_index_is_rebuilt_with_a_log_line(saved, caplog, name, damage):
    folder, truth, queries = saved
    path = index_folder(folder) / name
    DAMAGES[damage](path, path.read_bytes())
    with closing(Collection(folder, read_only=True)) as reader:
        assert "index" in kinds(reader)
    caplog.clear()
    with closing(Collection(folder)) as collection:
        assert len(caplog.records) == 1
        check(collection, truth, queries)
        collection.save_index()
    with closing(Collection(folder)) as collection:
        assert len(caplog.records) == 1
        assert collection.describe_index()["built"] == len(truth)
        check(collection, truth, queries)


def test_every_flipped_bit_of_the_index_is_noticed_or_harmless(saved):
    folder, truth, queries = saved
    rng = np.random.default_rng(0)
    for name in ("distinct.bin", "rows.bin", "ids.bin"):
        path = index_folder(folder) / name
        content = path.read_bytes()
        for place in rng.choice(len(content), 30, replace=False):
            damaged = bytearray(content)
            damaged[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            collection = Collection(folder, read_only=True)
            check(collection, truth, queries, ks=(1,))
            collection.close()
        path.write_bytes(content)


def test_a_catalog_restored_from_a_copy_does_not_use_a_newer_index(tmp_path):
    rng, truth, queries = np.random.default_rng(4), {}, random_codes(np.random.default_rng(1), 3, 12)
    folder = tmp_path / "collection"
    collection = code_collection(folder, n_bits=12)
    add(collection, truth, random_codes(rng, 10, 12), start=0)
    collection.save_index()
    collection.close()
    shutil.copy(folder / "catalog.sqlite", tmp_path / "copy")
    collection = Collection(folder)
    collection.add(new_images(random_codes(rng, 10, 12), start=50))
    collection.save_index()
    collection.close()
    shutil.copy(tmp_path / "copy", folder / "catalog.sqlite")
    collection = Collection(folder)
    check(collection, truth, queries)
    for start in range(70, 75):  # the generations overtake the lost ones, and the ids are given again
        add(collection, truth, random_codes(rng, 4, 12), start=start * 10)
    collection.close()  # without saving, as a killed process would
    collection = Collection(folder)
    check(collection, truth, queries)
    collection.close()


def test_an_index_that_the_catalog_does_not_name_is_replaced(saved):
    folder, truth, queries = saved
    sql(folder / "catalog.sqlite", "DELETE FROM meta WHERE key = 'index'")
    with closing(Collection(folder, read_only=True)) as collection:
        check(collection, truth, queries)
    with closing(Collection(folder)) as collection:
        collection.save_index()
    with closing(Collection(folder)) as collection:
        assert collection.describe_index()["built"] == len(truth)
    assert index_folder(folder).is_dir()


def test_readers_neither_wait_for_a_writer_nor_fail_when_it_deletes_their_files(saved, monkeypatch, caplog):
    folder, truth, queries = saved
    monkeypatch.setattr(hamming_index, "MAPPED", 0)
    load, writer = index_files.load_index, Collection(folder)
    with locked(folder):
        before = Collection(folder, read_only=True)

    def replaced_just_now(*of, **how):
        monkeypatch.undo()
        writer.save_index()
        return load(*of, **how)

    monkeypatch.setattr(index_files, "load_index", replaced_just_now)
    after = Collection(folder, read_only=True)
    assert [opened.describe_index()["built"] for opened in (before, after)] == [30, len(truth)]
    for opened in (before, after, writer):
        check(opened, truth, queries)
        opened.close()
    assert not caplog.records


def test_a_code_that_changed_in_the_catalog_is_found_by_verify(saved):
    folder, _, _ = saved
    db = sqlite3.connect(folder / "catalog.sqlite")
    with db:
        db.execute("UPDATE codes SET code = x'0102030405' WHERE image_id = 9")
    db.close()
    collection = Collection(folder, read_only=True)
    assert "index" in kinds(collection)
    collection.close()
    collection = Collection(folder)
    collection.build_index("exact")  # from the catalog, not from the index that was there
    assert "index" not in kinds(collection)
    assert collection.search(collection.catalog.code_of(9).code[None], k=1)[0][0].tolist() == [0]
    collection.close()
    again = Collection(folder, read_only=True)
    assert "index" not in kinds(again)
    again.close()


def test_changes_of_others_during_verify_are_no_findings(tmp_path, monkeypatch):
    rng, collection = np.random.default_rng(0), code_collection(tmp_path, n_bits=12)
    collection.add(new_images(random_codes(rng, 20, 12)))
    beside, changes, start = Collection(tmp_path), collection.catalog.changes, [100]

    def changed_before(**since):
        if start[0] < 110:
            beside.add(new_images(random_codes(rng, 2, 12), start=start[0]))
            beside.remove([start[0] - 98])
            start[0] += 2
        return changes(**since)

    monkeypatch.setattr(collection.catalog, "changes", changed_before)
    assert kinds(collection) == {"file", "checkpoint"}
    assert start == [110]
    with collection.catalog._db.transaction() as db:
        db.execute("UPDATE codes SET code = x'0000' WHERE image_id = 19")
    assert "index" in kinds(collection)
    collection.close()
    beside.close()


def images_of(problems):
    """The images that the problems of files name, in order."""
    return [int(re.search(r"the (?:content of the )?file of image (\d+) ", one)[1]) for one in problems]


def test_verify_reports_missing_files_and_a_damaged_checkpoint(own_collection):
    collection = Collection(own_collection)
    assert collection.verify() == []
    collection.add(new_images(np.zeros((1, 6), np.uint8)))
    [image] = new_images(np.ones((1, 6), np.uint8), start=50)
    sha256 = hashlib.sha256(b"kept").hexdigest()
    collection.add_with_file(replace(image, sha256=sha256), b"kept", suffix=".jpg")
    assert images_of(collection.verify()) == [13]
    kept = file_of(collection, collection.catalog.one(14))
    kept.unlink()
    kept.symlink_to("/proc/self/mem")  # reading it is an I/O error, also for root
    assert images_of(collection.verify()) == [13, 14]
    kept.unlink()
    kept.write_bytes(b"else")
    weights = own_collection / "checkpoint.safetensors"
    intact = weights.read_bytes()
    for damaged in (b"torn", intact[:-9] + b"x" + intact[-8:]):
        weights.write_bytes(damaged)
        checkpoint, *files = collection.verify()
        assert str(weights) in checkpoint
        assert images_of(files) == [13, 14]
    collection.close()


def test_threads_that_add_remove_save_and_search_see_every_acknowledged_change(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FRESH_LIMIT", 10)
    collection = code_collection(tmp_path, n_bits=48)
    codes = random_codes(np.random.default_rng(0), 120, 48)
    stop = threading.Event()

    def work(worker):
        for number in range(worker, len(codes), 4):
            [(image_id, _)] = collection.add(new_images(codes[number : number + 1], start=number))
            [(distances, ids)] = collection.search(codes[number : number + 1], k=3)
            assert (distances[0], ids[0]) == (0, image_id)
            if number % 3 == 0:
                collection.remove([image_id])
                [(_, ids)] = collection.search(codes[number : number + 1], k=200)
                assert image_id not in ids

    def repeat(action):
        while not stop.wait(0.005):
            action()

    keepers = [threading.Thread(target=repeat, args=(do,)) for do in (collection.save_index, collection.merge_segments)]
    for keeper in keepers:
        keeper.start()
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, worker) for worker in range(4)]:
            future.result()
    stop.set()
    for keeper in keepers:
        keeper.join()
    assert len(collection) == 80
    collection.save_index()
    collection.close()
    collection = Collection(tmp_path, read_only=True)
    assert len(collection) == collection.describe_index()["built"] == 80
    collection.close()


def test_a_kept_file_is_deleted_with_the_last_image_of_its_content(tmp_path):
    collection = code_collection(tmp_path, n_bits=8)
    one, two = new_images(np.zeros((2, 1), np.uint8))
    outside = tmp_path / "outside.jpg"
    outside.write_bytes(b"one")

    def put(image, key, data):
        return collection.add_with_file(replace(image, key=key), data, suffix=".jpg")

    def kept():
        return {path.name[:64] for path in (tmp_path / "files").rglob("*") if path.is_file()}

    assert [put(one, "a", b"one"), put(one, "b", b"one")] == [(1, "added"), (2, "added")]  # two images, one file
    assert kept() == {one.sha256}
    assert put(two, "a", b"two") == (1, "updated")
    assert kept() == {one.sha256, two.sha256}
    assert put(two, "b", b"two") == (2, "updated")
    assert kept() == {two.sha256}
    collection.remove([1])
    assert collection.owns(collection.catalog.one(2))
    assert file_of(collection, collection.catalog.one(2)).read_bytes() == b"two"
    file_of(collection, collection.catalog.one(2)).unlink()
    assert put(two, "b", b"two") == (2, "known")  # writes a lost file again
    assert kept() == {two.sha256}
    assert collection.add([replace(one, key="b", path=str(outside))]) == [(2, "updated")]
    assert kept() == {two.sha256}  # until `optimize`
    assert put(one, "b", b"one") == (2, "known")  # the file outside is enough
    assert (kept(), collection.catalog.one(2).path) == ({two.sha256}, str(outside))
    collection.close()


def test_many_images_are_removed_without_all_their_records_in_memory(tmp_path):
    n = 8000
    with closing(code_collection(tmp_path, n_bits=8)) as collection:
        collection.add(new_images(np.zeros((n, 1), np.uint8)))
        ids = list(range(1, n + 1))
        tracemalloc.start()
        collection.remove(ids, missing_ok=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(collection) == 0
    assert peak < 400 * n  # a record takes 1,000 bytes


def test_a_page_goes_on_after_images_that_were_removed_while_it_was_read(own_collection, monkeypatch):
    with closing(Collection(own_collection)) as collection, closing(Collection(own_collection)) as other:
        get = collection.catalog.get

        def get_late(ids):
            other.remove([2, 3], missing_ok=True)
            return get(ids)

        monkeypatch.setattr(collection.catalog, "get", get_late)
        labelled = Filter(any_labels=("even", "odd"))
        page = collection.browse(labelled, limit=3)
        assert ([image.id for image in page.images], page.next, page.total) == ([1], 3, 12)
        assert [image.id for image in collection.browse(labelled, after=3, limit=3).images] == [4, 5, 6]


def test_unknown_ids_of_any_size_are_not_removed(tmp_path):
    with closing(code_collection(tmp_path, n_bits=8)) as collection:
        collection.add(new_images(np.zeros((2, 1), np.uint8)))
        for unknown in (-1, 7, 2**63, 2**80):
            with pytest.raises(UnknownImage):
                collection.remove([1, unknown])
        collection.remove([1, 7, 2**80], missing_ok=True)
        assert len(collection) == 1


def test_an_image_is_removed_even_if_its_file_cannot_be_deleted_now(tmp_path, monkeypatch, caplog):
    collection = code_collection(tmp_path, n_bits=8)
    [image] = new_images(np.zeros((1, 1), np.uint8))
    collection.add_with_file(image, b"content", suffix=".jpg")

    def locked():
        raise CatalogLocked("another process is writing")

    monkeypatch.setattr(collection.catalog, "exclusive", locked)
    collection.remove([1])
    assert len(collection) == 0
    assert "another process is writing" in caplog.text
    collection.close()


def test_a_file_is_not_kept_when_its_content_is_stored_from_elsewhere_or_cannot_be_stored(tmp_path, monkeypatch):
    collection = code_collection(tmp_path, n_bits=8)
    (outside := tmp_path / "outside.jpg").write_bytes(b"content")
    images = [replace(image, path=str(outside), bytes=7) for image in new_images(np.zeros((2, 1), np.uint8))]
    images[0] = replace(images[0], sha256=hashlib.sha256(b"content").hexdigest())
    collection.add(images[:1])
    assert collection.add_with_file(images[0], b"content", suffix=".jpg") == (1, "known")
    assert collection.catalog.one(1).path == images[0].path

    def full(images):
        raise BadCollection("the disk is full")

    monkeypatch.setattr(collection.catalog, "add", full)
    with pytest.raises(BadCollection):
        collection.add_with_file(images[1], b"content", suffix=".jpg")
    assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    collection.close()


def test_an_upload_fails_as_in_a_moved_collection_if_it_is_moved_before_the_end(tmp_path, monkeypatch):
    with closing(code_collection(tmp_path / "c", n_bits=8)) as collection:
        add = collection.catalog.add

        def moved(images):
            outcomes = add(images)
            (tmp_path / "c").rename(tmp_path / "moved")
            return outcomes

        monkeypatch.setattr(collection.catalog, "add", moved)
        with pytest.raises(CatalogReplaced):
            collection.add_with_file(new_images(np.zeros((1, 1), np.uint8))[0], b"content", suffix=".jpg")
    assert not (tmp_path / "c").exists()


def test_an_upload_never_creates_the_folder_of_a_collection_that_was_moved(tmp_path):
    collection = code_collection(tmp_path / "c", n_bits=8)
    one, two = new_images(np.zeros((2, 1), np.uint8))
    collection.add_with_file(one, b"one", suffix=".jpg")
    (tmp_path / "c").rename(tmp_path / "moved")
    with pytest.raises(CatalogReplaced):
        collection.add_with_file(two, b"two", suffix=".jpg")
    assert not (tmp_path / "c").exists()
    other = code_collection(tmp_path / "new", n_bits=8)
    other.add_with_file(two, b"two", suffix=".jpg")
    other.close()
    (tmp_path / "new").rename(tmp_path / "c")
    with pytest.raises(CatalogReplaced):
        collection.add_with_file(two, b"two", suffix=".jpg")
    collection.close()
    with closing(Collection(tmp_path / "c")) as other:  # its file of the same content is still there
        assert file_of(other, other.catalog.one(1)).read_bytes() == b"two"


@pytest.mark.parametrize("moment", ["after it was removed", "before it was added"])
def test_one_content_removed_and_added_at_the_same_time_keeps_its_file_if_it_is_stored(tmp_path, monkeypatch, moment):
    collection, other = code_collection(tmp_path, n_bits=8), Collection(tmp_path)
    [image] = new_images(np.zeros((1, 1), np.uint8))
    collection.add_with_file(image, b"content", suffix=".jpg")
    if moment == "after it was removed":  # and before its file is deleted
        remove = collection.catalog.remove
        monkeypatch.setattr(
            collection.catalog,
            "remove",
            lambda ids, **options: (remove(ids, **options), other.add_with_file(image, b"content", suffix=".jpg")),
        )
        collection.remove([1])
    else:  # but after its file was written
        add = collection.catalog.add
        monkeypatch.setattr(collection.catalog, "add", lambda images: (other.remove([1]), add(images))[1])
        assert collection.add_with_file(image, b"content", suffix=".jpg") == (2, "added")
    [stored] = collection.catalog.page(after=0, limit=10)
    assert file_of(collection, stored).read_bytes() == b"content"
    collection.close()
    other.close()


def test_an_upload_keeps_its_file_if_another_with_the_same_key_came_between(tmp_path, monkeypatch):
    collection, other = code_collection(tmp_path, n_bits=8), Collection(tmp_path)
    one, two = (replace(image, key="k") for image in new_images(np.zeros((2, 1), np.uint8)))
    collection.add_with_file(one, b"one", suffix=".jpg")
    add = collection.catalog.add
    between = [lambda: other.add_with_file(two, b"two", suffix=".jpg")]
    monkeypatch.setattr(collection.catalog, "add", lambda images: ([run() for run in between], add(images))[1])
    assert collection.add_with_file(one, b"one", suffix=".jpg") == (1, "updated")
    between.clear()
    assert file_of(collection, collection.catalog.one(1)).read_bytes() == b"one"
    collection.close()
    other.close()


def test_a_kept_file_named_by_its_full_path_stays(tmp_path, checkpoint, pictures):
    collection = open_or_create(tmp_path / "c", checkpoint=checkpoint)
    data = next(pictures.glob("*.jpg")).read_bytes()
    image = NewImage(
        "", hashlib.sha256(data).hexdigest(), 1, 1, len(data), "image/jpeg", ("cat",), np.zeros(6, np.uint8)
    )
    collection.add_with_file(replace(image, key="mine"), data, suffix=".jpg")
    kept = file_of(collection, collection.catalog.one(1))
    export(collection, tmp_path / "e.parquet")
    assert import_export(tmp_path / "e.parquet", tmp_path / "c", checkpoint=None) == IngestReport(known=1)
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for path in (kept, kept.resolve(), tmp_path / "c" / kept.relative_to(collection.folder)):
        collection.add([replace(image, key="mine", path=str(path), labels=("dog",))])
        assert kept.read_bytes() == data
        assert collection.owns(collection.catalog.one(1))
    through_link = Collection(tmp_path / "link")
    through_link.add([replace(image, key="mine", path=str(kept.resolve()))])
    through_link.close()
    assert collection.catalog.one(1).path == str(kept.relative_to(collection.folder))
    assert collection.verify() == []
    collection.remove([1])
    assert not kept.exists()
    collection.close()


def test_a_place_in_which_no_folder_can_be_created_is_refused_and_others_are_left_as_they_are(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadCollection):
        check_place(tmp_path / "file" / "x")
    assert check_place(tmp_path / "a" / "b") == []
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_other_folders_and_files_are_refused_and_not_changed(tmp_path, checkpoint):
    with pytest.raises(BadCollection):
        Collection(tmp_path / "missing")
    with pytest.raises(BadCollection):
        open_or_create(tmp_path / "missing", checkpoint=None)
    with pytest.raises(BadCheckpoint):
        open_or_create(tmp_path / "missing", checkpoint=tmp_path / "none.safetensors")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadCollection):
        open_or_create(tmp_path / "file", checkpoint=checkpoint)
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("cat.jpg", "checkpoint.safetensors.bak"):
        (photos / name).write_text("mine")
        with pytest.raises(BadCollection):
            open_or_create(photos, checkpoint=checkpoint)
        assert [path.name for path in photos.iterdir()] == [name]
        (photos / name).unlink()


def test_a_foreign_checkpoint_is_refused(own_collection, other_checkpoint):
    before = {path: path.read_bytes() for path in own_collection.rglob("*") if path.is_file()}
    with pytest.raises(ForeignCodes):
        open_or_create(own_collection, checkpoint=other_checkpoint)
    assert {path: path.read_bytes() for path in own_collection.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_new_collection_that_got_no_image_is_deleted(tmp_path, checkpoint, other_checkpoint, fails):
    def use(folder, checkpoint, codes=None):
        with suppress(BadConfig), open_for_adding(folder, checkpoint=checkpoint) as collection:
            if codes is not None:
                collection.add(new_images(codes))
            collection.save_index()
            if fails:
                raise BadConfig("stopped")

    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new"):
        use(folder, checkpoint)
        assert folder.exists() == (folder.name == "empty")
        assert not [*folder.glob("*")]
        use(folder, other_checkpoint, np.zeros((1, 5), np.uint8))
        use(folder, other_checkpoint)
        with closing(Collection(folder)) as collection:
            assert len(collection) == 1


def test_another_process_may_use_a_new_collection_that_is_about_to_be_deleted(tmp_path, checkpoint):
    image = new_images(np.zeros((1, 6), np.uint8))
    with open_for_adding(tmp_path / "c", checkpoint=checkpoint):
        other = Collection(tmp_path / "c")
    with closing(other), pytest.raises(CatalogReplaced):
        other.add(image)
    with open_for_adding(tmp_path / "c", checkpoint=checkpoint), closing(Collection(tmp_path / "c")) as other:
        other.add(image)
    with closing(Collection(tmp_path / "c")) as collection:
        assert len(collection) == 1


def test_leftovers_of_an_interrupted_creation_are_replaced(tmp_path, checkpoint, other_checkpoint):
    folder = tmp_path / "collection"
    collection = open_or_create(folder, checkpoint=other_checkpoint)
    for name in ("catalog.sqlite-wal", "catalog.sqlite-shm", "catalog.sqlite"):  # as if killed before the rename
        (folder / name).rename(folder / name.replace("sqlite", "sqlite.new"))
    collection.close()
    (folder / ".checkpoint.safetensors.abc").write_bytes(b"half")
    collection = open_or_create(folder, checkpoint=checkpoint)
    assert collection.n_bits == 48
    assert collection.verify() == []
    assert sorted(path.name for path in folder.iterdir() if "sqlite-" not in path.name) == [
        "catalog.sqlite",
        "checkpoint.safetensors",
    ]
    collection.close()


def test_labels_and_engines_are_counted_once_for_each_state(tmp_path, monkeypatch):
    with closing(code_collection(tmp_path, n_bits=8)) as collection:
        counted, count = [], collection.catalog.label_counts
        monkeypatch.setattr(collection.catalog, "label_counts", lambda: counted.append(1) or count())
        for n in (1, 2):
            [(added, _)] = collection.add(new_images(np.full((1, 1), n, np.uint8), start=n, labels=("a",)))
            for _ in range(3):
                collection.label_counts().clear()  # the caller's own
            assert (collection.label_counts(), sum(counted)) == ({"a": n}, n)
        collection.update(added, labels=["b"])
        assert collection.label_counts() == {"a": 1, "b": 1}
        assert sum(collection.engines().values()) == 2
        collection.remove([added])
        assert sum(collection.engines().values()) == 1


def test_saving_twice_writes_once(saved):
    folder, _, _ = saved
    collection = Collection(folder)
    collection.save_index()
    before = index_folder(folder)
    collection.save_index()
    assert index_folder(folder) == before
    collection.close()


# ---------------------------------------------------------------- updates and code spaces


def test_an_open_collection_keeps_its_space_after_a_switch(tmp_path, caplog):
    rng, truth = np.random.default_rng(0), {}
    collection = code_collection(tmp_path, n_bits=12)
    add(collection, truth, random_codes(rng, 20, 12), start=0)
    collection.save_index()
    catalog = collection.catalog
    space = catalog.spaces.begin("e" * 64, 36, "new.safetensors")
    new = dict(zip(sorted(truth), random_codes(rng, 20, 36), strict=True))
    catalog.spaces.add_codes(space.id, with_codes(catalog, new))
    catalog.spaces.switch(space.id)
    check(collection, truth, random_codes(rng, 2, 12))
    opened = Collection(tmp_path)
    assert not caplog.records  # the old index is no problem
    assert opened.checkpoint.name == "new.safetensors"
    check(opened, new, random_codes(rng, 2, 36))
    opened.save_index()
    collection.remove([3])
    del truth[3], new[3]
    check(collection, truth, random_codes(rng, 2, 12))
    collection.save_index()  # neither replaces the other's
    collection.build_index()
    collection.close()
    opened.close()
    caplog.clear()
    opened = Collection(tmp_path, read_only=True)
    assert not caplog.records
    assert opened.describe_index()["built"] == 20
    check(opened, new, random_codes(rng, 2, 36))
    opened.close()


@pytest.mark.parametrize(("fault", "raised"), [(DiskFull("full"), OSError), (CatalogLocked("locked"), CatalogLocked)])
def test_an_index_that_cannot_be_named_leaves_the_former_one(saved, monkeypatch, fault, raised):
    before = index_folder(saved[0])
    with closing(Collection(saved[0])) as collection:
        monkeypatch.setattr(collection.catalog, "set_saved_index", MagicMock(side_effect=fault))
        with pytest.raises(raised, match="only the index"):
            collection.index.build()
    assert index_folder(saved[0]) == before


def test_an_interrupt_after_the_index_was_named_keeps_it(saved, monkeypatch):
    with closing(Collection(saved[0])) as collection:
        name = collection.catalog.set_saved_index

        def interrupted(description):
            name(description)
            raise KeyboardInterrupt

        monkeypatch.setattr(collection.catalog, "set_saved_index", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collection.index.build()
    with closing(Collection(saved[0])) as collection:
        assert collection.index.verify() == []


@pytest.mark.parametrize(
    "damage",
    [{"sha256": None}, {"generation": "x"}, {"generation": 10**9}, {"last_id": None}, {"folder": None}, {"kind": None}],
)
def test_an_index_with_a_damaged_description_is_rebuilt(saved, damage):
    folder, truth, _ = saved
    with closing(Collection(folder)) as collection:
        described = json.loads(collection.catalog.saved_index())
        collection.catalog.set_saved_index(json.dumps(described | damage))
    with closing(Collection(folder)) as collection:
        [(_, found)] = collection.search(next(iter(truth.values()))[None], k=len(truth))
        assert set(found.tolist()) == truth.keys()
        collection.save_index()
        assert collection.index.verify() == []
    index_folder(folder)
