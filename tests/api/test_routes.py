"""The HTTP service, route by route: right answers, problem JSON for every mistake, nothing lost or torn."""

import gc
import io
import json
import re
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from urllib.parse import quote

import pytest
from PIL import Image
from test_images import BAD, GOOD

import hashseek.indexing.index.collection_index
from hashseek.api import service
from hashseek.api.app import create_app
from hashseek.api.service import Service, parse_labels
from hashseek.api.settings import Settings
from hashseek.indexing.catalog import database
from hashseek.indexing.collection import Collection
from hashseek.indexing.index import segments
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import decode_for
from support.commands import wait_until
from support.pictures import N_PICTURES, draw, labels_of

with warnings.catch_warnings():  # newer versions of Starlette would rather have httpx2, older ones know only httpx
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient


@pytest.fixture(scope="module")
def clients():
    """Start a service over a collection: (folder, settings) -> client, ready."""
    with ExitStack() as stack:

        def start(folder, *, wait=True, **settings):
            app = create_app(Settings(collection=folder, device="cpu", **settings))
            client = stack.enter_context(TestClient(app, raise_server_exceptions=False))
            if wait:
                wait_until(lambda: client.get("/healthz/ready").status_code == 200)
            return client

        yield start


@pytest.fixture(scope="module")
def reader(clients, indexed):
    """A client of a read-only service over all pictures."""
    return clients(indexed, read_only=True, max_upload_bytes=2_000_000)


@contextmanager
def serving(folder):
    """A client of a service over a collection, when it is ready."""
    with TestClient(create_app(Settings(collection=folder, device="cpu")), raise_server_exceptions=False) as started:
        wait_until(lambda: started.get("/healthz/ready").status_code == 200)
        yield started


@pytest.fixture
def client(own_collection):
    """A client of a service that may be changed."""
    with serving(own_collection) as started:
        yield started


def png(seed, size=(96, 72)):
    buffer = io.BytesIO()
    draw(seed, size).save(buffer, "PNG")
    return buffer.getvalue()


def search(client, data, **fields):
    return client.post("/v1/search", files={"image": ("picture", data)}, data=fields)


def add(client, data, **fields):
    return client.post("/v1/images", files={"image": ("picture", data)}, data=fields)


def assert_problem(response, status, sentence):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    content = response.json()
    assert set(content) == {"type", "title", "status", "detail"}
    assert content["status"] == status
    assert re.search(sentence, content["detail"]), content["detail"]
    assert "\n" not in content["detail"]
    assert "Traceback" not in response.text


# ---------------------------------------------------------------- what works


def test_health_and_statistics(reader, checkpoint):
    from hashseek.retrieval.checkpoint import load_header

    assert reader.get("/healthz/live").json() == {"status": "live"}
    assert reader.get("/healthz/ready").json() == {"status": "ready"}
    stats = reader.get("/v1/stats").json()
    assert (stats["n_images"], stats["n_bits"], stats["backbone"], stats["read_only"]) == (
        12,
        48,
        "squeezenet1_1",
        True,
    )
    assert stats["labels"] == {"even": 6, "odd": 6, "three": 4}
    assert stats["fingerprint"] == load_header(checkpoint).fingerprint


def test_every_stored_picture_finds_itself_at_distance_0(reader, pictures):
    for file in sorted(path for path in pictures.rglob("*") if path.is_file()):
        content = search(reader, file.read_bytes(), k=12).json()
        hits = content["hits"]
        assert (content["n_bits"], content["n_images"], len(hits)) == (48, 12, 12)
        assert [hit["rank"] for hit in hits] == list(range(1, 13))
        assert [(hit["distance"], hit["id"]) for hit in hits] == sorted((hit["distance"], hit["id"]) for hit in hits)
        own = next(hit for hit in hits if hit["path"] == str(file))
        assert own["distance"] == 0
        assert set(own["labels"]) == set(labels_of(file))
        assert own["url"] == f"/v1/images/{own['id']}/file"


