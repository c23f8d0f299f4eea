"""Searching over HTTP: hits, parameters, filters, and what is refused."""

import gzip
import json
import re
from contextlib import closing
from urllib.parse import quote

import numpy as np
import pytest

import hashseek
from hashseek.indexing import remote
from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.searcher import Query, Searcher, SearchOptions
from hashseek.retrieval.codes import pack
from support import web
from support.collections import sql
from support.pictures import labels_of, png
from support.service import add, assert_problem, hits, search, serving


def test_health_statistics_and_documentation(reader, checkpoint):
    from hashseek.retrieval.checkpoint import load_header

    assert reader.get("/healthz/live").json() == {"status": "live"}
    assert reader.get("/healthz/ready").json() == {"status": "ready"}
    stats = reader.get("/v1/stats").json()
    assert stats["fingerprint"] == load_header(checkpoint).fingerprint
    assert (stats["n_images"], stats["n_bits"], stats["read_only"]) == (12, 48, True)
    assert (stats["backbone"], stats["labels"]) == ("squeezenet1_1", {"even": 6, "odd": 6, "three": 4})
    paths = reader.get("/openapi.json").json()["paths"]
    assert {path: sorted(operations) for path, operations in paths.items()} == {
        "/v1/search": ["post"],
        "/v1/collections": ["get"],
        "/v1/duplicates": ["get"],
        "/v1/duplicates/kept": ["post"],
        "/v1/encode": ["post"],
        "/v1/batch": ["post"],
        "/v1/images": ["delete", "get", "post"],
        "/v1/images/by-key/{key}": ["delete", "get", "patch"],
        "/v1/images/{image_id}": ["delete", "get", "patch"],
        "/v1/images/{image_id}/file": ["get"],
        "/v1/images/{image_id}/similar": ["get"],
        "/v1/overview": ["get"],
        "/v1/reports": ["get"],
        "/v1/reports/{name}": ["get"],
        "/v1/session": ["delete", "get", "post"],
        "/v1/stats": ["get"],
        "/healthz/live": ["get"],
        "/healthz/ready": ["get"],
    }
    parameters = paths["/v1/images/{image_id}/similar"]["get"]["parameters"]
    assert {one["name"] for one in parameters if one["in"] == "query"} == SEARCH_PARAMETERS
    assert all(one.get("description") for one in parameters if one["in"] == "query")


