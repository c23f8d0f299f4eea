"""Changes that are sent again with the same Idempotency-Key are done once."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import pytest

import hashseek
from hashseek.api.access import repeats
from hashseek.api.collections.service import Service
from hashseek.api.messages.schemas import NDJSON
from support.pictures import draw, encoded, png
from support.service import assert_problem, serving


def key(name):
    return {"Idempotency-Key": name}


def upload(client, number, name, **options):
    return client.post("/v1/images", files={"image": png(number)}, headers=key(name), **options)


def removal(client, headers, label="odd"):
    return client.delete("/v1/images", params={"label": label, "expected": 6}, headers=headers)


def test_a_repeated_change_is_answered_as_before_and_done_once(client):
    first = removal(client, key("a"))
    assert first.json() == {"removed": 6}
    again = removal(client, key("a"))
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["X-Request-ID"] != first.headers["X-Request-ID"]
    assert_problem(removal(client, {}), 409, "UnexpectedNumber")

    added = upload(client, 77, "b")
    deleted = [client.delete(f"/v1/images/{added.json()['id']}", headers=key("c")) for _ in range(2)]
    assert [answer.status_code for answer in deleted] == [204, 204]
    assert upload(client, 77, "b").json() == added.json()  # although it was deleted meanwhile
    assert upload(client, 77, "d").json()["id"] > added.json()["id"]


def test_a_key_belongs_to_one_request(client):
    assert upload(client, 77, "a").status_code == 201
    assert upload(client, 77, "a").json()["change"] == "added"
    assert_problem(upload(client, 77, "a", params={"x": "1"}), 422, "BadRequest")
    assert removal(client, key("a")).json() == {"removed": 6}
    left = client.get("/v1/images", headers=key("a")).json()
    assert left["total"] == 7
    for image in left["images"][:2]:
        address = f"/v1/images/{image['id']}"
        assert client.patch(address, json={}, headers=key("a")).json() == image
        assert client.delete(address, headers=key("a")).status_code == 204
    assert_problem(upload(client, 78, "a" * 256), 422, "BadRequest")
    assert upload(client, 78, "a" * 255).status_code == 201


def test_an_error_is_not_repeated(own_collection, monkeypatch):
    go_on, load = threading.Event(), Service._load
    monkeypatch.setattr(Service, "_load", lambda self: (go_on.wait(60), load(self)))
    with serving(own_collection, ready=False) as client:
        assert_problem(upload(client, 77, "a"), 503, "NotReady")
        go_on.set()
        remote = hashseek.Client("http://localhost", http=client, retries=60)
        remote.stats()
        with monkeypatch.context() as broken:
            broken.setattr(Service, "searcher", property(lambda _: 1 / 0))
            assert_problem(upload(client, 77, "a"), 500)
        assert upload(client, 77, "a").status_code == 201


def test_a_change_in_progress_is_not_begun_again(serve, own_collection):
    _, client = serve(own_collection)
    files = {"image": encoded(draw(77, (200, 150)), "BMP")}  # a change with a small body begins once that has arrived
    request = client.build_request("POST", "/v1/images", files=files, headers=key("a"))
    body = request.read()
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as slow:
        slow.sendall(f"POST /v1/images HTTP/1.1\r\n{head}Expect: 100-continue\r\n\r\n".encode())
        assert slow.recv(1000).startswith(b"HTTP/1.1 100")  # it was accepted, and its body is waited for
        waiting = upload(client, 77, "a")
        assert_problem(waiting, 503, "StillWorking")
        assert waiting.headers["Retry-After"] == "1"
        slow.sendall(body)
        assert slow.recv(1000).startswith(b"HTTP/1.1 201")
    assert upload(client, 77, "a").json()["change"] == "added"
    assert client.post("/v1/images", files=files, headers=key("b")).json()["change"] == "known"


@pytest.mark.parametrize(
    ("status", "media_type", "n_runs"), [(200, "application/json", 1), (200, NDJSON, 2), (400, "application/json", 2)]
)
def test_a_change_is_over_when_its_answer_is(status, media_type, n_runs):
    """Although the service still cleans up: a client with the whole answer may repeat its request at once."""
    runs = []

    async def app(scope, receive, send):
        runs.append(scope)
        headers = [(b"content-type", media_type.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})
        await done.wait()

    async def answered():
        messages, is_whole = [], asyncio.Event()

        async def send(message):
            messages.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                is_whole.set()

        headers = [(b"idempotency-key", b"a")]
        scope = {"type": "http", "method": "POST", "path": "/v1/images", "query_string": b"", "headers": headers}
        tasks.append(asyncio.create_task(repeated(scope, None, send)))
        await asyncio.wait_for(is_whole.wait(), 60)
        return messages

    async def twice():
        first, second = await answered(), await answered()
        done.set()
        await asyncio.gather(*tasks)
        return first, second

    repeated, done, tasks = repeats.RepeatedChanges(app), asyncio.Event(), []
    first, second = asyncio.run(twice())
    assert first == second
    assert len(runs) == n_runs


def test_old_answers_are_forgotten(client, monkeypatch):
    monkeypatch.setattr(repeats, "_KEPT_BYTES", 3500)
    assert removal(client, key("a")).is_success
    assert upload(client, 77, "b").status_code == 201
    assert removal(client, key("a")).is_success
    assert upload(client, 78, "c").status_code == 201
    assert_problem(removal(client, key("a")), 409, "UnexpectedNumber")


@contextmanager
def unreliable(address):
    """An address that passes requests on to another one, and loses the first answer."""
    lost = []

    def serve(listener):
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:  # closed
                return
            with asking, socket.create_connection(address) as service:
                service.sendall(asking.recv(100_000).replace(b"keep-alive", b"close"))
                answer = b"".join(iter(lambda: service.recv(100_000), b""))
                if lost:
                    asking.sendall(answer)
                lost.append(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1], lost
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_clients_send_a_change_again_whose_answer_was_lost(serve, own_collection):
    _, client = serve(own_collection)
    address = client.base_url.host, client.base_url.port

    async def remove_even(url):
        async with hashseek.AsyncClient(url) as remote:
            return await remote.delete_where(6, label=["even"])

    with unreliable(address) as (port, lost), hashseek.Client(f"http://127.0.0.1:{port}") as remote:
        assert remote.delete_where(6, label=["odd"]).removed == 6
    assert lost[0].startswith(b"HTTP/1.1 200")
    with unreliable(address) as (port, lost):
        assert asyncio.run(remove_even(f"http://127.0.0.1:{port}")).removed == 6
    assert lost[0].startswith(b"HTTP/1.1 200")
    assert client.get("/v1/stats").json()["n_images"] == 0
