"""Several collections of one service: list, create, replace, delete; what they share; no request is dropped."""

import os
import shutil
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

import hashseek
from hashseek.api.collections import collections
from hashseek.indexing.collection import Collection, open_or_create
from support.collections import sql
from support.commands import wait_until
from support.paths import copy_collection
from support.pictures import png
from support.service import assert_problem, figures, hits, serving


@pytest.fixture
def folder(several):
    return several


@pytest.fixture
def client(folder):
    with serving(folder) as started:
        yield started


def listed(client):
    return {one["name"]: one for one in client.get("/v1/collections").json()["collections"]}


def delete(client, name):
    return client.delete(f"/v1/collections/{name}", params={"confirm": name})


def test_each_has_its_own_images_under_its_own_address(client):
    found = listed(client)
    assert {name: (one["url"], one["status"], one["n_images"]) for name, one in found.items()} == {
        "a": ("/collections/a/", "ready", 12),
        "b c": ("/collections/b%20c/", "ready", 9),
    }
    answer = client.post("/collections/b%20c/v1/search", files={"image": png(1)}, data={"k": 50})
    assert len(hits(answer)) == 9
    assert all(client.get(hit["url"]).is_success for hit in hits(answer)[:2])
    assert client.get("/collections/a/v1/images/1").json()["url"] == "/collections/a/v1/images/1/file"
    assert client.get("/collections/a/v1/stats").json()["n_images"] == 12
    assert_problem(client.get("/collections/b%20c/v1/images/1"), 404, "UnknownImage")
    assert_problem(client.get("/v1/stats"), 404, "about:blank", "/v1/collections")
    assert_problem(client.get("/collections/other/v1/stats"), 404, "UnknownCollection", "other")
    assert "Hashseek" in client.get("/collections/a").text  # with a slash, where it is led
    assert figures(client)["hashseek_index_images",] == 21


def test_they_share_encoder_and_decoders(client):
    one, two = (service.searcher for service in client.app.state.collections)
    assert one.encoder is two.encoder
    assert one.load == two.load == client.app.state.collections.decoders.load
    assert one.collection is not two.collection


def test_one_that_is_served_alone_is_listed_and_cannot_be_joined_by_others(indexed):
    with serving(indexed, read_only=True) as client:
        [(name, one)] = listed(client).items()
        assert (name, one["url"], one["n_images"]) == (indexed.name, "/", 12)
        assert client.post("/v1/collections", json={"name": "new", "like": name}).status_code == 405
        assert delete(client, name).status_code == 404


def test_a_new_one_is_empty_and_takes_images(client, folder):
    created = client.post("/v1/collections", json={"name": "new", "like": "a"})
    assert (created.status_code, created.json()["n_images"], created.json()["status"]) == (201, 0, "ready")
    assert created.json()["fingerprint"] == listed(client)["a"]["fingerprint"]
    assert client.post("/collections/new/v1/images", files={"image": png(50)}).status_code == 201
    found = client.post("/collections/new/v1/search", files={"image": png(50)})
    assert [hit["distance"] for hit in hits(found)] == [0]
    with hashseek.Client("http://localhost", collection="new", http=client) as own:
        assert own.stats().n_images == 1
        assert [image.url for image in own.images()] == [hits(found)[0]["url"]]


def test_a_new_one_keeps_features_if_its_model_does(folder, checkpoint):
    open_or_create(folder / "with", checkpoint=checkpoint, keep_features=True).close()
    with serving(folder) as client:
        for like, keeps in (("with", True), ("a", False)):
            assert client.post("/v1/collections", json={"name": f"like-{like}", "like": like}).status_code == 201
            assert client.get(f"/collections/like-{like}/v1/stats").json()["keeps_features"] == keeps