def test_records_files_and_similar_images(reader):
    for image_id in range(1, N_PICTURES + 1):
        record = reader.get(f"/v1/images/{image_id}").json()
        assert (record["id"], record["width"], record["height"]) == (image_id, 96, 72)
        response = reader.get(record["url"])
        assert response.headers["content-type"] == record["media_type"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert len(response.content) == record["bytes"]
        hits = reader.get(f"/v1/images/{image_id}/similar", params={"k": 3}).json()["hits"]
        assert (hits[0]["id"], hits[0]["distance"], len(hits)) == (image_id, 0, 3)


def test_max_distance_and_k_agree_between_search_and_similar(reader, pictures):
    data = (pictures / "picture 00.jpg").read_bytes()
    everything = search(reader, data, k=100).json()["hits"]
    [image_id] = [hit["id"] for hit in everything if hit["distance"] == 0]
    limit = everything[5]["distance"]
    near = [hit for hit in everything if hit["distance"] <= limit]
    assert search(reader, data, k=100, max_distance=limit).json()["hits"] == near
    url = f"/v1/images/{image_id}/similar"
    assert reader.get(url, params={"k": 100, "max_distance": limit}).json()["hits"] == near
    assert search(reader, data, k=100, max_distance=10**30).json()["hits"] == everything
    assert search(reader, data, k=10_000).json()["hits"] == everything
    assert len(search(reader, data).json()["hits"]) == 10


def test_pages(reader):
    seen, after = [], 0
    while after is not None:
        page = reader.get("/v1/images", params={"after": after, "limit": 5}).json()
        seen += [image["id"] for image in page["images"]]
        after = page["next"]
    assert seen == list(range(1, 13))
    three = reader.get("/v1/images", params={"label": "three"}).json()
    assert len(three["images"]) == 4
    assert three["next"] is None
    for label in ("'; DROP TABLE images; --", "none", " ", "\0", "ü"):
        assert reader.get("/v1/images", params={"label": label}).json() == {"images": [], "next": None}


@pytest.mark.parametrize("size", [16, 40, 1024])
def test_thumbnails(reader, size):
    response = reader.get("/v1/images/1/file", params={"size": size})
    assert response.headers["content-type"] == "image/jpeg"
    image = Image.open(io.BytesIO(response.content))
    assert max(image.size) == min(size, 96)
    assert abs(image.width / image.height - 96 / 72) < 0.1


@pytest.mark.parametrize("name", GOOD)
def test_every_kind_of_picture_can_be_searched_with(reader, name):
    response = search(reader, GOOD[name][0], k=1)
    assert (response.status_code, len(response.json()["hits"])) == (200, 1)


def test_the_page_and_its_files_come_from_here_alone(reader):
    response = reader.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(/web/[^"]+)"', response.text)
    assert len(files) >= 3
    for file in files:
        assert reader.get(file).status_code == 200
        assert reader.get(file).headers["content-type"].split(";")[0] in (
            "text/css",
            "text/javascript",
            "image/svg+xml",
        )
    for text in (response.text, *(reader.get(file).text for file in files)):
        assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_the_documentation_works_without_any_other_host(reader):
    for path in ("/docs", "/redoc"):
        page = reader.get(path)
        assert page.status_code == 200
        assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page.text)
        for asset in re.findall(r"""(?:src|href)=["'](/[^"']+)["']""", page.text):
            assert reader.get(asset).status_code == 200
    schema = reader.get("/openapi.json").json()
    assert {path: sorted(operations) for path, operations in schema["paths"].items()} == {
        "/v1/search": ["post"],
        "/v1/images": ["get", "post"],
        "/v1/images/by-key/{key}": ["delete", "get"],
        "/v1/images/{image_id}": ["delete", "get"],
        "/v1/images/{image_id}/file": ["get"],
        "/v1/images/{image_id}/similar": ["get"],
        "/v1/stats": ["get"],
        "/healthz/live": ["get"],
        "/healthz/ready": ["get"],
    }


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_refused_with_the_reason(reader, name):
    data, reason = BAD[name]
    if not data:
        reason = r"the upload is empty \(0 bytes\)"
    assert_problem(search(reader, data), 422, reason.replace("^cat.jpg", "the upload"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"k": 0}, "k is the number of results and must be 1 to 10,000, not 0"),
        ({"k": -7}, "must be 1 to 10,000, not -7"),
        ({"k": 10_001}, "not 10001"),
        ({"k": 10**30}, "must be 1 to 10,000, not 1000"),
        ({"k": "9" * 5000}, "^k: "),
        ({"k": "many"}, "^k: input should be a valid integer"),
        ({"k": "1.5"}, "^k: "),
        ({"max_distance": -1}, "max_distance counts bits and must be at least 0, not -1"),
        ({"max_distance": "near"}, "^max_distance: "),
        ({"max_distance": "nan"}, "^max_distance: "),
    ],
)
def test_numbers_out_of_limits_are_refused(reader, fields, sentence):
    assert_problem(search(reader, png(1), **fields), 422, sentence)
    assert_problem(reader.get("/v1/images/1/similar", params=fields), 422, sentence)


def test_a_service_that_gives_fewer_than_the_usual_ten_gives_as_many_as_it_does(clients, indexed):
    client = clients(indexed, read_only=True, max_k=4)
    assert len(search(client, png(1)).json()["hits"]) == 4
    assert len(client.get("/v1/images/1/similar").json()["hits"]) == 4
    assert len(client.get("/v1/images/1/similar?k=2").json()["hits"]) == 2
    assert_problem(client.get("/v1/images/1/similar?k=5"), 422, "must be 1 to 4, not 5")


