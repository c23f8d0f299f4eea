"""Faults, injected for real: no acknowledged image is lost, no wrong hit is found, every refusal says what to do."""

import os
import shutil
import signal
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.index.hamming_index import KINDS
from hashseek.indexing.maintenance.backup import restore, snapshot
from hashseek.indexing.maintenance.exchange import export
from hashseek.indexing.maintenance.optimize import optimize
from hashseek.retrieval.errors import HashseekError
from support.collections import code_collection, import_export, index_folder, new_images, random_codes
from support.disks import small_disk_at
from support.faults import OPERATIONS, NoDisk, check_search, content, cut_the_power, fill, found, kill_again_and_again
from support.paths import copy_collection
from support.pictures import draw


def test_kill_9_at_random_moments(start, tmp_path, checkpoint, other_checkpoint):
    killed = kill_again_and_again(
        start, tmp_path, checkpoints=(checkpoint, other_checkpoint), n_kills=len(OPERATIONS), seed=1
    )
    assert killed.wrong == []
    assert sum(killed.hit.values()) == len(OPERATIONS)


def test_power_cuts_at_random_moments(start, tmp_path, checkpoint):
    try:
        acknowledged, wrong = cut_the_power(start, tmp_path, checkpoint, n_cuts=5, seed=1)
    except NoDisk as error:
        pytest.skip(str(error))
    assert wrong == []
    assert len(acknowledged) == 5
    assert acknowledged[-1] > 5


def test_the_power_cut_detects_data_that_was_not_synced(start, tmp_path, checkpoint):
    """The same with a catalog that acknowledges before the disk has it: the cut must show the loss."""
    unsafe = (
        "import hashseek.indexing.catalog.database; original = hashseek.indexing.catalog.database._connect\n"
        "def connect(path, mode):\n"
        "    db = original(path, mode)\n"
        "    db.execute('PRAGMA synchronous = OFF')\n"
        "    return db\n"
        "hashseek.indexing.catalog.database._connect = connect\n"
    )
    try:
        _, wrong = cut_the_power(
            lambda *a, before: start(*a, before=unsafe + before), tmp_path, checkpoint, n_cuts=8, seed=1
        )
    except NoDisk as error:
        pytest.skip(str(error))
    assert any("lost" in problem or "unreadable" in problem for problem in wrong), wrong


# ---------------------------------------------------------------- full disk


def fill_up(place, leave):
    room = os.statvfs(place)
    (place / "filler").write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - leave)))


def test_a_full_disk_is_reported_and_loses_nothing(hashseek, tmp_path, indexed, pictures, other_checkpoint):
    draw(77).save(tmp_path / "new.png")
    with small_disk_at(tmp_path / "disk", megabytes=24) as disk:
        folder = disk / "collection"
        copy_collection(indexed, folder)
        with closing(Collection(folder)) as collection:
            before = content(collection)
        index = index_folder(folder)
        commands = {
            "add": ("add", folder, tmp_path / "new.png", "--device", "cpu"),
            "optimize": ("optimize", folder),
            "reencode": ("reencode", folder, "--checkpoint", other_checkpoint, "--device", "cpu"),
            "snapshot": ("snapshot", folder, disk / "s.tar"),
            "export": ("export", folder, disk / "e.parquet"),
        }
        for leave in (0, 20_000):
            for name, command in commands.items():
                fill_up(disk, leave)
                code, out, err = hashseek("index", *command)
                assert (code, err.count("\n"), "Traceback" in err) == (2, 1, False), (name, leave, out, err)
                assert any(word in err for word in ("No space left", "is full", "has space")), err
                (disk / "filler").unlink()
                assert not (disk / "s.tar").exists()
                assert not (disk / "e.parquet").exists()
                assert not list(disk.glob(".hashseek*"))
                with closing(Collection(folder)) as collection:
                    assert content(collection) == before
                    assert collection.verify() == []
                assert index_folder(folder) == index
        for name, command in commands.items():
            assert hashseek("index", *command)[0] == 0, name
        with closing(Collection(folder)) as collection:
            assert (len(collection), collection.n_bits, collection.verify()) == (13, 36, [])


def test_a_collection_that_a_full_disk_interrupts_is_created_by_the_next_try(tmp_path, checkpoint):
    with small_disk_at(tmp_path / "disk", megabytes=24) as disk:
        n_refused, size = 0, checkpoint.stat().st_size
        for leave in range(size, size + 300_000, 20_000):
            fill_up(disk, leave)
            try:
                open_or_create(disk / "collection", checkpoint=checkpoint).close()
            except (HashseekError, OSError):
                n_refused += 1
            (disk / "filler").unlink()
            with closing(open_or_create(disk / "collection", checkpoint=checkpoint)) as collection:
                assert collection.verify() == []
            shutil.rmtree(disk / "collection")
        assert 0 < n_refused < 15


