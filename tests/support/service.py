"""The HTTP service in the process of the test, and the requests that tests make."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from hashseek.api.app import create_app
from hashseek.api.settings import Settings
from support.commands import wait_until

with warnings.catch_warnings():  # newer versions of Starlette prefer httpx2, older ones know only httpx
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient


@contextmanager
def serving(folder: Path, *, ready: bool = True, **settings: Any) -> Iterator[TestClient]:
    """A client of a service for the collection in `folder`."""
    app = create_app(Settings(collection=folder, **{"device": "cpu", **settings}))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        if ready:
            wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        yield client


@contextmanager
def listening(folder: Path, **settings: Any) -> Iterator[str]:
    """The address of a service for the collection in `folder`, for programs that need a port."""
    app = create_app(Settings(collection=folder, **{"device": "cpu", **settings}))
    # Uvicorn's own configuration would close all logging handlers, one of which (absl's) then closes pytest's stderr.
    config = uvicorn.Config(app, port=0, log_level="error", log_config=None)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    url = "http://localhost:{1}".format(*server.servers[0].sockets[0].getsockname())
    try:
        wait_until(lambda: httpx.get(f"{url}/healthz/ready").status_code == 200)
        yield url
    finally:  # or a test that fails would never end
        server.should_exit = True
        thread.join()


def search(client, data: bytes, **fields: Any):
    return client.post("/v1/search", files={"image": ("picture", data)}, data=fields)


def add(client, data: bytes, **fields: Any):
    return client.post("/v1/images", files={"image": ("picture", data)}, data=fields)


def hits(answer) -> list[dict[str, Any]]:
    """The hits of a search."""
    assert answer.status_code == 200, answer.text
    return answer.json()["hits"]


def assert_problem(response, status: int, kind: str = "about:blank", *values: str) -> None:
    """The response is problem JSON of this status and kind, whose detail names the values."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    content = response.json()
    assert set(content) == {"type", "title", "status", "detail", "request_id"}
    assert content["request_id"] == response.headers["X-Request-ID"]
    assert (content["status"], content["type"].removeprefix("urn:hashseek:")) == (status, kind), content
    assert all(value in content["detail"] for value in values), content["detail"]
    assert "\n" not in content["detail"]
    assert "Traceback" not in response.text


def figures(client) -> dict[tuple[str, ...], float]:
    """{(name, values of the labels, sorted): value} of all metrics."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


def kept_files(collection: Path) -> list[Path]:
    """The uploaded files that the collection has kept."""
    return [path for path in (collection / "files").rglob("*") if path.is_file()]


def url_in(text):
    """The URL that a starting server prints, or None."""
    found = re.search(r"search page on (http://\S+?),", text)
    return found and found[1]