@pytest.mark.parametrize("method", ["record", "file", "similar", "delete"])
@pytest.mark.parametrize("image_id", ["0", "-1", "99", str(2**63 - 1), str(2**63), str(10**40)])
def test_unknown_ids_of_any_size_are_404(reader, client, method, image_id):
    url = f"/v1/images/{image_id}"
    if method == "delete":
        response = client.delete(url)
    else:
        response = reader.get(url if method == "record" else f"{url}/{method}")
    assert_problem(response, 404, f"there is no image {image_id} in the collection")


def test_other_mistakes_are_problems_too(reader):
    for response, status, sentence in (
        (reader.get("/v1/images/cat"), 422, "image_id: input should be a valid integer"),
        (reader.get("/v1/images/1.5/file"), 422, "image_id: "),
        (reader.get("/v1/images/" + "9" * 5000), 422, "image_id: "),
        (reader.post("/v1/search"), 422, "the request lacks image"),
        (reader.post("/v1/search", data={"k": "3"}), 422, "the request lacks image"),
        (reader.post("/v1/search", json={"image": "x"}), 422, "the request lacks image"),
        (reader.post("/v1/search", data={"image": "text"}), 422, "image: "),
        (reader.post("/v1/search", content=b"junk", headers={"Content-Type": "multipart/form-data"}), 400, "."),
        (
            reader.post("/v1/search", content=b"junk", headers={"Content-Type": "multipart/form-data; boundary=x"}),
            400,
            ".",
        ),
        (reader.get("/v1/images", params={"after": -1}), 422, "after: "),
        (reader.get("/v1/images", params={"after": 2**63}), 422, "after: "),
        (reader.get("/v1/images", params={"limit": 0}), 422, "limit: "),
        (reader.get("/v1/images", params={"limit": 1001}), 422, "limit: "),
        (reader.get("/v1/images/1/file", params={"size": 15}), 422, "size: "),
        (reader.get("/v1/images/1/file", params={"size": 1025}), 422, "size: "),
        (reader.get("/nothing"), 404, "Not Found"),
        (reader.get("/web/nothing.js"), 404, "Not Found"),
        (reader.put("/v1/search"), 405, "Method Not Allowed"),
    ):
        assert_problem(response, status, sentence)
    assert reader.put("/v1/search").headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    [
        "/web/../app.py",
        "/web/%2e%2e/app.py",
        "/web/..%2fapp.py",
        "/web/%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/web//etc/passwd",
        "/v1/images/..%2f..%2f1/file",
        "/web/%00",
    ],
)
def test_no_path_leads_out_of_the_folders(reader, path):
    response = reader.get(path)
    assert response.status_code in (404, 422)
    assert "import" not in response.text


def test_uploads_that_are_too_large_or_of_unknown_length_are_refused_unread(reader):
    response = search(reader, b"x" * 2_000_001)
    assert_problem(response, 413, r"the upload has 2,000,\d+ bytes; at most 2,000,000 are taken")
    parts = iter([b"--x\r\n"])
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert_problem(reader.post("/v1/search", content=parts, headers=headers), 411, "Content-Length")
    for length in ("many", "-5", "1e3"):
        response = reader.post("/v1/search", content=b"", headers={**headers, "Content-Length": length})
        assert_problem(response, 400, "Content-Length")


def test_a_read_only_service_refuses_changes_before_it_looks_at_them(reader):
    for response in (
        add(reader, png(1)),
        add(reader, b""),
        reader.delete("/v1/images/1"),
        reader.delete("/v1/images/99"),
    ):
        assert_problem(response, 403, "read-only")
    assert reader.get("/v1/stats").json()["n_images"] == 12


# ---------------------------------------------------------------- changes


def kept_files(collection):
    return [path for path in (collection / "files").rglob("*") if path.is_file()]