# ---------------------------------------------------------------- no right to write


def test_without_write_permission_changes_are_refused_and_searches_work(
    hashseek, own_collection, tmp_path, pictures, other_checkpoint
):
    assert hashseek("index", "snapshot", own_collection, tmp_path / "s.tar")[0] == 0
    closed = tmp_path / "closed"
    closed.mkdir()
    before = {path: path.read_bytes() for path in own_collection.rglob("*") if path.is_file()}
    for place in (closed, own_collection, own_collection / "index"):
        place.chmod(0o555)
    rights = {"before": "drop_rights()"}
    refused = [
        hashseek("index", "optimize", own_collection, **rights),
        hashseek("index", "snapshot", own_collection, tmp_path / "t.tar", **rights),
        hashseek("index", "reencode", own_collection, "--checkpoint", other_checkpoint, **rights),
        hashseek("index", "restore", tmp_path / "s.tar", closed / "new", **rights),
        hashseek("index", "verify", own_collection, "--repair", **rights),
        hashseek("index", "switch", own_collection, 1, **rights),
        hashseek("index", "export", own_collection, closed / "e.parquet", **rights),
        hashseek("index", "add", own_collection, pictures, "--device", "cpu", **rights),
        hashseek("index", "remove", own_collection, 1, **rights),
    ]
    for code, _, err in refused:
        assert (code, err.count("\n")) == (2, 1), err
        assert "write" in err or "Permission denied" in err
    assert hashseek("index", "export", own_collection, tmp_path / "e.parquet", **rights)[0] == 0
    assert hashseek("index", "verify", own_collection, **rights)[:2] == (0, "12 images, 0 problems\n")
    code, out, err = hashseek("search", own_collection, pictures / "picture 00.jpg", "--device", "cpu", **rights)
    assert (code, err, len(out.splitlines())) == (0, "", 11)
    for place in (closed, own_collection, own_collection / "index"):
        place.chmod(0o755)
    assert {path: path.read_bytes() for path in own_collection.rglob("*") if path.is_file()} == before


# ---------------------------------------------------------------- damage


def test_every_flipped_bit_of_a_catalog_gives_an_error_or_an_answer(tmp_path):
    with closing(code_collection(tmp_path / "c", n_bits=48)) as collection:
        fill(collection, 12, keep=lambda number: False)
        collection.save_index()
    path = tmp_path / "c" / "catalog.sqlite"
    whole, rng, n_refused = path.read_bytes(), np.random.default_rng(0), 0
    used = [at for at in range(len(whole)) if whole[at]]
    for trial in range(150):
        damaged = bytearray(whole)
        damaged[used[int(rng.integers(len(used)))]] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            with closing(Collection(tmp_path / "c", read_only=trial % 2 == 0)) as opened:
                opened.verify()
                found(opened)
                content(opened)
                if trial % 2:
                    opened.add(new_images(random_codes(rng, 1, opened.n_bits), start=10_000))
        except HashseekError:
            n_refused += 1
        for companion in ("-wal", "-shm", "-writer"):
            path.with_name(f"{path.name}{companion}").unlink(missing_ok=True)
    assert 0 < n_refused < 150


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut"])
def test_every_command_reports_a_damaged_catalog_and_keeps_the_files(own_collection, hashseek, damage):
    path = own_collection / "catalog.sqlite"
    whole = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes({"emptied": b"", "cut": whole[:5000]}[damage])
    files = sorted(p for p in own_collection.rglob("*") if p.is_file())
    for command in (("verify",), ("optimize",), ("stats",), ("remove", 1), ("snapshot", own_collection.parent / "s")):
        code, _, err = hashseek("index", command[0], own_collection, *command[1:])
        assert (code, err.count("\n"), err.startswith("hashseek: ")) == (2, 1, True), err
    assert not (own_collection.parent / "s").exists()
    assert [p for p in files if not p.exists()] == []


# ---------------------------------------------------------------- concurrency


def test_maintenance_and_changes_at_the_same_time(start, own_collection, tmp_path):
    pictures = tmp_path / "more"
    pictures.mkdir()
    for seed in range(20):
        draw(300 + seed).save(pictures / f"{seed}.png")
    slow = "import hashseek.indexing.ingest.batch; hashseek.indexing.ingest.batch.BATCH = 2"
    processes = [
        start("index", "add", own_collection, pictures, "--device", "cpu", before=slow),
        start("index", "optimize", own_collection),
        start("index", "snapshot", own_collection, tmp_path / "a.tar"),
        start("index", "remove", own_collection, 1, 2),
        start("index", "optimize", own_collection),
        start("index", "snapshot", own_collection, tmp_path / "b.tar"),
    ]
    assert [process.wait() for process in processes] == [0] * 6, [process.err for process in processes]
    with closing(Collection(own_collection)) as collection:
        assert (len(collection), collection.verify(), check_search(collection)) == (30, [], [])
    assert index_folder(own_collection).is_dir()
    for name in "ab":
        restore(tmp_path / f"{name}.tar", tmp_path / name)
        with closing(Collection(tmp_path / name)) as collection:
            assert collection.verify() == []


