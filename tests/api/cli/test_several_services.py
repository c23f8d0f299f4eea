"""Several services on one collection: what one changes the others find, and none stops another."""

import os
import shutil
import signal
import subprocess
import threading
from contextlib import closing, contextmanager

import httpx
import pytest

from hashseek.indexing.collection import Collection
from hashseek.retrieval.checkpoint import load_header
from support.commands import wait_until
from support.milvus_server import free_port
from support.paths import ROOT
from support.pictures import png
from support.service import add, hits, search


@pytest.fixture
def two(serve, own_collection):
    """Two services on a folder: [(process, client)]."""
    return [serve(own_collection), serve(own_collection)]


@pytest.fixture
def proxied(two, tmp_path):
    """A client of Caddy, with the Caddyfile that we ship, in front of both services."""
    if shutil.which("caddy") is None:
        pytest.skip("caddy is not installed")
    port, upstreams = free_port(), " ".join(client.base_url.netloc.decode() for _, client in two)
    own = {"HASHSEEK_HOST_NAME": f"http://localhost:{port}", "HASHSEEK_UPSTREAMS": upstreams}
    own |= {"CADDY_ADMIN": f"localhost:{free_port()}", "HOME": str(tmp_path)}
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", ROOT / "docs" / "deploy" / "Caddyfile"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://localhost:{port}", timeout=60) as client:
            wait_until(lambda: is_answering(client))
            yield client
    finally:
        process.terminate()
        process.wait()


def is_answering(client):
    try:
        return client.get("/healthz/ready").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def searching(client, seed):
    """Search for a stored picture until the end of the block: a list of the answers, and of the errors of connections.

    By upload, which encodes, and by id in turns, on connections of its own.
    """
    answers, stop = [], threading.Event()

    def look():
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            image_id = hits(search(own, png(seed), k=1))[0]["id"]
            while not stop.is_set():
                try:
                    answers.append(search(own, png(seed), k=20))
                    answers.append(own.get(f"/v1/images/{image_id}/similar", params={"k": 20}))
                except httpx.TransportError as error:
                    answers.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        wait_until(lambda: len(answers) >= 4)
        yield answers
    finally:
        stop.set()
        thread.join()


def test_what_one_changes_the_other_finds_with_its_next_search(two):
    (_, first), (_, second) = two
    for seed, (one, other) in enumerate([(first, second), (second, first)] * 3, start=900):
        added = add(one, png(seed)).json()["id"]
        [hit] = hits(search(other, png(seed), k=1))
        assert (hit["id"], hit["distance"]) == (added, 0)
        assert other.get(f"/v1/images/{added}/file").content == png(seed)
        assert other.delete(f"/v1/images/{added}").status_code == 204
        assert one.get(f"/v1/images/{added}/similar").status_code == 404
        assert added not in [hit["id"] for hit in hits(search(one, png(seed), k=20))]


def test_both_change_the_model_without_a_failed_request(two, own_collection, other_checkpoint, checkpoint, hashseek):
    clients = [client for _, client in two]
    old, new = load_header(checkpoint), load_header(other_checkpoint)
    add(clients[0], png(900))
    with searching(clients[0], 900) as of_first, searching(clients[1], 900) as of_second:
        code, _, err = hashseek(
            "index", "reencode", own_collection, "--checkpoint", other_checkpoint, "--device", "cpu"
        )
        assert code == 0, err
        wait_until(lambda: all(c.get("/v1/stats").json()["fingerprint"] == new.fingerprint for c in clients))
        counts = [len(of_first), len(of_second)]
        wait_until(lambda: all(len(now) > n + 2 for now, n in zip((of_first, of_second), counts, strict=True)))
    for answers in (of_first, of_second):
        assert {answer.status_code for answer in answers} == {200}
        contents = [answer.json() for answer in answers]
        named = [(content["fingerprint"], content["n_bits"]) for content in contents]
        assert list(dict.fromkeys(named)) == [(old.fingerprint, old.n_bits), (new.fingerprint, new.n_bits)]
        for content in contents[::2]:  # the uploads; whichever model answers, it finds the picture itself
            assert (content["hits"][0]["distance"], len(content["hits"])) == (0, 13)


def test_a_killed_one_fails_only_its_own_requests(two, own_collection):
    (killed, first), (_, second) = two
    add(first, png(900))
    with searching(first, 900) as of_first, searching(second, 900) as of_second:
        killed.send(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        wait_until(lambda: isinstance(of_first[-1], httpx.TransportError))
        added = add(second, png(901))
        count = len(of_second)
        wait_until(lambda: len(of_second) > count + 4)
    assert added.status_code == 201
    assert hits(search(second, png(901), k=1))[0]["id"] == added.json()["id"]
    assert {answer.status_code for answer in of_second} == {200}
    with closing(Collection(own_collection, read_only=True)) as collection:
        assert (len(collection), collection.verify()) == (14, [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_behind_the_proxy_a_repeated_change_is_done_once_and_one_service_is_enough(proxied, two, number):
    for image_id in range(1, 7):  # at random, half of these would reach the other service and get 404
        for _ in range(3):
            sent = proxied.delete(f"/v1/images/{image_id}", headers={"Idempotency-Key": f"delete {image_id}"})
            assert sent.status_code == 204
    assert proxied.get("/metrics").status_code == 404
    with searching(proxied, 900) as answers:
        two[0][0].send(number)
        two[0][0].wait()
        n = len(answers)
        wait_until(lambda: len(answers) >= n + 20)
    failed = [answer for answer in answers if isinstance(answer, Exception) or answer.status_code != 200]
    assert len(failed) <= 2  # the request that was in progress, and the one that finds the service gone
