"""A snapshot is the whole collection as of one moment; restored, it is that or nothing. Optimizing loses nothing."""

import errno
import os
import re
import shutil
import sqlite3
import tarfile
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance import backup
from hashseek.indexing.maintenance.backup import restore, snapshot
from hashseek.indexing.maintenance.optimize import MIN_AGE_SECONDS, optimize
from hashseek.indexing.maintenance.scratch import _PREFIX, MAX_IDLE_SECONDS, scratch_directory
from hashseek.retrieval.checkpoint import check_intact, save_checkpoint
from hashseek.retrieval.errors import BadCollection, BadConfig, HashseekError
from hashseek.retrieval.models.hash_model import HashModel
from support.collections import code_collection, file_of, new_images, random_codes, sql
from support.commands import wait_until
from support.dataset_files import write_tar
from support.faults import content, fill, found


def write_checkpoint(folder):
    torch.manual_seed(0)
    model = HashModel(backbone="mlp:3-4", n_bits=12)
    save_checkpoint(folder / "checkpoint.safetensors", model, None, label_names=())


@pytest.fixture
def collection(tmp_path):
    """20 images of 12 bits, half of them with kept files; the checkpoint is small and did not compute the codes."""
    opened = code_collection(tmp_path / "collection", n_bits=12)
    write_checkpoint(tmp_path / "collection")
    fill(opened, 20)
    opened.remove([7, 8])
    yield opened
    opened.close()