def test_an_upload_is_found_at_once_and_gone_at_once(client, own_collection):
    data = png(500, (300, 200))
    response = add(client, data, labels="new; shiny ;;new")
    assert response.status_code == 201
    record = response.json()
    assert (record["id"], record["created"], record["labels"], record["bytes"]) == (
        13,
        True,
        ["new", "shiny"],
        len(data),
    )
    assert (record["width"], record["height"], record["media_type"]) == (300, 200, "image/png")
    hits = search(client, data, k=50).json()
    assert (hits["hits"][0]["id"], hits["hits"][0]["distance"], hits["n_images"]) == (13, 0, 13)
    assert client.get(record["url"]).content == data
    assert client.get("/v1/stats").json()["labels"]["new"] == 1
    [kept] = kept_files(own_collection)
    assert kept.read_bytes() == data

    again = add(client, data, labels="other")
    assert (again.status_code, again.json()) == (200, {**record, "created": False, "change": "known"})
    assert len(kept_files(own_collection)) == 1

    assert client.delete("/v1/images/13").status_code == 204
    assert client.delete("/v1/images/13").status_code == 404
    assert client.get("/v1/images/13").status_code == 404
    assert client.get(record["url"]).status_code == 404
    assert 13 not in [hit["id"] for hit in search(client, data, k=50).json()["hits"]]
    assert kept_files(own_collection) == []
    assert add(client, data).json()["id"] == 14


def test_deleting_an_indexed_image_leaves_its_file(client, pictures):
    path = client.get("/v1/images/5").json()["path"]
    assert client.delete("/v1/images/5").status_code == 204
    assert (pictures / path).is_file()
    assert len(search(client, png(0), k=50).json()["hits"]) == 11


@pytest.mark.parametrize("name", BAD)
def test_a_bad_upload_stores_nothing(client, own_collection, name):
    assert_problem(add(client, BAD[name][0]), 422, "^the upload ")
    assert client.get("/v1/stats").json()["n_images"] == 12
    assert kept_files(own_collection) == []


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("RGB JPEG", ".jpg"), ("animated GIF", ".gif"), ("multi-picture JPEG", ".jpg"), ("32-bit TIFF", ".tif")],
)
def test_a_kept_file_has_the_suffix_of_its_content_whatever_its_name_said(client, own_collection, name, suffix):
    data = GOOD[name][0]
    response = client.post("/v1/images", files={"image": ("../../evil.html\0", data, "text/html")})
    assert response.status_code == 201
    assert [path.suffix for path in kept_files(own_collection)] == [suffix]
    served = client.get(response.json()["url"])
    assert served.headers["content-type"] == response.json()["media_type"] != "text/html"
    assert served.content == data


def test_labels_of_an_upload(client):
    assert parse_labels(" a;b ; a;;") == ("a", "b")
    with pytest.raises(BadConfig, match="at most 200 characters, not 201"):
        parse_labels("x" * 201)
    assert_problem(add(client, png(1), labels="x" * 201), 422, "at most 200 characters")
    labels = "<script>alert(1)</script>;'; DROP TABLE images;ü\0x"
    record = add(client, png(501), labels=labels).json()
    assert set(record["labels"]) == {"<script>alert(1)</script>", "'", "DROP TABLE images", "ü\0x"}
    assert client.get("/v1/images", params={"label": "ü\0x"}).json()["images"][0]["id"] == 13


def test_a_file_that_has_gone_is_410(client, own_collection):
    record = add(client, png(502)).json()
    [kept] = kept_files(own_collection)
    kept.unlink()
    for url in (record["url"], f"{record['url']}?size=64"):
        assert_problem(client.get(url), 410, "no longer there")
    kept.write_bytes(b"no picture")
    assert_problem(client.get(record["url"]), 410, "what is in its place now is no picture")
    assert_problem(client.get(f"{record['url']}?size=64"), 422, "not an image")
    assert client.delete("/v1/images/13").status_code == 204


def test_many_clients_at_once(client, own_collection):
    """Each adds pictures of its own, finds them at once, removes some; all search all the time."""
    stop, failures = threading.Event(), []

    def look():
        while not stop.is_set():
            response = search(client, png(3), k=500)
            if response.status_code != 200 or not response.json()["hits"]:
                failures.append(response.text)

    def work(worker):
        for number in range(4):
            data = png(1000 + 10 * worker + number)
            record = add(client, data).json()
            hits = search(client, data, k=500).json()["hits"]
            assert record["id"] in [hit["id"] for hit in hits if hit["distance"] == 0]
            if number % 2:
                assert client.delete(f"/v1/images/{record['id']}").status_code == 204
                assert record["id"] not in [hit["id"] for hit in search(client, data, k=500).json()["hits"]]

    def same(_):
        return add(client, png(2000)).json()

    looking = threading.Thread(target=look)
    looking.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
        records = list(pool.map(same, range(8)))
    stop.set()
    looking.join()
    assert failures == []
    assert len({record["id"] for record in records}) == 1
    assert sum(record["created"] for record in records) == 1
    assert client.get("/v1/stats").json()["n_images"] == 12 + 8 + 1
    assert len(kept_files(own_collection)) == 9


