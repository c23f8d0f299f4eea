"""Decodes images for the service; those that may take long or crash their decoder, in processes that can be ended.

`python -m hashseek.api.decoding` is such a process. Its standard input is a socket to the service.
"""

import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.errors import BadImage, HashseekError
from hashseek.retrieval.images import LoadedFile, Preprocessing, decode, load_file, memory_to_decode

MEMORY = 2**30  # bytes that all images together may use during decoding; one that needs more is decoded alone
# Bytes that a JPEG may use to be decoded in the service itself, which takes about a second at most. A process would
# make uploads an eighth slower (2 ms).
SMALL = 2**26
WAIT_SECONDS = 30.0  # an image is refused if it has waited this long for memory and a processor core
DECODE_SECONDS = 30.0  # a process that reads the header of an image or decodes it is ended after this time


class Overloaded(HashseekError):
    """The service is too busy at the moment; the same request may succeed a little later."""


class OutOfMemory(HashseekError):
    """The system killed the process that decoded an image, probably because the memory ran out."""


class Budget:
    """Makes threads wait until what they are about to use fits within a limit. One thread may always proceed.

    Attributes:
        waiting: number of threads that are waiting now.
    """

    def __init__(self, limit: int) -> None:
        self.waiting = 0
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, amount: int = 1) -> Iterator[None]:
        """Context in which `amount` is in use.

        Raises:
            Overloaded: it did not fit within `WAIT_SECONDS`.
        """
        with self._changed:
            self.waiting += 1
            fits = self._changed.wait_for(
                lambda: not self._held or self._held + amount <= self._limit, timeout=WAIT_SECONDS
            )
            self.waiting -= 1
            if fits:
                self._held += amount
            self._wake_next()  # also if this thread gave up: it may have been the one that was woken
        if not fits:
            raise Overloaded(f"the service was busy with other images for {WAIT_SECONDS:.0f} s: try again later")
        try:
            yield
        finally:
            with self._changed:
                self._held -= amount
                self._wake_next()

    def _wake_next(self) -> None:
        """Wake the thread that has waited longest. Waking all of them would cost more than encoding an image."""
        if self._held < self._limit:
            self._changed.notify()


