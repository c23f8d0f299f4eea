"""What the service does in the background: loading, merging, following its collection; and what happens in trouble."""

import gc
import json
import os
import shutil
import sqlite3
import sys
import threading
import time
from contextlib import closing

import pytest
from PIL import Image

import hashseek.indexing.index.collection_index
from hashseek.api.collections import service
from hashseek.api.collections.service import Service, Shared
from hashseek.api.settings import Settings
from hashseek.indexing.catalog import Catalog, database
from hashseek.indexing.collection import Collection
from hashseek.indexing.index import segments
from hashseek.indexing.searcher import SearchOptions
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.images import load_file
from support.collections import file_of, index_folder, with_codes
from support.commands import wait_until
from support.pictures import encoded, png
from support.service import add, assert_problem, hits, kept_files, search, serving


def state_of(folder):
    """(images, images in the built index, problems) of a collection."""
    with closing(Collection(folder, read_only=True)) as collection:
        return len(collection), collection.describe_index()["built"], collection.verify()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_model_is_loaded_with_a_lower_priority(own_collection, monkeypatch):
    """OpenVINO starts its threads meanwhile, which inherit it."""
    found = []

    def observed(*arguments, **options):
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return opened(*arguments, **options)

    opened = service.open_encoder
    monkeypatch.setattr(service, "open_encoder", observed)
    with serving(own_collection):
        pass
    assert found[0] > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


# ---------------------------------------------------------------- the index


@pytest.fixture
def merges_at_once(monkeypatch):
    """Segments are merged after every change."""
    monkeypatch.setattr(service, "MERGE_SECONDS", 0.01)
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(segments, "FRESH_LIMIT", 0)


class HeldMerge:
    """A merge that waits in the middle until it is let go on."""

    def __init__(self):
        self.began, self.go_on, self.merge = (
            threading.Event(),
            threading.Event(),
            hashseek.indexing.index.collection_index.merge,
        )

    def __call__(self, *arguments):
        self.began.set()
        assert self.go_on.wait(20)
        return self.merge(*arguments)


def test_requests_do_not_wait_for_a_merge(own_collection, monkeypatch, merges_at_once):
    with serving(own_collection) as client:
        held = HeldMerge()
        monkeypatch.setattr(hashseek.indexing.index.collection_index, "merge", held)
        ids = [add(client, png(600 + number)).json()["id"] for number in range(2)]
        assert held.began.wait(60)
        assert hits(search(client, png(601)))[0]["id"] == ids[1]
        assert client.delete(f"/v1/images/{ids[0]}").status_code == 204
        assert ids[0] not in [hit["id"] for hit in hits(search(client, png(600)))]
        assert client.get("/v1/stats").json()["index"]["built"] == 12
        held.go_on.set()
        wait_until(lambda: client.get("/v1/stats").json()["index"]["built"] >= 13)
        assert hits(search(client, png(601)))[0]["id"] == ids[1]
    assert state_of(own_collection)[2] == []


def test_a_service_that_stops_during_a_merge_does_not_wait_for_it(own_collection, monkeypatch, merges_at_once):
    monkeypatch.setattr(service, "STOP_SECONDS", 0.01)
    threads = set(threading.enumerate())
    held = HeldMerge()
    with serving(own_collection) as client:
        monkeypatch.setattr(hashseek.indexing.index.collection_index, "merge", held)
        assert add(client, png(600)).status_code == 201
        assert held.began.wait(60)
    held.go_on.set()
    wait_until(lambda: "hashseek-merge" not in {thread.name for thread in set(threading.enumerate()) - threads})
    n_images, _, problems = state_of(own_collection)
    assert (n_images, problems) == (13, [])


def test_a_failed_merge_is_logged_and_tried_again(own_collection, monkeypatch, merges_at_once, caplog):
    def fail(*_):
        raise MemoryError("no room")

    with serving(own_collection) as client:
        with monkeypatch.context() as patch:
            patch.setattr(hashseek.indexing.index.collection_index, "merge", fail)
            image_id = add(client, png(600)).json()["id"]
            wait_until(lambda: "no room" in caplog.text)
            assert hits(search(client, png(600)))[0]["id"] == image_id
        wait_until(lambda: client.get("/v1/stats").json()["index"]["built"] == 13)


