"""Clients of a running service, as a process that imports only the standard library; `bench/serve.py` starts it.

    python bench/http_load.py < order.json > outcome.json

Every client is a thread with one kept connection. Without a rate it sends its next request as soon as it has an answer;
with one, requests are due at equal intervals, and latency counts from the time when a request was due. `Client` sends
the mix of requests of `bench/soak.py`.
"""

import hashlib
import itertools
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOUNDARY = "hashseek-bench"

# Operations: share of the requests (%), and the status of a success. As many images are added as deleted.
MIX = {"upload": (40, 200), "id": (30, 200), "list": (6, 200), "add": (8, 201), "relabel": (8, 200), "delete": (8, 204)}
REFUSALS = (429, 503)
THREADS = 8  # of a client process
Stored = dict[str, tuple[int, str, tuple[str, ...]]]  # by key: id, SHA-256 and labels


def post(path: str, image: bytes, *, labels: Sequence[str] = (), **fields: object) -> bytes:
    """A form with a picture."""
    pairs = [*fields.items(), *(("labels", label) for label in labels)]
    parts = [
        *(f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in pairs),
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


class Client:
    """One process of clients. `stored` has the answers they got; `unsure` are keys of changes that failed."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.pictures = [Path(file).read_bytes() for file in order["files"]]
        self.counts: Counter[tuple[str, int]] = Counter()
        self.latencies: list[float] = []
        self.stored: Stored = {}
        self.unsure: set[str] = set()
        self.numbers = itertools.count()

    def run(self) -> dict[str, Any]:
        """Send requests until the time is over."""
        self.started = time.perf_counter()
        threads = [threading.Thread(target=self.work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: getattr(self, name) for name in ("counts", "latencies", "stored", "unsure")}

    def work(self, thread: int) -> None:
        """One connection after the other; a new one only if the service closed the last."""
        rng, mine, connection = random.Random(f"{self.order['name']}-{thread}"), Stored(), None
        rate = self.order["rate"]
        while True:
            number = next(self.numbers)
            due = self.started + number / rate if rate else time.perf_counter()
            if due - self.started >= self.order["seconds"]:
                self.stored.update(mine)
                return
            time.sleep(max(due - time.perf_counter(), 0))
            [operation] = rng.choices(list(MIX), [share for share, _ in MIX.values()])
            if operation in ("relabel", "delete") and not mine:
                operation = "add"
            if operation == "add":
                key = f"{self.order['name']}-{thread}-{number}"
            else:
                key = rng.choice(list(mine)) if mine else ""
            sent, after = self.request(operation, key, mine, rng)
            try:
                connection = connection or connect(self.order["port"])
                connection.sendall(with_key(sent, self.order["secret"]))
                status, body = answer(connection)
            except OSError:
                status, body, connection = 0, b"", None
            self.latencies.append(1000 * (time.perf_counter() - due))
            self.counts[operation, status] += 1
            if operation not in ("add", "relabel", "delete") or status in REFUSALS:
                continue
            mine.pop(key, None)
            if status != MIX[operation][1]:
                self.unsure.add(key)
            elif after is not None:
                mine[key] = (json.loads(body)["id"], *after)

    def request(
        self, operation: str, key: str, mine: Stored, rng: random.Random
    ) -> tuple[bytes, tuple[str, tuple[str, ...]] | None]:
        """A request, and SHA-256 and labels of the image after it."""
        picture, labels = rng.choice(self.pictures), (f"a{rng.randrange(50)}", f"b{rng.randrange(50)}")
        image_id = mine[key][0] if key in mine else 0
        if operation == "upload":
            return post("/v1/search", picture, k=10), None
        if operation == "id":
            image_id = image_id if image_id and rng.random() < 0.3 else rng.choice(self.order["ids"])
            return request("GET", f"/v1/images/{image_id}/similar?k=10"), None
        if operation == "list":
            return request("GET", f"/v1/images?limit=24&offset={rng.randrange(1000)}"), None
        if operation == "add":
            picture += key.encode()  # after the end of the JPEG: another file with the same pixels
            sha256 = hashlib.sha256(picture).hexdigest()
            return post("/v1/images", picture, key=key, labels=labels), (sha256, labels)
        if operation == "relabel":
            change = json.dumps({"labels": labels}).encode()
            return request("PATCH", f"/v1/images/{image_id}", change), (mine[key][1], labels)
        return request("DELETE", f"/v1/images/{image_id}"), None


if __name__ == "__main__":
    json.dump(load(json.load(sys.stdin)), sys.stdout)
