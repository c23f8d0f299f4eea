"""`hashseek.Client` and `hashseek.AsyncClient` against a service."""

import asyncio
import inspect
import math
import os
import signal
import socket
import sqlite3
import threading
import time
from contextlib import closing
from hashlib import sha256
from http.server import HTTPServer
from pathlib import Path
from unittest.mock import create_autospec

import httpx
import numpy as np
import pytest

import hashseek
from hashseek.api import client as client_module
from hashseek.api.client import Filters, Query, SearchOptions, ServiceError
from hashseek.api.collections.service import Service
from hashseek.api.messages.parameters import MAX_BATCH, FilterParameters, SearchParameters, SearchQuery
from hashseek.api.messages.schemas import ImageRecord
from hashseek.api.settings import Settings
from hashseek.retrieval.errors import BadConfig, BadImage
from support.pictures import png
from support.service import serving
from support.web import QuietHandler

URL = "http://localhost"


@pytest.fixture
def remote(client):
    """A client of a service whose collection the test may change."""
    return hashseek.Client(URL, http=client)


def asynchronous(client):
    return hashseek.AsyncClient(URL, http=httpx.AsyncClient(transport=httpx.ASGITransport(client.app)))


def test_everything_that_a_client_can_do(remote, tmp_path):
    (tmp_path / "made.png").write_bytes(png(600))
    added = remote.add(tmp_path / "made.png", key="../a b?/.", labels=["x", "made"], attributes={"n": 1})
    assert (added.id, added.change, added.attributes) == (13, "added", {"filename": "made.png", "n": 1})
    assert remote.add(png(600), key="../a b?/.").change == "known"
    assert remote.get("../a b?/.") == remote.get(13)
    changed = remote.change("../a b?/.", labels=["made"])
    assert (changed.labels, changed.attributes) == (["made"], added.attributes)
    assert remote.change(13, attributes={}).attributes == {}
    other = remote.add(png(601), labels=["made"])
    assert (other.attributes, other.key) == ({}, None)

    code = remote.encode(png(600))
    assert remote.search(str(tmp_path / "made.png"), k=1).hits[0].id == 13
    assert remote.search(png(600), png(601), k=3, label=["made"]).hits[0].labels == ["made"]
    answers = remote.search_each(
        [{"image_id": 13}, {"image_key": "../a b?/."}, {"code": code.code}], label=["made"], include=["histogram"]
    )
    assert [answer.hits for answer in answers] == [remote.similar(13, label=["made"]).hits] * 3
    assert sum(answers[0].histogram) == 2
    assert remote.search_each([{"image_id": 13}], label="made")[0].hits == answers[0].hits

    assert remote.file(13) == png(600)
    assert remote.file(13, size=32)[:3] == b"\xff\xd8\xff"
    assert [image.id for image in remote.images(limit=5)] == list(range(1, 15))  # of a page
    assert remote.page(limit=5, label=["odd"]).total == 6
    assert (remote.stats().n_images, remote.stats().labels["made"]) == (14, 2)
    with pytest.raises(hashseek.ServiceError) as refused:
        remote.delete_where(3, label=["made"])
    assert (refused.value.status, refused.value.kind) == (409, "UnexpectedNumber")
    assert remote.delete_where(2, label=["made"]).removed == 2
    remote.delete(1)
    assert [image.id for image in remote.images(any_label=["odd", "even"])] == list(range(2, 13))


def test_as_many_ids_keys_and_labels_as_documented_can_be_sent(remote):
    assert len(remote.search(png(1), id=range(1, 1001), key=[str(n) for n in range(1000)], k=5).hits) == 0
    assert len(remote.search(png(1), id=range(1, 1001), k=5).hits) == 5
    many = [f"label {number}" for number in range(1000)]
    assert remote.add(png(600), key="many", labels=many, attributes={"n": 1}).labels == sorted(many)
    with pytest.raises(ServiceError) as refused:
        remote.add(png(601), labels=[*many, "one more"])
    assert refused.value.status == 422
    large = {"attributes": {"text": "x" * 16_000}}
    results = remote.add_many([(png(number), large) for number in range(700, 700 + MAX_BATCH)])
    assert [result.change for result in results] == ["added"] * MAX_BATCH


def test_what_cannot_be_sent_is_refused(remote):
    for call in (
        lambda: remote.get("\udcff"),
        lambda: remote.add(png(1), key="\udcff"),
        lambda: remote.change(1, labels=["\udcff"]),
        lambda: remote.similar(1, where=["a=\udcff"]),
    ):
        with pytest.raises(BadConfig):
            call()


def test_a_request_too_long_for_a_url_is_refused():
    with hashseek.Client("http://127.0.0.1:1") as remote, pytest.raises(BadConfig):
        remote.similar(1, key=["k" * 500] * 1000)


