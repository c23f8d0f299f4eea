"""API keys: which request needs which role, how keys come and go, how often they may be used."""

import logging
import os
import re
import time
from contextlib import contextmanager

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Mount

from hashseek.api.access.limits import RateLimit, needed_role
from hashseek.api.keys import ROLES, create, hash_of, read_keys, revoke
from hashseek.api.routes.dependencies import require_writable, require_writable_folder
from hashseek.api.settings import Settings
from hashseek.retrieval.errors import BadConfig
from support.pictures import png
from support.service import add, assert_problem, hits, search, serving

OPEN = {"/", "/healthz/live", "/healthz/ready", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
OPEN_FOLDERS = {"/web/", "/static-offline-docs/"}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys" / "keys.toml"


@pytest.fixture
def secret(file, capsys):
    """Create a key of a role, whose name is the role's too; gives the secret."""

    def make(role, name=None):
        create(name or role, file, role)
        return capsys.readouterr().out.strip()

    return make


def bearer(secret):
    return {"Authorization": f"Bearer {secret}"}


@contextmanager
def keyed(folder, file, **settings):
    with serving(folder, keys=file, **settings) as client:
        yield client


def routes(found, prefix=""):
    """Every one of the routes, as (method, path with values, whether it may change something)."""
    for route in found:
        if hasattr(route, "original_router"):  # how newer versions of FastAPI keep those of a router
            yield from routes(route.original_router.routes, route.include_context.prefix)
            continue
        path = re.sub(r"\{\w+(:\w+)?\}", "1", prefix.replace("{collection}", "a") + route.path) + "/" * isinstance(
            route, Mount
        )
        for method in getattr(route, "methods", None) or {"GET"}:
            changes = isinstance(route, APIRoute) and any(
                d.dependency in (require_writable, require_writable_folder) for d in route.dependencies
            )
            yield method, path, changes


@pytest.mark.parametrize(("kind", "address"), [("own_collection", ""), ("several", "/collections/a")])
def test_every_route_needs_a_key_with_the_right_role(request, kind, address, file, secret):
    keys = [bearer(secret(role)) for role in ROLES]
    open_paths = {*OPEN, *OPEN_FOLDERS, f"{address}/"}
    of_admins = {("DELETE", f"{address}/v1/images"), ("POST", "/v1/collections"), ("DELETE", "/v1/collections/1")}
    with keyed(request.getfixturevalue(kind), file) as client:
        assert client.get("/openapi.json").json()["components"]["securitySchemes"]  # /docs asks for a key
        found = list(routes(client.app.routes))
        own = {f"{address}/v1/{path}" for path in ("images/1", "search", "stats")}
        assert {path for _, path, _ in found} >= own | open_paths | {"/v1/collections"}
        others = [("GET", "/v1/no-such-route", False), ("PATCH", f"{address}/v1/search", False)]
        for method, path, changes in [*found, *others]:
            client.cookies.clear()  # of /v1/session
            answers = [client.request(method, path, headers=headers) for headers in ({}, *keys)]
            status = [answer.status_code for answer in answers]
            if path in open_paths:
                assert method in ("GET", "HEAD"), "a path that needs no key must change nothing"
                assert not {401, 403} & {*status}, (method, path)
                continue
            assert_problem(answers[0] if method != "HEAD" else client.get(path), 401, "KeyNeeded")
            assert answers[0].headers["WWW-Authenticate"] == "Bearer"
            assert (status[1] == 403) == changes, (method, path, "must the role be write? See api/access/limits.py")
            assert (status[2] == 403) == ((method, path) in of_admins), (method, path)
            assert not {401, 403} & {status[3]}, (method, path)


OTHER = ("/healthz/live/x", "/metrics", "/v1", "/v1/", "//", "//v1/stats", "/web/../v1/stats", "/website", "/docs2")
NO_ROUTES = ("/collections", "/collections/", "/collections//v1/stats", "/collections/a/collections/b/")


@pytest.mark.parametrize("path", [*OTHER, *NO_ROUTES])
def test_other_paths_need_a_key(path):
    """Whoever adds a route is safe."""
    needed = needed_role("GET", path)
    assert needed == ("read" if not path.startswith("/web/") else None)  # which is a file of that folder, or nothing


def test_the_page_of_a_collection_needs_no_slash_at_the_end(placed_folder, file, secret):
    folder, address = placed_folder
    secret("read")
    with keyed(folder, file) as client:
        page = client.get(address)
        assert (page.status_code, page.url.path, "<html" in page.text) == (200, f"{address}/", True)


def test_a_newline_after_a_path_gives_no_right(placed_folder, file, secret):
    """Starlette's routes match such a path, too."""
    folder, address = placed_folder
    with keyed(folder, file) as client:
        query, headers = {"id": 1, "expected": 1}, bearer(secret("write"))
        for path in ("/v1/images%0A", "/v1/images%0a/"):
            assert client.delete(address + path, params=query, headers=headers).status_code in (403, 404), path
        new = {"name": "new", "like": "a"}
        assert client.post("/v1/collections%0A", json=new, headers=headers).status_code == 403
        assert client.get(f"{address}/v1/images/1", headers=headers).is_success


def test_nothing_leaves_the_open_folders(own_collection, file, secret):
    secret("admin")
    with keyed(own_collection, file) as client:
        for path in (
            "/web/../v1/stats",
            "/web/%2e%2e/v1/stats",
            "/web/..%2fapp.py",
            "/web//v1/stats",
            "/docs/../v1/stats",
        ):
            assert client.get(path).status_code in (401, 404), path


def test_only_a_known_secret_in_the_header_or_the_cookie_counts(indexed, file, secret):
    good = secret("read")
    with keyed(indexed, file, read_only=True) as client:
        for headers in (
            bearer(good + "x"),
            bearer(good[:-1]),
            bearer(hash_of(good)),
            bearer("read"),
            {"Authorization": b"Bearer \xe4"},
            {"Authorization": f"Basic {good}"},
            {"Authorization": "Bearer"},
            {"X-API-Key": good},
            {"Cookie": "hashseek_key=x"},
        ):
            assert_problem(client.get("/v1/stats", headers=headers), 401, "KeyNeeded")
        assert_problem(client.get("/v1/stats", params={"key": good, "access_token": good}), 401, "KeyNeeded")
        assert client.get("/v1/stats", headers={"authorization": f"bearer  {good}"}).is_success
        assert hits(client.post("/v1/search", files={"image": png(1)}, headers=bearer(good)))
        assert client.head("/v1/stats", headers=bearer(good)).is_success


def test_a_running_service_sees_new_and_revoked_keys(indexed, file, secret, caplog):
    good = secret("read")
    with keyed(indexed, file, read_only=True) as client:

        def status(secret):
            return client.get("/v1/stats", headers=bearer(secret)).status_code

        assert status(good) == 200
        other = secret("admin")
        assert (status(good), status(other)) == (200, 200)
        revoke("read", file)
        assert (status(good), status(other)) == (401, 200)
        content = file.read_text()
        file.write_text("damaged")
        assert (status(good), status(other)) == (401, 401)
        file.unlink()
        assert (status(good), status(other)) == (401, 401)
        assert len(caplog.records) == 4
        file.write_text(content)
        assert (status(good), status(other)) == (401, 200)
        file.write_text(content.replace(hash_of(other), hash_of(good)))  # in place, and of the same size
        os.utime(file, (1, 1))
        assert (status(good), status(other)) == (200, 401)


def test_the_page_keeps_its_key_in_a_cookie(own_collection, file, secret):
    with keyed(own_collection, file) as client:
        assert_problem(client.post("/v1/session"), 401, "KeyNeeded")
        signed_in = client.post("/v1/session", headers=bearer(secret("write")))
        assert signed_in.json() == {"key": "write", "role": "write"}
        cookie = signed_in.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {*cookie.split("; ")}
        assert "Secure" not in cookie
        assert "Max-Age" not in cookie  # until the browser is closed
        assert client.get("/v1/images/1/file", params={"size": 64}).is_success  # as <img> asks, without a header
        assert client.get("/v1/session").json() == signed_in.json()
        assert_problem(client.delete("/v1/images/1", headers={"Origin": "http://evil.example"}), 403, "ForeignPage")
        assert client.delete("/v1/images/1", headers={"Origin": "http://localhost"}).status_code == 204
        assert client.delete("/v1/session").status_code == 204
        assert_problem(client.get("/v1/images/2/file"), 401, "KeyNeeded")
        https = {**bearer(secret("read")), "X-Forwarded-Proto": "https"}
        assert "Secure" in client.post("/v1/session", headers=https).headers["Set-Cookie"]


def test_the_access_log_names_the_key_but_not_its_secret(indexed, file, secret, caplog):
    good = secret("read", "alice")
    with keyed(indexed, file, read_only=True) as client, caplog.at_level(logging.INFO, "hashseek.access"):
        client.get("/v1/stats", headers=bearer(good))
        client.get("/v1/stats")
        client.delete("/v1/stats", headers=bearer(good))
    noted = [record.request for record in caplog.records if record.name == "hashseek.access"]
    assert [(request["status"], request["key"]) for request in noted] == [(200, "alice"), (401, None), (403, "alice")]
    assert [" alice " in line for line in caplog.messages if "/v1/stats" in line] == [True, False, True]
    assert good not in caplog.text


def test_without_keys_everybody_may_do_everything(client):
    assert client.post("/v1/session").json() == {"key": None, "role": "admin"}
    assert "Set-Cookie" not in client.post("/v1/session").headers
    assert add(client, png(70)).status_code == 201


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "127.8.8.8"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "0.0.0.0", "read_only": True}, True),
        ({"host": "0.0.0.0", "no_keys": True}, True),
        ({"host": "0.0.0.0", "keys": True}, True),
        ({"keys": True, "no_keys": True}, False),
        ({"rate_limit": 1}, False),
        ({"keys": True, "rate_burst": 9}, False),
        ({"keys": True, "rate_burst": 9, "rate_limit": 1}, True),
        ({"allowed_origins": ["*"]}, False),
        ({"allowed_origins": ["https://my.example/page"]}, False),
        ({"allowed_origins": ["my.example"]}, False),
        ({"allowed_origins": ["https://my.example:8443"]}, True),
        ({"allowed_hosts": ["https://images.example"]}, False),
        ({"allowed_hosts": ["images.example:8443"]}, False),
        ({"allowed_hosts": ["images.example", "fd00::7"]}, True),
        ({"url_hosts": ["https://images.example"]}, False),
        ({"url_hosts": ["images.example:port"]}, False),
        ({"url_hosts": ["images.example/cats"]}, False),
        ({"url_hosts": ["*.images.example"]}, False),
        ({"url_hosts": ["images.example", "images.example:8443"]}, True),
    ],
)
def test_strangers_may_change_nothing_unless_somebody_said_so(tmp_path, file, secret, settings, allowed):
    secret("read")
    checked = Settings(tmp_path, **{name: file if name == "keys" else value for name, value in settings.items()})
    if allowed:
        checked.check()
    else:
        with pytest.raises(BadConfig):
            checked.check()


