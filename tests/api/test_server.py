"""The service as a process: how it starts, how it stops, and what a kill leaves behind."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from hashseek.indexing.collection import Collection
from support.commands import wait_until
from support.pictures import draw


def png(seed):
    buffer = io.BytesIO()
    draw(seed).save(buffer, "PNG")
    return buffer.getvalue()


def address(text):
    """The address that a starting server prints, or None."""
    found = re.search(r"search page on (http://\S+?),", text)
    return found and found[1]


@pytest.fixture
def serve(start):
    """Start `hashseek serve` on a free port: (collection, options) -> (process, client of it)."""
    clients = []

    def serve_collection(folder, *options, ready=True, before=""):
        process = start("serve", folder, "--port", 0, "--device", "cpu", *options, before=before)
        wait_until(lambda: address(process.err) or process.ended)
        client = httpx.Client(base_url=address(process.err), timeout=60)
        clients.append(client)
        if ready:
            wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        return process, client

    yield serve_collection
    for client in clients:
        client.close()


SLOW = """
import hashseek.api.service, time
load = hashseek.api.service.Service._load
def slowly(self):
    time.sleep(1.5)
    load(self)
hashseek.api.service.Service._load = slowly
"""


def test_it_answers_from_the_start_and_is_ready_when_loaded(serve, indexed):
    _, client = serve(indexed, "--read-only", ready=False, before=SLOW)
    assert client.get("/healthz/live").status_code == 200
    response = client.get("/healthz/ready")
    assert response.status_code == 503
    assert "being loaded" in response.json()["detail"]
    wait_until(lambda: client.get("/healthz/ready").status_code == 200)
    hits = client.post("/v1/search", files={"image": png(0)}).json()["hits"]
    assert len(hits) == 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order_within_seconds(serve, own_collection, number):
    process, client = serve(own_collection, before="finish = in_order")  # with all that Python does at its end
    assert client.post("/v1/images", files={"image": png(900)}).status_code == 201
    started = time.monotonic()
    process.send(number)
    assert process.wait() == 0
    assert time.monotonic() - started < 30  # seconds, on a machine that may be busy
    assert "Traceback" not in process.err
    assert len(process.err.splitlines()) == 1
    collection = Collection(own_collection, read_only=True)
    assert (len(collection), collection.describe_index()["built"]) == (13, 13)
    collection.close()


def test_a_signal_while_it_loads_ends_it_too(serve, own_collection):
    process, _ = serve(own_collection, ready=False, before=f"finish = in_order\n{SLOW}")
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert "Traceback" not in process.err


def test_a_signal_during_requests_lets_them_finish(serve, own_collection):
    process, client = serve(own_collection)
    before = client.get("/v1/stats").json()["n_images"]
    stored, failures = [], []

    def upload(worker):
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            for number in range(50):
                try:
                    response = own.post("/v1/images", files={"image": png(3000 + 100 * worker + number)})
                except httpx.TransportError:
                    return  # the server has gone, as it was told to
                (stored if response.status_code == 201 else failures).append(response.text)

    threads = [threading.Thread(target=upload, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(stored) >= 5)
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    for thread in threads:
        thread.join()
    assert failures == []
    collection = Collection(own_collection, read_only=True)
    assert len(collection) >= before + len(stored)
    assert collection.verify() == []
    collection.close()


def test_kill_9_keeps_what_was_acknowledged(serve, own_collection):
    process, client = serve(own_collection)
    ids = [client.post("/v1/images", files={"image": png(seed)}).json()["id"] for seed in range(910, 915)]
    assert client.delete(f"/v1/images/{ids[2]}").status_code == 204
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process, client = serve(own_collection)
    for position, image_id in enumerate(ids):
        response = client.get(f"/v1/images/{image_id}/file")
        assert response.status_code == (404 if position == 2 else 200)
        if position != 2:
            assert response.content == png(910 + position)
            hits = client.post("/v1/search", files={"image": png(910 + position)}, data={"k": 100}).json()["hits"]
            assert image_id in [hit["id"] for hit in hits if hit["distance"] == 0]
    assert client.get("/v1/stats").json()["n_images"] == 16


def test_kill_9_in_the_middle_of_uploads(serve, own_collection):
    process, client = serve(own_collection)
    acknowledged = []

    def upload():
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            for seed in range(5000, 5100):
                try:
                    acknowledged.append(own.post("/v1/images", files={"image": png(seed)}).json()["id"])
                except httpx.TransportError:
                    return

    thread = threading.Thread(target=upload)
    thread.start()
    wait_until(lambda: len(acknowledged) >= 5)
    process.send(signal.SIGKILL)
    process.wait()
    thread.join()
    collection = Collection(own_collection)
    stored = {image.id for image in collection.catalog.page(after=0, limit=1000)}
    assert set(acknowledged) <= stored
    assert len(stored) - 12 - len(acknowledged) in (0, 1)
    assert collection.verify() == []
    collection.close()


def test_a_port_in_use_is_one_sentence(hashseek, indexed):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = hashseek("serve", indexed, "--port", port)
    assert (code, out) == (2, "")
    sentence = f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port or --host"
    assert err == f"hashseek: {sentence}\n"


def test_settings_come_from_the_environment_and_options_win(serve, indexed, hashseek):
    variables = {
        "HASHSEEK_MAX_UPLOAD_BYTES": "2000",
        "HASHSEEK_MAX_K": "3",
        "HASHSEEK_READ_ONLY": "1",
        "HASHSEEK_PORT": "1",
    }
    _, client = serve(indexed, before=f"os.environ.update({variables!r})")
    assert client.get("/v1/stats").json()["read_only"] is True
    assert client.post("/v1/search", files={"image": b"x" * 3000}).status_code == 413
    assert "1 to 3, not 4" in client.get("/v1/images/1/similar", params={"k": 4}).json()["detail"]
    code, _, err = hashseek("serve", indexed, before="os.environ['HASHSEEK_MAX_K'] = 'many'")
    assert code == 2
    assert err.startswith("hashseek: the setting max_k is 'many'")
    assert err.count("\n") == 1


def test_a_body_that_is_too_large_is_answered_though_it_is_not_read(serve, indexed):
    _, client = serve(indexed, "--read-only", before="os.environ['HASHSEEK_MAX_UPLOAD_BYTES'] = '1000'")
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port), timeout=60) as raw:
        raw.sendall(b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 1000)
        answer = raw.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 413 ")
    with socket.create_connection((host, port), timeout=60) as raw:
        raw.sendall(b"POST /v1/search HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        answer = raw.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 411 ")


def test_a_client_that_hangs_up_in_the_middle_harms_nobody(serve, indexed):
    process, client = serve(indexed, "--read-only")
    host, port = client.base_url.host, client.base_url.port
    for _ in range(5):
        with socket.create_connection((host, port), timeout=60) as raw:
            raw.sendall(
                b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n"
                b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
            )
    assert client.post("/v1/search", files={"image": png(0)}).status_code == 200
    assert "Traceback" not in process.err


def test_the_installed_command_serves_until_it_is_told_to_stop(own_collection):
    command = Path(sys.executable).parent / "hashseek"
    environment = {**os.environ, "HASHSEEK_COLLECTION": str(own_collection), "HASHSEEK_PORT": "0"}
    with subprocess.Popen([command, "serve"], stderr=subprocess.PIPE, text=True, env=environment) as process:
        base = address(process.stderr.readline())
        with httpx.Client(base_url=base, timeout=60) as client:
            wait_until(lambda: client.get("/healthz/ready").status_code == 200)
            assert len(client.post("/v1/search", files={"image": png(1)}).json()["hits"]) == 10
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