def test_numbers_of_numpy_are_numbers(remote):
    added = remote.add(png(600), attributes={"year": np.int64(2015), "size": np.float32(0.5)})
    assert added.attributes == {"year": 2015, "size": 0.5}
    ids = np.array([added.id, 1])
    assert remote.get(ids[0]).id == added.id
    assert [hit.id for hit in remote.similar(ids[0], k=np.int64(2), id=ids).hits] == [added.id, 1]
    assert [hit.id for hit in remote.search(png(600), k=np.int32(1), id=ids[0]).hits] == [added.id]
    assert remote.search_each([{"image_id": ids[0]}], k=ids[1])[0].hits[0].id == added.id
    assert remote.change(ids[0], attributes={"mean": np.ones(2)}).attributes == {"mean": [1, 1]}
    with pytest.raises(BadConfig):
        remote.change(added.id, attributes={"taken": object()})


def test_the_name_of_a_file_may_be_in_another_encoding_than_utf_8(remote, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png"))
    path.write_bytes(png(600))
    assert remote.add(path).attributes == {"filename": "caf\ufffd.png"}
    assert remote.search(path, k=1).hits[0].id == 13


@pytest.fixture(params=["Client", "AsyncClient"])
def add_many(request):
    """`add_many` of either client: (url, images) -> results."""

    async def add(url, images):
        async with hashseek.AsyncClient(url, retries=60) as remote:
            return [result async for result in remote.add_many(images)]

    def add_all(url, images):
        if request.param == "AsyncClient":
            return asyncio.run(add(url, images))
        with hashseek.Client(url, retries=60) as remote:
            return list(remote.add_many(images))

    return add_all


def test_many_images_are_read_as_they_are_sent_and_each_has_its_result(serve, own_collection, add_many, tmp_path):
    limit = 300_000
    _, client = serve(own_collection, "--max-upload-bytes", limit)
    (tmp_path / "made.png").write_bytes(png(600))
    n_stored = []

    def large(seed):
        return png(seed) + bytes(limit // 30)  # a batch of these reaches the limit

    def images():
        yield tmp_path / "made.png", {"key": "a", "labels": ["x"], "attributes": {"n": np.int64(1)}}
        yield b"no picture"
        yield tmp_path / "missing.png"
        yield bytearray(b"no path and no bytes")
        yield "no\0path"
        yield png(601), {"key": None, "labels": ["x" * 1000]}
        yield b"\x89PNG" + bytes(limit)
        for seed in range(90):
            n_stored.append(client.get("/v1/stats").json()["n_images"] - 12)
            yield large(seed)

        yield large(90), {"key": "a line separator \u2028"}

    results = add_many(str(client.base_url), images())
    assert results.pop().key == "a line separator \u2028"
    first, *wrong = results[:7]
    assert (first.key, first.labels, first.change) == ("a", ["x"], "added")
    assert first.attributes == {"filename": "made.png", "n": 1}
    assert [getattr(one, "kind", None) for one in wrong] == ["BadImage", None, None, None, "BadRequest", "TooLarge"]
    assert str(tmp_path / "missing.png") in str(wrong[1])
    assert [one.sha256 for one in results[7:]] == [sha256(large(seed)).hexdigest() for seed in range(90)]
    assert {one.change for one in results[7:]} == {"added"}
    assert max(n - before for n, before in enumerate(n_stored, 7)) <= 63 + len(wrong)


def test_a_batch_is_within_the_limits_of_a_service():
    sizes = [*[1] * 70, *[6 * 2**20] * 3, 2**25, 1]
    batches = list(client_module._in_batches(map(bytes, sizes)))
    assert (
        [[len(image) for image in batch] for batch in batches]
        == [
            sizes[:64],
            sizes[64:72],  # one more would have 18 MiB
            sizes[72:73],
            sizes[73:74],
            sizes[74:],
        ]
    )
    assert client_module._BATCH == MAX_BATCH
    assert Settings.max_upload_bytes >= 2 * client_module._BATCH_BYTES


def test_a_batch_that_breaks_off_is_sent_again_and_nothing_is_stored_twice(serve, own_collection, add_many):
    dies_after_three = """
import os, signal
from hashseek.indexing.collection import Collection
def add(self, *args, stored=[], original=Collection.add_with_file, **options):
    if len(stored) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    stored.append(original(self, *args, **options))
    return stored[-1]
Collection.add_with_file = add
"""
    process, client = serve(own_collection, before=dies_after_three)
    port = client.base_url.port

    def restart():
        process.wait()
        serve(own_collection, "--port", port, ready=False)

    again = threading.Thread(target=restart)
    again.start()
    results = add_many(str(client.base_url), [(png(600 + n), {"key": f"{n}"}) for n in range(5)])
    again.join()
    assert [one.key for one in results] == list("01234")
    assert [one.change for one in results] == [*["known"] * 3, *["added"] * 2]
    assert client.get("/v1/stats").json()["n_images"] == 12 + 5


def test_an_image_that_met_a_busy_service_is_sent_again(serve, own_collection, add_many):
    _, client = serve(own_collection, before="import hashseek.indexing.catalog.database as d; d.BUSY_SECONDS = 0.1")
    with closing(
        sqlite3.connect(own_collection / "catalog.sqlite", isolation_level=None, check_same_thread=False)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(1.5, lambda: other.execute("ROLLBACK")).start()
        results = add_many(str(client.base_url), [png(600), png(601)])
    assert [one.sha256 for one in results] == [sha256(png(600)).hexdigest(), sha256(png(601)).hexdigest()]
    assert client.get("/v1/stats").json()["n_images"] == 12 + 2


def test_what_would_search_or_delete_more_than_was_meant_is_refused(remote):
    for name in ("id", "key", "any_label"):
        for nothing in ([], ()):
            with pytest.raises(BadConfig):
                remote.delete_where(6, label=["odd"], **{name: nothing})
    assert remote.stats().n_images == 12
    for call in (remote.similar, remote.file):
        with pytest.raises(BadConfig):
            call("a key")
    with pytest.raises(ServiceError):
        remote.search(png(1), label="")
    for number in (math.nan, math.inf):
        with pytest.raises(BadConfig):
            remote.encode_vector([number])
        with pytest.raises(BadConfig):
            remote.add(png(1), attributes={"n": number})
    with pytest.raises(BadConfig):
        remote.add(png(1), key="")


def test_both_clients_have_the_same_methods_and_get_the_same_answers(reader):
    methods = {name for name, _ in inspect.getmembers(hashseek.Client, callable) if not name.startswith("_")}
    assert methods == {name for name in vars(hashseek.AsyncClient) if not name.startswith("_")}
    for name in methods - {"close", "images", "add_many"}:
        first, second = (getattr(kind, name) for kind in (hashseek.Client, hashseek.AsyncClient))
        assert str(inspect.signature(first)) == str(inspect.signature(second))
        assert first.__doc__ == second.__doc__
    signature = inspect.signature(hashseek.Client.get)
    assert ([*signature.parameters], signature.return_annotation) == (["self", "image"], ImageRecord)
    assert create_autospec(hashseek.Client, instance=True).similar(3, k=4) is not None

    async def ask():
        async with asynchronous(reader) as client:
            found = await asyncio.gather(client.similar(3, k=4), client.search_each([{"image_id": 3}], k=4))
            return *found, [image.id async for image in client.images(label=["three"], limit=3)], await client.stats()

    remote = hashseek.Client(f"{URL}/", http=reader)
    similar, [each], ids, stats = asyncio.run(ask())
    assert similar.hits == each.hits == remote.similar(3, k=4, max_distance=None).hits
    assert ids == [image.id for image in remote.images(label=["three"])]
    assert stats == remote.stats()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Filters, FilterParameters), (SearchOptions, SearchParameters), (Query, SearchQuery)]
)
def test_its_options_are_those_of_the_service(ours, theirs):
    assert set(ours.__annotations__) == {field.alias or name for name, field in theirs.model_fields.items()}