def test_pages_load_nothing_from_another_host(reader):
    page = reader.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(/web/[^"]+)"', page.text)
    assert len(files) >= 3
    assert {reader.get(file).headers["Cache-Control"] for file in ("/", *files)} == {"no-cache"}  # of one version
    for text in (page.text, *(reader.get(file).text for file in files)):
        assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    for path in ("/", "/docs", "/redoc"):
        text = reader.get(path).text
        assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", text)
        for asset in re.findall(r"""(?:src|href)=["'](/[^"']+)["']""", text):
            assert reader.get(asset).status_code == 200


def test_every_stored_picture_finds_itself_at_distance_0(reader, pictures):
    for file in sorted(path for path in pictures.rglob("*") if path.is_file()):
        content = search(reader, file.read_bytes(), k=12, rank="hamming").json()
        found = content["hits"]
        assert (content["n_bits"], content["n_images"], len(found)) == (48, 12, 12)
        assert [hit["rank"] for hit in found] == list(range(1, 13))
        assert [(hit["distance"], hit["id"]) for hit in found] == sorted((hit["distance"], hit["id"]) for hit in found)
        own = next(hit for hit in found if hit["path"] == file.name)
        assert (own["distance"], set(own["labels"])) == (0, set(labels_of(file)))
        assert own["url"] == f"/v1/images/{own['id']}/file"


def test_a_picture_by_url_is_searched_if_its_host_is_allowed(reader, indexed, pictures, monkeypatch):
    smallest, *_, largest = sorted(pictures.glob("picture*"), key=lambda file: file.stat().st_size)
    data = smallest.read_bytes()
    with web.serving(pictures) as place:
        place = place.replace("127.0.0.1", "localhost")
        host, url = place.removeprefix("http://"), f"{place}/{quote(smallest.name)}"
        with serving(indexed, read_only=True) as client:
            assert_problem(client.post("/v1/search", json={"url": url}), 422, "BadConfig", "--url-host")
        allowed = {"url_hosts": ["pictures.example", host.upper()], "max_upload_bytes": len(data)}
        with serving(indexed, read_only=True, **allowed) as client:
            assert_problem(client.post("/v1/search", json={"url": url}), 422, "BadImage", host)  # not public
            monkeypatch.setattr(remote, "is_public", lambda _: True)
            answer = client.post("/v1/search", json={"url": url, "k": 3})
            assert hits(answer) == hits(search(reader, data, k=3))
            assert answer.json()["ranked_by"] == "asymmetric"
            by_client = hashseek.Client("http://localhost", http=client).search_url(url, k=3)
            assert [hit.id for hit in by_client.hits] == [hit["id"] for hit in hits(answer)]
            for other in (
                url.replace("localhost", "127.0.0.1"),
                f"http://{host}/none",
                f"http://{host}/{quote(largest.name)}",  # larger than an upload may be
                "file:///x",
            ):
                assert_problem(client.post("/v1/search", json={"url": other}), 422, "BadImage", other)
            assert_problem(client.post("/v1/search", json={"url": url, "image_id": 1}), 422, "BadRequest")
            assert_problem(client.post("/v1/search", json={"queries": [{"url": url}]}), 422, "BadRequest")


def test_max_distance_and_k_agree_between_search_and_similar(reader, pictures):
    data = (pictures / "picture 00.jpg").read_bytes()
    ranked = {"rank": "hamming"}
    everything = hits(search(reader, data, k=10_000, **ranked))
    [image_id] = [hit["id"] for hit in everything if hit["distance"] == 0]
    limit = everything[5]["distance"]
    near = [hit for hit in everything if hit["distance"] <= limit]
    assert hits(search(reader, data, k=100, max_distance=limit, **ranked)) == near
    assert hits(reader.get(f"/v1/images/{image_id}/similar", params={"k": 100, "max_distance": limit})) == near
    assert hits(search(reader, data, k=100, max_distance=10**30, **ranked)) == everything
    assert hits(search(reader, data, **ranked)) == everything[:10]


@pytest.mark.parametrize("rank", ["hamming", "asymmetric"])
def test_pages_of_a_search_follow_each_other(reader, pictures, rank):
    data, found, offset = (pictures / "picture 00.jpg").read_bytes(), [], 0
    while offset is not None:
        answer = search(reader, data, k=5, rank=rank, offset=offset).json()
        found += answer["hits"]
        offset = answer["next_offset"]
    assert found == hits(search(reader, data, k=12, rank=rank))
    assert (answer["is_exact"], answer["histogram"], len(answer["hits"])) == (True, None, 2)
    assert hits(search(reader, data, k=5, offset=9_000)) == []
    assert_problem(search(reader, data, k=5, offset=9_996), 422, "BadConfig", "9996", "10,000")


def test_a_histogram_counts_what_passes_the_filters_at_any_distance(reader):
    everything = hits(reader.get("/v1/images/1/similar?k=12"))
    for label, allowed in ((None, {"odd", "even"}), ("odd", {"odd"})):
        parameters = {"k": 1, "max_distance": 0, "include": "histogram"} | ({"label": label} if label else {})
        counts = reader.get("/v1/images/1/similar", params=parameters).json()["histogram"]
        distances = [hit["distance"] for hit in everything if allowed & {*hit["labels"]}]
        assert counts == [distances.count(distance) for distance in range(49)]


def test_rankings_say_what_orders_their_hits(reader, pictures):
    data, similar = (pictures / "picture 00.jpg").read_bytes(), "/v1/images/1/similar"
    for answer, rank in (
        (search(reader, data), "asymmetric"),
        (search(reader, data, rank="asymmetric", oversample=100), "asymmetric"),
        (search(reader, data, rank="hamming"), "hamming"),
        (reader.get(similar), "hamming"),
    ):
        found = hits(answer)
        assert answer.json()["ranked_by"] == rank
        by_score = sorted(
            found, key=lambda hit: (-(hit["score"] or 0), hit["distance"] * (rank == "hamming"), hit["id"])
        )
        assert found == by_score
        assert all((hit["score"] is None) == (rank == "hamming") for hit in found)
    answers = [search(reader, data, k=2, oversample=oversample).json() for oversample in (1, 6)]
    assert [answer["is_exact"] for answer in answers] == [False, True]  # of 2 and of all 12 pictures
    assert_problem(reader.get(similar, params={"rank": "asymmetric"}), 422, "BadConfig", "hamming")
    assert_problem(search(reader, data, rank="float"), 422, "BadConfig", "--keep-features")


def test_a_collection_that_keeps_features_ranks_uploads_by_them(checkpoint, tmp_path):
    with closing(open_or_create(tmp_path / "keeping", checkpoint=checkpoint, keep_features=True)):
        pass
    with serving(tmp_path / "keeping") as client:
        stats = client.get("/v1/stats").json()
        assert (stats["holds"], stats["keeps_features"]) == ("images", True)
        ids = [add(client, png(seed)).json()["id"] for seed in range(5)]
        [first, *others] = hits(search(client, png(2), rank="float", k=5))
        assert (first["id"], len(others)) == (ids[2], 4)
        assert first["score"] == pytest.approx(1, abs=1e-3)
        by_id = hits(client.get(f"/v1/images/{ids[2]}/similar", params={"rank": "float", "k": 5}))
        assert by_id == [first, *others]


def test_a_service_with_a_limit_below_the_default_returns_as_many_as_it_may(indexed):
    with serving(indexed, read_only=True, max_k=4) as client:
        assert len(hits(search(client, png(1)))) == len(hits(client.get("/v1/images/1/similar"))) == 4
        assert len(hits(client.get("/v1/images/1/similar?k=2"))) == 2
        assert_problem(client.get("/v1/images/1/similar?k=5"), 422, "BadConfig", "5", "4")


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"k": 0}, "k"),
        ({"offset": -1}, "offset"),
        ({"include": "everything"}, "include"),
        ({"k": -7}, "k"),
        ({"k": "9" * 5000}, "k"),
        ({"k": "1.5"}, "k"),
        ({"max_distance": -1}, "max_distance"),
        ({"max_distance": "nan"}, "max_distance"),
        ({"min_precision": 1.5}, "min_precision"),
        ({"rank": "cosine"}, "rank"),
        ({"oversample": 0}, "oversample"),
        ({"oversample": 101}, "oversample"),
        ({"id": "x"}, "id"),
        ({"lable": "odd"}, "lable"),
    ],
)
def test_invalid_and_unknown_parameters_are_refused(reader, parameters, name):
    assert_problem(search(reader, png(1), **parameters), 422, "BadRequest", name)
    assert_problem(reader.get("/v1/images/1/similar", params=parameters), 422, "BadRequest", name)


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"k": 10_001}, "10001"),
        ({"k": 10**30}, "10,000"),
        ({"where": "n!=2"}, "n!=2"),
        ({"added_after": "soon"}, "soon"),
        ({"effort": 5}, "effort"),
    ],
)
def test_values_that_the_library_refuses_are_bad_config(reader, parameters, value):
    assert_problem(search(reader, png(1), **parameters), 422, "BadConfig", value)
    assert_problem(reader.get("/v1/images/1/similar", params=parameters), 422, "BadConfig", value)


