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


def upload(file: str, k: int) -> bytes:
    """A search with the picture in a file."""
    parts = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="k"\r\n\r\n{k}\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="picture"\r\n\r\n'
    )
    body = parts.encode() + Path(file).read_bytes() + f"\r\n--{BOUNDARY}--\r\n".encode()
    head = (
        "POST /v1/search HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(path: str) -> bytes:
    """A request without a body."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def answer(connection: socket.socket) -> int:
    """Read one answer; its status."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += _more(connection)
    head = received[:end].lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    missing = end + 4 + length - len(received)
    while missing > 0:
        missing -= len(_more(connection))
    return int(head.split(b" ", 2)[1])


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(2**16)
    if not data:
        raise ConnectionError("the service closed the connection")
    return data


def load(order: dict[str, Any]) -> dict[str, Any]:
    """Send requests for `seconds` from `clients` threads; latencies (ms) and statuses of the answers."""
    requests = [upload(file, order["k"]) for file in order.get("files", ())] + [get(p) for p in order.get("paths", ())]
    numbers, rate = itertools.count(), order.get("rate")
    outcomes: list[tuple[float, int]] = []
    ready = threading.Barrier(order["clients"] + 1)
    started = 0.0

    def client() -> None:
        with socket.create_connection(("127.0.0.1", order["port"]), timeout=120) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready.wait()
            ready.wait()
            while True:
                number = next(numbers)
                due = time.perf_counter() if rate is None else started + number / rate
                if due - started >= order["seconds"]:
                    return
                time.sleep(max(due - time.perf_counter(), 0))
                connection.sendall(requests[number % len(requests)])
                status = answer(connection)
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