# ---------------------------------------------------------------- clock, sizes, ids


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpu"])
@pytest.mark.parametrize("n", [0, 1])
def test_0_and_1_images_at_every_kind(tmp_path, n, kind):
    with closing(code_collection(tmp_path, n_bits=12)) as collection:
        fill(collection, n, keep=lambda number: False)
        collection.build_index(kind)
        for _ in range(2):
            assert check_search(collection) == []
            optimize(collection)
            assert list(collection.duplicates(radius=3)) == []
    with closing(Collection(tmp_path)) as again:
        assert (again.describe_index()["kind"], len(again), check_search(again)) == (kind, n, [])
        fill(again, 3, start=50, keep=lambda number: False)
        again.remove([image.id for image in again.catalog.page(after=0, limit=9)])
        assert (len(again), check_search(again)) == (0, [])
        again.save_index()


@pytest.mark.parametrize("last", [2**32 - 2, 2**53 - 2])
def test_ids_beyond_32_bits(tmp_path, last):
    with closing(code_collection(tmp_path / "c", n_bits=12)) as collection:
        (tmp_path / "c" / "checkpoint.safetensors").write_bytes(b"weights")
        fill(collection, 2)
        with closing(sqlite3.connect(tmp_path / "c" / "catalog.sqlite")) as db, db:
            db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'images'", (last,))
        assert fill(collection, 4, start=10) == [last + 1, last + 2, last + 3, last + 4]
        collection.remove([last + 2])
        expected = content(collection)
        optimize(collection)
        assert check_search(collection) == []
        snapshot(collection, tmp_path / "s.tar")
        export(collection, tmp_path / "e.parquet")
        [group] = collection.duplicates(radius=11)
        assert group.tolist() == [1, 2, last + 1, last + 3, last + 4]
    with closing(Collection(tmp_path / "c", read_only=True)) as again:
        assert again.describe_index()["built"] == 5
        assert (content(again), check_search(again)) == (expected, [])
    restore(tmp_path / "s.tar", tmp_path / "r")
    with closing(Collection(tmp_path / "r")) as again:
        assert (content(again), check_search(again)) == (expected, [])
        assert fill(again, 1, start=90) == [last + 5]
    code_collection(tmp_path / "i", n_bits=12).close()
    assert import_export(tmp_path / "e.parquet", tmp_path / "i", checkpoint=None).added == 5


@pytest.mark.parametrize("step", ["index.index_files.save_index", "catalog.Catalog.set_saved_index"])
def test_the_next_writer_deletes_what_a_killed_one_left_in_the_index(start, own_collection, step):
    """Killed when the files are complete, but before or after the catalog names them."""
    die = "import os, signal, hashseek.indexing.index.index_files\n"
    die += f"def die(*of, original=hashseek.indexing.{step}): original(*of); os.kill(os.getpid(), signal.SIGKILL)\n"
    die += f"hashseek.indexing.{step} = die"
    for _ in range(3):
        assert start("index", "optimize", own_collection, before=die).wait() == -signal.SIGKILL
        assert len([*(own_collection / "index").iterdir()]) == 2
        with closing(Collection(own_collection, read_only=True)) as collection:
            assert (collection.describe_index()["built"], collection.verify()) == (12, [])
    assert start("index", "optimize", own_collection).wait() == 0
    assert index_folder(own_collection).is_dir()


def test_leftovers_of_a_killed_snapshot_are_deleted_a_day_later(start, own_collection, tmp_path):
    place = tmp_path / "backups"
    place.mkdir()
    die = "import os, signal, hashseek.indexing.maintenance.backup\n"
    die += "hashseek.indexing.maintenance.backup.checksum_of = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    assert start("index", "snapshot", own_collection, place / "x", before=die).wait() == -signal.SIGKILL
    [leftover] = place.iterdir()
    assert start("index", "snapshot", own_collection, place / "a.tar").wait() == 0
    assert sorted(place.iterdir()) == [leftover, place / "a.tar"]
    for path in (leftover, *leftover.iterdir()):
        os.utime(path, (0, 0))
    assert start("index", "snapshot", own_collection, place / "b.tar").wait() == 0
    assert [path.name for path in sorted(place.iterdir())] == ["a.tar", "b.tar"]
