"""Shards depend on their images only; on a real Ray, dead workers and stopped runs lose nothing; codes are equal."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.ingest.batch import ingest
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import find_sources
from hashseek.indexing.maintenance.exchange import export, import_
from hashseek.indexing.ray_encoding import Cluster, _checked, _name, _shards, _Worker, encode_shards
from hashseek.indexing.remote import fetch
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadConfig, HashseekError
from hashseek.retrieval.label_files import Problem
from support.commands import wait_until
from support.dataset_files import write_tar
from support.pictures import labels_of, png, save
from support.web import QuietHandler, answering, url_of

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'hashseek[ray]'")
# Ray allows a cluster 30 seconds to start. Two at the same time may take longer, and tests of Milvus also start one.
STARTS_RAY = pytest.mark.xdist_group("milvus")
ENGINE = "openvino" if find_spec("openvino") else "torch"


def test_a_new_image_changes_only_the_shard_that_it_is_in():
    sources = [ImageSource(Path(f"/pictures/{number:05}.jpg")) for number in range(5000)]
    before = list(_shards(sources, 100))
    assert [source for part in before for source in part] == sources
    assert len(before) in range(35, 80)
    assert max(map(len, before)) <= 400
    for place in (0, 777, 5000):
        after = list(_shards([*sources[:place], ImageSource(Path("/pictures/new.jpg")), *sources[place:]], 100))
        assert sum(part not in before for part in after) <= 2
    assert list(_shards([], 100)) == []


def test_notes_do_not_end_a_shard():
    source, note = ImageSource(Path("/pictures/1.jpg")), Problem("list.csv line 1", "its labels were corrected")
    assert list(_shards([note, source] * 50, 100)) == [[note, source] * 50]


def test_only_shards_with_urls_depend_on_how_these_are_fetched(tmp_path):
    for uri, n_names in (("https://example.org/1.png", 2), (save(tmp_path / "1.png", 1), 1)):
        names = {_name([ImageSource(uri)], [], partial(fetch, seconds=seconds)) for seconds in (9, 30)}
        assert len(names) == n_names


def test_only_shards_are_deleted_from_the_folder(own_collection, tmp_path):
    shard, other = tmp_path / f"0000001-{'a' * 32}.parquet", tmp_path / "embeddings.parquet"
    for file in (shard, other):
        file.touch()
    with closing(Collection(own_collection)) as collection:
        written = encode_shards(
            [],
            tmp_path,
            collection=collection,
            cluster=Cluster("local"),
            options={"device": "cpu", "engine": "auto"},
            fetch=fetch,
            shard_size=10,
            stopped=lambda: False,
            progress=lambda *_: None,
        )
    assert (written, list(tmp_path.glob("*.parquet"))) == ([], [other])


@contextmanager
def server(on_request) -> Iterator[str]:
    """The URL of a picture; `on_request(number)` is called before each answer."""
    numbers = iter(range(1, 100))

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            on_request(next(numbers))
            with suppress(OSError):
                self.send_response(200)
                self.send_header("Content-Length", str(len(png(99))))
                self.end_headers()
                self.wfile.write(png(99))

    with answering(Handler) as running:
        yield f"{url_of(running)}/99.png"


def busy_workers(mark: str) -> list[int]:
    """The processes of Ray that encode now and were started with `mark` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = mark.encode() in (process / "environ").read_bytes()
            if is_ours and (process / "cmdline").read_bytes().startswith(b"ray::_Worker.encode"):
                found.append(int(process.name))
    return found


def times(shards: Path) -> dict[str, int]:
    """When each shard was written, by the hash in its name."""
    return {file.stem.rpartition("-")[2]: file.stat().st_mtime_ns for file in shards.iterdir()}


def table(folder: Path, file: Path):
    """Everything about the images of a collection, without the times at which they were added."""
    with closing(Collection(folder)) as collection:
        export(collection, file)
        rows = pq.read_table(file).drop_columns(["added_at", "changed_at"]).to_pylist()
        return rows, collection.records_by_path([row["uri"] for row in rows])


