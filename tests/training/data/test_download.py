"""Downloads from a real server: resumed after a cut, checked, refused with a reason, unpacked without halves."""

import contextlib
import errno
import hashlib
import os
import socket
import struct
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hashseek.retrieval.errors import BadDataset
from hashseek.training.data.download import Archive, fetch, read_or_download, unpack
from hashseek.training.data.image_table import Incomplete
from hashseek.training.runs.progress import Progress
from support.dataset_files import write_tar

CONTENT = bytes(range(256)) * 20_000  # 5 MB
QUIET = Progress(quiet=True)


@dataclass
class Behaviour:
    """What the server does, and what it saw."""

    files: dict[str, bytes]
    ranges: bool = True  # whether it can resume
    length: bool = True  # whether it says how long an answer is
    cut_after: list[int] = field(default_factory=list)  # bytes of the next answers, after which the connection ends
    reset: bool = False  # whether it ends with a reset, which may take with it what was on the way
    statuses: list[int] = field(default_factory=list)  # of the next answers
    seen: list[str | None] = field(default_factory=list)  # the Range of each request
    sent: int = 0


def serve(behaviour: Behaviour) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            behaviour.seen.append(self.headers.get("Range"))
            content = behaviour.files.get(self.path)
            status = behaviour.statuses.pop(0) if behaviour.statuses else 200 if content is not None else 404
            if status != 200 or content is None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = 0
            wanted = self.headers.get("Range")
            if wanted and behaviour.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            if behaviour.length:
                self.send_header("Content-Length", str(len(content) - start))
            else:
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            end = start + behaviour.cut_after.pop(0) if behaviour.cut_after else len(content)
            self.wfile.write(content[start:end])
            behaviour.sent += len(content[start:end])
            if end < len(content):
                self.wfile.flush()
                self.close_connection = True
                if behaviour.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:  # the client went away: nothing to report
            pass

    return Server(("127.0.0.1", 0), Handler)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    behaviour = Behaviour({"/set.zip": CONTENT})
    running = serve(behaviour)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    behaviour.url = f"http://127.0.0.1:{running.server_port}"
    yield behaviour
    running.shutdown()
    thread.join()
    running.server_close()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def get(server, folder: Path, checksum: str | None = md5(CONTENT), name: str = "set.zip") -> Path:
    return fetch(Archive(f"{server.url}/{name}", checksum), folder, progress=QUIET, pause=0.01)


def test_a_file_is_downloaded_once(server, tmp_path):
    file = get(server, tmp_path / "new" / "folder")
    assert file.read_bytes() == CONTENT
    assert get(server, tmp_path / "new" / "folder") == file
    assert server.seen == [None]


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_is_resumed_where_it_broke(server, tmp_path, reset):
    server.cut_after, server.reset = [2_000_000, 1_500_000], reset
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert len(server.seen) == 3
    if not reset:  # a reset may take bytes with it that were on the way
        assert server.seen == [None, "bytes=2000000-", "bytes=3500000-"]
        assert server.sent == len(CONTENT), "nothing was sent twice"


def test_a_later_run_resumes_and_a_server_without_ranges_sends_everything(server, tmp_path):
    server.cut_after, server.ranges = [1_000_000] * 5, False
    with pytest.raises(BadDataset):
        get(server, tmp_path)
    assert not (tmp_path / "set.zip").exists()
    server.ranges = True
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.seen[5] == "bytes=1000000-"


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_a_complete_part_is_renamed_and_one_that_is_too_long_is_downloaded_again(server, tmp_path, extra):
    (tmp_path / "set.zip.part").write_bytes(CONTENT + extra)
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.sent == (len(CONTENT) if extra else 0)


def test_a_file_with_a_wrong_checksum_is_removed(server, tmp_path):
    with pytest.raises(BadDataset, match=md5(CONTENT)):
        get(server, tmp_path, "0" * 32)
    assert not (tmp_path / "set.zip").exists()
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_answers_without_a_length_and_files_without_a_checksum(server, tmp_path):
    server.length = False
    assert get(server, tmp_path, None).read_bytes() == CONTENT


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    server.statuses = [503, 429, 500]
    assert get(server, tmp_path).read_bytes() == CONTENT
    before = len(server.seen)
    with pytest.raises(BadDataset, match="404"):
        get(server, tmp_path, name="gone.zip")
    assert len(server.seen) == before + 1


def test_no_connection_at_all(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        archive = Archive(f"http://127.0.0.1:{unused.getsockname()[1]}/set.zip", None)
        with pytest.raises(BadDataset):
            fetch(archive, tmp_path, progress=QUIET, pause=0.001)


def test_a_full_disk_is_one_message(server, small_disk):
    with pytest.raises(BadDataset, match=os.strerror(errno.ENOSPC)):
        get(server, small_disk)


def make_zip(file: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return file


MAKERS = {".zip": make_zip, ".tar": write_tar}


@pytest.mark.parametrize("kind", MAKERS)
def test_unpacking_completes_a_folder_and_writes_nothing_outside(tmp_path, kind):
    members = {"set/a.jpg": b"a" * 1000, "set/deep/c.txt": b"c"}
    file = MAKERS[kind](tmp_path / f"set{kind}", members)
    (tmp_path / "root" / "set").mkdir(parents=True)
    (tmp_path / "root" / "set" / "a.jpg").write_bytes(b"a" * 700)
    unpack(file, tmp_path / "root")
    for name, content in members.items():
        assert (tmp_path / "root" / name).read_bytes() == content
    unsafe = MAKERS[kind](tmp_path / f"unsafe{kind}", {"../outside.txt": b"x"})
    with contextlib.suppress(BadDataset):
        unpack(unsafe, tmp_path / "root")
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_damaged_archive_is_refused(tmp_path, kind):
    file = MAKERS[kind](tmp_path / f"set{kind}", {f"{i}.txt": bytes(2000) for i in range(9)})
    file.write_bytes(file.read_bytes()[:7000])
    with pytest.raises(BadDataset, match=str(file)):
        unpack(file, tmp_path / "root")


def test_a_set_is_downloaded_when_files_are_missing_and_then_left_alone(server, tmp_path):
    server.files["/set.zip"] = make_zip(tmp_path / "made.zip", {"a.jpg": b"a"}).read_bytes()
    archive = Archive(f"{server.url}/set.zip", md5(server.files["/set.zip"]), into="images")
    root = tmp_path / "root"

    def read(on_error: str) -> str:
        if not (root / "images" / "a.jpg").is_file():
            raise Incomplete("a.jpg is missing")
        return on_error

    with pytest.raises(Incomplete):
        read_or_download(read, [archive], root, download=False, on_error="skip")
    assert read_or_download(read, [archive], root, download=True, on_error="skip") == "skip"
    (root / "images" / "a.jpg").unlink()
    assert read_or_download(read, [archive], root, download=True, on_error="skip") == "skip"
    assert len(server.seen) == 1, "the archive was still there"
    (root / "set.zip").unlink()
    read_or_download(read, [archive], root, download=True, on_error="skip")
    assert len(server.seen) == 1, "a complete set needs no archive"