def test_stopping_writes_the_index_and_what_was_added_is_there_again(own_collection, caplog):
    with serving(own_collection) as client:
        assert add(client, png(600)).status_code == 201
    collection = Collection(own_collection, read_only=True)
    assert (len(collection), collection.describe_index()["built"]) == (13, 13)
    assert collection.verify() == []
    collection.close()


def test_nobody_waits_while_the_index_takes_in_what_changed(own_collection, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    merge = hashseek.indexing.index.collection_index.merge

    def slow(*arguments):
        began.set()
        assert go_on.wait(20)
        return merge(*arguments)

    monkeypatch.setattr(service, "MERGE_SECONDS", 0.01)
    monkeypatch.setattr(segments, "FRESH_LIMIT", 0)
    with serving(own_collection) as client:
        monkeypatch.setattr(hashseek.indexing.index.collection_index, "merge", slow)
        ids = [add(client, png(600 + number)).json()["id"] for number in range(2)]
        assert began.wait(5)
        assert search(client, png(601)).json()["hits"][0]["id"] == ids[1]
        assert client.delete(f"/v1/images/{ids[0]}").status_code == 204
        assert ids[0] not in [hit["id"] for hit in search(client, png(600)).json()["hits"]]
        assert client.get("/v1/stats").json()["index"]["built"] == 12
        go_on.set()
        wait_until(lambda: client.get("/v1/stats").json()["index"]["built"] >= 13)
        assert search(client, png(601)).json()["hits"][0]["id"] == ids[1]
    with closing(Collection(own_collection, read_only=True)) as collection:
        assert collection.verify() == []


def test_an_approximate_index_is_built_anew_and_written_while_the_service_runs(own_collection, monkeypatch):
    with closing(Collection(own_collection)) as collection:
        collection.build_index("multihash")
    manifest = own_collection / "index" / "manifest.json"
    monkeypatch.setattr(service, "MERGE_SECONDS", 0.01)
    with serving(own_collection) as client:
        monkeypatch.setattr(segments, "FRESH_LIMIT", 1)
        for number in range(2):
            assert add(client, png(600 + number)).status_code == 201
        wait_until(lambda: json.loads(manifest.read_text())["n_images"] == 14)
        manifest.unlink()  # by whoever it was
        wait_until(manifest.exists)
        assert json.loads(manifest.read_text())["kind"] == "multihash"


def test_the_end_of_a_service_does_not_build_an_approximate_index(own_collection, monkeypatch):
    with closing(Collection(own_collection)) as collection:
        collection.build_index("multihash")
    manifest = own_collection / "index" / "manifest.json"
    monkeypatch.setattr(service, "MERGE_SECONDS", 60)
    with serving(own_collection) as client:
        before = manifest.read_text()
        monkeypatch.setattr(segments, "FRESH_LIMIT", 0)
        assert add(client, png(600)).status_code == 201
        assert add(client, png(601)).status_code == 201
    assert manifest.read_text() == before


def test_a_service_that_ends_while_its_index_is_built_anew_does_not_wait_for_it(own_collection, monkeypatch, caplog):
    began, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(service, "MERGE_SECONDS", 0.01)
    monkeypatch.setattr(service, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(segments, "FRESH_LIMIT", 0)
    threads = set(threading.enumerate())
    with serving(own_collection) as client:
        merge = hashseek.indexing.index.collection_index.merge
        monkeypatch.setattr(
            hashseek.indexing.index.collection_index, "merge", lambda *of: (began.set(), go_on.wait(20), merge(*of))[-1]
        )
        assert add(client, png(600)).status_code == 201
        assert began.wait(5)
    assert "the next start builds it" in caplog.text
    go_on.set()
    wait_until(lambda: "hashseek-merge" not in {thread.name for thread in set(threading.enumerate()) - threads})
    with closing(Collection(own_collection, read_only=True)) as collection:
        assert (len(collection), collection.verify()) == (13, [])


def test_segments_that_cannot_be_merged_are_said_and_tried_again(own_collection, monkeypatch, caplog):
    monkeypatch.setattr(service, "MERGE_SECONDS", 0.01)
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(segments, "FRESH_LIMIT", 0)
    with serving(own_collection) as client:
        with monkeypatch.context() as patch:
            patch.setattr(hashseek.indexing.index.collection_index, "merge", raise_memory_error)
            image_id = add(client, png(600)).json()["id"]
            wait_until(lambda: "could not be merged: no room" in caplog.text)
            assert search(client, png(600)).json()["hits"][0]["id"] == image_id
        wait_until(lambda: client.get("/v1/stats").json()["index"]["built"] == 13)


def raise_memory_error(*_):
    raise MemoryError("no room")


# ---------------------------------------------------------------- keys, attributes, filters


@pytest.mark.parametrize(
    "key", ["a", "photos/2026/ä b.jpg", "/leading/slash", "1", "by-key/x", "x/file", "50%?#&=", "a//b/", "ü" * 512]
)
def test_an_image_has_the_key_and_attributes_it_was_given(client, key):
    url = f"/v1/images/by-key/{quote(key)}"
    assert_problem(client.get(url), 404, "no image with the key")
    said = {"camera": {"model": "X"}, "year": 2015, "note": "<b>ü"}
    record = add(client, png(510), key=key, attributes=json.dumps(said)).json()
    assert (record["key"], record["attributes"], record["change"]) == (key, said, "added")
    assert client.get(url).json() == client.get(f"/v1/images/{record['id']}").json()
    [hit] = search(client, png(510), k=1).json()["hits"]
    assert (hit["id"], hit["key"], hit["attributes"]) == (record["id"], key, said)
    assert client.delete(url).status_code == 204
    assert_problem(client.delete(url), 404, "no image with the key")


def test_a_picture_under_a_known_key_takes_the_place_of_the_old_one(client, own_collection):
    first = add(client, png(520), key="k", labels="old", attributes='{"n": 1}')
    same = add(client, png(520), key="k")
    assert (first.status_code, same.status_code, same.json()["change"]) == (201, 200, "known")
    other = add(client, png(521), key="k", labels="new")
    record = other.json()
    assert (other.status_code, record["created"], record["change"]) == (200, False, "updated")
    assert (record["id"], record["labels"], record["attributes"]) == (first.json()["id"], ["new"], {"n": 1})
    assert client.get(record["url"]).content == png(521)
    hits = search(client, png(521), k=99).json()["hits"]
    assert (hits[0]["id"], hits[0]["distance"], len(hits)) == (record["id"], 0, 13)
    assert len(kept_files(own_collection)) == 1
    twin = add(client, png(521), key="l").json()  # its content is there: nothing is encoded, the file is shared
    assert (twin["id"], twin["change"]) == (record["id"] + 1, "added")
    assert len(kept_files(own_collection)) == 1
    assert client.delete("/v1/images/by-key/k").status_code == 204
    assert client.get(twin["url"]).content == png(521)
    stats = client.get("/v1/stats").json()
    assert (stats["n_images"], sum(stats["engines"].values())) == (13, 13)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"key": "x" * 513}, "a key has 1 to 512 characters, not 513"),
        ({"attributes": "[1]"}, r"attributes are a JSON object, not \[1\]"),
        ({"attributes": "{year: 2015}"}, "attributes are a JSON object, and this is no JSON"),
        ({"attributes": "[" * 100_000}, "attributes are a JSON object"),
        ({"attributes": '{"x": ' + "[" * 500 + "]" * 500 + "}"}, "at most 32 deep"),
        ({"attributes": '{"x": NaN}'}, "cannot be written as one"),
        ({"attributes": '{"x": "\\ud800"}'}, "cannot be written as one"),
        ({"attributes": json.dumps({"x": "y" * 16_400})}, "at most 16,384 bytes"),
    ],
)
def test_keys_and_attributes_beyond_their_limits_are_refused_and_nothing_is_stored(
    client, own_collection, fields, sentence
):
    assert_problem(add(client, png(530), **fields), 422, sentence)
    assert client.get("/v1/stats").json()["n_images"] == 12
    assert kept_files(own_collection) == []


