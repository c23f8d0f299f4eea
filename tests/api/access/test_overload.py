"""More than the service can do: too many uploads, waiting too long, slow, idle and too many connections."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import httpx

from hashseek.api import decoding
from support.commands import wait_until
from support.pictures import png
from support.service import assert_problem, figures, hits, search, serving

IMPATIENT = "import hashseek.api.access.connections as c; c.HEADER_SECONDS = c.BODY_SECONDS = 0.5"
FIRST = b"GET /healthz/live HTTP/1.1\r\nHost: localhost\r\n\r\n"  # it is answered, and the connection stays open
HEADERS = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\nContent-Type: multipart/form-data"


def test_200_uploads_at_once_are_answered_or_refused_and_none_is_lost(serve, indexed):
    _, client = serve(indexed, "--read-only", "--max-uploads", 20)
    start = threading.Barrier(201)

    def upload(number):
        data = png(number)
        start.wait()
        return own.post("/v1/search", files={"image": data}).status_code

    no_limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=client.base_url, timeout=120, limits=no_limits) as own, ThreadPoolExecutor(200) as pool:
        answers = [pool.submit(upload, number) for number in range(200)]
        start.wait()
        while not all(answer.done() for answer in answers):
            assert client.get("/healthz/live").status_code == 200
        statuses = [answer.result() for answer in answers]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 20
    assert figures(client)["hashseek_errors_total", "Overloaded"] == statuses.count(503)


def test_an_upload_that_waits_too_long_is_refused_while_searches_by_id_go_on(indexed, monkeypatch):
    n = 60  # more than the threads that the web framework has by default
    with serving(indexed, read_only=True, max_uploads=n) as client, ThreadPoolExecutor(n) as pool:
        with client.app.state.collections.decoders.cores.hold(1000):
            waiting = [pool.submit(search, client, png(1), rank="asymmetric") for _ in range(n)]
            wait_until(lambda: figures(client)["hashseek_queue_length",] == n)
            assert hits(client.get("/v1/images/1/similar"))
            assert not any(one.done() for one in waiting)
        assert all(hits(one.result()) for one in waiting)
        monkeypatch.setattr(decoding, "WAIT_SECONDS", 0.2)
        with client.app.state.collections.decoders.cores.hold(1000):
            refused = search(client, png(1), rank="asymmetric")
        assert_problem(refused, 503, "Overloaded")
        assert refused.headers["Retry-After"] == "1"
        assert hits(search(client, png(1), rank="asymmetric"))
        assert figures(client)["hashseek_queue_length",] == 0


def is_closed(connection, sent):
    """Send something and look whether the other side has closed the connection."""
    try:
        connection.sendall(sent)
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_connection_that_sends_too_slowly_is_closed(serve, indexed):
    process, client = serve(indexed, "--read-only", before=IMPATIENT)
    assert client.get("/healthz/live").is_success
    with ExitStack() as stack:
        beginnings = (b"", b"GET /healthz", FIRST + b"GET /", HEADERS, HEADERS + b"; boundary=x\r\n\r\n--x")
        slow = {sent: connected(client, stack, sent) for sent in beginnings}
        for connection in slow.values():
            connection.settimeout(0.1)
        # Those that have begun go on sending, so they are never idle.
        wait_until(lambda: sum(is_closed(one, b"x" if sent else b"") for sent, one in slow.items()) == len(slow))
    time.sleep(1)  # kept alive between two requests, which have all the time they need
    assert client.get("/healthz/live").is_success
    assert hits(client.post("/v1/search", files={"image": png(1)}))
    assert len(process.err.splitlines()) == 1


def connected(client, stack, sent):
    """A connection on which this was sent."""
    connection = stack.enter_context(socket.create_connection((client.base_url.host, client.base_url.port)))
    connection.sendall(sent)
    return connection


def test_small_bodies_that_do_not_arrive_keep_nobody_out(serve, indexed):
    _, client = serve(indexed, "--read-only", "--max-uploads", 4)
    with ExitStack() as stack:
        slow = [connected(client, stack, HEADERS + b"; boundary=x\r\n\r\n--") for _ in range(8)]
        wait_until(lambda: figures(client)["hashseek_requests_in_progress",] == 9)
        assert hits(client.post("/v1/search", files={"image": png(1)}))
        assert hits(client.post("/v1/search", json={"image_id": 1}))
        slow[0].sendall(b"x" * 898)
        assert slow[0].recv(1000).startswith(b"HTTP/1.1 4")


def test_a_body_that_stops_is_closed_soon_but_one_that_goes_on_is_read(serve, indexed):
    impatient = "import hashseek.api.access.connections as c; c.IDLE_SECONDS = 2"
    _, client = serve(indexed, "--read-only", "--max-uploads", 2, before=impatient)
    large = HEADERS.replace(b"900", b"900000") + b"; boundary=x\r\n\r\n--"
    with ExitStack() as stack:
        stopped = [connected(client, stack, large) for _ in range(2)]
        wait_until(lambda: figures(client)["hashseek_requests_in_progress",] == 3)
        wait_until(lambda: client.post("/v1/search", files={"image": png(1)}).is_success)
        assert [connection.recv(1000) for connection in stopped] == [b"", b""]
        going = connected(client, stack, HEADERS + b"; boundary=x\r\n\r\n")
        for _ in range(9):
            time.sleep(0.3)
            going.sendall(b"x" * 100)
        assert going.recv(1000).startswith(b"HTTP/1.1 4")


def test_a_body_that_the_service_itself_is_slow_to_read_is_waited_for(serve, indexed):
    slow = """