def test_the_command_refuses_an_open_port_without_keys(hashseek, indexed, tmp_path):
    for options in (("--host", "0.0.0.0"), ("--keys", tmp_path / "none.toml")):
        code, out, err = hashseek("serve", indexed, "--port", 0, *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "hashseek keys create" in err


def test_the_commands_create_list_and_revoke(hashseek, file):
    before = f"os.environ['HASHSEEK_KEYS'] = {str(file)!r}; os.umask(0o077)"
    code, printed, _ = hashseek("keys", "create", "alice.b", "--role", "write", before=before)
    assert file.stat().st_mode & 0o777 == 0o644  # the service may run as another user
    [secret] = printed.split()
    assert (code, len(secret)) == (0, 47)
    assert secret not in file.read_text()
    assert [(key.name, key.role, key.sha256) for key in read_keys(file).values()] == [
        ("alice.b", "write", hash_of(secret))
    ]
    assert hashseek("keys", "create", "alice.b", before=before)[0] == 2  # the name is taken
    assert hashseek("keys", "create", "a b", before=before)[0] == 2
    code, listed, _ = hashseek("keys", "list", before=before)
    assert listed.split()[:2] == ["alice.b", "write"]
    assert secret not in listed
    assert hash_of(secret) not in listed
    assert hashseek("keys", "revoke", "bob", before=before)[0] == 2
    assert hashseek("keys", "revoke", "alice.b", before=before)[0] == 0
    assert read_keys(file) == {}


@pytest.mark.parametrize(
    "content",
    [
        "x",
        "x = 1",
        "[a]\nrole = 'read'",
        f"[a]\nrole = 'root'\nsha256 = '{'0' * 64}'\ncreated_at = ''",
        "[a]\nrole = 'read'\nsha256 = 'Ä'\ncreated_at = ''",
        f"[a]\nrole = 'read'\nsha256 = '{'0' * 64}'\ncreated_at = ''\nmore = 1",
    ],
)
def test_a_damaged_file_of_keys_is_refused(file, content):
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(BadConfig, match=r"keys\.toml"):
        read_keys(file)


def test_a_bucket_of_tokens():
    rate = RateLimit(per_minute=30, burst=2)  # one token every two seconds
    assert [rate.wait("a", 0), rate.wait("a", 0), rate.wait("a", 0), rate.wait("b", 0)] == [0, 0, 2, 0]
    assert [rate.wait("a", 1), rate.wait("a", 2), rate.wait("a", 2)] == [1, 0, 2]
    assert [rate.wait("a", 100) for _ in range(3)] == [0, 0, 2]  # never more than the burst


def test_each_key_has_its_own_rate(indexed, file, secret):
    busy, calm = bearer(secret("read", "busy")), bearer(secret("read", "calm"))
    with keyed(indexed, file, read_only=True, rate_limit=1, rate_burst=3) as client:
        started = time.monotonic()
        answers = [client.get("/v1/stats", headers=busy) for _ in range(4)]
        assert [answer.status_code for answer in answers[:3]] == [200] * 3
        assert_problem(answers[3], 429, "TooOften", "busy")
        assert 60 - (time.monotonic() - started) <= int(answers[3].headers["Retry-After"]) <= 61
        assert client.get("/v1/stats", headers=calm).is_success
        assert client.get("/healthz/live", headers=busy).is_success


def test_pages_of_allowed_origins_may_use_the_api(own_collection, file, secret):
    good, friend = bearer(secret("write")), {"Origin": "https://friend.example"}
    asking = {"Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": "authorization"}
    with keyed(own_collection, file, allowed_origins=["https://friend.example"]) as client:
        asked = client.options("/v1/images/1", headers={**friend, **asking})
        assert asked.is_success
        assert asked.headers["Access-Control-Allow-Origin"] == friend["Origin"]
        assert "Access-Control-Allow-Credentials" not in asked.headers
        refused = client.delete("/v1/images/1", headers=friend)
        assert_problem(refused, 401, "KeyNeeded")
        assert refused.headers["Access-Control-Allow-Origin"] == friend["Origin"]  # so that the page can read it
        assert client.delete("/v1/images/1", headers={**good, **friend}).status_code == 204
        for origin in ("http://friend.example", "https://friend.example.evil.example", "null"):
            assert client.options("/v1/images/1", headers={"Origin": origin, **asking}).status_code == 400
            assert_problem(client.delete("/v1/images/2", headers={**good, "Origin": origin}), 403, "ForeignPage")
            answer = client.get("/v1/stats", headers={**good, "Origin": origin})
            assert "Access-Control-Allow-Origin" not in answer.headers


def test_cors_is_off_by_default(client):
    asking = {"Origin": "https://friend.example", "Access-Control-Request-Method": "GET"}
    assert "Access-Control-Allow-Origin" not in client.options("/v1/stats", headers=asking).headers
    assert "Access-Control-Allow-Origin" not in client.get("/v1/stats", headers=asking).headers
    assert search(client, png(1)).is_success


def test_clients_do_not_share_idempotency_keys(own_collection, file, secret):
    alice, bob = ({**bearer(secret("admin", name)), "Idempotency-Key": "a"} for name in ("alice", "bob"))
    with keyed(own_collection, file) as client:
        first, again, other = (
            client.delete("/v1/images", params={"label": "odd", "expected": 6}, headers=headers)
            for headers in (alice, alice, bob)
        )
    assert first.json() == again.json() == {"removed": 6}
    assert_problem(other, 409, "UnexpectedNumber")