def test_both_ways_to_search_know_the_same_filters(client, pictures):
    for n in range(6):
        add(client, png(540 + n), key=f"k{n}", labels="made;even" if n % 2 else "made", attributes=f'{{"n": {n}}}')
    everything = {hit["id"]: hit for hit in search(client, png(540), k=99).json()["hits"]}
    assert len(everything) == 18

    def ids(**filters):
        hits = search(client, png(540), k=99, **filters).json()["hits"]
        assert hits == [dict(everything[hit["id"]], rank=rank) for rank, hit in enumerate(hits, 1)]
        by_id = client.get("/v1/images/13/similar", params={"k": 99, **filters}).json()["hits"]
        assert [(hit["id"], hit["distance"]) for hit in by_id] == [(hit["id"], hit["distance"]) for hit in hits]
        return {hit["id"] for hit in hits}

    assert ids(label="made") == set(range(13, 19))
    assert ids(label=["made", "even"]) == {14, 16, 18}
    assert ids(any_label=["made", "three"]) == set(range(13, 19)) | {
        i for i, hit in everything.items() if "three" in hit["labels"]
    }
    assert ids(label="made", without="even") == {13, 15, 17}
    assert ids(where=["n>=1", "n<4"]) == {14, 15, 16}
    assert ids(key=["k0", "k5", "none"]) == {13, 18}
    assert ids(id=[1, 13, 10**30]) == {1, 13}
    assert ids(added_after="2020-01-01", where="n=2") == {15}
    assert ids(added_before="2020-01-01T00:00:00+02:00") == set()
    assert ids(label="\0'; --") == set()
    for bad, sentence in (
        ({"where": "n!=2"}, "no condition on an attribute: write NAME=VALUE"),
        ({"added_after": "soon"}, "'soon' is no time"),
        ({"id": "x"}, "^id"),
        ({"effort": 5}, "is exact and takes no effort"),
    ):
        assert_problem(search(client, png(540), **bad), 422, sentence)
        assert_problem(client.get("/v1/images/13/similar", params=bad), 422, sentence)