import asyncio
import hashseek.api.access.connections as c
from starlette.datastructures import UploadFile
async def write(self, data, pauses=[2.5], original=UploadFile.write):
    await asyncio.sleep(pauses.pop() if pauses else 0)
    await original(self, data)
c.IDLE_SECONDS, UploadFile.write = 1.0, write
"""
    _, client = serve(indexed, "--read-only", before=slow)
    assert_problem(client.post("/v1/search", files={"image": bytes(900_000)}), 422, "BadImage")


def test_a_connection_with_endless_headers_is_closed(serve, indexed):
    """The parser of the headers keeps them whole, so a single connection could fill the memory within the 10 s."""
    _, client = serve(indexed, "--read-only")
    for head in (b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX", FIRST + b"GET /"):
        with ExitStack() as stack:
            endless = connected(client, stack, head)
            started, sent = time.monotonic(), 0
            with suppress(ConnectionError):
                while time.monotonic() - started < 20:
                    sent += endless.send(b"a" * 2**16)
        assert sent < 2**24, head  # most of it in buffers of the system
    assert client.get("/healthz/live", headers={"X": "a" * 50_000}).is_success
    assert hits(client.post("/v1/search", files={"image": png(1)}))


def test_with_few_file_descriptors_connections_beyond_them_are_closed_without_a_word(serve, indexed):
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    process, client = serve(indexed, "--read-only", before=few)
    with ExitStack() as opened:
        for _ in range(400):
            opened.enter_context(closing(socket.create_connection((client.base_url.host, client.base_url.port))))
        assert client.get("/healthz/live").is_success  # on the connection that was there before
        assert hits(client.post("/v1/search", files={"image": png(1)}))
    wait_until(lambda: httpx.get(client.base_url.join("/healthz/live")).is_success)
    assert len(process.err.splitlines()) == 1


def test_a_client_that_leaves_before_its_requests_are_answered_is_no_fault(serve, indexed):
    process, client = serve(indexed, "--read-only")
    request = b"GET /web/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for _ in range(30):
        with ExitStack() as stack:
            connected(client, stack, request * 20)
    with ExitStack() as stack:
        patient = connected(client, stack, request * 20)
        patient.settimeout(10)
        answers = b""
        while answers.count(b"HTTP/1.1 200 OK") < 20:
            answers += patient.recv(2**16)
    assert figures(client).get(("hashseek_errors_total", "about:blank"), 0) == 0
    assert len(process.err.splitlines()) == 1