@pytest.mark.parametrize(
    ("method", "url", "name"),
    [
        ("get", "/v1/images?lables=odd", "lables"),
        ("get", "/v1/images/1?size=20", "size"),
        ("get", "/v1/images/by-key/a/b?x=1", "x"),
        ("get", "/v1/images/1/file?sice=20", "sice"),
        ("post", "/v1/search?label=odd", "label"),
    ],
)
def test_every_route_refuses_unknown_parameters(reader, method, url, name):
    files = {"files": {"image": png(1)}} if method == "post" else {}
    assert_problem(reader.request(method, url, **files), 422, "BadRequest", name)


SEARCH_PARAMETERS = {
    "label", "any_label", "without", "where", "id", "key", "added_after", "added_before", "k", "max_distance",
    "min_precision", "effort", "rank", "oversample", "offset", "include",
}  # fmt: skip


def test_an_empty_value_is_refused_in_a_query_string_and_not_given_in_a_form(reader):
    """A browser sends a field of a form that was not filled in as an empty one."""
    one_word = SEARCH_PARAMETERS - {"label", "any_label", "without", "where", "id", "key", "include"}
    assert hits(search(reader, png(1), **dict.fromkeys(one_word, ""))) == hits(search(reader, png(1)))
    for name in SEARCH_PARAMETERS - one_word:  # or it would not filter
        assert search(reader, png(1), **{name: ""}).status_code == 422
    for name in SEARCH_PARAMETERS:
        assert reader.get("/v1/images/1/similar", params={name: ""}).status_code == 422
    assert_problem(reader.get("/v1/images?limit="), 422, "BadRequest", "limit")
    assert hits(reader.get("/v1/images/1/similar?label=%20")) == []  # a space is a label


