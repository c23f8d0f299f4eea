"""Downloads from a real server: resumed after a cut, checked, refused with a reason, unpacked without halves."""

import hashlib
import io
import socket
import struct
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_voc import IMAGES, write_voc

from hashseek.retrieval.errors import BadDataset
from hashseek.training.data import download as module
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.download import Archive, fetch, unpack
from hashseek.training.runs.progress import Progress
from support.dataset_files import names

CONTENT = bytes(range(256)) * 20_000  # 5 MB
QUIET = Progress(quiet=True)


@dataclass
class Behaviour:
    """What the server does, and what it saw."""

    files: dict[str, bytes]
    ranges: bool = True  # whether it can resume
    length: bool = True  # whether it says how long an answer is
    etag: str | None = '"one"'
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
            fresh = self.headers.get("If-Range") in (None, behaviour.etag)
            if wanted and behaviour.ranges and fresh:
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
            if behaviour.etag:
                self.send_header("ETag", behaviour.etag)
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


def test_a_file_comes_whole_and_only_once(server, tmp_path):
    file = get(server, tmp_path / "new" / "folder")
    assert file.read_bytes() == CONTENT
    assert [path.name for path in file.parent.iterdir()] == ["set.zip"], "nothing is left beside it"
    assert get(server, tmp_path / "new" / "folder") == file
    assert server.seen == [None], "what is there is not asked for again"


def test_a_cut_connection_is_resumed_where_it_broke(server, tmp_path):
    server.cut_after = [2_000_000, 1_500_000]
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert len(server.seen) == 3
    assert server.seen[0] is None
    starts = [int(seen.removeprefix("bytes=").removesuffix("-")) for seen in server.seen[1:]]
    assert starts == [2_000_000, 3_500_000]
    assert server.sent == len(CONTENT), "nothing was sent twice"


def test_a_connection_that_is_reset_is_made_again(server, tmp_path):
    server.cut_after, server.reset = [2_000_000, 1_500_000], True
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert len(server.seen) == 3


def test_another_run_goes_on_with_what_the_first_one_got(server, tmp_path):
    server.cut_after = [1_000_000] * 5
    server.ranges = False  # nothing is gained by trying again
    with pytest.raises(BadDataset, match=r"cannot be downloaded .*: run the same command again, it goes on after"):
        get(server, tmp_path)
    assert not (tmp_path / "set.zip").exists()
    server.ranges = True
    before = len(server.seen)
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.seen[before] == "bytes=1000000-"
    assert server.sent == 5 * 1_000_000 + len(CONTENT) - 1_000_000


def test_a_server_that_cannot_resume_sends_all_again(server, tmp_path):
    server.cut_after, server.ranges = [2_000_000], False
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.sent >= len(CONTENT) + 1_000_000


def test_a_file_that_changed_between_two_tries_is_not_patched_together(server, tmp_path):
    server.cut_after = [3_000_000] * 5
    server.ranges = False
    with pytest.raises(BadDataset):
        get(server, tmp_path)
    server.ranges, server.cut_after = True, []
    server.files["/set.zip"], server.etag = CONTENT[::-1], '"two"'
    assert get(server, tmp_path, md5(CONTENT[::-1])).read_bytes() == CONTENT[::-1]


def test_a_part_that_is_complete_only_gets_its_name(server, tmp_path):
    (tmp_path / "set.zip.part").write_bytes(CONTENT)
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.sent == 0


def test_a_part_that_is_too_long_is_started_over(server, tmp_path):
    (tmp_path / "set.zip.part").write_bytes(CONTENT + b"more")
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_the_file_does_not_stay(server, tmp_path):
    with pytest.raises(
        BadDataset, match=f"has the checksum {md5(CONTENT)}, not {'0' * 32} as published: it was removed"
    ):
        get(server, tmp_path, "0" * 32)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".zip"] == []
    assert get(server, tmp_path).read_bytes() == CONTENT

    (tmp_path / "set.zip").write_bytes(CONTENT[:-1])
    with pytest.raises(BadDataset, match="set.zip .* has the checksum .* as published: delete it"):
        get(server, tmp_path)


def test_where_no_checksum_is_published_the_first_one_is_kept(server, tmp_path, capsys):
    fetch(Archive(f"{server.url}/set.zip", None), tmp_path, progress=Progress())
    assert "no checksum of set.zip is published; that of this copy is kept in" in capsys.readouterr().err
    record = tmp_path / "set.zip.sha256"
    assert record.read_text() == f"{hashlib.sha256(CONTENT).hexdigest()}  set.zip\n"
    get(server, tmp_path, None)
    (tmp_path / "set.zip").unlink()
    server.files["/set.zip"] = CONTENT[::-1]
    with pytest.raises(BadDataset, match=r"not .* as recorded in .*set.zip.sha256: it was removed"):
        get(server, tmp_path, None)


def test_answers_without_a_length(server, tmp_path):
    server.length = False
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    server.statuses = [503, 429, 500]
    assert get(server, tmp_path).read_bytes() == CONTENT
    before = len(server.seen)
    with pytest.raises(BadDataset, match=r"/gone.zip cannot be downloaded: the server answers 404 .*gone.zip$"):
        get(server, tmp_path, name="gone.zip")
    assert len(server.seen) == before + 1
    server.statuses = [503] * 9
    with pytest.raises(BadDataset, match=r"cannot be downloaded .the server answers 503"):
        get(server, tmp_path / "other")


