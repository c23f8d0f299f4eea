"""Downloads from a real server: resumed after a cut, checked, refused with a reason."""

import errno
import hashlib
import os
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from hashseek.retrieval.download import download
from support.web import QuietHandler, answering, url_of

CONTENT = bytes(range(256)) * 20_000  # 5 MB


@dataclass
class Server:
    """What the server does, and what it saw."""

    files: dict[str, bytes]
    url: str = ""
    ranges: bool = True  # whether it can resume
    cut_after: int | None = None  # bytes after which it closes the connection
    seen: list[str | None] = field(default_factory=list)  # the Range of each request

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.seen.append(wanted)
        content = self.files.get(request.path)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        status = 404 if content is None else 416 if start and start >= len(content) else 206 if start else 200
        part = (content or b"")[start:] if status < 400 else b""
        request.send_response(status)
        request.send_header("Content-Length", str(len(part)))
        request.end_headers()
        request.wfile.write(part[: self.cut_after])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = Server({"/set.zip": CONTENT})

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            served.answer(self)

    with answering(Handler) as running:
        served.url = url_of(running)
        yield served


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def get(server, folder: Path, checksum: str | None = md5(CONTENT), name: str = "set.zip") -> Path:
    download(f"{server.url}/{name}", folder / name, digest=checksum)
    return folder / name


def test_a_file_is_downloaded_once(server, tmp_path):
    file = get(server, tmp_path / "new" / "folder")
    assert file.read_bytes() == CONTENT
    assert get(server, tmp_path / "new" / "folder") == file
    assert server.seen == [None]


@pytest.mark.parametrize("ranges", [True, False])
def test_the_next_call_resumes_a_download_that_was_cut_off(server, tmp_path, ranges):
    server.cut_after, server.ranges = 2_000_000, ranges
    with pytest.raises(ConnectionError):
        get(server, tmp_path)
    assert not (tmp_path / "set.zip").exists()
    server.cut_after = None
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.seen == [None, "bytes=2000000-"]


@pytest.mark.parametrize("checksum", [md5(CONTENT), None])
@pytest.mark.parametrize(
    "part", [CONTENT, CONTENT[:-1] + b"other", bytes(len(CONTENT))], ids=["whole", "too long", "zeros"]
)
def test_a_part_that_lacks_nothing_is_not_trusted(server, tmp_path, checksum, part):
    (tmp_path / "set.zip.part").write_bytes(part)
    assert get(server, tmp_path, checksum).read_bytes() == CONTENT
    assert server.seen == [f"bytes={len(part)}-", None]
    server.files["/set.zip"] = part = b"another archive"
    (tmp_path / "set.zip").unlink()
    with pytest.raises(OSError, match=md5(part)):
        get(server, tmp_path)
    assert list(tmp_path.glob("set.zip*")) == []


def test_what_cannot_be_downloaded_or_saved_is_refused(server, tmp_path, small_disk):
    with pytest.raises(OSError, match="404"):
        get(server, tmp_path, name="gone.zip")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        get(server, small_disk)
    server.url = "http://127.0.0.1:9"  # where nothing listens
    with pytest.raises(ConnectionError):
        get(server, tmp_path)


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:9", "socks5h://127.0.0.1:9", "http://127.0.0.1:port"])
def test_a_proxy_that_cannot_be_used_is_refused(server, tmp_path, monkeypatch, proxy):
    monkeypatch.setenv("no_proxy", "")  # counts before NO_PROXY
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConnectionError):
        get(server, tmp_path)