def test_a_parameter_with_one_value_is_refused_if_it_is_given_twice(reader):
    for name in ("k", "rank", "max_distance"):
        assert_problem(search(reader, png(1), **{name: ["1", "1"]}), 422, "BadConfig")
        assert_problem(reader.get("/v1/images/1/similar", params={name: ["1", "1"]}), 422, "BadConfig")
    for path in ("images", "images/1/file", "duplicates"):
        for name in ("limit", "size", "radius"):
            assert_problem(reader.get(f"/v1/{path}?{name}=20&{name}=20"), 422, "BadConfig")
    assert hits(search(reader, png(1), k=["1", ""]))  # an empty one is not given


def test_both_ways_to_search_have_the_same_filters(client):
    ranked = {"k": 99, "rank": "hamming"}
    for n in range(6):
        add(
            client,
            png(540 + n),
            key=f"k{n}",
            labels=["made", "even"] if n % 2 else ["made"],
            attributes=f'{{"n": {n}}}',
        )
    everything = {hit["id"]: hit for hit in hits(search(client, png(540), **ranked))}
    assert len(everything) == 18

    def ids(**filters):
        found = hits(search(client, png(540), **ranked, **filters))
        assert found == [dict(everything[hit["id"]], rank=rank) for rank, hit in enumerate(found, 1)]
        by_id = hits(client.get("/v1/images/13/similar", params=ranked | filters))
        assert [(hit["id"], hit["distance"]) for hit in by_id] == [(hit["id"], hit["distance"]) for hit in found]
        return {hit["id"] for hit in found}

    three = {i for i, hit in everything.items() if "three" in hit["labels"]}
    assert ids(label="made") == set(range(13, 19))
    assert ids(label=["made", "even"]) == {14, 16, 18}
    assert ids(any_label=["made", "three"]) == set(range(13, 19)) | three
    assert ids(label="made", without="even") == {13, 15, 17}
    assert ids(where=["n>=1", "n<4"]) == {14, 15, 16}
    assert ids(key=["k0", "k5", "none"]) == {13, 18}
    assert ids(id=[1, 13, 10**30]) == {1, 13}
    assert ids(added_after="2020-01-01", where="n=2") == {15}
    assert ids(added_before="2020-01-01T00:00:00+02:00") == set()
    assert ids(label="\0'; --") == set()


def ask(client, **body):
    return client.post("/v1/search", json=body)


def test_a_code_an_id_and_a_key_find_what_the_stored_image_finds(client):
    record = add(client, png(580), key="a/b").json()
    similar = {"k": 5, "label": ["odd"], "include": ["histogram"]}
    expected = client.get(f"/v1/images/{record['id']}/similar", params=similar).json()
    encoded = client.post("/v1/encode", files={"image": ("picture", png(580))}).json()
    assert (len(encoded["code"]), encoded["n_bits"], encoded["fingerprint"]) == (12, 48, expected["fingerprint"])
    queries = [{"image_id": record["id"]}, {"image_key": "a/b"}, {"code": encoded["code"].upper()}]
    together = ask(client, queries=queries, **similar).json()["answers"]
    pages = ask(client, queries=queries[:2], k=2, offset=4).json()["answers"]
    assert [page["next_offset"] for page in pages] == [6, 6]
    last = ask(client, queries=queries[:2], k=2, offset=4998).json()["answers"]
    assert [page["next_offset"] for page in last] == [None, None]
    for query, answer in zip(queries, together, strict=True):
        for one in (answer, ask(client, **query, **similar, fingerprint=encoded["fingerprint"]).json()):
            assert {**one, "search_ms": 0} == {**expected, "search_ms": 0}


def test_the_code_of_a_picture_is_the_one_that_it_is_stored_with(client, own_collection):
    encoded = client.post("/v1/encode", files={"image": ("picture", png(581))}).json()
    add(client, png(581))
    stored = "SELECT lower(hex(code)) FROM codes WHERE image_id = 13"
    assert sql(own_collection / "catalog.sqlite", stored) == [(encoded["code"],)]
    sql(own_collection / "catalog.sqlite", "UPDATE codes SET code = zeroblob(6) WHERE image_id = 13")
    again = client.post("/v1/encode", files={"image": ("picture", png(581))}).json()
    assert again["code"] == "00" * 6  # as another engine might have computed it


