"""Malformed pictures and requests for a running service; `bench/soak.py --hostile` starts it as a process.

Pictures of every kind with flipped bytes, cut off, spliced, two kinds in one file, with huge sizes in the header, with
many frames or scans, and small files that decode to 80 megapixels. Requests with endless, huge or wrong headers, wrong
lengths, broken chunks, paths that lead elsewhere, guessed keys; and connections that send their headers or body slowly.
"""

import hashlib
import io
import itertools
import json
import random
import socket
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
from http_load import BOUNDARY, answer, connect, post, request, with_key
from PIL import Image, ImageDraw

THREADS = 6  # that send pictures
N_SLOW = 100  # connections that send a byte of their headers a second, and as many a byte of their body
EVIL = (
    "../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fcatalog.sqlite",
    "a\x00b",
    "\ud7ff" * 600,
    "C:\\x",
    "'; DROP TABLE",
    "${jndi:x}",
)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def kinds() -> tuple[str, ...]:
    """The kinds of pictures that this Pillow writes."""
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    return tuple(kind for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "HEIF") if kind in Image.SAVE)


def sound() -> dict[str, bytes]:
    """Small valid pictures, from which the malformed ones are made."""
    image = Image.effect_mandelbrot((160, 120), (-2, -1.5, 1, 1.5), 90).convert("RGB")
    frames = [image.rotate(10 * number) for number in range(5)]
    found = {kind: encoded(image, kind) for kind in kinds()}
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        found[f"{kind} with frames"] = encoded(image, kind, save_all=True, append_images=frames)
    found["JPEG, progressive"] = encoded(image, "JPEG", progressive=True)
    found["PNG, 16 bits"] = encoded(Image.fromarray(np.arange(19200, dtype=np.uint16).reshape(120, 160)), "PNG")
    found["PNG, palette"] = encoded(image.quantize(), "PNG", transparency=3)
    found["TIFF, CMYK"] = encoded(image.convert("CMYK"), "TIFF", compression="tiff_lzw")
    return found