def test_a_new_one_needs_a_free_name_and_a_model(client, folder):
    before = sorted(folder.iterdir())
    for name, like, status, kind in (
        ("b c", "a", 422, "BadRequest"),
        ("../a", "a", 422, "BadRequest"),
        (".a", "a", 422, "BadRequest"),
        ("a", "a", 409, "CollectionExists"),
        ("other", "a", 409, "CollectionExists"),  # a folder that is none
        ("new", "missing", 404, "UnknownCollection"),
    ):
        assert_problem(client.post("/v1/collections", json={"name": name, "like": like}), status, kind)
        assert sorted(folder.iterdir()) == before


def test_one_that_cannot_be_created_leaves_nothing_behind(small_disk, indexed):
    folder, checkpoint = small_disk / "a", "checkpoint.safetensors"
    shutil.copytree(indexed, folder, ignore=shutil.ignore_patterns(checkpoint, "*-wal", "*-shm"))
    (folder / checkpoint).symlink_to(indexed / checkpoint)  # larger than the disk
    with serving(small_disk) as client:
        assert_problem(client.post("/v1/collections", json={"name": "new", "like": "a"}), 507, "Storage")
        assert list(small_disk.iterdir()) == [folder]


def test_deleting_repeats_the_name(client, folder):
    assert client.delete("/v1/collections/a").status_code == 422
    assert_problem(client.delete("/v1/collections/a", params={"confirm": "b c"}), 422, "BadConfig", "b c")
    assert listed(client).keys() == {"a", "b c"}
    assert delete(client, "a").status_code == 204
    assert sorted(path.name for path in folder.iterdir()) == ["b c", "other"]
    assert_problem(client.get("/collections/a/v1/stats"), 404, "UnknownCollection")
    assert_problem(delete(client, "a"), 404, "UnknownCollection")
    assert client.post("/v1/collections", json={"name": "a", "like": "b c"}).status_code == 201


def test_deleting_a_linked_one_leaves_what_it_links_to(folder, indexed, tmp_path):
    copy_collection(indexed, tmp_path / "target")
    (folder / "linked").symlink_to(tmp_path / "target")
    with serving(folder) as client:
        assert delete(client, "linked").status_code == 204
        assert listed(client).keys() == {"a", "b c"}
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b c", "other"]
    with closing(Collection(tmp_path / "target")) as target:
        assert (len(target), target.verify()) == (12, [])


def test_folders_that_come_and_go_are_followed(client, folder, indexed, tmp_path):
    copy_collection(indexed, tmp_path / "copy")
    (tmp_path / "copy").rename(folder / "late")
    wait_until(lambda: "late" in listed(client))
    assert listed(client)["late"]["n_images"] == 12
    (folder / "late").rename(tmp_path / "gone")
    wait_until(lambda: "late" not in listed(client))
    assert client.get("/collections/late/v1/stats").status_code == 404


def test_those_in_a_folder_that_cannot_be_listed_are_still_served(serve, folder, indexed, tmp_path):
    process, client = serve(folder, before="drop_rights()")
    folder.chmod(0o311)
    wait_until(lambda: process.err.count("PermissionError") > 2)  # one that is missing twice is gone
    assert listed(client).keys() == {"a", "b c"}
    folder.chmod(0o755)
    copy_collection(indexed, tmp_path / "copy")
    (tmp_path / "copy").rename(folder / "late")
    wait_until(lambda: listed(client).keys() == {"a", "b c", "late"})


def test_one_that_is_being_deleted_is_not_found_again(client, monkeypatch):
    rename = Path.rename

    def scan_first(path, target):
        client.app.state.collections._scan(set())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", scan_first)
    assert delete(client, "a").status_code == 204
    assert listed(client).keys() == {"b c"}