@STARTS_RAY
@NEEDS_RAY
@pytest.mark.timeout(900)
def test_workers_that_die_and_runs_that_stop_lose_nothing_and_codes_are_those_of_one_process(
    checkpoint, own_cache, tmp_path
):
    pictures, shards, by_ray = tmp_path / "pictures", tmp_path / "by-ray.shards", tmp_path / "by-ray"
    files = [save(pictures / f"{number:02}.png", number) for number in range(60)]
    shutil.copy(files[0], pictures / "copy of 00.png")  # one content, two files
    (pictures / "broken.png").write_bytes(b"no picture")
    write_tar(tmp_path / "shard.tar", {"70.png": png(70)})
    rows = [{"file": str(file), "key": file.stem, "labels": labels_of(file), "n": 1} for file in files[:9]]

    def on_request(number: int) -> None:
        """The first request kills the worker that sends it; the next one stops the run."""
        if number == 1:
            for worker in busy_workers(str(own_cache)):
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
        elif number == 2:
            running.send_signal(signal.SIGTERM)
            wait_until(lambda: b"stopping" in log.read_bytes())

    killed: list[int] = []
    log = tmp_path / "log.txt"
    with server(on_request) as url:
        rows.insert(4, {"url": url})
        (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = [str(tmp_path / "list.jsonl"), str(pictures), str(tmp_path / "shard.tar")]
        command = [sys.executable, "-m", "hashseek", "index", "add", str(by_ray), *sources, "--engine", ENGINE]
        command += ["--checkpoint", str(checkpoint), "--allow-private", "--ray", "local", "--ray-workers", "2"]
        command += ["--shard-size", "8"]
        with log.open("wb") as out:
            running = subprocess.Popen(command, stdout=out, stderr=out)
        assert running.wait(800) == 143, log.read_text()
        assert killed
        assert not by_ray.exists()
        finished = times(shards)
        assert finished

        save(pictures / "new.png", 80)
        again = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
        assert "broken.png" in again.stderr
        assert "added 63, already stored 10, skipped 1" in again.stdout
        kept = times(shards)
        assert len(finished.items() - kept.items()) <= 1  # the one with the new picture, if it was there
        with closing(open_or_create(tmp_path / "here", checkpoint=checkpoint)) as collection:
            encoder = Searcher.open(collection, engine=ENGINE).image_encoder
            *_, _ = ingest(collection, encoder, find_sources(sources), fetch=partial(fetch, allow_private=True))
    assert table(by_ray, tmp_path / "1.parquet") == table(tmp_path / "here", tmp_path / "2.parquet")

    last = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)  # without the server
    assert "added 0, already stored 73, skipped 1" in last.stdout
    assert times(shards) == kept
    *_, outcome = import_(shards, tmp_path / "imported", checkpoint=checkpoint)
    assert (outcome.added, outcome.known) == (63, 10)


# In a process of its own: Ray runs Python between fork and exec, which can hang in one with many threads.
MACHINES = """
import sys
from ray.cluster_utils import Cluster

size = {"num_cpus": 1, "object_store_memory": 2**27}
try:
    machines = Cluster(initialize_head=True, head_node_args=size)
except Exception:  # on a busy machine, Ray may give up after 30 s
    machines = Cluster(initialize_head=True, head_node_args=size)
other = machines.add_node(**size, node_ip_address="127.0.0.2")
print(machines.address, flush=True)
if sys.stdin.readline():
    machines.remove_node(other, allow_graceful=False)
sys.stdin.read()
machines.shutdown()
"""