@pytest.mark.parametrize("seconds", [0.01, 60])
def test_an_approximate_index_is_rebuilt_while_the_service_runs_and_not_when_it_stops(
    own_collection, monkeypatch, seconds
):
    with closing(Collection(own_collection)) as collection:
        collection.build_index("ivf")
    before = index_folder(own_collection)
    monkeypatch.setattr(service, "MERGE_SECONDS", seconds)

    def is_rebuilt():
        with closing(Collection(own_collection, read_only=True)) as collection:
            return [collection.describe_index()[name] for name in ("kind", "built")] == ["ivf", 14]

    with serving(own_collection) as client:
        monkeypatch.setattr(segments, "FRESH_LIMIT", 1)
        for number in range(2):
            assert add(client, png(600 + number)).status_code == 201
        if seconds < 1:
            wait_until(is_rebuilt)
    assert (index_folder(own_collection) == before) == (seconds > 1)


# ---------------------------------------------------------------- another model


def switch_to(folder, checkpoint):
    """Give the collection the codes of another checkpoint, as another process would."""
    collection = Collection(folder)
    encoder = Encoder(load_checkpoint(checkpoint), device="cpu")
    shutil.copy(checkpoint, folder / "new.safetensors")
    space = collection.catalog.spaces.begin(encoder.fingerprint, encoder.header.n_bits, "new.safetensors")
    for image in collection.catalog.spaces.missing(space.id, after=0, limit=1000):
        pixels = load_file(file_of(collection, image).read_bytes(), encoder.preprocessing).pixels
        code = encoder.encode_pixels(pixels[None])[0]
        collection.catalog.spaces.add_codes(space.id, with_codes(collection.catalog, {image.id: code}, encoder.engine))
    collection.catalog.spaces.switch(space.id)
    collection.close()
    return encoder.fingerprint


def test_a_service_follows_its_collection_to_another_model_while_it_serves(
    client, own_collection, other_checkpoint, pictures, monkeypatch
):
    go_on, load = threading.Event(), Service._open
    monkeypatch.setattr(Service, "_open", lambda self, checkpoint: (go_on.wait(60), load(self, checkpoint))[1])
    data = (pictures / "picture 00.jpg").read_bytes()
    before = search(client, data, k=99).json()
    fingerprint = switch_to(own_collection, other_checkpoint)
    assert fingerprint != before["fingerprint"]
    during = search(client, data, k=99).json()  # while the new model is loading
    assert (during["fingerprint"], during["hits"]) == (before["fingerprint"], before["hits"])
    assert_problem(add(client, png(900)), 503, "SpaceRetired")
    assert client.get("/v1/images/1/similar").status_code == 200
    with closing(Catalog(own_collection / "catalog.sqlite")) as catalog:
        catalog.spaces.drop(1)
    assert_problem(client.get("/v1/images/1/similar"), 503, "SpaceRetired")
    assert_problem(client.get("/v1/images/99/similar"), 404, "UnknownImage")
    assert client.get("/healthz/ready").status_code == 200
    stop, answers = threading.Event(), []

    def look():
        while not stop.is_set():
            answers.append(search(client, data, k=3))

    looking = threading.Thread(target=look)
    looking.start()
    go_on.set()
    wait_until(lambda: client.get("/v1/stats").json()["fingerprint"] == fingerprint)
    stop.set()
    looking.join()
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["fingerprint"] for answer in answers} <= {fingerprint, before["fingerprint"]}
    after = search(client, data, k=99).json()
    assert (after["hits"][0]["distance"], len(after["hits"]), after["n_bits"]) == (0, 12, 36)
    assert add(client, png(900)).status_code == 201
    assert hits(search(client, png(900), k=1))[0]["distance"] == 0


