"""Clients of services, in the process of the test and as processes of their own."""

from contextlib import closing

import httpx
import pytest

from hashseek.api.collections import computed
from hashseek.indexing.collection import Collection
from support.commands import wait_until
from support.paths import copy_collection
from support.service import serving, url_in


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine, results of a few images may take seconds, too."""
    monkeypatch.setattr(computed, "WAIT_SECONDS", 60)


@pytest.fixture(scope="session")
def reader(indexed):
    """A client of a read-only service for all pictures."""
    with serving(indexed, read_only=True, max_upload_bytes=2_000_000) as client:
        yield client


@pytest.fixture
def client(own_collection):
    """A client of a service whose collection the test may change."""
    with serving(own_collection) as started:
        yield started


@pytest.fixture
def several(indexed, tmp_path):
    """A folder with the collections `a` and `b c`, which lacks the images 1 to 3, and with a folder that is none."""
    folder = tmp_path / "several"
    for name in ("a", "b c"):
        copy_collection(indexed, folder / name)
    with closing(Collection(folder / "b c")) as collection:
        collection.remove([1, 2, 3])
    (folder / "other").mkdir()
    return folder


@pytest.fixture(params=["", "/collections/a"])
def placed_folder(request):
    """(folder to serve that the test may change, address of a collection in it); alone, or one of several."""
    return request.getfixturevalue("several" if request.param else "own_collection"), request.param


@pytest.fixture
def placed(placed_folder):
    """(client of a service for such a folder, address of the collection)."""
    with serving(placed_folder[0]) as started:
        yield started, placed_folder[1]


@pytest.fixture
def serve(start):
    """Start `hashseek serve` on a free port: (collection, options) -> (process, client of it)."""
    clients = []

    def serve_collection(folder, *options, ready=True, before=""):
        process = start("serve", folder, "--port", 0, "--device", "cpu", *options, before=before)
        wait_until(lambda: url_in(process.err) or process.ended)
        client = httpx.Client(base_url=url_in(process.err), timeout=60)
        clients.append(client)
        if ready:
            wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        return process, client

    yield serve_collection
    for client in clients:
        client.close()
