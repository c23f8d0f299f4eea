"""Clients of services, in the process of the test and as processes of their own."""

import httpx
import pytest

from support.commands import wait_until
from support.service import serving, url_in


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