def test_the_old_collection_is_closed_when_the_last_request_has_dropped_it(
    own_collection, checkpoint, other_checkpoint, monkeypatch
):
    closed, close = [], Collection.close
    monkeypatch.setattr(Collection, "close", lambda self: (closed.append(self.fingerprint), close(self)))
    service = Service(Settings(own_collection, checkpoint=checkpoint, device="cpu"), "", Shared())  # of the old codes
    service.start()
    wait_until(lambda: service._searcher)
    of_a_request = service.searcher
    fingerprint = of_a_request.encoder.fingerprint
    switch_to(own_collection, other_checkpoint)
    closed.clear()
    wait_until(lambda: service.searcher.encoder.fingerprint != fingerprint)
    gc.collect()
    assert closed == []
    assert len(of_a_request.similar(1, SearchOptions(k=99)).hits) == 12
    del of_a_request
    wait_until(lambda: closed)
    assert closed == [fingerprint]
    service.stop()


def test_a_model_that_cannot_be_loaded_leaves_the_old_one_answering(client, own_collection, other_checkpoint, caplog):
    before = hits(search(client, png(3), k=99))
    switch_to(own_collection, other_checkpoint)
    (own_collection / "new.safetensors").write_bytes(b"torn")
    wait_until(lambda: (search(client, png(3), k=1), "could not be loaded" in caplog.text)[1])
    assert hits(search(client, png(3), k=99)) == before
    assert_problem(add(client, png(900)), 503, "SpaceRetired")


def test_a_service_follows_a_copy_that_replaced_its_collection(client, own_collection, tmp_path):
    copy = tmp_path / "copy"
    client.delete("/v1/images/1")
    shutil.copytree(own_collection, copy)
    assert add(client, png(950)).status_code == 201
    own_collection.rename(tmp_path / "aside")
    copy.rename(own_collection)
    wait_until(lambda: client.get("/v1/stats").json()["n_images"] == 11)
    record = add(client, png(951))
    assert record.status_code == 201
    assert client.get(record.json()["url"]).content == png(951)


# ---------------------------------------------------------------- trouble


def test_while_loading_it_is_live_but_not_ready(own_collection, monkeypatch):
    go_on, load = threading.Event(), Service._load
    monkeypatch.setattr(Service, "_load", lambda self: (go_on.wait(60), load(self)))
    with serving(own_collection, ready=False) as client:
        assert client.get("/healthz/live").status_code == client.get("/").status_code == 200
        for response in (*map(client.get, ("/healthz/ready", "/v1/stats", "/v1/images/1")), search(client, png(1))):
            assert_problem(response, 503, "NotReady")
            assert response.headers["retry-after"] == "1"
        go_on.set()
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        assert search(client, png(1)).status_code == 200


def test_a_service_that_stops_waits_for_its_first_load(own_collection, monkeypatch):
    """Otherwise OpenVINO may crash the process."""
    monkeypatch.setattr(service, "STOP_SECONDS", 60)
    go_on, load, threads = threading.Event(), Service._load, set(threading.enumerate())
    monkeypatch.setattr(Service, "_load", lambda self: (go_on.wait(60), load(self)))
    with serving(own_collection, ready=False):
        [loader] = [one for one in set(threading.enumerate()) - threads if one.name == "hashseek-load"]
        threading.Timer(0.2, go_on.set).start()
    assert not loader.is_alive()


def test_a_collection_that_cannot_be_loaded_is_500_with_the_reason_and_never_ready(own_collection, caplog):
    (own_collection / "checkpoint.safetensors").write_bytes(b"torn")
    with serving(own_collection, ready=False) as client:
        wait_until(lambda: client.get("/v1/stats").status_code != 503)
        for response in (client.get("/v1/stats"), client.get("/v1/images/1"), search(client, png(1))):
            assert_problem(response, 500, "NotLoaded", "checkpoint.safetensors")
            assert str(own_collection) not in response.text
        assert_problem(client.get("/healthz/ready"), 503, "NotReady", "checkpoint.safetensors")
        assert client.get("/healthz/live").status_code == client.get("/").status_code == 200