def bombs() -> list[bytes]:
    """Small files that need much memory or time: 80 megapixels, 400, 2,000 frames, 3,000 scans, 100 in run lengths."""
    side = 8944
    big = Image.new("L", (side, side), 7)
    palette = big.convert("P")
    found = [
        encoded(palette, "PNG", transparency=3),
        encoded(big, "GIF"),
        encoded(big, "TIFF", compression="tiff_deflate"),
    ]
    found.append(encoded(Image.new("L", (20_000, 20_000)), "PNG"))
    small = Image.new("RGB", (6000, 6000), "red")
    options = {"WEBP": {"lossless": True, "method": 0, "quality": 0}, "AVIF": {"speed": 10}}
    found += [encoded(small, kind, **options.get(kind, {})) for kind in kinds() if kind in ("WEBP", "AVIF", "HEIF")]
    frames = [Image.new("P", (400, 400), number % 256) for number in range(2000)]
    for number, frame in enumerate(frames):
        ImageDraw.Draw(frame).point((number % 400, 0), 0)
    found.append(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    scans = encoded(Image.new("RGB", (6000, 6000)), "JPEG", progressive=True)
    last = scans[scans.rindex(b"\xff\xda") : -2]
    run_length = bytearray(encoded(Image.new("P", (1, 1)), "BMP")[: 54 + 1024])
    run_length[18:26], run_length[30] = 2 * (10_000).to_bytes(4, "little"), 1
    found.append(bytes(run_length) + 10_000 * b"\1\7\0\0")
    return [*found, scans[:-2] + 3000 * last + scans[-2:]]


def mutants(seed: int) -> Iterator[bytes]:
    """Malformed pictures without end."""
    rng, whole = random.Random(seed), sound()
    originals, heavy = list(whole.values()), bombs()
    yield b""  # by now the bombs are made
    numbers = (0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)

    def flip(data: bytearray) -> None:
        for _ in range(rng.choice((1, 3, 10, 100))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def cut(data: bytearray) -> None:
        del data[rng.randrange(len(data)) :]

    def splice(data: bytearray) -> None:
        other = rng.choice(originals)
        data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]

    def append(data: bytearray) -> None:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("../../x.html", "<script>alert(1)</script>")
        data += rng.choice((*originals, archive.getvalue(), b"<script>alert(1)</script>", b"%PDF-1.7\n", b"\0" * 2**20))

    def prepend(data: bytearray) -> None:
        data[:0] = rng.choice(
            (b"<svg>", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe1\xff\xff", b"II*\0", b"PK\3\4")
        )

    def enlarge(data: bytearray) -> None:
        place, size = rng.randrange(min(64, len(data))), rng.choice((2, 4))
        data[place : place + size] = (rng.choice(numbers) % 256**size).to_bytes(size, rng.choice(("big", "little")))

    def repeat(data: bytearray) -> None:
        first = rng.randrange(len(data))
        last = min(len(data), first + rng.choice((4, 100, 4000)))
        data[first:last] = data[first:last] * rng.choice((2, 50, 500))

    changes: tuple[Callable[[bytearray], None], ...] = (flip, cut, splice, append, prepend, enlarge, repeat)
    for number in itertools.count():
        if number % 50 == 0:
            yield heavy[number // 50 % len(heavy)]
            continue
        data = bytearray(rng.choice(originals))
        for change in rng.choices(changes, k=rng.choice((1, 1, 2, 4))):
            if data:
                change(data)
        yield bytes(data)


def malformed_requests(seed: int) -> Iterator[bytes]:
    """Requests that no client should send, without end; whatever has to have a key has one."""
    rng, picture = random.Random(seed), sound()["PNG"]
    form = f"multipart/form-data; boundary={BOUNDARY}".encode()
    head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: " + form + b"\r\n"
    whole = post("/v1/search", picture)
    body = whole.partition(b"\r\n\r\n")[2]
    while True:
        evil, noise = rng.choice(EVIL), rng.randbytes(rng.choice((10, 1000, 100_000)))
        text = evil.encode()
        path = "".join(f"%{byte:02x}" for byte in text)
        yield from (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * rng.choice((10**4, 10**6, 3 * 10**7)) + b"\r\n\r\n",
            b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 10**5 + b"\r\n",
            head + b"Content-Length: %d\r\n\r\n" % (len(body) - rng.randrange(1, len(body))) + body,
            head + b"Content-Length: %d\r\n\r\n" % (len(body) + 100) + body,
            head
            + rng.choice((b"-1", b"1e9", b"99999999999999999999", b"", b"1, 2", b"\xb2")).join(
                (b"Content-Length: ", b"\r\n\r\n")
            ),
            head + b"Transfer-Encoding: chunked\r\n\r\n" + noise,
            head + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nffffffffff\r\n" + noise,
            head + b"Content-Length: %d\r\n\r\n" % len(noise) + noise,
            noise + b"\r\n\r\n",
            whole.replace(b'filename="picture"', b'filename="%s"' % text),
            whole.replace(b'name="image"', b'name="%s"' % text),
            request("GET", f"/v1/images/by-key/{path}"),
            request("GET", f"/collections/{path}/v1/stats"),
            request(
                "GET", f"/web/{evil}".encode("ascii", "ignore").decode().replace("\x00", "%00").replace(" ", "%20")
            ),
            request("GET", f"/v1/images?label={path}&where={path}&key={path}&id=9{'9' * 30}"),
            request("POST", "/v1/collections", b'{"name": "../x", "like": "/etc"}'),
            request("PATCH", "/v1/images/1", b"[" * 100_000),
            request("POST", "/v1/search", b'{"image_id": 1, "k": 1e400}'),
            request("POST", "/v1/search", b'{"code": "' + b"f" * 10**6 + b'"}'),
            request(rng.choice(("TRACE", "CONNECT", "PUT", "X" * 5000)), "/v1/images"),
        )


def exchange(port: int, sent: bytes, timeout: float) -> tuple[int, bytes]:
    """Status and body of the answer on a new connection; 0 if there is none."""
    try:
        with closing(connect(port, timeout)) as connection:
            with suppress(OSError):  # an answer may come before everything was sent
                connection.sendall(sent)
            return answer(connection)
    except (OSError, ValueError):
        return 0, b""


def attack(order: dict[str, Any]) -> dict[str, Any]:
    """Send the malformed pictures over the whole time, and the rest in parallel. The outcome is that of a client."""
    counts: Counter[tuple[str, int]] = Counter()
    stored: dict[str, tuple[int, str, tuple[str, ...]]] = {}
    unsure: set[str] = set()
    port, secret, lock, numbers = order["port"], order["secret"], threading.Lock(), itertools.count()
    pictures, end = mutants(order["seed"]), time.monotonic() + order["seconds"]
    next(pictures)
    started = time.monotonic()
    interval = (end - started) / order["mutants"]

    def send_pictures() -> None:
        while True:
            with lock:
                number, picture = next(numbers), next(pictures)
            if number >= order["mutants"]:
                return
            time.sleep(max(started + number * interval - time.monotonic(), 0))
            key = f"{EVIL[number % len(EVIL)]}-{number}"
            route = ("search", "search", "encode", "images")[number // 3 % 4]
            fields = {"key": key} if route == "images" else {}
            status, body = exchange(port, with_key(post(f"/v1/{route}", picture, **fields), secret), 300)
            counts[f"malformed picture, {route}", status] += 1
            if route == "images" and status in (200, 201):
                image_id = json.loads(body)["id"]
                stored[key] = image_id, hashlib.sha256(picture).hexdigest(), ()
                thumbnail = request("GET", f"/v1/images/{image_id}/file?size=1024")
                counts["malformed picture, thumbnail", exchange(port, with_key(thumbnail, secret), 300)[0]] += 1
            elif route == "images" and (status == 0 or status >= 500):
                unsure.add(key)

    def send_requests() -> None:
        rng = random.Random(order["seed"])
        for sent in malformed_requests(order["seed"]):
            if time.monotonic() > end:
                return
            counts["malformed request", exchange(port, with_key(sent, secret), 5)[0]] += 1
            guess = rng.choice((secret[:-1], secret.lower(), "hsk_" + rng.randbytes(32).hex(), "", "\xff"))
            counts["guessed key", exchange(port, with_key(request("GET", "/v1/stats"), guess), 60)[0]] += 1

    def send_slowly(first: bytes) -> None:
        slow: list[socket.socket] = []
        while time.monotonic() < end:
            while len(slow) < N_SLOW:
                slow.append(connect(port))
                slow[-1].sendall(first)
            for connection in slow[:]:
                try:
                    connection.sendall(b"G")
                except OSError:
                    connection.close()
                    slow.remove(connection)
                    counts["slow connection", 0] += 1
            time.sleep(1)
        for connection in slow:
            connection.close()

    head, _, body = with_key(post("/v1/search", sound()["PNG"]), secret).partition(b"\r\n\r\n")
    threads = [threading.Thread(target=work) for work in (*[send_pictures] * THREADS, send_requests)]
    threads += [threading.Thread(target=send_slowly, args=(first,)) for first in (b"", head + b"\r\n\r\n" + body[:2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"counts": counts, "stored": stored, "unsure": unsure, "latencies": []}
