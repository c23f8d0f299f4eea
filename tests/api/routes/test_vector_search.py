"""Searching a collection of vectors over HTTP."""

import json

import pytest

import hashseek
from support.pictures import png
from support.service import add, assert_problem, hits, search, serving
from support.vector_files import WIDTH, clustered


@pytest.fixture(scope="module")
def vectors():
    return clustered(80)


@pytest.fixture(scope="module")
def vector_client(tmp_path_factory, vectors):
    folder = tmp_path_factory.mktemp("vectors") / "c"
    labels = [["even"] if i % 2 == 0 else ["odd"] for i in range(80)]
    hashseek.create_vector_collection(folder, vectors, [f"v{i}" for i in range(80)], labels=labels, n_bits=16).close()
    with serving(folder) as client:
        yield client


def test_a_vector_finds_itself_and_the_parameters_are_those_of_images(vector_client, vectors):
    assert vector_client.get("/v1/stats").json()["holds"] == "vectors"
    for row in (0, 7, 79):
        found = hits(vector_client.post("/v1/search", json={"vector": vectors[row].tolist(), "k": 5}))
        assert (found[0]["key"], found[0]["distance"], len(found)) == (f"v{row}", 0, 5)
        assert (found[0]["url"], found[0]["path"]) == (None, "")
    body = {"vector": vectors[0].tolist(), "k": 80, "rank": "hamming", "label": ["odd"], "max_distance": 3}
    found = hits(vector_client.post("/v1/search", json=body))
    assert 0 < len(found) < 40
    assert all(hit["labels"] == ["odd"] and hit["distance"] <= 3 for hit in found)
    similar = {"k": 80, "label": "odd", "max_distance": 3}
    stored = vector_client.get("/v1/images/by-key/v0").json()
    assert (stored["media_type"], stored["width"]) == ("application/x-vector", 0)
    assert hits(vector_client.get(f"/v1/images/{stored['id']}/similar", params=similar)) == found


@pytest.mark.parametrize(
    ("body", "kind", "named"),
    [
        ({"k": 3}, "BadRequest", "vector"),
        ({"vector": [1.0, 2.0]}, "BadDataset", "24"),
        ({"vector": []}, "BadRequest", "vector"),
        ({"vector": [float("nan")] * WIDTH}, "BadRequest", "vector"),
        ({"vector": [1e300] * WIDTH}, "BadDataset", "float32"),
        ({"vector": [0] * WIDTH}, "BadDataset", "zeros"),
        ({"vector": ["x"] * WIDTH}, "BadRequest", "vector"),
        ({"vector": [1] * WIDTH, "k": 0}, "BadRequest", "k"),
        ({"vector": [1] * WIDTH, "labels": "odd"}, "BadRequest", "labels"),
        ([1, 2], "BadRequest", ""),
    ],
)
def test_a_bad_body_is_a_problem(vector_client, body, kind, named):
    headers = {"content-type": "application/json"}
    assert_problem(vector_client.post("/v1/search", content=json.dumps(body), headers=headers), 422, kind, named)


def test_files_and_uploads_are_refused(vector_client, reader, vectors):
    assert_problem(vector_client.get("/v1/images/1/file"), 404, "UnknownImage", "1")
    assert_problem(vector_client.get("/v1/images/1/file", params={"size": 256}), 404, "UnknownImage", "1")
    assert_problem(add(vector_client, png(1)), 422, "BadCheckpoint")
    assert_problem(search(vector_client, png(1)), 422, "BadCheckpoint")
    assert_problem(reader.post("/v1/search", json={"vector": vectors[0].tolist()}), 422, "BadCheckpoint")
    assert vector_client.get("/v1/stats").json()["n_images"] == 80


def test_a_vector_is_encoded_and_found_by_its_code(vector_client, vectors):
    body = {"vector": vectors[7].tolist()}
    encoded = vector_client.post("/v1/encode", json=body).json()
    assert encoded["n_bits"] == 16
    remote = hashseek.Client("http://localhost", http=vector_client)
    assert remote.encode_vector(vectors[7]).code == encoded["code"]
    by_code = {"code": encoded["code"], "k": 5}
    assert hits(vector_client.post("/v1/search", json=by_code)) == hits(
        vector_client.post("/v1/search", json=body | {"k": 5, "rank": "hamming"})
    )
    answers = vector_client.post("/v1/search", json={"queries": [body, {"image_key": "v7"}], "rank": "hamming"}).json()
    assert answers["answers"][0]["hits"] == answers["answers"][1]["hits"]
    assert_problem(vector_client.post("/v1/encode", json={"vector": [1.0]}), 422, "BadDataset")
    assert_problem(vector_client.post("/v1/encode", files={"image": png(1)}), 422, "BadCheckpoint")


def test_the_documentation_describes_both_bodies(reader):
    content = reader.get("/openapi.json").json()["paths"]["/v1/search"]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "application/json"}
    properties = content["application/json"]["schema"]["properties"]
    assert set(properties["queries"]["items"]["properties"]) == {"image_id", "image_key", "code", "vector"}
    assert set(properties) > set(properties["queries"]["items"]["properties"])
    assert "$ref" not in str(properties)