def test_it_waits_for_a_service_that_is_starting(own_collection, monkeypatch):
    go_on, load = threading.Event(), Service._load
    monkeypatch.setattr(Service, "_load", lambda self: (go_on.wait(60), load(self)))
    with serving(own_collection, ready=False) as client:
        with pytest.raises(hashseek.ServiceError) as refused:
            hashseek.Client(URL, http=client, retries=0).stats()
        assert (refused.value.status, refused.value.kind) == (503, "NotReady")
        threading.Timer(0.5, go_on.set).start()
        started = time.monotonic()
        assert hashseek.Client(URL, http=client, retries=60).add(png(602), key="k").change == "added"
        assert time.monotonic() - started > 1  # as Retry-After says


def test_it_waits_for_a_service_that_is_restarted(serve, own_collection):
    process, client = serve(own_collection)
    port = client.base_url.port
    with hashseek.Client(str(client.base_url), retries=60) as remote:
        images = remote.stats().n_images
        process.send(signal.SIGTERM)
        process.wait()
        again = threading.Timer(0.5, lambda: serve(own_collection, "--port", port, ready=False))
        again.start()
        assert remote.stats().n_images == images
        again.join()


def test_it_waits_for_a_restart_that_broke_its_first_request():
    class Deleting(QuietHandler):
        def do_DELETE(self):
            self.send_response(204)
            self.end_headers()

    dying = socket.create_server(("127.0.0.1", 0))
    port = dying.getsockname()[1]

    def restart():
        with dying:
            dying.accept()[0].close()
        time.sleep(1.5)  # the second request, after 1 s, is refused
        with HTTPServer(("127.0.0.1", port), Deleting) as again:
            again.timeout = 60
            again.handle_request()

    service = threading.Thread(target=restart)
    service.start()
    with hashseek.Client(f"http://127.0.0.1:{port}") as remote:
        remote.delete(1)
    service.join()