def test_a_collection_that_could_not_be_loaded_is_loaded_once_it_is_replaced(own_collection, monkeypatch, caplog):
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.1)
    good = own_collection.with_name("good")
    shutil.copytree(own_collection, good)
    (own_collection / "checkpoint.safetensors").write_bytes(b"torn")
    with serving(own_collection, ready=False) as client:
        wait_until(lambda: client.get("/v1/stats").status_code == 500)
        own_collection.rename(own_collection.with_name("bad"))
        good.rename(own_collection)
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        assert len(hits(search(client, png(1), k=50))) == 12


def test_a_catalog_that_is_lost_while_serving_is_500(client, own_collection, caplog):
    with closing(sqlite3.connect(own_collection / "catalog.sqlite")) as db, db:
        db.execute("DROP TABLE images")
        db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
    assert_problem(search(client, png(1)), 500, "CatalogDamaged")
    assert_problem(add(client, png(1)), 500, "CatalogDamaged")


def test_a_locked_catalog_is_503_for_changes_while_searches_go_on(own_collection, monkeypatch):
    busy = 2.0
    monkeypatch.setattr(database, "BUSY_SECONDS", busy)
    with serving(own_collection) as client:
        assert hits(search(client, png(1)))  # starts the process that decodes
        with closing(sqlite3.connect(own_collection / "catalog.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            started = time.monotonic()
            assert_problem(add(client, png(700)), 503, "CatalogLocked")
            assert time.monotonic() - started < 2 * busy, "the lock is waited for once"
            files, headers = {"image": ("a.png", png(701))}, {"Idempotency-Key": "a"}
            [line] = client.post("/v1/batch", files=files, headers=headers).text.splitlines()
            assert (json.loads(line)["status"], json.loads(line)["type"]) == (503, "urn:hashseek:CatalogLocked")
            assert_problem(client.delete("/v1/images/1"), 503, "CatalogLocked")
            assert len(hits(search(client, png(1), k=50))) == 12
            other.execute("ROLLBACK")
        assert add(client, png(700)).status_code == 201
        [line] = client.post("/v1/batch", files=files, headers=headers).text.splitlines()
        assert json.loads(line)["change"] == "added", "a failed line is tried again"


def test_a_full_disk_is_507_and_searching_goes_on(small_disk, indexed, caplog):
    folder = small_disk / "collection"
    folder.mkdir()
    for name in ("catalog.sqlite", "index"):
        (shutil.copytree if (indexed / name).is_dir() else shutil.copy)(indexed / name, folder / name)
    with serving(folder, checkpoint=indexed / "checkpoint.safetensors") as client:
        assert add(client, png(800)).status_code == 201
        large = encoded(Image.effect_noise((1000, 1000), 90))
        assert_problem(add(client, large), 507, "Storage")
        [line] = client.post("/v1/batch", files={"image": ("large", large)}).text.splitlines()
        assert (json.loads(line)["status"], json.loads(line)["type"]) == (507, "urn:hashseek:Storage")
        assert "POST /v1/batch" in caplog.text
        assert len(kept_files(folder)) == 1
        assert len(hits(search(client, large, k=50))) == client.get("/v1/stats").json()["n_images"] == 13
    with closing(Collection(folder, read_only=True)) as collection:
        assert len(collection) == 13


def test_the_log_says_where_a_storage_error_came_from(client, own_collection, caplog):
    (own_collection / "files").write_text("not a folder")
    assert_problem(add(client, png(700)), 500, "Storage")
    [record] = [record for record in caplog.records if record.exc_info]
    assert isinstance(record.exc_info[1], FileExistsError)


def test_an_unexpected_error_is_500_without_details(client, monkeypatch, caplog):
    monkeypatch.setattr(Service, "searcher", property(lambda self: 1 / 0))
    response = client.get("/v1/stats")
    assert_problem(response, 500)
    assert "division" not in response.text
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