def test_the_name_of_one_whose_folder_just_went_is_free_after_it_was_closed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(collections, "FOLLOW_SECONDS", 0.1)
    with serving(folder) as client:
        served = client.app.state.collections
        served._stopped.set()  # the test scans
        served._scanner.join()
        (folder / "a").rename(tmp_path / "gone")
        new = {"name": "a", "like": "b c"}
        assert_problem(client.post("/v1/collections", json=new), 409, "CollectionExists")
        served._scan(served._scan(set()))
        assert client.post("/v1/collections", json=new).status_code == 201
        served._scan(served._scan(set()))
        assert listed(client).keys() == {"a", "b c"}


def test_a_folder_whose_name_is_not_utf8_is_left_out(folder):
    (folder / os.fsdecode(b"\xff")).symlink_to(folder / "a")
    with serving(folder) as client:
        assert listed(client).keys() == {"a", "b c"}


def test_a_damaged_one_leaves_the_others_alone(folder, caplog):
    (folder / "a" / "catalog.sqlite").write_bytes(b"torn")
    (folder / "b c" / "checkpoint.safetensors").rename(folder / "checkpoint")
    with serving(folder, ready=False) as client:
        wait_until(lambda: {one["status"] for one in listed(client).values()} == {"failed"})
        assert client.get("/healthz/ready").status_code == 503
    (folder / "checkpoint").rename(folder / "b c" / "checkpoint.safetensors")
    with serving(folder) as client:
        wait_until(lambda: listed(client)["a"]["status"] == "failed")
        assert_problem(client.get("/collections/a/v1/stats"), 500, "NotLoaded", "a/catalog.sqlite")
        assert client.get("/collections/b c/v1/images/4/similar").is_success


def test_one_that_becomes_unreadable_leaves_the_list_and_the_metrics_of_the_others(client, folder):
    sql(folder / "a" / "catalog.sqlite", "DELETE FROM meta WHERE key = 'generation'")
    assert {name: one["n_images"] for name, one in listed(client).items()} == {"a": None, "b c": 9}
    assert figures(client)["hashseek_index_images",] == 9


def test_a_read_only_service_creates_and_deletes_nothing(folder):
    with serving(folder, read_only=True) as client:
        assert_problem(client.post("/v1/collections", json={"name": "new", "like": "a"}), 403, "ReadOnly")
        assert_problem(delete(client, "a"), 403, "ReadOnly")


def test_each_one_that_may_not_be_written_is_read_only_by_itself(serve, folder, indexed):
    """As for a user who does not own it; its files alone are enough."""
    (folder / "a" / "files").mkdir(exist_ok=True)
    (folder / "a" / "files").chmod(0o555)
    process, client = serve(folder, before="drop_rights()")

    def states():
        return {name: client.get(f"/collections/{name}/v1/stats").json()["read_only"] for name in listed(client)}

    assert states() == {"a": True, "b c": False}
    refused = add_to(client, "a", 70)
    assert_problem(refused, 403, "ReadOnly", "a/files")
    assert "--read-only" not in refused.text
    assert_problem(client.patch("/collections/a/v1/images/1", json={"labels": []}), 403, "ReadOnly")
    assert_problem(client.delete("/collections/a/v1/images/1"), 403, "ReadOnly")
    assert_problem(delete(client, "a"), 403, "ReadOnly")
    assert add_to(client, "b c", 70).status_code == 201
    hidden = folder / ".new"
    copy_collection(indexed, hidden)
    (hidden / "catalog.sqlite").chmod(0o444)
    hidden.rename(folder / "new")
    wait_until(lambda: "new" in listed(client))
    (folder / "a" / "files").chmod(0o755)
    wait_until(lambda: states() == {"a": False, "b c": False, "new": True})
    assert add_to(client, "a", 70).status_code == 201
    assert_problem(add_to(client, "new", 70), 403, "ReadOnly")
    folder.chmod(0o555)
    assert_problem(client.post("/v1/collections", json={"name": "more", "like": "a"}), 403, "ReadOnly")
    assert_problem(delete(client, "a"), 403, "ReadOnly")
    assert states() == {"a": False, "b c": False, "new": True}
    folder.chmod(0o755)
    assert "Traceback" not in process.err