class Decoders:
    """Decodes the images of several threads, as many at a time as there are processor cores.

    A JPEG of usual size is decoded in the thread, any other image in a process, which is started when it is needed.

    Args:
        observe: called with "wait" or "decode" and the seconds that an image waited, or was decoded.

    Attributes:
        memory, cores: limits that images wait for: bytes, and one processor core each.
    """

    def __init__(self, observe: Callable[[str, float], object]) -> None:
        self.memory, self.cores = Budget(MEMORY), Budget(n_cores())
        self._observe = observe
        self._idle: list[_Process] = []

    @property
    def waiting(self) -> int:
        """Number of images that are waiting."""
        return self.memory.waiting + self.cores.waiting

    def load(self, data: bytes, preprocessing: Preprocessing, *, name: str = "the image") -> LoadedFile:
        """The network's input for an image file, see `hashseek.retrieval.images.load_file`.

        Raises:
            BadImage: it is not a usable image, crashes its decoder, or takes longer than `DECODE_SECONDS`.
            Overloaded: other images kept the memory or the processor busy for too long.
            OutOfMemory: the system killed the process that decoded it.
        """
        task = {"preprocessing": preprocessing.as_dict(), "at_least": preprocessing.shorter_side, "name": name}
        about, pixels = self._carry_out(task, data)
        shape = 3, preprocessing.size, preprocessing.size
        return LoadedFile(np.frombuffer(pixels, np.uint8).reshape(shape), **about)

    def thumbnail(self, data: bytes, size: int, *, name: str = "the image") -> bytes:
        """The image as a JPEG file whose longer side has at most `size` pixels.

        Raises:
            BadImage, Overloaded, OutOfMemory: see `load`.
        """
        return self._carry_out({"at_least": size, "name": name}, data)[1]

    def close(self) -> None:
        """End the processes. Nothing may be decoding."""
        while self._idle:
            self._idle.pop().end()

    def _carry_out(self, task: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        started = time.perf_counter()
        with self.cores.hold():
            # Only the header of a JPEG is read here: those of other formats may themselves take long.
            n_bytes = memory_to_decode(data, at_least=task["at_least"]) if data.startswith(b"\xff\xd8") else MEMORY
            if n_bytes <= SMALL:
                with self._decoding(n_bytes, started):
                    about, content = _carry_out(task, data)
            else:
                about, content = self._in_process(task, data, started)
        if "error" in about:
            raise BadImage(about["error"])
        return about, content

    @contextmanager
    def _decoding(self, n_bytes: int, started: float) -> Iterator[None]:
        with self.memory.hold(n_bytes):
            waited = time.perf_counter()
            self._observe("wait", waited - started)
            yield
            self._observe("decode", time.perf_counter() - waited)

    def _in_process(self, task: dict[str, Any], data: bytes, started: float) -> tuple[dict[str, Any], bytes]:
        process = self._idle_process() or _Process()
        try:
            process.send(json.dumps(task).encode(), data)
            with self._decoding(int(process.receive()), started):
                process.send(b"")
                answer = json.loads(process.receive()), process.receive()
        except TimeoutError:
            process.end()
            raise BadImage(f"{task['name']} takes longer than {DECODE_SECONDS:.0f} s to decode") from None
        except (OSError, EOFError):  # the process has ended, or is about to
            if process.end(within=5) == -signal.SIGKILL:  # Linux sends it if the memory runs out; crashes send others
                raise OutOfMemory(
                    f"{task['name']} was not decoded: the system killed its decoder, probably because the memory ran "
                    "out: give the service more memory"
                ) from None
            raise BadImage(f"{task['name']} is damaged: it crashed its decoder") from None
        except BaseException:
            process.end()
            raise
        self._idle.append(process)
        return answer

    def _idle_process(self) -> "_Process | None":
        with suppress(IndexError):
            while not (process := self._idle.pop()).is_running:
                process.end()
            return process
        return None


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", __name__],  # Pillow warns about metadata
                stdin=theirs.fileno(),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._connection = Connection(ours.detach())

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self._connection.send_bytes(part)

    def receive(self) -> bytes:
        """Raise `OSError` or `EOFError` if the process has ended, `TimeoutError` after `DECODE_SECONDS`."""
        if not self._connection.poll(DECODE_SECONDS):
            raise TimeoutError
        return self._connection.recv_bytes()

    def end(self, *, within: float = 0) -> int:
        """Kill the process unless it exits within this many seconds. Returns its exit code, negative for a signal."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        self._process.kill()
        self._connection.close()
        return self._process.wait()


def main() -> None:
    """Carry out the tasks of `Decoders`, until the service closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the service ends what it has accepted
        signal.signal(number, signal.SIG_IGN)
    give_memory_back()
    with suppress(EOFError, ConnectionError), Connection(sys.stdin.fileno()) as service:
        while True:
            task, data = json.loads(service.recv_bytes()), service.recv_bytes()
            service.send_bytes(b"%d" % memory_to_decode(data, at_least=task["at_least"]))
            service.recv_bytes()
            about, content = _carry_out(task, data)
            service.send_bytes(json.dumps(about).encode())
            service.send_bytes(content)


def _carry_out(task: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """What `data` is, or the error, and its pixels or thumbnail."""
    try:
        if "preprocessing" in task:
            pixels, *about = load_file(data, Preprocessing.from_dict(task["preprocessing"]), name=task["name"])
            return dict(zip(LoadedFile._fields[1:], about, strict=True)), pixels.tobytes()
        size, buffer = task["at_least"], io.BytesIO()
        thumbnail = decode(data, name=task["name"], at_least=size).image
        thumbnail.thumbnail((size, size))
        thumbnail.save(buffer, "JPEG", quality=85)
        return {}, buffer.getvalue()
    except BadImage as error:
        return {"error": str(error)}, b""


def give_memory_back() -> None:
    """Make glibc return the memory of decoded images at once. By default it keeps blocks of up to 32 MB for reuse."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(ctypes.c_int(-3), ctypes.c_int(2**20))  # M_MMAP_THRESHOLD


if __name__ == "__main__":
    main()