def test_the_documentation_says_what_each_filter_does(reader):
    paths = reader.get("/openapi.json").json()["paths"]
    of_query = {p["name"]: p.get("description") for p in paths["/v1/images/{image_id}/similar"]["get"]["parameters"]}
    names = {"label", "any_label", "without", "where", "id", "key", "added_after", "added_before", "effort"}
    assert names <= set(of_query)
    assert all(of_query[name] for name in names)


# ---------------------------------------------------------------- another model


def switch_to(folder, checkpoint):
    """Give the collection the codes of another checkpoint, as another process would."""
    collection = Collection(folder)
    encoder = Encoder(load_checkpoint(checkpoint), device="cpu")
    shutil.copy(checkpoint, folder / "new.safetensors")
    space = collection.catalog.spaces.begin(encoder.fingerprint, encoder.header.n_bits, "new.safetensors")
    for image in collection.catalog.spaces.missing(space.id, after=0, limit=1000):
        picture = decode_for(collection.file_of(image).read_bytes(), encoder.preprocessing)[0]
        collection.catalog.spaces.add_codes(space.id, [(image.id, encoder.encode([picture.image])[0], encoder.engine)])
    collection.catalog.spaces.switch(space.id)
    collection.close()
    return encoder.fingerprint


def test_a_service_follows_its_collection_to_another_model_while_it_serves(
    client, own_collection, other_checkpoint, pictures, monkeypatch, caplog
):
    go_on, load = threading.Event(), Service._replace
    monkeypatch.setattr(Service, "_replace", lambda self, old: (go_on.wait(60), load(self, old)))
    data = (pictures / "picture 00.jpg").read_bytes()
    before = search(client, data, k=99).json()
    fingerprint = switch_to(own_collection, other_checkpoint)
    assert fingerprint != before["fingerprint"]
    for _ in range(3):  # while the new model is being loaded
        during = search(client, data, k=99).json()
        assert (during["fingerprint"], during["hits"]) == (before["fingerprint"], before["hits"])
        assert_problem(add(client, png(900)), 503, "has switched to other codes.*nothing was stored, try again")
    assert client.get("/healthz/ready").status_code == 200
    stop, answers = threading.Event(), []

    def look():
        while not stop.is_set():
            answers.append(search(client, data, k=3))

    looking = threading.Thread(target=look)
    looking.start()
    go_on.set()
    wait_until(lambda: client.get("/v1/stats").json()["fingerprint"] == fingerprint)
    stop.set()
    looking.join()
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["fingerprint"] for answer in answers} <= {fingerprint, before["fingerprint"]}
    after = search(client, data, k=99).json()
    assert (after["hits"][0]["distance"], len(after["hits"]), after["n_bits"]) == (0, 12, 36)
    assert add(client, png(900)).status_code == 201
    assert search(client, png(900), k=1).json()["hits"][0]["distance"] == 0


def test_what_a_service_had_open_is_closed_when_the_last_request_has_let_go_of_it(
    own_collection, other_checkpoint, monkeypatch
):
    closed, close = [], Collection.close
    monkeypatch.setattr(Collection, "close", lambda self: (closed.append(self.fingerprint), close(self)))
    service = Service(Settings(collection=own_collection, device="cpu"))
    service._load()
    of_a_request = service.searcher
    fingerprint = of_a_request.encoder.fingerprint
    switch_to(own_collection, other_checkpoint)
    closed.clear()
    wait_until(lambda: service.searcher.encoder.fingerprint != fingerprint)
    gc.collect()
    assert closed == []
    assert len(of_a_request.similar(1, k=99).hits) == 12
    del of_a_request
    wait_until(lambda: (gc.collect(), closed)[1])
    assert closed == [fingerprint]
    service.stop()