@contextmanager
def asking(base, paths, n_threads):
    """Threads that request the paths all the time; gives a list of (path, status, start, end)."""
    answers, stop = [], threading.Event()

    def work(number):
        with httpx.Client(base_url=base, timeout=60) as own:
            while not stop.is_set():
                for path in paths:
                    started = time.monotonic()
                    if path.endswith("search"):
                        status = own.post(path, files={"image": png(number)}).status_code
                    else:
                        status = own.get(path).status_code
                    answers.append((path, status, started, time.monotonic()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    yield answers
    stop.set()
    for thread in threads:
        thread.join()


def test_no_request_is_dropped_while_collections_are_created_replaced_and_deleted(serve, folder, indexed, tmp_path):
    """Real server, real clients: every answer is 200, but for 404 of requests to a collection that is not there."""
    _, client = serve(folder)
    copy_collection(indexed, tmp_path / "rebuilt")
    stay = ["/collections/b%20c/v1/search", "/collections/b%20c/v1/images/5/similar"]
    leave = [
        "/collections/a/v1/search",
        "/collections/a/v1/images/5/file?size=64",
        "/collections/a/v1/images/5/similar",
    ]
    with asking(client.base_url, [*stay, *leave], 6) as answers:
        wait_until(lambda: len(answers) > 50)
        assert client.post("/v1/collections", json={"name": "new", "like": "a"}).status_code == 201
        assert add_to(client, "new", 70).status_code == 201
        assert client.get("/collections/b%20c/v1/stats").json()["n_images"] == 9
        (folder / "b c").rename(tmp_path / "old")
        (tmp_path / "rebuilt").rename(folder / "b c")
        wait_until(lambda: client.get("/collections/b%20c/v1/stats").json()["n_images"] == 12)
        n = len(answers)
        wait_until(lambda: len(answers) > n + 30)
        asked = time.monotonic()
        assert delete(client, "a").status_code == 204
        deleted = time.monotonic()
        n = len(answers)
        wait_until(lambda: len(answers) > n + 30)
    assert {status for path, status, *_ in answers if path in stay} == {200}
    assert {status for path, status, *_ in answers if path in leave} == {200, 404}
    assert {status for path, status, _, end in answers if path in leave and end < asked} == {200}
    assert {status for path, status, start, _ in answers if path in leave and start > deleted} == {404}
    assert listed(client).keys() == {"b c", "new"}
    assert not list(folder.glob(".*"))


def add_to(client, name, seed):
    return client.post(f"/collections/{name}/v1/images", files={"image": png(seed)})


def test_deleting_waits_for_an_answer_that_is_under_way(client, folder):
    """An upload that waits for a processor core is encoded and stored before its collection goes."""
    decoders, done = client.app.state.collections.decoders, []
    with decoders.cores.hold(1000):
        upload = threading.Thread(target=lambda: done.append(add_to(client, "a", 80).status_code))
        upload.start()
        wait_until(lambda: decoders.waiting)
        deleting = threading.Thread(target=lambda: done.append(delete(client, "a").status_code))
        deleting.start()
        wait_until(lambda: "a" not in listed(client))
        assert_problem(add_to(client, "a", 81), 404, "UnknownCollection")
        assert (folder / "a").exists()
        assert done == []
    upload.join()
    deleting.join()
    assert done == [201, 204]
    assert not (folder / "a").exists()


def test_the_command_serves_a_folder_of_several(serve, hashseek, folder, tmp_path, checkpoint):
    _, client = serve(folder, "--read-only")
    assert listed(client).keys() == {"a", "b c"}
    for arguments in ((tmp_path / "none",), (folder / "other",), (folder, "--checkpoint", checkpoint)):
        code, out, err = hashseek("serve", *arguments, "--port", 0)
        assert (code, out, err.count("\n")) == (2, "", 1)
