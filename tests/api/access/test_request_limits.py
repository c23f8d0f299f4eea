"""Requests that are refused before their bodies are read: foreign pages, other hosts, too many at once."""

import socket

import httpx
import pytest

from support.commands import wait_until
from support.pictures import png
from support.service import add, assert_problem, hits, serving

FOREIGN = (
    {"Origin": "http://evil.example"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "null"},
    {"Origin": "http://[::1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
)


def test_a_page_of_another_site_changes_nothing(placed):
    client, address = placed
    before = client.get("/v1/collections").json()
    for headers in FOREIGN:
        for refused in (
            client.post(f"{address}/v1/images", files={"image": png(77)}, headers=headers),
            client.delete(f"{address}/v1/images/1", headers=headers),
            client.post("/v1/collections", json={"name": "new", "like": "a"}, headers=headers),
            client.delete("/v1/collections/a", params={"confirm": "a"}, headers=headers),
        ):
            assert_problem(refused, 403, "ForeignPage")
        assert client.get("/v1/collections").json() == before


def test_a_redirect_names_neither_scheme_nor_host(placed):
    """The service cannot know those under which a proxy is reached."""
    client, address = placed
    moved = client.get(f"{address}/v1/images/?limit=1", headers={"X-Forwarded-Proto": "https"}, follow_redirects=False)
    assert (moved.status_code, moved.headers["Location"]) == (307, f"{address}/v1/images?limit=1")


def test_the_own_page_and_programs_may_change(client):
    own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/v1/images", files={"image": png(77)}, headers=own).status_code == 201
    assert add(client, png(78)).status_code == 201
    assert client.get("/v1/stats").headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.parametrize(("kind", "address"), [("indexed", ""), ("several", "/collections/a")])
def test_only_known_hosts_are_answered(request, kind, address):
    """A name of another site that was made to lead here (DNS rebinding) stays the name that a browser sends."""
    stats, evil, good = f"{address}/v1/stats", {"Host": "evil.example"}, {"Host": "Pictures.example:80"}
    indexed = request.getfixturevalue(kind)
    with serving(indexed, read_only=True) as client:
        assert_problem(client.get(stats, headers=evil), 421, "WrongHost", "evil.example")
        assert client.get("/healthz/live", headers=evil).status_code == 200  # a proxy may use the name of a container
        assert_problem(client.get(stats, headers=good), 421, "WrongHost")
        assert_problem(client.get(stats, headers={"Host": "[evil"}), 421, "WrongHost")
        assert all(client.get(stats, headers={"Host": own}).is_success for own in ("127.0.0.1:8000", "[::1]:8000"))
    with serving(indexed, read_only=True, host="Own.example", allowed_hosts=("pictures.Example",)) as client:
        assert client.get(stats, headers=good).is_success
        assert all(client.get(stats, headers={"Host": own}).is_success for own in ("own.example:80", "localhost"))
        assert_problem(client.get(stats, headers=evil), 421, "WrongHost")
        assert_problem(client.get(stats, headers={"Host": "10.0.0.7.evil.example"}), 421, "WrongHost")
        # Probes of Kubernetes and Prometheus use the address of a container; a page of another site has a name.
        assert all(client.get(stats, headers={"Host": own}).is_success for own in ("10.0.0.7:8000", "[fd00::7]:8000"))
    with serving(indexed, read_only=True, host="127.0.0.2") as client:  # an address of this machine alone, too
        assert_problem(client.get(stats, headers=evil), 421, "WrongHost")
    with serving(indexed, read_only=True, host="0.0.0.0") as client:
        assert client.get(stats, headers=evil).is_success


def test_more_uploads_than_allowed_are_refused_until_one_is_done(serve, indexed):
    _, client = serve(indexed, "--read-only", "--max-uploads", 1)
    search = {"files": {"image": png(1)}}
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as slow:
        head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\nExpect: 100-continue\r\n"
        slow.sendall(head + b"Content-Type: multipart/form-data; boundary=x\r\n\r\n")
        assert slow.recv(1000).startswith(b"HTTP/1.1 100")  # it was accepted, and its body is waited for
        refused = client.post("/v1/search", **search)
        assert_problem(refused, 503, "Overloaded", "1")
        assert refused.headers["Retry-After"] == "1"
        assert httpx.get(client.base_url.join("/healthz/live")).is_success
    wait_until(lambda: client.post("/v1/search", **search).status_code == 200)
    assert hits(client.post("/v1/search", **search))
    assert 'status="500"' not in client.get("/metrics").text  # the slow client has gone, which is no fault of ours


@pytest.mark.parametrize(
    "path",
    [
        "/v1/images",
        "/v1/images/1",
        "/v1/images/by-key/a/b",
        "/v1/search",
        "/v1/session",
        "/v1/stats",
        "/",
        "/web/app.js",
    ],
)
def test_options_and_405_name_the_methods_that_a_path_takes(reader, path):
    asked, wrong = reader.options(path), reader.request("TRACE", path)
    assert (asked.status_code, asked.content) == (204, b"")
    assert_problem(wrong, 405)
    assert asked.headers["Allow"] == wrong.headers["Allow"]
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    taken = {method for method in methods if reader.request(method, path).status_code != 405}
    assert {*asked.headers["Allow"].split(", ")} == taken | {"OPTIONS"}


def test_options_of_an_unknown_path(reader):
    assert_problem(reader.options("/v1/nothing"), 404)