def test_errors_name_the_service_and_the_reason(reader):
    remote = hashseek.Client(URL, http=reader)
    for call, status, kind in (
        (lambda: remote.get(99), 404, "UnknownImage"),
        (lambda: remote.get(".."), 404, "UnknownImage"),
        (lambda: remote.search(b"no picture"), 422, "BadImage"),
        (lambda: remote.search(), 422, "BadRequest"),
        (lambda: remote.similar(1, k=0), 422, "BadRequest"),
        (lambda: remote.delete(".."), 403, "ReadOnly"),
        (lambda: remote.search_each([{"vector": [1.0]}]), 422, "BadCheckpoint"),
        (lambda: remote.search_url("https://pictures.example/1.jpg", k=3), 422, "BadConfig"),
    ):
        with pytest.raises(hashseek.ServiceError, match=URL) as refused:
            call()
        assert (refused.value.status, refused.value.kind) == (status, kind)
    for call, kind in (
        (lambda: remote.add(png(1), labels="zebra"), BadConfig),
        (lambda: remote.search("no"), BadImage),
        (lambda: remote.search([png(1), png(2)]), BadImage),
    ):
        with pytest.raises(kind):
            call()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(0)
        started = time.monotonic()
        url = "http://127.0.0.1:{1}".format(*silent.getsockname())
        with hashseek.Client(url, timeout=0.1) as impatient, pytest.raises(hashseek.ServiceError) as late:
            impatient.stats()
        assert (late.value.status, time.monotonic() - started < 30) == (None, True)  # the default is 60
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it was asked once
            silent.accept()
    with (
        pytest.raises(hashseek.ServiceError, match=str(port)) as unreachable,
        hashseek.Client(f"http://127.0.0.1:{port}") as nobody,
    ):
        nobody.stats()
    assert unreachable.value.status is None


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "http://127.0.0.1:port"])
@pytest.mark.parametrize("kind", [hashseek.Client, hashseek.AsyncClient])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch, proxy, kind):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(hashseek.ServiceError, match="ALL_PROXY"):
        kind("http://127.0.0.1:9")


def test_a_key_is_sent_with_every_request():
    """The service of httpx's own mock answers what it was sent; there is no other way to see a header."""
    seen = []

    def answer(request):
        seen.append(request.headers["Authorization"])
        return httpx.Response(200, content=b"picture")

    with hashseek.Client(URL, api_key="secret\n", http=httpx.Client(transport=httpx.MockTransport(answer))) as remote:
        assert remote.file(1) == b"picture"
        for call in (remote.stats, lambda: next(remote.add_many([b"picture"]))):
            with pytest.raises(hashseek.ServiceError, match=URL):
                call()
    assert seen == ["Bearer secret"] * 3
    for wrong in ("secr\net", "s\u00e9cret"):
        with pytest.raises(BadConfig):
            hashseek.Client(URL, api_key=wrong)


def test_a_thousand_calls_at_once_are_sent_a_few_at_a_time():
    n_open, most = 0, 0

    async def answer(_):
        nonlocal n_open, most
        n_open += 1
        most = max(most, n_open)
        await asyncio.sleep(0.001)
        n_open -= 1
        return httpx.Response(200, content=b"picture")

    async def ask():
        async with hashseek.AsyncClient(URL, http=httpx.AsyncClient(transport=httpx.MockTransport(answer))) as client:
            calls = [client.file(number) for number in range(1, 1001)]
            batches = [anext(client.add_many([b"picture"])) for _ in range(100)]
            return await asyncio.gather(*calls, *batches, return_exceptions=True)

    assert asyncio.run(ask())[:1000] == [b"picture"] * 1000
    assert most == 16


def test_waiting_grows_and_has_a_limit(monkeypatch):
    monkeypatch.setattr(client_module.random, "random", lambda: 0.5)
    for header, first in (("7", 7), ("", 1), ("soon", 1), ("99999", 60)):
        waits = [client_module._wait(httpx.Response(503, headers={"Retry-After": header}), n) for n in range(4)]
        assert waits == [first, first + 0.5, first + 1, first + 1.5]