def test_no_connection_at_all(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        archive = Archive(f"http://127.0.0.1:{unused.getsockname()[1]}/set.zip", None)
        with pytest.raises(BadDataset, match=r"cannot be downloaded .*refused.*: run the same command again"):
            fetch(archive, tmp_path, progress=QUIET, pause=0.001)


def test_two_at_once_do_not_write_the_same_file(server, tmp_path):
    with (
        (tmp_path / "set.zip.part").open("ab") as target,
        module._alone(target, "x"),
        pytest.raises(BadDataset, match="another process is downloading .*: wait until it is done"),
    ):
        get(server, tmp_path)
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(server, small_disk):
    with pytest.raises(BadDataset, match=r"set.zip needs 0.0 GiB in .* make room or choose another root"):
        get(server, small_disk)
    assert (small_disk / "set.zip.part").stat().st_size == 0


# --- unpacking ---------------------------------------------------------------------------------------------


def make_zip(file: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return file


def make_tar(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as packed:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return file


MAKERS = {".zip": make_zip, ".tar": make_tar}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_interrupted_unpacking_is_completed(tmp_path, kind):
    members = {"set/a.jpg": b"a" * 1000, "set/b.jpg": b"b" * 2000, "set/deep/c.txt": b"c"}
    file = MAKERS[kind](tmp_path / f"set{kind}", members)
    unpack(file, tmp_path / "root", progress=QUIET)
    assert {path.relative_to(tmp_path / "root").as_posix() for path in (tmp_path / "root").rglob("*.*")} == set(members)
    whole = tmp_path / "root" / "set" / "a.jpg"
    (tmp_path / "root" / "set" / "b.jpg").write_bytes(b"b" * 700)
    (tmp_path / "root" / "set" / "deep" / "c.txt").unlink()
    before = whole.stat().st_mtime_ns, whole.stat().st_ino
    unpack(file, tmp_path / "root", progress=QUIET)
    for name, content in members.items():
        assert (tmp_path / "root" / name).read_bytes() == content
    assert (whole.stat().st_mtime_ns, whole.stat().st_ino) == before, "what is whole is left alone"


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/hashseek-outside.txt", "a/../../outside.txt"])
def test_nothing_is_written_outside_the_folder(tmp_path, kind, name):
    file = MAKERS[kind](tmp_path / f"set{kind}", {"inside.txt": b"x", name: b"x"})
    with pytest.raises(BadDataset, match="a place outside .*: it is not the official archive"):
        unpack(file, tmp_path / "root", progress=QUIET)
    assert list((tmp_path / "root").iterdir()) == []
    assert not Path("/tmp/hashseek-outside.txt").exists()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_damaged_archive_is_one_sentence(tmp_path, kind):
    file = MAKERS[kind](tmp_path / f"set{kind}", {f"{i}.txt": bytes(2000) for i in range(9)})
    file.write_bytes(file.read_bytes()[:7000])
    with pytest.raises(BadDataset, match=f"set{kind} is damaged .*: delete it and download it again"):
        unpack(file, tmp_path / "root", progress=QUIET)


def test_a_whole_set_is_downloaded_completed_and_then_left_alone(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", str(tmp_path / "cache"))
    made = write_voc(tmp_path / "made", "2007", {"trainval": list(IMAGES)[:4], "test": list(IMAGES)[4:]})
    everything = {path.relative_to(tmp_path / "made").as_posix(): path for path in made.rglob("*") if path.is_file()}
    archives = []
    for name, ids in (("trainval.tar", list(IMAGES)[:4]), ("test.tar", list(IMAGES)[4:])):
        members = {
            file: path.read_bytes()
            for file, path in everything.items()
            if path.stem in ids or path.stem == name.removesuffix(".tar")
        }
        content = make_tar(tmp_path / name, members).read_bytes()
        server.files[f"/{name}"] = content
        archives.append(Archive(f"{server.url}/{name}", md5(content)))
    monkeypatch.setitem(build_splits.__globals__["voc2007"].__globals__["ARCHIVES"], "2007", tuple(archives))
    root = tmp_path / "root"

    splits = build_splits("voc2007", root=str(root), download=True)
    assert names(splits.train) == [f"{name}.jpg" for name in list(IMAGES)[:4]]
    assert names(splits.query) == [f"{name}.jpg" for name in list(IMAGES)[4:]]
    n_requests = len(server.seen)
    assert n_requests == 2

    (root / "VOCdevkit" / "VOC2007" / "JPEGImages" / "000002.jpg").unlink()
    assert build_splits("voc2007", root=str(root), download=True).fingerprint == splits.fingerprint
    assert len(server.seen) == n_requests, "the archives were still there"
    for archive in archives:
        (root / archive.name).unlink()
    assert build_splits("voc2007", root=str(root), download=True).fingerprint == splits.fingerprint
    assert len(server.seen) == n_requests, "a complete set needs no archive"