def test_a_model_that_cannot_be_loaded_leaves_the_old_one_answering(client, own_collection, other_checkpoint, caplog):
    before = search(client, png(3), k=99).json()
    switch_to(own_collection, other_checkpoint)
    (own_collection / "new.safetensors").write_bytes(b"torn")
    wait_until(lambda: (search(client, png(3), k=1), "could not be loaded" in caplog.text)[1])
    assert search(client, png(3), k=99).json()["hits"] == before["hits"]
    assert_problem(add(client, png(900)), 503, "try again")


def test_a_service_follows_a_copy_that_was_put_in_the_place_of_its_collection(client, own_collection, tmp_path):
    copy = tmp_path / "copy"
    client.delete("/v1/images/1")
    shutil.copytree(own_collection, copy)
    assert add(client, png(950)).status_code == 201
    own_collection.rename(tmp_path / "aside")
    copy.rename(own_collection)
    wait_until(lambda: client.get("/v1/stats").json()["n_images"] == 11)
    record = add(client, png(951))
    assert record.status_code == 201
    assert client.get(record.json()["url"]).content == png(951)


# ---------------------------------------------------------------- trouble behind the service


def test_while_loading_it_lives_but_is_not_ready(own_collection, monkeypatch):
    go_on = threading.Event()
    load = Service._load
    monkeypatch.setattr(Service, "_load", lambda self: (go_on.wait(60), load(self)))
    with TestClient(create_app(Settings(collection=own_collection, device="cpu"))) as client:
        assert client.get("/healthz/live").status_code == 200
        assert client.get("/").status_code == 200
        for response in (
            client.get("/healthz/ready"),
            client.get("/v1/stats"),
            search(client, png(1)),
            client.get("/v1/images/1"),
        ):
            assert_problem(response, 503, "is being loaded")
            assert response.headers["retry-after"] == "1"
        go_on.set()
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        assert search(client, png(1)).status_code == 200


def test_a_collection_that_cannot_be_loaded_is_500_with_the_reason_and_never_ready(own_collection, caplog):
    (own_collection / "checkpoint.safetensors").write_bytes(b"torn")
    with TestClient(create_app(Settings(collection=own_collection, device="cpu"))) as client:
        wait_until(lambda: client.get("/v1/stats").status_code != 503)
        for response in (
            client.get("/v1/stats"),
            search(client, png(1)),
            client.get("/v1/images/1"),
            add(client, png(1)),
        ):
            assert_problem(response, 500, "could not be loaded: .*truncated")
        assert_problem(client.get("/healthz/ready"), 503, "could not be loaded: .*truncated")
        assert client.get("/healthz/live").status_code == 200
        assert client.get("/").status_code == 200


def test_a_catalog_that_is_lost_while_serving_is_500_and_not_ready(own_collection, caplog):
    with TestClient(
        create_app(Settings(collection=own_collection, device="cpu")), raise_server_exceptions=False
    ) as client:
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        import sqlite3

        db = sqlite3.connect(own_collection / "catalog.sqlite")
        with db:
            db.execute("DROP TABLE images")
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
        db.close()
        assert_problem(search(client, png(1)), 500, "catalog")
        assert_problem(add(client, png(1)), 500, "catalog")


def test_a_locked_catalog_is_503_for_changes_and_no_matter_for_searches(own_collection, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    import sqlite3

    with serving(own_collection) as client:
        other = sqlite3.connect(own_collection / "catalog.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert_problem(add(client, png(700)), 503, "another process has been writing")
        assert_problem(client.delete("/v1/images/1"), 503, "another process has been writing")
        assert len(search(client, png(1), k=50).json()["hits"]) == 12
        other.execute("ROLLBACK")
        other.close()
        assert add(client, png(700)).status_code == 201


def test_a_full_disk_is_507_and_searching_goes_on(small_disk, indexed, caplog):
    folder = small_disk / "collection"
    folder.mkdir()
    for name in ("catalog.sqlite", "index"):
        (shutil.copytree if (indexed / name).is_dir() else shutil.copy)(indexed / name, folder / name)
    settings = Settings(collection=folder, device="cpu", checkpoint=indexed / "checkpoint.safetensors")
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        assert add(client, png(800)).status_code == 201
        large = io.BytesIO()
        Image.effect_noise((1000, 1000), 90).save(large, "PNG")
        assert_problem(add(client, large.getvalue()), 507, "No space left")
        assert len(kept_files(folder)) == 1
        assert client.get("/v1/stats").json()["n_images"] == 13
        assert len(search(client, large.getvalue(), k=50).json()["hits"]) == 13
    collection = Collection(folder, read_only=True)
    assert len(collection) == 13
    collection.close()


def test_an_error_of_our_own_is_500_without_details(client, monkeypatch, caplog):
    monkeypatch.setattr(Service, "searcher", property(lambda self: 1 / 0))
    assert_problem(client.get("/v1/stats"), 500, "its log says more")
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
