"""Parameters that an operation does not have: refused, since a filter that is not one would let everything through."""

import io
import warnings

import pytest

from hashseek.api.app import create_app
from hashseek.api.settings import Settings
from support.commands import wait_until
from support.pictures import draw

with warnings.catch_warnings():  # newer versions of Starlette would rather have httpx2, older ones know only httpx
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient


@pytest.fixture(scope="module")
def reader(indexed):
    with TestClient(create_app(Settings(collection=indexed, device="cpu", read_only=True))) as client:
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        yield client


@pytest.fixture
def writer(own_collection):
    with TestClient(create_app(Settings(collection=own_collection, device="cpu"))) as client:
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        yield client


def picture(seed=1):
    buffer = io.BytesIO()
    draw(seed).save(buffer, "PNG")
    return {"image": ("x.png", buffer.getvalue())}


def operation(client, path, method="get"):
    return client.get("/openapi.json").json()["paths"][path][method]["parameters"]


def hits(answer):
    assert answer.status_code == 200, answer.text
    return [{**hit, "rank": 0} for hit in answer.json()["hits"]]


@pytest.mark.parametrize(
    ("fields", "query", "says"),
    [
        ({"lable": "odd"}, {}, "no field 'lable', and it was not carried out: did you mean 'label'?"),
        ({}, {"label": "odd"}, "no parameter 'label', and it was not carried out: it is a field of the form here"),
        ({"colour": "red"}, {}, "it takes added_after, added_before, any_label,"),
        ({"k": ["1", "2"]}, {}, "the field 'k' is given 2 times and takes one value: send it once"),
    ],
)
def test_a_search_by_upload_refuses_what_it_does_not_know(reader, fields, query, says):
    answer = reader.post("/v1/search", files=picture(), data=fields, params=query)
    assert answer.status_code == 422
    assert says in answer.json()["detail"]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (
            "/v1/images/1/similar?withot=odd",
            "no parameter 'withot', and it was not carried out: did you mean 'without'?",
        ),
        ("/v1/images/1/similar?k=1&k=2", "the parameter 'k' is given 2 times"),
        ("/v1/images?lables=odd", "did you mean 'label'?"),
        ("/v1/images/1?size=20", "no parameter 'size', and it was not carried out: it takes none"),
        ("/v1/images/by-key/a/b?x=1", "no parameter 'x'"),
    ],
)
def test_an_address_with_a_parameter_that_is_not_known_is_refused(reader, address, says):
    answer = reader.get(address)
    assert answer.status_code == 422
    assert says in answer.json()["detail"]


def test_every_parameter_that_is_known_is_taken_and_lists_may_be_repeated(reader):
    fields = {"label": ["odd", "three"], "k": "3", "max_distance": "48", "where": [], "id": [str(i) for i in range(30)]}
    answer = reader.post("/v1/search", files=picture(), data=fields)
    assert answer.status_code == 200
    assert all({"odd", "three"} <= {*hit["labels"]} for hit in answer.json()["hits"])
    assert reader.get("/v1/images/1/similar?label=odd&label=three&k=2").status_code == 200
    assert reader.get("/v1/images/1/file?size=32").status_code == 200


EMPTY = (
    "label", "any_label", "without", "where", "id", "key", "added_after", "added_before", "k", "max_distance",
    "min_precision", "effort",
)  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_value_counts_as_not_given(reader, name):
    assert set(EMPTY) == {
        one["name"] for one in operation(reader, "/v1/images/{image_id}/similar") if one["in"] == "query"
    }
    usual = hits(reader.post("/v1/search", files=picture()))
    assert len(usual) == 10
    assert hits(reader.post("/v1/search", files=picture(), data={name: ""})) == usual
    usual = hits(reader.get("/v1/images/1/similar"))
    assert hits(reader.get(f"/v1/images/1/similar?{name}=")) == usual
    assert hits(reader.get(f"/v1/images/1/similar?{name}")) == usual


def test_beside_an_empty_value_the_others_count(reader):
    odd = hits(reader.get("/v1/images/1/similar?label=odd"))
    assert all("odd" in hit["labels"] for hit in odd)
    assert hits(reader.get("/v1/images/1/similar?label=&label=odd&k=&key=&k=10")) == odd
    fields = {"label": ["odd", ""], "id": ["", "1", "2", "3"], "k": "10"}
    assert {hit["id"] for hit in hits(reader.post("/v1/search", files=picture(), data=fields))} <= {1, 2, 3}
    assert hits(reader.get("/v1/images/1/similar?label=%20")) == []  # a label all the same
    assert hits(reader.get("/v1/images/1/similar?label=odd&lable=")) == odd
    page = reader.get("/v1/images").json()
    assert reader.get("/v1/images?label=&after=&limit=").json() == page
    whole = reader.get("/v1/images/1/file")
    assert reader.get("/v1/images/1/file?size=").content == whole.content


@pytest.mark.parametrize("twice", [["", "2"], ["2", ""]])
def test_a_field_of_one_value_that_comes_twice_is_refused_though_one_is_empty(reader, twice):
    answer = reader.post("/v1/search", files=picture(), data={"k": twice})
    assert answer.status_code == 422
    assert "'k' is given 2 times" in answer.json()["detail"]


def test_an_upload_with_empty_fields_is_stored_without_them(writer):
    answer = writer.post("/v1/images", files=picture(97), data={"labels": "", "key": "", "attributes": ""})
    assert (answer.status_code, answer.json()["key"], answer.json()["labels"]) == (201, None, [])


def test_an_upload_with_a_field_that_would_be_lost_is_not_stored(writer):
    n_images = writer.get("/v1/stats").json()["n_images"]
    for fields in ({"label": "odd"}, {"labels": ["odd", "three"]}, {"path": "/etc/passwd"}):
        assert writer.post("/v1/images", files=picture(99), data=fields).status_code == 422
    twice = [("image", picture(98)["image"]), ("image", picture(99)["image"])]
    assert "'image' is given 2 times" in writer.post("/v1/images", files=twice).json()["detail"]
    assert writer.get("/v1/stats").json()["n_images"] == n_images
    assert writer.post("/v1/images", files=picture(99), data={"labels": "odd;three", "key": "a"}).status_code == 201


def test_nothing_is_removed_by_a_request_with_a_parameter_too_many(writer):
    assert writer.delete("/v1/images/1?dry_run=true").status_code == 422
    assert writer.get("/v1/images/1").status_code == 200
