"""`hashseek index add`: interruption, exit codes, the file of errors, dry runs, watching, URLs."""

import hashlib
import json
import os
import signal
import socket
import time
from contextlib import closing, suppress

import pytest

from hashseek.indexing.collection import Collection
from hashseek.indexing.remote import SECONDS
from support import service
from support.collections import n_stored, sql
from support.commands import wait_until
from support.dataset_files import write_tar
from support.pictures import save
from support.service import assert_problem
from support.web import serving


def records(folder):
    with closing(Collection(folder, read_only=True)) as opened:
        return opened.catalog.page(after=0, limit=1000)


SLOW = """
import time, types, hashseek.indexing.ingest.batch, hashseek.indexing.catalog
hashseek.indexing.ingest.batch.BATCH = 4
Loader = hashseek.indexing.ingest.batch.Loader
few = lambda encoder: types.SimpleNamespace(preprocessing=encoder.preprocessing, batch_size=4)
hashseek.indexing.ingest.batch.Loader = lambda catalog, encoder, fetch: Loader(catalog, few(encoder), fetch)
add = hashseek.indexing.catalog.Catalog.add
hashseek.indexing.catalog.Catalog.add = lambda *a: (time.sleep(0.15), add(*a))[1]
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_stores_its_batch_and_the_next_run_continues(start, hashseek, tmp_path, checkpoint, number, code):
    for seed in range(100):
        save(tmp_path / "many" / f"{seed:03}.png", seed)
    folder = tmp_path / "collection"
    command = ("index", "add", folder, tmp_path / "many", "--checkpoint", checkpoint, "--device", "cpu")
    process = start(*command, before=SLOW)
    wait_until(lambda: (folder / "catalog.sqlite").exists() and len(records(folder)) >= 4)
    process.send(number)
    assert process.wait() == code
    n = n_stored(folder)
    assert 4 <= n < 100
    assert process.out == f"added {n}, already stored 0, skipped 0; {folder} holds {n} images\n"
    assert [line.partition(" ")[0] for line in process.err.splitlines()] == ["stopping", "stopped:"]
    assert hashseek(*command)[:2] == (
        0,
        f"added {100 - n}, already stored {n}, skipped 0; {folder} holds 100 images\n",
    )
    assert n_stored(folder) == 100


def test_the_second_signal_stops_at_once(start, tmp_path, pictures, checkpoint):
    folder = tmp_path / "collection"
    stuck = """