def test_several_pictures_are_searched_with_the_mean_of_their_outputs(reader, indexed):
    with closing(Collection(indexed, read_only=True)) as collection:
        searcher = Searcher.open(collection, device="cpu")
        files = [png(seed) for seed in (590, 591, 592)]
        outputs = np.mean([searcher.encode_file(data)[1].outputs.astype(float) for data in files], axis=0)
        query = Query(pack(outputs[None])[0], outputs)
        found = [(hit.image.id, hit.distance) for hit in searcher.answer([query], SearchOptions(k=12)).hits]
    images = [("image", ("picture", data)) for data in files]
    answer = reader.post("/v1/search", files=images, data={"k": 12})
    assert [(hit["id"], hit["distance"]) for hit in hits(answer)] == found
    assert hits(reader.post("/v1/search", files=images[:1], data={"k": 12})) == hits(search(reader, files[0], k=12))
    assert_problem(reader.post("/v1/search", files=[*images, ("image", b"no")]), 422, "BadImage", "number 4")
    assert_problem(reader.post("/v1/search", files=images[:1] * 17), 422, "BadRequest", "image")


@pytest.mark.parametrize("rank", ["hamming", "asymmetric"])
def test_a_union_has_the_best_of_the_hits_of_each_picture(reader, rank):
    images = [("image", ("picture", png(seed))) for seed in (590, 591, 3)]
    options = {"k": 12, "rank": rank, "combine": "union"}
    best = {}
    for image in images:
        for hit in hits(reader.post("/v1/search", files=[image], data=options)):
            value = (-(hit["score"] or 0), hit["distance"] if rank == "hamming" else 0, hit["id"])
            best[hit["id"]] = min(value, best.get(hit["id"], value))
    expected = [image_id for *_, image_id in sorted(best.values())]
    found = [hit["id"] for hit in hits(reader.post("/v1/search", files=images, data=options))]
    assert found == expected
    answer = reader.post("/v1/search", files=images, data={**options, "k": 4, "offset": 4})
    assert [hit["id"] for hit in hits(answer)] == expected[4:8]
    assert answer.json()["next_offset"] == 8
    refused = reader.post("/v1/search", files=images, data={**options, "include": "histogram"})
    assert_problem(refused, 422, "BadConfig")
    remote = hashseek.Client("http://localhost", http=reader)
    assert [hit.id for hit in remote.search(*(png(seed) for seed in (590, 591, 3)), **options).hits] == expected


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({}, 422, "BadRequest"),
        ({"image_id": 1, "code": "00" * 6}, 422, "BadRequest"),
        ({"image_id": 1, "queries": [{"image_id": 1}]}, 422, "BadRequest"),
        ({"queries": []}, 422, "BadRequest"),
        ({"queries": [{"image_id": 1}] * 65}, 422, "BadRequest"),
        ({"queries": [{"image_id": 1}, {}]}, 422, "BadRequest"),
        ({"queries": [{"image_id": 1, "k": 3}]}, 422, "BadRequest"),
        ({"queries": [{"image_id": 1}] * 64, "k": 157}, 422, "BadConfig"),
        ({"queries": [{"image_id": 1}, {"image_id": 99}]}, 404, "UnknownImage"),
        ({"image_id": 99}, 404, "UnknownImage"),
        ({"image_id": -(10**30)}, 404, "UnknownImage"),
        ({"image_id": None}, 422, "BadRequest"),
        ({"image_id": 1.5}, 422, "BadRequest"),
        ({"image_key": "x" * 513}, 422, "BadRequest"),
        ({"image_key": "none\0"}, 404, "UnknownImage"),
        ({"image_key": "\ud800"}, 422, "BadRequest"),
        ({"code": "00" * 5}, 422, "BadCodes"),
        ({"code": "00" * 7}, 422, "BadCodes"),
        ({"code": "0" * 11}, 422, "BadRequest"),
        ({"code": "00 00 00 00 00 00"}, 422, "BadRequest"),
        ({"code": "zz" * 6}, 422, "BadRequest"),
        ({"code": "٠٠" * 6}, 422, "BadRequest"),
        ({"code": "00" * 6, "rank": "asymmetric"}, 422, "BadConfig"),
        ({"code": "00" * 6, "rank": "float"}, 422, "BadConfig"),
        ({"code": "00" * 6, "fingerprint": "f" * 64}, 409, "ForeignCodes"),
        ({"image_id": 1, "k": None}, 422, "BadRequest"),
        ({"image_id": 1, "k": "5"}, 200, None),
        ({"image_id": 1, "id": list(range(1001))}, 422, "BadRequest"),
        ({"image_id": 1, "any_label": ["x"] * 65}, 422, "BadRequest"),
        ({"image_id": 1, "label": ["x" * 10**6], "without": ["y"] * 64, "where": ["a=b"] * 64}, 200, None),
    ],
)
def test_bodies_of_searches(reader, body, status, kind):
    response = reader.post("/v1/search", content=json.dumps(body), headers={"Content-Type": "application/json"})
    if kind is None:
        assert response.status_code == status
    else:
        assert_problem(response, status, kind)


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b'{"queries":' * 100_000, b"\xff", b"{", b'{"k": ' + b"9" * 9000 + b"}"],
    ids=["lists", "objects", "not UTF-8", "cut off", "large number"],
)
def test_json_that_cannot_be_read_is_refused(reader, content):
    response = reader.post("/v1/search", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_other_mistakes_are_problems_too(reader):
    post, form = reader.post, "multipart/form-data"
    for response, status, kind, value in (
        (post("/v1/search"), 422, "BadRequest", "image"),
        (post("/v1/search", data={"k": "3"}), 422, "BadRequest", "image"),
        (post("/v1/search", json={"image": "x"}), 422, "BadRequest", "image"),
        (post("/v1/search", data={"image": "text"}), 422, "BadRequest", "image"),
        (post("/v1/search", content=b"x", headers={"Content-Type": form}), 400, "about:blank", ""),
        (
            post("/v1/search", content=b"x", headers={"Content-Type": "multipart/form-data; boundary=y"}),
            400,
            "about:blank",
            "",
        ),
        (search(reader, b""), 422, "BadImage", "0 bytes"),
        (search(reader, b"no picture"), 422, "BadImage", "the upload"),
        (search(reader, png(1)[:1000]), 422, "BadImage", "the upload"),
        (reader.get("/nothing"), 404, "about:blank", ""),
        (reader.get("/web/nothing.js"), 404, "about:blank", ""),
        (reader.put("/v1/search"), 405, "about:blank", ""),
    ):
        assert_problem(response, status, kind, value)


def test_uploads_that_are_too_large_or_of_unknown_length_are_refused_unread(reader):
    assert_problem(search(reader, b"x" * 2_000_001), 413, "TooLarge", "2,000,000")
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert_problem(reader.post("/v1/search", content=iter([b"--x\r\n"]), headers=headers), 411)


def test_compressed_bodies_are_refused(reader):
    packed = gzip.compress(b'{"image_id": 1}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert_problem(reader.post("/v1/search", content=packed, headers=headers), 415, "about:blank", "gzip")


def test_json_that_is_too_large_is_refused_unread(indexed):
    with serving(indexed, read_only=True) as client:  # an upload of this size would be read
        for content in (
            {"json": {"vector": [0] * 2**21}},
            {"content": b"\xff\xd8\xff" + bytes(2**22)},  # or a bare picture
            {"content": bytes(2**22 + 1), "headers": {"Content-Type": "application/json; x=multipart/form-data"}},
        ):
            limits = f"{2**22:,}", f"{2**25:,}"
            assert_problem(client.post("/v1/search", **content), 413, "TooLarge", *limits)
        form = client.build_request("POST", "/v1/search", files={"image": bytes(2**22)})
        form.headers["Content-Type"] = form.headers["Content-Type"].replace(
            "multipart/form-data", "Multipart/Form-Data"
        )
        assert_problem(client.send(form), 422, "BadImage")  # it was read


def test_a_body_that_is_not_json_says_where(reader):
    response = reader.post("/v1/search", content=b'{"image_id": 1,', headers={"Content-Type": "application/json"})
    assert_problem(response, 422, "BadRequest", "JSON", "column 15")


def test_a_misspelt_field_is_named_together_with_the_one_that_it_hides(reader):
    for path in ("/v1/search", "/v1/encode"):
        refused = reader.post(path, files={"file": ("a.png", png(1))})
        assert_problem(refused, 422, "BadRequest", "'file'", "image")