@STARTS_RAY
@NEEDS_RAY
@pytest.mark.timeout(600)
def test_the_shard_of_a_machine_that_dies_is_encoded_by_another(checkpoint, own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    started = subprocess.Popen(
        [sys.executable, "-c", MACHINES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def on_request(number: int) -> None:
        """The first worker waits until the other one encodes too; then the other machine dies."""
        if number == 1:
            wait_until(lambda: len(busy_workers(str(own_cache))) == 2)
            print(file=started.stdin, flush=True)

    files = [save(tmp_path / "pictures" / f"{number:02}.png", number) for number in range(30)]
    command = [sys.executable, "-m", "hashseek", "index", "add", "new", "list.jsonl", "--checkpoint", str(checkpoint)]
    command += ["--allow-private", "--url-seconds", "300", "--engine", ENGINE, "--shard-size", "4"]
    with started, server(on_request) as url:
        rows = [{"url": url}, *({"file": str(file)} for file in files)]
        (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command += ["--ray", started.stdout.readline().strip()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "added 31, already stored 0, skipped 0" in done.stdout


@STARTS_RAY
@NEEDS_RAY
def test_a_start_of_ray_that_fails_is_repeated():
    """The first node manager ends at once, so Ray gives up after 30 s."""
    program = (
        "import ray, ray._private.services as services; from hashseek.indexing.ray_encoding import Cluster\n"
        "start, executables = ray.init, iter(['/bin/false', services.RAYLET_EXECUTABLE])\n"
        "def init(*address, **options):\n"
        "    services.RAYLET_EXECUTABLE = next(executables)\n"
        "    start(*address, **options)\n"
        "ray.init = init; print(Cluster('local', workers=1).connect(), *executables)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@STARTS_RAY
@NEEDS_RAY
@pytest.mark.timeout(600)
def test_a_cluster_that_refuses_the_token_is_named_and_nothing_is_left(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 32)
    start = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
    start += ["--port=0", "--num-cpus=1", f"--object-store-memory={2**27}", "--include-dashboard=false"]
    save(tmp_path / "picture.png", 1)
    log = tmp_path / "log.txt"
    with log.open("wb") as out, subprocess.Popen(start, stdout=out, stderr=out) as head:
        try:
            wait_until(lambda: re.search(r"--address='(.+?)'", log.read_text()))
            address = re.search(r"--address='(.+?)'", log.read_text())[1]
            command = [sys.executable, "-m", "hashseek", "index", "add", "new", "picture.png", "--ray", address]
            done = subprocess.run(
                [*command, "--checkpoint", str(checkpoint)],
                env=os.environ
                | {"RAY_AUTH_TOKEN": "1" * 32, "RAY_NUM_REDIS_GET_RETRIES": "3"},  # Ray waits 3 s, not 20
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
        finally:
            head.terminate()
    assert done.returncode == 2
    assert address in done.stderr.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "picture.png"}


@NEEDS_RAY
def test_a_cluster_that_is_not_there_is_refused():
    for address in ("127.0.0.1:1", "127.0.0.1:99999", "nowhere", "auto"):
        with pytest.raises(BadConfig, match=address):  # before a hash layer is fitted
            Cluster(address).check()
    with pytest.raises(BadConfig, match="1.5"):
        Cluster("local", gpus=1.5).check()


def test_a_machine_that_does_not_see_a_file_ends_the_run(tmp_path):
    with pytest.raises(HashseekError, match=r"gone\.jpg"):
        _Worker({}, fetch, 1).encode([], [ImageSource(tmp_path / "gone.jpg")])
    found = _checked(ImageSource(tmp_path / "gone.jpg", where="list.csv line 2"))  # gone here, too
    assert (found.where, found.skipped, found.missing) == ("list.csv line 2", True, True)


@NEEDS_RAY
def test_the_fit_of_a_new_collection_is_kept_for_the_shards_that_are_finished(hashseek, pictures, tmp_path):
    failing = "import hashseek.indexing.cli.add as m, os; m.encode_shards = lambda *_, **__: m.BadConfig.no_such_name"
    command = ("index", "add", tmp_path / "c", pictures, "--backbone", "pixels", "--bits", 8, "--ray", "local")
    assert hashseek(*command, before=failing)[0] == 1
    with closing(Collection(tmp_path / "c")) as collection:
        assert (len(collection), collection.n_bits) == (0, 8)


@pytest.mark.parametrize("option", ["--watch", "--dry-run", "--trust-mtime", "--keep-features", "--on-error=stop"])
def test_what_ray_cannot_do_is_refused(hashseek, tmp_path, option):
    code, _, err = hashseek("index", "add", tmp_path / "new", tmp_path, "--ray", "local", option)
    assert (code, option.partition("=")[0] in err) == (2, True)
    assert not (tmp_path / "new").exists()