import sys, time, hashseek.indexing.collection
hashseek.indexing.collection.Collection.add = lambda *_, **__: (print("stuck", file=sys.stderr), time.sleep(600))
"""
    process = start("index", "add", folder, pictures, "--checkpoint", checkpoint, "--device", "cpu", before=stuck)
    for word in ("stuck", "stopping"):
        wait_until(lambda word=word: word in process.err or process.ended)
        process.send(signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.err
    assert not folder.exists()


def test_the_third_signal_does_not_wait_for_downloads(start, tmp_path, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.jpg"
        command = ["index", "add", tmp_path / "collection", url, "--checkpoint", checkpoint, "--device", "cpu"]
        process = start(*command, "--allow-private", "--url-seconds", "250")
        with silent.accept()[0], suppress(ProcessLookupError):  # it has ended
            while True:
                process.send(signal.SIGINT)
                time.sleep(0.2)
        assert (process.wait(), process.err.partition(" ")[0]) == (-signal.SIGINT, "stopping")


@pytest.mark.parametrize("failure", ["no image can be used", "the model cannot be loaded"])
def test_a_new_collection_that_got_no_image_is_removed_again(hashseek, tmp_path, checkpoint, failure):
    (tmp_path / "bad.png").write_bytes(b"x")
    before = "" if failure.startswith("no") else "import hashseek.indexing.searcher as s; s.load_checkpoint = None"
    command = ("index", "add", tmp_path / "new", tmp_path / "bad.png", "--checkpoint", checkpoint, "--device", "cpu")
    assert hashseek(*command, before=before)[0] == 1
    assert not (tmp_path / "new").exists()


def test_every_problem_is_a_line_of_json_and_strict_exits_with_3(hashseek, own_collection, tmp_path):
    folder = tmp_path / "new"
    save(folder / "good.png", 50)
    for number in range(30):
        (folder / f"bad {number:02}\n.png").write_bytes(b"x")
    command = ("index", "add", own_collection, folder, "--device", "cpu", "--errors", tmp_path / "errors.jsonl")
    code, out, err = hashseek(*command)
    assert (code, out.split(";")[0]) == (0, "added 1, already stored 0, skipped 30")
    assert (err.count("skipped: "), err.count("\n")) == (20, 21)
    assert err.endswith(f"{tmp_path}/errors.jsonl\n")
    lines = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert len(lines) == 30
    assert lines[0]["uri"] == lines[0]["where"] == f"{folder}/bad 00\n.png"
    assert lines[0]["skipped"] is True
    assert hashseek(*command, "--strict")[0] == 3
    assert hashseek("index", "add", own_collection, folder / "good.png", "--strict", "--device", "cpu")[0] == 0
    code, _, err = hashseek(*command[:-2])  # without a file of problems, all of them are printed
    assert (code, err.count("skipped: "), err.count("\n")) == (0, 30, 30)


def test_a_dry_run_prints_what_would_happen_and_writes_nothing(
    hashseek, own_collection, tmp_path, pictures, checkpoint
):
    save(tmp_path / "new" / "a.png", 60)
    (tmp_path / "new" / "bad.png").write_bytes(b"x")

    def contents():  # without the files that readers share
        files = [path for path in own_collection.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if not path.name.endswith(("-shm", "-wal"))}

    before = contents()
    command = ("index", "add", own_collection, pictures, tmp_path / "new", "--dry-run")
    code, out, err = hashseek(*command)
    outcome = "dry run: would be added 1, already stored 12, skipped 1; nothing was written;"
    assert (code, out) == (0, f"{outcome} {own_collection} holds 12 images\n")
    assert err.startswith("skipped: ")
    assert contents() == before
    for options in (("--checkpoint", checkpoint), ()):
        code, out, _ = hashseek("index", "add", tmp_path / "none", pictures, "--dry-run", *options)
        assert (code, out.split(";")[0]) == (0, "dry run: would be added 12, already stored 0, skipped 0")
        assert not (tmp_path / "none").exists()


def test_labels_keys_and_attributes_of_a_list_are_stored(hashseek, own_collection, tmp_path):
    save(tmp_path / "a.png", 70)
    (tmp_path / "m.csv").write_text("path,key,labels,year\na.png,the key,x,2015\n")
    command = ("index", "add", own_collection, tmp_path / "m.csv", "--label", "more", "--device", "cpu")
    assert hashseek(*command)[0] == 0
    last = records(own_collection)[-1]
    assert (last.key, last.labels, last.attributes) == ("the key", ("more", "x"), {"year": 2015})
    (tmp_path / "m.csv").write_text("path,key,labels,year\na.png,the key,x,2016\n")
    assert hashseek(*command)[1].startswith("added 0, updated 1, already stored 0, skipped 0;")
    assert hashseek("index", "add", own_collection, tmp_path / "a.png", "--key-from", "name", "--device", "cpu")[0] == 0
    assert records(own_collection)[-1].key == "a.png"


def test_only_with_trust_mtime_a_file_that_seems_unchanged_is_not_read(hashseek, own_collection, tmp_path):
    file = save(tmp_path / "a.png", 70)
    command = ("index", "add", own_collection, file, "--device", "cpu")
    assert hashseek(*command)[0] == 0
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for options in ((), ("--dry-run",)):
        assert hashseek(*command[:4], *options)[0] == 1
        assert hashseek(*command[:4], *options, "--trust-mtime")[0] == 0


def test_without_a_terminal_progress_is_a_line_now_and_then(hashseek, own_collection, pictures):
    before = "import hashseek.indexing.cli.output as output; output._PROGRESS_SECONDS = 0"
    code, _, err = hashseek("index", "add", own_collection, pictures, "--device", "cpu", before=before)
    assert code == 0
    assert err.startswith("adding: 12, ")
    assert err.endswith("/s, 0 skipped\n")


def test_watching_follows_a_folder_until_it_is_stopped(start, tmp_path, checkpoint):
    folder, watched = tmp_path / "collection", tmp_path / "watched"
    save(watched / "a.png", 1)
    (watched / "bad.png").write_bytes(b"x")
    errors = tmp_path / "errors.jsonl"
    process = start(
        *("index", "add", folder, watched, "--checkpoint", checkpoint, "--device", "cpu"),
        *("--watch", "--prune", "--every", "0.1", "--label", "seen", "--errors", errors),
        before="import hashseek.indexing.catalog.database as d; d.BUSY_SECONDS = 0.5",
    )

    def holds(*names):
        there = records(folder) if (folder / "catalog.sqlite").exists() else []
        return [record.path.rpartition("/")[2] for record in there] == [*names]

    wait_until(lambda: holds("a.png") or process.ended)
    wait_until(lambda: list((folder / "index").glob("*/ids.bin")))  # others need not build the index
    wait_until(lambda: "bad.png" in errors.read_text() or process.ended)
    with closing(Collection(folder)) as other, other.catalog.exclusive():
        save(watched / "b.png", 2)
        wait_until(lambda: "locked" in process.err or process.ended)
    wait_until(lambda: holds("a.png", "b.png") or process.ended)
    (watched / "a.png").unlink()
    wait_until(lambda: holds("b.png") or process.ended)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.err
    assert process.out.splitlines()[-1] == f"added 2, already stored 0, skipped 1, removed 1; {folder} holds 1 image"
    assert records(folder)[0].labels == ("seen",)
    assert n_stored(folder) == 1


@pytest.fixture
def web(pictures):
    """The pictures, served over http."""
    with serving(pictures) as url:
        yield url


def test_a_list_of_urls_is_downloaded_and_stored(hashseek, web, tmp_path, pictures, checkpoint):
    urls = [f"{web}/picture 00.jpg", f"{web}/picture%2001.jpg", f"{web}/Höhle, 2 °C/picture 03.jpg", f"{web}/none.jpg"]
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    folder = tmp_path / "collection"
    command = ("index", "add", folder, tmp_path / "urls.txt", "--checkpoint", checkpoint, "--device", "cpu")
    code, out, err = hashseek(*command)
    assert (code, out.split(";")[0]) == (1, "added 0, already stored 0, skipped 4")
    assert err.count("--allow-private") == 4
    code, out, _ = hashseek(*command, "--allow-private", "--dry-run")
    assert (code, out.split(";")[0]) == (0, "dry run: would be added 3, already stored 0, skipped 1")
    code, out, err = hashseek(*command, "--allow-private")
    assert (code, out.split(";")[0]) == (0, "added 3, already stored 0, skipped 1")
    assert err.startswith(f"skipped: urls.txt line 4: {urls[3]} ")
    assert [record.path for record in records(folder)] == urls[:3]
    code, out, _ = hashseek("index", "add", folder, pictures, urls[0], "--allow-private", "--device", "cpu")
    assert (code, out.split(";")[0]) == (0, "added 9, already stored 4, skipped 0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, started = f"http://127.0.0.1:{silent.getsockname()[1]}/a.jpg", time.monotonic()
        assert hashseek("index", "add", folder, url, "--allow-private", "--url-seconds", 0.3)[0] == 1
    assert time.monotonic() - started < SECONDS


def test_private_urls_are_read_again_only_if_allowed(hashseek, web, tmp_path, checkpoint, other_checkpoint):
    folder = tmp_path / "collection"
    add = ("index", "add", folder, f"{web}/picture 00.jpg", f"{web}/picture 01.jpg", "--allow-private")
    assert hashseek(*add, "--checkpoint", checkpoint, "--device", "cpu")[0] == 0
    for command in (
        ("verify", folder, "--codes", 2),
        ("verify", folder, "--repair"),
        ("duplicates", folder, "--radius", 4, "--flips"),
        ("reencode", folder, "--checkpoint", other_checkpoint, "--device", "cpu"),
    ):
        if "--repair" in command:
            sql(folder / "catalog.sqlite", "DELETE FROM codes WHERE image_id = 2")
        code, out, err = hashseek("index", *command)
        assert "--allow-private" in out + err
        code, out, err = hashseek("index", *command, "--allow-private")
        assert (code, "--allow-private" in out + err) == (0, False), command
    assert hashseek("index", "verify", folder)[0] == 0
    for command in (("verify", folder), ("duplicates", folder, "--radius", 4)):
        assert hashseek("index", *command, "--allow-private")[0] == 2


def test_the_service_shows_images_in_tars_and_private_urls_only_if_allowed(
    hashseek, web, tmp_path, pictures, checkpoint, caplog
):
    write_tar(tmp_path / "a.tar", {"x/0.jpg": (pictures / "picture 00.jpg").read_bytes()})
    folder, url = tmp_path / "collection", f"{web}/picture 01.jpg"
    command = ("index", "add", folder, tmp_path / "a.tar", url, "--allow-private", "--device", "cpu")
    assert hashseek(*command, "--checkpoint", checkpoint)[0] == 0
    in_tar, private = records(folder)
    with service.serving(folder) as client:
        shown = client.get(f"/v1/images/{in_tar.id}/file")
        assert hashlib.sha256(shown.content).hexdigest() == in_tar.sha256
        assert client.get(f"/v1/images/{in_tar.id}/file?size=32").headers["content-type"] == "image/jpeg"
        refused = client.get(f"/v1/images/{private.id}/file")
        assert refused.status_code >= 400
        assert_problem(refused, 502, "FileNotSent")
        assert "--allow-private" in caplog.text
    with service.serving(folder, allow_private=True) as client:
        shown = client.get(f"/v1/images/{private.id}/file")
        assert hashlib.sha256(shown.content).hexdigest() == private.sha256


# ---------------------------------------------------------------- refusals


@pytest.fixture
def folder(tmp_path):
    """A good picture and a bad one."""
    (save(tmp_path / "pictures" / "a.png", 1).parent / "bad.png").write_bytes(b"x")
    return tmp_path / "pictures"


def test_a_dry_run_is_refused_as_the_run_is(hashseek, own_collection, tmp_path, folder, checkpoint):
    for command, named in (
        (("index", "add", own_collection, folder, "--on-error", "stop"), "bad.png"),
        (("index", "add", folder, folder, "--checkpoint", checkpoint), str(folder)),
        (("index", "add", folder / "a.png", folder, "--checkpoint", checkpoint), "a.png"),
    ):
        refused = hashseek(*command, "--dry-run")
        assert refused == hashseek(*command, "--device", "cpu")
        assert refused[:2] == (2, "")
        assert named in refused[2]
    torn = tmp_path / "torn"  # a creation was interrupted here
    torn.mkdir()
    for name in ("checkpoint.safetensors", ".checkpoint.safetensors.x", "catalog.sqlite.new"):
        (torn / name).write_bytes(b"")
    command = ("index", "add", torn, folder, "--checkpoint", checkpoint)
    code, out, _ = hashseek(*command, "--dry-run")
    assert (code, out.split(";")[0]) == (0, "dry run: would be added 1, already stored 0, skipped 1")
    assert hashseek(*command, "--device", "cpu")[0] == 0


def test_a_full_disk_under_the_file_of_errors_ends_the_run_with_a_message(hashseek, own_collection, folder):
    command = ("index", "add", own_collection, folder, "--device", "cpu", "--errors", "/dev/full")
    code, out, err = hashseek(*command)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("hashseek: ")
    assert "Traceback" not in err


def test_watching_reads_no_lists_even_with_on_error_stop(start, tmp_path, folder, checkpoint):
    (folder / "bad.png").unlink()
    (folder / "labels.csv").write_text("file,labels\nnothing.png,cat\n")
    command = ("index", "add", tmp_path / "new", folder, "--checkpoint", checkpoint, "--device", "cpu")
    process = start(*command, "--watch", "--every", "0.1", "--on-error", "stop")
    wait_until(lambda: "added 1" in process.out or process.ended)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.err
