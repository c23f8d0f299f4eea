"""Clients of a running service, as a process that imports only the standard library; `bench/serve.py` starts it.

    python bench/http_load.py < order.json > outcome.json

Every client is a thread with one kept connection. Without a rate it sends its next request as soon as it has an answer;
with one, requests are due at equal intervals, and latency counts from the time when a request was due.
"""

import itertools
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

BOUNDARY = "hashseek-bench"


def post(path: str, image: bytes, **fields: object) -> bytes:
    """A form with a picture."""
    parts = [
        *(f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()),
        b'Content-Disposition: form-data; name="image"; filename="picture"\r\n\r\n' + image,
    ]
    body = b"".join(b"--%s\r\n%s\r\n" % (BOUNDARY.encode(), part) for part in parts)
    form = f"multipart/form-data; boundary={BOUNDARY}"
    return request("POST", path, body + f"--{BOUNDARY}--\r\n".encode(), form)


def request(method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    """A request whose body has this media type."""
    about = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{about}\r\n".encode() + body


def connect(port: int, timeout: float = 120) -> socket.socket:
    """A connection to the service on this machine."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def with_key(sent: bytes, secret: str) -> bytes:
    """The request with an API key."""
    return sent.replace(b"\r\n", b"\r\nAuthorization: Bearer %s\r\n" % secret.encode(), 1)


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read one answer; its status and body."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += _more(connection)
    head, body = received[:end].lower(), bytearray(received[end + 4 :])
    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)  # 204 has none
    while len(body) < length:
        body += _more(connection)
    return int(head.split(b" ", 2)[1]), bytes(body)


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(2**16)
    if not data:
        raise ConnectionError("the service closed the connection")
    return data


def load(order: dict[str, Any]) -> dict[str, Any]:
    """Send requests for `seconds` from `clients` threads; latencies (ms) and statuses of the answers."""
    requests = [post("/v1/search", Path(file).read_bytes(), k=order["k"]) for file in order.get("files", ())]
    requests += [request("GET", path) for path in order.get("paths", ())]
    numbers, rate = itertools.count(), order.get("rate")
    outcomes: list[tuple[float, int]] = []
    ready = threading.Barrier(order["clients"] + 1)
    started = 0.0

    def client() -> None:
        with connect(order["port"]) as connection:
            ready.wait()
            ready.wait()
            while True:
                number = next(numbers)
                due = time.perf_counter() if rate is None else started + number / rate
                if due - started >= order["seconds"]:
                    return
                time.sleep(max(due - time.perf_counter(), 0))
                connection.sendall(requests[number % len(requests)])
                status, _ = answer(connection)
                outcomes.append((1000 * (time.perf_counter() - due), status))

    threads = [threading.Thread(target=client) for _ in range(order["clients"])]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    ready.wait()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    statuses = [status for _, status in outcomes]
    return {
        "per_second": len(outcomes) / seconds,
        "latencies": sorted(latency for latency, _ in outcomes),
        "statuses": {str(status): statuses.count(status) for status in set(statuses)},
    }


if __name__ == "__main__":
    json.dump(load(json.load(sys.stdin)), sys.stdout)
