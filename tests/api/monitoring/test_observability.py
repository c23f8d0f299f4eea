"""What the service says about itself: metrics, request ids, the log; and that its answers are what they claim to be."""

import gzip
import json
import sqlite3
from contextlib import closing

import pytest
from PIL import Image

from hashseek.api.messages.schemas import SearchAnswer
from support.commands import wait_until
from support.pictures import encoded, png
from support.service import add, figures, hits, search, serving


def test_metrics_count_what_was_done(serve, indexed):
    _, client = serve(indexed, "--read-only")
    for seed in range(3):
        assert hits(client.post("/v1/search", files={"image": png(800 + seed)}))
    assert hits(client.get("/v1/images/1/similar"))
    assert client.head("/v1/images/1").status_code == 200
    for path in ("/v1/images/99", "/v1/images/98", "/nowhere/1", "/nowhere/2"):
        assert client.get(path).status_code == 404
    found = figures(client)
    counted = {key: value for key, value in found.items() if key[0] == "hashseek_requests_total"}
    assert {key: value for key, value in counted.items() if "/healthz/ready" not in key} == {
        ("hashseek_requests_total", "/v1/search", "200", "POST"): 3,
        ("hashseek_requests_total", "/v1/images/{image_id}/similar", "200", "GET"): 1,
        ("hashseek_requests_total", "/v1/images/{image_id}", "200", "HEAD"): 1,
        ("hashseek_requests_total", "/v1/images/{image_id}", "404", "GET"): 2,
        ("hashseek_requests_total", "404", "other", "other"): 2,  # or clients could make up any number of routes
    }
    stages = {"wait": 3, "decode": 3, "encode": 3, "search": 4, "records": 4}
    assert {stage: found["hashseek_stage_seconds_count", stage] for stage in stages} == stages
    assert all(0 < found["hashseek_stage_seconds_sum", stage] < 60 for stage in stages)
    assert found["hashseek_request_seconds_count", "/v1/search"] == 3
    assert (found["hashseek_batch_images_count",], found["hashseek_batch_images_sum",]) == (3, 3)
    assert found["hashseek_errors_total", "UnknownImage"] == 2
    assert (found["hashseek_index_images",], found["hashseek_queue_length",]) == (12, 0)
    assert found["hashseek_requests_in_progress",] == 1  # this one
    assert found["process_resident_memory_bytes",] > 2**20


@pytest.mark.parametrize("given", ["a.b:c_d-9", "x" * 64])
def test_a_request_keeps_its_id(reader, given):
    assert reader.get("/healthz/live", headers={"X-Request-ID": given}).headers["X-Request-ID"] == given
    unknown = reader.get("/v1/images/99", headers={"X-Request-ID": given})
    assert (unknown.headers["X-Request-ID"], unknown.json()["request_id"]) == (given, given)
    refused = reader.post("/v1/search", content=b"x" * 3_000_000, headers={"X-Request-ID": given})
    assert (refused.status_code, refused.json()["request_id"]) == (413, given)


@pytest.mark.parametrize("given", [None, "", "x" * 65, "a b", "a\tb", b"caf\xc3\xa9", '"', "a,b"])
def test_a_request_without_a_sound_id_gets_one(reader, given):
    answers = [reader.get("/v1/images/99", headers={} if given is None else {"X-Request-ID": given}) for _ in range(2)]
    made = {answer.headers["X-Request-ID"] for answer in answers}
    assert made == {answer.json()["request_id"] for answer in answers}
    assert len(made) == 2
    assert all(len(one) == 16 and one.isalnum() for one in made)


def test_the_log_in_json_has_one_object_per_line_with_the_id_of_its_request(serve, own_collection):
    process, client = serve(own_collection, "--log-format", "json", "--access-log")
    similar = client.get("/v1/images/1/similar", params={"k": 3}, headers={"X-Request-ID": "mine"})
    assert hits(similar)
    with closing(sqlite3.connect(own_collection / "catalog.sqlite")) as db, db:
        db.execute("DROP TABLE images")
    assert client.get("/v1/images/2", headers={"X-Request-ID": "broken"}).status_code == 500
    wait_until(lambda: process.err.count('"broken"') == 2)
    lines = [json.loads(line) for line in process.err.splitlines()]
    assert lines[0]["message"].startswith("search page on")
    assert all("time" in line for line in lines)
    [mine] = [line for line in lines if line.get("request_id") == "mine"]
    assert 0 < mine.pop("milliseconds") < 60_000
    assert {key: mine[key] for key in ("level", "client", "method", "path", "status")} == {
        "level": "info",
        "client": "127.0.0.1",
        "method": "GET",
        "path": "/v1/images/1/similar",
        "status": 200,
    }
    assert [line["level"] for line in lines if line.get("request_id") == "broken"] == ["error", "info"]


def test_the_log_in_text_cannot_be_forged(serve, indexed):
    process, client = serve(indexed, "--read-only", "--access-log")
    client.get("/v1/images/1%0Ahashseek: all is well")
    wait_until(lambda: "all is well" in process.err)
    [line] = [line for line in process.err.splitlines() if "all is well" in line]
    assert not line.startswith("hashseek: all")


def test_answers_are_what_the_documentation_says(own_collection):
    with serving(own_collection) as client:
        assert add(
            client, png(900), key="a/b", labels=["one", "two"], attributes='{"n": [1, null, "\\u00e9"]}'
        ).is_success
        for response in (
            client.get("/v1/images/1/similar", params={"k": 99}),
            search(client, png(900), k=1),
            search(client, png(901), rank="hamming"),
        ):
            content = response.json()
            assert SearchAnswer.model_validate(content, strict=True).model_dump(mode="json") == content
            assert response.headers["content-type"] == "application/json"


def test_long_json_is_compressed_for_those_who_ask_and_pictures_never(own_collection):
    with serving(own_collection) as client:
        bmp = encoded(Image.new("RGB", (64, 64)), "BMP")
        stored = add(client, bmp).json()["url"]

        def get(path, accepted):
            with client.stream("GET", path, headers={"Accept-Encoding": accepted}) as response:
                return response.headers, b"".join(response.iter_raw())

        headers, plain = get("/v1/images?limit=12", "identity")
        assert "content-encoding" not in headers
        headers, packed = get("/v1/images?limit=12", "gzip")
        assert headers["content-encoding"] == "gzip"
        assert int(headers["content-length"]) == len(packed) < len(plain) / 2
        assert gzip.decompress(packed) == plain
        for path in (stored, "/healthz/live"):
            assert "content-encoding" not in get(path, "gzip")[0]
        assert get(stored, "gzip")[1] == bmp