def test_a_restored_snapshot_is_the_collection(collection, tmp_path):
    collection.build_index("ivf")
    contents = snapshot(collection, tmp_path / "s.tar")
    assert (contents.n_images, contents.lost) == (18, ())
    for folder in (tmp_path / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        assert restore(tmp_path / "s.tar", folder) == contents
        again = Collection(folder)
        assert content(again) == content(collection)
        assert found(again) == found(collection)
        assert [again.describe_index()[name] for name in ("kind", "built")] == ["ivf", 18]
        assert again.catalog.generation() == collection.catalog.generation()
        assert again.catalog.uuid != collection.catalog.uuid
        check_intact(folder / "checkpoint.safetensors")
        assert fill(again, 1, start=50) == [21]  # an id is not given twice
        again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collection", "empty", "new", "s.tar"]


def test_a_snapshot_taken_while_others_write_is_the_state_of_one_moment(collection, tmp_path, monkeypatch):
    states, stop = {collection.catalog.generation(): content(collection)}, threading.Event()
    removed = next(image for image in collection.catalog.page(after=0, limit=99) if collection.owns(image))
    pack, added = backup._pack_files, []
    waiting = threading.Thread(target=lambda: collection.remove(added))

    def pack_among_changes(tar, folder, catalog, done):
        if catalog == collection.catalog.path:  # writers are not kept waiting yet
            lost = pack(tar, folder, catalog, done)
            collection.remove([removed.id])
            added.extend(fill(collection, 1, start=90, keep=lambda _: True))
            states[collection.catalog.generation()] = content(collection)
            return lost
        waiting.start()
        waiting.join(0.2)
        return pack(tar, folder, catalog, done)

    with monkeypatch.context() as patch:
        patch.setattr(backup, "_pack_files", pack_among_changes)
        taken = [snapshot(collection, tmp_path / "0.tar")]
    waiting.join()

    def write():
        rng, number = np.random.default_rng(0), 100
        while not stop.is_set():
            ids = [image.id for image in collection.catalog.page(after=0, limit=10**6)]
            if rng.random() < 0.4 and ids:
                collection.remove([int(rng.choice(ids))])
            else:
                fill(collection, 1, start=number)
                number += 1
            states[collection.catalog.generation()] = content(collection)

    writer = threading.Thread(target=write)
    writer.start()
    for number in range(1, 6):
        n_before = len(states)
        wait_until(lambda n=n_before: len(states) > n)
        taken.append(snapshot(collection, tmp_path / f"{number}.tar"))
    stop.set()
    writer.join()
    assert len({contents.generation for contents in taken}) > 2
    for number, contents in enumerate(taken):
        assert contents.lost == ()
        restore(tmp_path / f"{number}.tar", tmp_path / str(number))
        again = Collection(tmp_path / str(number))
        assert content(again) == states[contents.generation]
        kept = {str(p.relative_to(again.folder)) for p in (again.folder / "files").rglob("*") if p.is_file()}
        assert kept == set(content(again)[2])
        again.close()


def test_files_that_were_missing_before_the_snapshot_are_listed(collection, tmp_path, hashseek):
    images = [image for image in collection.catalog.page(after=0, limit=99) if collection.owns(image)]
    file_of(collection, images[0]).unlink()
    file_of(collection, images[1]).write_bytes(b"other")
    file_of(collection, images[2]).unlink()
    file_of(collection, images[2]).mkdir()  # it cannot be read as a file
    weights = collection.folder / "checkpoint.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    collection.save_index()
    code, out, err = hashseek("index", "snapshot", collection.folder, tmp_path / "s.tar")
    assert code == 1
    assert out == f"{tmp_path}/s.tar: 18 images\n"
    lost = sorted([*(image.path for image in images[:3]), "checkpoint.safetensors"])
    with tarfile.open(tmp_path / "s.tar") as packed:  # after its removal, damaged content would not be restored
        assert not {*packed.getnames()} & {*lost}
    assert [line.split()[0] for line in err.splitlines()] == lost
    code, out, err = hashseek("index", "restore", tmp_path / "s.tar", tmp_path / "new")
    assert (code, err.count("\n")) == (1, 4)
    again = Collection(tmp_path / "new")
    assert again.catalog.page(after=0, limit=99) == collection.catalog.page(after=0, limit=99)
    assert not file_of(again, images[1]).exists()
    again.close()
    sql(collection.catalog.path, "UPDATE codes SET code = x'00' WHERE image_id = 1")  # `index verify` repairs it
    snapshot(collection, tmp_path / "malformed.tar")
    assert restore(tmp_path / "malformed.tar", tmp_path / "malformed").n_images == 18


def test_every_flipped_bit_and_every_cut_is_noticed_or_harmless(tmp_path):
    small = code_collection(tmp_path / "collection", n_bits=12)
    write_checkpoint(tmp_path / "collection")
    fill(small, 3)
    snapshot(small, tmp_path / "s.tar")
    whole = (tmp_path / "s.tar").read_bytes()
    rng, expected, n_refused = np.random.default_rng(0), content(small), 0
    used = [at for at in range(len(whole)) if whole[at]]  # most of a catalog so small is zeros
    for trial in range(90):
        damaged = bytearray(whole)
        if trial < 70:
            damaged[used[rng.integers(len(used))] if trial % 2 else rng.integers(len(whole))] ^= 1 << rng.integers(8)
        else:
            del damaged[int(rng.integers(len(whole))) :]
        (tmp_path / "damaged").write_bytes(damaged)
        folder = tmp_path / f"restored {trial}"
        try:
            restore(tmp_path / "damaged", folder)
        except HashseekError:
            n_refused += 1
            assert not folder.exists()
        else:
            again = Collection(folder)
            assert content(again) == expected
            again.close()
            shutil.rmtree(folder)
    assert n_refused > 60
    small.close()


def test_a_full_disk_is_reported_with_its_folder(tmp_path):
    with pytest.raises(OSError) as caught, scratch_directory(tmp_path):  # noqa: PT011 - checked below
        Path("/dev/full").write_bytes(b"x")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_deleted_after_a_day(tmp_path):
    old, in_use = (tmp_path / f"{_PREFIX}{name}" for name in ("old", "in use"))
    past = time.time() - MAX_IDLE_SECONDS - 10
    for folder in (old, in_use):
        folder.mkdir()
        (folder / "unfinished").touch()
    for path in (old, old / "unfinished", in_use):
        os.utime(path, (past, past))
    with scratch_directory(tmp_path):
        assert (old.exists(), in_use.exists()) == (False, True)


def test_invalid_snapshots_and_folders_are_refused(collection, tmp_path, monkeypatch):
    snapshot(collection, tmp_path / "s.tar")
    (tmp_path / "text").write_text("text" * 300)
    (tmp_path / "nothing").write_bytes(b"")
    write_tar(tmp_path / "other.tar", {"text": b"text" * 300})
    with monkeypatch.context() as newer:
        newer.setattr(backup, "FORMAT", 2)
        snapshot(collection, tmp_path / "newer.tar")
    for name in ("missing", "text", "nothing", "other.tar", "newer.tar"):
        with pytest.raises(BadCollection):
            restore(tmp_path / name, tmp_path / "new")
        assert not (tmp_path / "new").exists()
    before = content(collection)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for place in (collection.folder, tmp_path / "text", tmp_path / "a" / "b", tmp_path / "link"):
        with pytest.raises(BadCollection):
            restore(tmp_path / "s.tar", place)
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(BadCollection):  # it could not be replaced at the end
        restore(tmp_path / "s.tar", tmp_path / "empty")
    for file in (tmp_path / "text", tmp_path / "a" / "s.tar"):
        with pytest.raises(BadConfig):
            snapshot(collection, file)
    assert content(collection) == before


def test_a_snapshot_holds_each_file_once_and_is_refused_without_any_of_them(collection, tmp_path):
    snapshot(collection, tmp_path / "s.tar")
    with tarfile.open(tmp_path / "s.tar") as whole:
        names = whole.getnames()
        assert len(set(names)) == len(names)
        for missing in names:
            with tarfile.open(tmp_path / "less.tar", "w") as less:
                for member in whole:
                    if member.name != missing:
                        less.addfile(member, whole.extractfile(member))
            with pytest.raises(BadCollection):
                restore(tmp_path / "less.tar", tmp_path / "new")
            assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../../outside",
        "{tmp}/outside",
        "files/../../../outside",
        f"files/00/{'0' * 64}/../../../../../outside",
        "sparse",
        "back",
    ],
)
def test_a_snapshot_cannot_write_outside_its_folder_or_fill_the_disk(collection, tmp_path, name):
    snapshot(collection, tmp_path / "s.tar")
    with tarfile.open(tmp_path / "s.tar") as old, tarfile.open(tmp_path / "evil.tar", "w") as new:
        for member in old:
            if member.name == "catalog.sqlite" and name == "sparse":  # holes, as GNU tar writes them
                member.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**28)}
            elif member.name == "catalog.sqlite" and name == "back":  # the next member would be this one, for ever
                member.size = -512
                new.fileobj.write(member.tobuf(tarfile.GNU_FORMAT))
                continue
            elif member.name == "catalog.sqlite":
                added = tarfile.TarInfo(name.format(tmp=tmp_path))
                added.size = member.size
                new.addfile(added, old.extractfile(member))
            new.addfile(member, old.extractfile(member))
    refused = "catalog.sqlite" if name == "sparse" else name.format(tmp=tmp_path)
    with pytest.raises(BadCollection, match=None if name == "back" else re.escape(repr(refused))):  # or by tarfile
        restore(tmp_path / "evil.tar", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collection", "evil.tar", "s.tar"]


def test_a_path_out_of_the_folder_is_not_deleted(collection, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"somebody's")
    [stray] = new_images(random_codes(np.random.default_rng(3), 1, 12), start=90)
    [(image_id, _)] = collection.add([replace(stray, path="files/../../victim")])
    collection.remove([image_id])
    assert victim.read_bytes() == b"somebody's"


# ---------------------------------------------------------------- optimize


def test_optimizing_changes_no_search_of_any_process(collection):
    beside = Collection(collection.folder, read_only=True)
    other = Collection(collection.folder)
    found(beside)
    collection.remove([1, 2, 3])
    fill(collection, 5, start=40)
    before = content(collection)
    done = optimize(collection)
    assert (done.n_merged, done.n_removed) == (20, 0)
    for opened in (collection, beside, other):
        assert content(opened) == before
        assert found(opened) == found(collection)
        assert len(opened) == 20
    described = collection.describe_index()
    assert (described["built"], described["fresh"], described["removed"]) == (20, 0, 0)
    other.remove([4])
    assert [4 in ids for opened in (collection, beside) for _, ids in found(opened)] == [False] * 6
    again = Collection(collection.folder)
    assert again.describe_index()["built"] == 20
    assert found(again) == found(collection)
    for opened in (again, other, beside):
        opened.close()


def test_optimizing_frees_disk_space(tmp_path):
    big = code_collection(tmp_path, n_bits=512)
    big.add(new_images(random_codes(np.random.default_rng(0), 3000, 512)))
    big.remove(list(range(1, 2901)))
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = (tmp_path / "catalog.sqlite").stat().st_size
    optimize(big)
    assert (tmp_path / "catalog.sqlite").stat().st_size < size / 4
    assert not (tmp_path / "catalog.sqlite-wal").exists() or not (tmp_path / "catalog.sqlite-wal").stat().st_size
    assert len(found(big)[0][1]) == 100
    big.close()


def test_optimizing_deletes_unneeded_files_after_an_hour(collection):
    folder, before = collection.folder, content(collection)
    spare = [
        folder / "files" / "ab" / ("ab" * 32 + ".jpg"),
        folder / "files" / "ab" / f".{'ab' * 32}.jpg.x7",
        folder / f"checkpoint-{'ab' * 8}.safetensors",
        folder / ".checkpoint.safetensors.x7",
    ]
    foreign = [  # no collection creates such names
        folder / "files" / "backup.tar",
        folder / "files" / "ab" / "photo.jpg",
        folder / "files" / os.fsdecode(b"\xff.jpg"),
        folder / "best.safetensors",
    ]
    for path in (*spare, *foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"spare")
    assert optimize(collection).n_deleted == 0
    past = time.time() - MIN_AGE_SECONDS - 10
    for path in [*folder.rglob("*")]:
        os.utime(path, (past, past))
    assert optimize(collection).n_deleted == len(spare)
    assert not any(path.exists() for path in spare)
    assert all(path.exists() for path in foreign)
    assert content(collection) == before
    assert (folder / "checkpoint.safetensors").exists()


def test_the_commands(own_collection, hashseek, tmp_path):
    code, out, err = hashseek("index", "snapshot", own_collection, tmp_path / "s.tar")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path}/s.tar: 12 images\n"
    code, out, err = hashseek("index", "restore", tmp_path / "s.tar", tmp_path / "new")
    assert (code, err, out.split(",")[0]) == (0, "", f"{tmp_path}/new holds 12 images")
    assert hashseek("index", "verify", tmp_path / "new")[:2] == (0, "12 images, 0 problems\n")
    assert hashseek("index", "remove", tmp_path / "new", 1, 2)[0] == 0
    code, out, err = hashseek("index", "optimize", tmp_path / "new")
    assert (code, err, out.split(";")[0]) == (0, "", "10 images")
    code, _, err = hashseek("index", "restore", tmp_path / "s.tar", tmp_path / "new")
    assert (code, err.count("\n")) == (2, 1)
