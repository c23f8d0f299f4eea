"""Stored images over HTTP: records, files, pages, adding, deleting, keys and attributes."""

import errno
import io
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

from hashseek.api.routes import images
from hashseek.retrieval.tar_members import member_path
from support import web
from support.collections import sql
from support.commands import wait_until
from support.paths import copy_collection
from support.pictures import N_PICTURES, draw, encoded, png
from support.service import add, assert_problem, figures, hits, kept_files, search, serving

NAMED = {"filename": "picture"}  # of every upload


@pytest.fixture(scope="module")
def unchanged(indexed, tmp_path_factory):
    """(client, collection): a service that may change its collection, for requests that are refused."""
    folder = copy_collection(indexed, tmp_path_factory.mktemp("unchanged") / "collection")
    with serving(folder) as started:
        yield started, folder


def n_images(client):
    return client.get("/v1/stats").json()["n_images"]


def test_records_files_and_similar_images(reader):
    for image_id in range(1, N_PICTURES + 1):
        record = reader.get(f"/v1/images/{image_id}").json()
        assert (record["id"], record["width"], record["height"]) == (image_id, 96, 72)
        response = reader.get(record["url"])
        assert response.headers["content-type"] == record["media_type"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert len(response.content) == record["bytes"]
        found = hits(reader.get(f"/v1/images/{image_id}/similar", params={"k": 3}))
        assert (found[0]["id"], found[0]["distance"], len(found)) == (image_id, 0, 3)


@pytest.mark.parametrize("size", [16, 40, 1024])
def test_thumbnails(reader, size):
    response = reader.get("/v1/images/1/file", params={"size": size})
    assert response.headers["content-type"] == "image/jpeg"
    image = Image.open(io.BytesIO(response.content))
    assert max(image.size) == min(size, 96)
    assert abs(image.width / image.height - 96 / 72) < 0.1


def test_pages(reader):
    seen, after = [], 0
    while after is not None:
        page = reader.get("/v1/images", params={"after": after, "limit": 5}).json()
        seen += [image["id"] for image in page["images"]]
        after = page["next"]
    assert seen == list(range(1, 13))
    three = reader.get("/v1/images", params={"label": "three"}).json()
    assert (len(three["images"]), three["total"], three["next"]) == (4, 4, None)
    chosen = {"any_label": ["three", "odd"], "without": "even", "id": [1, 3, 5, 7, 10**30], "limit": 2}
    page = reader.get("/v1/images", params=chosen).json()
    everything = hits(reader.get("/v1/images/1/similar", params={**chosen, "limit": [], "k": 12}))
    assert page["total"] == len(everything) > 2
    rest = reader.get("/v1/images", params={**chosen, "after": page["next"]}).json()
    ids = [image["id"] for image in (*page["images"], *rest["images"])]
    second = reader.get("/v1/images", params={**chosen, "offset": 1, "limit": 2}).json()
    assert [image["id"] for image in second["images"]] == ids[1:3]
    assert [image["id"] for image in reader.get("/v1/images", params={"offset": 10}).json()["images"]] == [11, 12]
    assert (ids, rest["total"]) == (sorted(hit["id"] for hit in everything)[:4], page["total"])
    for label in ("'; DROP TABLE images; --", "none", " ", "\0", "ü"):
        assert reader.get("/v1/images", params={"label": label}).json() == {"images": [], "total": 0, "next": None}


@pytest.mark.parametrize("suffix", ["", "/file", "/similar"])
@pytest.mark.parametrize("image_id", ["-1", "99", str(10**40)])
def test_unknown_ids_of_any_size_are_404(reader, suffix, image_id):
    assert_problem(reader.get(f"/v1/images/{image_id}{suffix}"), 404, "UnknownImage", image_id)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/v1/images/cat", "image_id"),
        ("/v1/images/" + "9" * 5000, "image_id"),
        (f"/v1/images?after={2**63}", "after"),
        ("/v1/images?limit=1001", "limit"),
        ("/v1/images/1/file?size=1025", "size"),
    ],
)
def test_values_outside_their_limits_are_refused(reader, url, name):
    assert_problem(reader.get(url), 422, "BadRequest", name)


@pytest.mark.parametrize(
    "path",
    [
        "/web/../app.py",
        "/web/%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/v1/images/..%2f..%2f1/file",
        "/web/%00",
    ],
)
def test_no_path_leads_out_of_the_folders(reader, path):
    response = reader.get(path)
    assert response.status_code in (404, 422)
    assert "import" not in response.text


def test_a_read_only_service_refuses_changes_before_it_looks_at_them(reader):
    for response in (
        add(reader, png(1)),
        add(reader, b""),
        *map(reader.delete, ("/v1/images/1", "/v1/images/99", "/v1/images?label=odd&expected=6")),
        reader.patch("/v1/images/1", json={"labels": []}),
    ):
        assert_problem(response, 403, "ReadOnly")
    assert n_images(reader) == 12


# ---------------------------------------------------------------- changes


def test_an_upload_is_found_at_once_and_gone_at_once(client, own_collection):
    data = png(500, (300, 200))
    response = add(client, data, labels=["new", " shiny ", "", "new"])
    assert response.status_code == 201
    record = response.json()
    assert (record["id"], record["created"], record["labels"], record["bytes"]) == (
        13,
        True,
        ["new", "shiny"],
        len(data),
    )
    assert (record["width"], record["height"], record["media_type"]) == (300, 200, "image/png")
    found = search(client, data, k=50).json()
    assert (found["hits"][0]["id"], found["hits"][0]["distance"], found["n_images"]) == (13, 0, 13)
    assert client.get(record["url"]).content == data
    assert client.get("/v1/stats").json()["labels"]["new"] == 1
    [kept] = kept_files(own_collection)
    assert kept.read_bytes() == data

    again = add(client, data, labels="other")
    assert (again.status_code, again.json()) == (200, {**record, "created": False, "change": "known"})
    assert len(kept_files(own_collection)) == 1

    assert client.delete("/v1/images/13").status_code == 204
    assert_problem(client.delete("/v1/images/13"), 404, "UnknownImage", "13")
    for url in ("/v1/images/13", record["url"]):
        assert client.get(url).status_code == 404
    assert 13 not in [hit["id"] for hit in hits(search(client, data, k=50))]
    assert kept_files(own_collection) == []
    assert add(client, data).json()["id"] == 14


def test_deleting_an_indexed_image_leaves_its_file(client, pictures):
    assert client.delete("/v1/images/5?dry_run=true").status_code == 422
    path = client.get("/v1/images/5").json()["path"]
    assert client.delete("/v1/images/5").status_code == 204
    assert (pictures / path).is_file()
    assert len(hits(search(client, png(0), k=50))) == 11


@pytest.mark.parametrize(
    ("data", "fields", "kind"),
    [
        (b"", {}, "BadImage"),
        (b"no picture", {}, "BadImage"),
        (png(530)[:1000], {}, "BadImage"),
        (png(530), {"label": "odd"}, "BadRequest"),
        (png(530), {"path": "/etc/passwd"}, "BadRequest"),
        (png(530), {"labels": "x" * 201}, "BadRequest"),
        (png(530), {"key": ["a", "b"]}, "BadConfig"),
        (png(530), {"labels": "a\0b"}, "BadConfig"),
        (png(530), {"labels": "a\nb"}, "BadConfig"),
        (png(530), {"key": "x" * 513}, "BadConfig"),
        (png(530), {"attributes": "[1]"}, "BadRequest"),
        (png(530), {"attributes": "[" * 100_000}, "BadRequest"),
        (png(530), {"attributes": '{"x": ' + "[" * 100 + "]" * 100 + "}"}, "BadConfig"),
        (png(530), {"attributes": '{"x": "\\ud800"}'}, "BadRequest"),
        (png(530), {"attributes": json.dumps({"x": "y" * 16_400})}, "BadConfig"),
    ],
)
def test_a_refused_upload_stores_nothing(unchanged, data, fields, kind):
    client, collection = unchanged
    assert_problem(add(client, data, **fields), 422, kind)
    assert n_images(client) == 12
    assert kept_files(collection) == []


def test_only_one_picture_is_stored_at_a_time(client):
    files = [("image", ("a", png(500))), ("image", ("b", png(501)))]
    assert_problem(client.post("/v1/images", files=files), 422, "BadConfig")
    assert_problem(client.post("/v1/encode", files=files), 422, "BadConfig")
    assert n_images(client) == 12


def test_each_image_of_a_batch_is_stored_or_has_its_own_problem(client):
    files = [("image", (f"{n}.png", data)) for n, data in enumerate([png(500), b"no picture", png(500), png(501)])]
    details = [{"key": "a"}, {}, {"labels": ["x"]}, {"labels": ["y"], "attributes": {"n": 1}}]
    response = client.post("/v1/batch", files=files, data={"details": json.dumps(details)})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    assert "content-encoding" not in response.headers  # compressed, lines would be held back
    first, broken, same, last = map(json.loads, response.text.splitlines())
    assert (first["id"], first["key"], first["change"]) == (13, "a", "added")
    assert (broken["status"], broken["type"]) == (422, "urn:hashseek:BadImage")
    assert (same["id"], same["change"]) == (13, "known")
    assert (last["labels"], last["attributes"]) == (["y"], {"n": 1, "filename": "3.png"})
    assert client.get("/v1/images/14").json()["sha256"] == last["sha256"]
    assert_problem(client.post("/v1/batch", files=files, data={"details": "[{}]"}), 422, "BadConfig")
    assert_problem(client.post("/v1/batch", files=files * 17), 422, "BadRequest")
    assert n_images(client) == 14


def test_labels_may_be_repeated_and_empty_fields_count_as_not_given(client):
    record = add(client, png(500), labels="", key="", attributes="").json()
    assert (record["labels"], record["key"], record["attributes"]) == ([], None, {"filename": "picture"})
    labels = ["<script>alert(1)</script>", "'; DROP TABLE images", "ü x"]
    assert set(add(client, png(501), labels=labels).json()["labels"]) == {*labels}
    assert client.get("/v1/images", params={"label": "ü x"}).json()["images"][0]["id"] == 14


def test_a_kept_file_has_the_suffix_of_its_content_whatever_its_name_said(client, own_collection):
    for kind, suffix in (("JPEG", ".jpg"), ("GIF", ".gif"), ("TIFF", ".tif")):
        data, before = encoded(draw(510), kind), set(kept_files(own_collection))
        response = client.post("/v1/images", files={"image": ("../../evil.html\0", data, "text/html")})
        assert response.status_code == 201
        assert [path.suffix for path in set(kept_files(own_collection)) - before] == [suffix]
        served = client.get(response.json()["url"])
        assert served.headers["content-type"] == response.json()["media_type"] != "text/html"
        assert served.content == data


def test_files_that_take_long_to_read_leave_threads_for_other_requests(client, own_collection, monkeypatch):
    url, go, n = add(client, png(503)).json()["url"] + "?size=64", threading.Event(), 80
    monkeypatch.setattr(images, "open_uri", lambda *_args, **_options: go.wait(60) and png(503))
    with ThreadPoolExecutor(n) as pool:
        waiting = [pool.submit(client.get, url) for _ in range(n)]
        wait_until(lambda: figures(client)["hashseek_requests_in_progress",] == n + 1)
        assert client.get("/healthz/ready").status_code == 200
        go.set()
        assert {response.result().status_code for response in waiting} == {200}


def test_a_file_that_is_gone_is_410(client, own_collection, monkeypatch):
    record = add(client, png(502)).json()
    [kept] = kept_files(own_collection)
    kept.unlink()
    for url in (record["url"], f"{record['url']}?size=64"):
        assert_problem(client.get(url), 410, "FileGone")
        kept.write_bytes(b"no picture")
        assert_problem(client.get(url), 410, "FileGone")
        kept.unlink()
    kept.write_bytes(png(502)[:99])
    assert_problem(client.get(f"{record['url']}?size=64"), 422, "BadImage")

    def forbidden(*_args, **_options):
        raise PermissionError(errno.EACCES, "Permission denied", str(kept))

    monkeypatch.setattr(Path, "open", forbidden)
    for url in (record["url"], f"{record['url']}?size=64"):
        assert_problem(client.get(url), 410, "FileGone")
    assert client.delete("/v1/images/13").status_code == 204


def test_a_picture_that_was_indexed_by_url_is_read_from_there_if_that_is_allowed(own_collection, pictures):
    url, data = "/v1/images/1/file", (pictures / "picture 00.jpg").read_bytes()
    with web.serving(pictures) as place, serving(own_collection, allow_private=True) as client:
        sql(own_collection / "catalog.sqlite", f"UPDATE images SET path = '{place}/picture 00.jpg' WHERE id = 1")
        assert client.get(url).content == data
        assert client.get(f"{url}?size=64").is_success
        with serving(own_collection) as strict:
            assert_problem(strict.get(url), 502, "FileNotSent")
            assert_problem(strict.get(f"{url}?size=64"), 502, "FileNotSent")
    with serving(own_collection, allow_private=True) as client:  # its server has gone
        assert_problem(client.get(url), 502, "FileNotSent")


def test_clients_do_not_see_the_folder_of_a_tar_that_was_cut_off(own_collection, tmp_path):
    shard = tmp_path / "photos.tar"
    shard.write_bytes(b"short")
    member = member_path(shard, "512+900/a.png")
    sql(own_collection / "catalog.sqlite", f"UPDATE images SET path = '{member}' WHERE id = 1")
    with serving(own_collection) as client:
        for url in ("/v1/images/1/file", "/v1/images/1/file?size=64"):
            answer = client.get(url)
            assert_problem(answer, 410, "FileGone", "photos.tar")
            assert str(tmp_path) not in answer.text


def test_an_image_has_the_key_and_attributes_it_was_given(client):
    keys = ["photos/2026/ä b.jpg", "/leading/slash", "by-key/x", "similar", "x/file", "50%?#&=", "a//b/"]
    for key in (*keys, "4711\n", "a\nb", "ü" * 512):
        url = f"/v1/images/by-key/{quote(key)}"
        assert_problem(client.get(url), 404, "UnknownImage")
        attributes = {"camera": {"model": "X"}, "year": 2015, "note": "<b>ü", "filename": "own.png"}
        record = add(client, png(510), key=key, attributes=json.dumps(attributes)).json()
        assert (record["key"], record["attributes"], record["change"]) == (key, attributes, "added")
        assert client.get(url).json() == client.get(f"/v1/images/{record['id']}").json()
        [hit] = hits(search(client, png(510), k=1))
        assert (hit["id"], hit["key"], hit["attributes"]) == (record["id"], key, attributes)
        assert client.delete(url).status_code == 204
        assert_problem(client.delete(url), 404, "UnknownImage")


def test_known_content_keeps_its_code_and_gets_one_if_it_has_none(client, own_collection):
    codes = "SELECT hex(code) FROM codes WHERE image_id >= 13 ORDER BY image_id"
    catalog = own_collection / "catalog.sqlite"
    add(client, png(540))
    [(by_this_engine,)] = sql(catalog, codes)
    # As another engine would have computed it.
    [(stored,)] = sql(catalog, "UPDATE codes SET code = zeroblob(length(code)) WHERE image_id = 13", codes)
    assert stored != by_this_engine
    assert add(client, png(540), key="twin").json()["change"] == "added"
    assert sql(catalog, codes) == [(stored,), (stored,)]
    # As after a change of model that could not read the file.
    sql(catalog, "DELETE FROM codes WHERE image_id >= 13")
    assert add(client, png(540)).json()["id"] == 13
    assert sql(catalog, codes) == [(by_this_engine,)]


def test_known_content_whose_file_is_gone_gets_the_uploaded_file(client, own_collection, tmp_path):
    record = add(client, png(571)).json()
    [kept] = kept_files(own_collection)
    assert add(client, png(571)).json()["change"] == "known"
    kept.unlink()
    assert add(client, png(571)).json()["change"] == "known"
    assert client.get(record["url"]).content == png(571)
    # As if it had been added with `index add`.
    sql(own_collection / "catalog.sqlite", f"UPDATE images SET path = '{tmp_path}/gone.png' WHERE id = {record['id']}")
    again = add(client, png(571))
    assert (again.status_code, again.json()["change"], again.json()["id"]) == (200, "updated", record["id"])
    assert client.get(record["url"]).content == png(571)


def test_an_upload_under_a_known_key_replaces_the_image(client, own_collection):
    first = add(client, png(520), key="k", labels="old", attributes='{"n": 1}')
    same = add(client, png(520), key="k")
    assert (first.status_code, same.status_code, same.json()["change"]) == (201, 200, "known")
    other = add(client, png(521), key="k", labels="new")
    record = other.json()
    assert (other.status_code, record["created"], record["change"]) == (200, False, "updated")
    assert (record["id"], record["labels"], record["attributes"]) == (first.json()["id"], ["new"], NAMED | {"n": 1})
    assert client.get(record["url"]).content == png(521)
    found = hits(search(client, png(521), k=99))
    assert (found[0]["id"], found[0]["distance"], len(found)) == (record["id"], 0, 13)
    assert len(kept_files(own_collection)) == 1
    twin = add(client, png(521), key="l").json()  # known content is not encoded again, and the file is shared
    assert (twin["id"], twin["change"]) == (record["id"] + 1, "added")
    assert len(kept_files(own_collection)) == 1
    assert client.delete("/v1/images/by-key/k").status_code == 204
    assert client.get(twin["url"]).content == png(521)
    stats = client.get("/v1/stats").json()
    assert (stats["n_images"], sum(stats["engines"].values())) == (13, 13)


def test_the_file_name_of_an_upload_is_kept_as_an_attribute(client):
    def send(name, data, **fields):
        return client.post("/v1/images", files={"image": (name, data)}, data={"key": "k", **fields}).json()

    for name, kept in (
        ("IMG 1.jpg", {"filename": "IMG 1.jpg"}),
        ("../../etc/evil.html", {"filename": "evil.html"}),
        ("C:\\photos\\ä\u202e<b>.png", {"filename": "ä<b>.png"}),
        ("x" * 300 + ".png", {"filename": "x" * 251 + ".png"}),
        ("folder/", {}),
    ):
        assert send(name, png(550))["attributes"] == kept
        assert send(name, png(550))["change"] == "known"
        changed = client.patch("/v1/images/by-key/k", json={"attributes": {"n": 1}})
        assert changed.json()["attributes"] == {"n": 1}
        assert send(name, png(550))["change"] == "known"  # not given, so they stay
        assert send(name, png(551))["attributes"] == kept | {"n": 1}  # but for the name, which is another file's
        assert send(name, png(551), attributes='{"n": 2}')["attributes"] == kept | {"n": 2}
        assert send(name, png(551), attributes='{"n": 2}')["change"] == "known"
        assert client.delete("/v1/images/by-key/k").status_code == 204


@pytest.mark.parametrize("url", ["/v1/images/13", "/v1/images/by-key/a/b"])
def test_labels_and_attributes_are_replaced_and_found_at_once(client, url):
    before = add(client, png(560), key="a/b", labels=["old", "kept"], attributes='{"n": 1, "m": 2}').json()

    def counts():
        return [
            client.get("/v1/images/1/similar", params={"k": 99, **one, "include": "histogram"}).json()["histogram"]
            for one in ({"label": "new"}, {"where": "fresh>2"}, {"label": "old"}, {"where": "n=1"})
        ]

    assert [sum(one) for one in counts()] == [0, 0, 1, 1]
    record = client.patch(url, json={"labels": ["new", "kept", "new"]}).json()
    assert (record["labels"], record["attributes"]) == (["kept", "new"], before["attributes"])
    record = client.patch(url, json={"attributes": {"fresh": 3}}).json()
    assert (record["labels"], record["attributes"]) == (["kept", "new"], {"fresh": 3})
    assert [sum(one) for one in counts()] == [1, 1, 0, 0]
    assert client.get(url).json() == record
    assert client.patch(url, json={}).json() == record
    record = client.patch(url, json={"labels": [], "attributes": {}}).json()
    assert (record["labels"], record["attributes"]) == ([], {})
    assert {name: record[name] for name in ("id", "sha256", "key", "added_at")} == {
        name: before[name] for name in ("id", "sha256", "key", "added_at")
    }


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"labels": ["a\nb"]}, "BadConfig"),
        ({"labels": [""]}, "BadRequest"),
        ({"labels": ["x" * 201]}, "BadRequest"),
        ({"labels": [str(n) for n in range(1001)]}, "BadRequest"),
        ({"labels": None}, "BadRequest"),
        ({"labels": "a"}, "BadRequest"),
        ({"labels": ["\ud800"]}, "BadRequest"),
        ({"attributes": {"x": "y" * 16_400}}, "BadConfig"),
        ({"attributes": {"x": "\ud800"}}, "BadConfig"),
        ({"attributes": [1]}, "BadRequest"),
        ({"key": "new"}, "BadRequest"),
        ([], "BadRequest"),
    ],
)
def test_refused_changes_change_nothing(unchanged, body, kind):
    client, _ = unchanged
    before = client.get("/v1/images/1").json()
    content = json.dumps({**body, "attributes": body.get("attributes", {"n": 1})} if body else body)
    headers = {"Content-Type": "application/json"}
    assert_problem(client.patch("/v1/images/1", content=content, headers=headers), 422, kind)
    assert client.get("/v1/images/1").json() == before
    assert_problem(client.patch("/v1/images/99", json={}), 404, "UnknownImage")


def test_images_are_deleted_by_filter_only_if_their_number_is_the_expected_one(client, own_collection):
    for n in range(3):
        add(client, png(570 + n), labels="made", attributes=f'{{"n": {n}}}')
    chosen = {"label": "made", "where": "n>=1"}
    assert_problem(client.delete("/v1/images", params={**chosen, "expected": 3}), 409, "UnexpectedNumber", "2", "3")
    for parameters in ({"expected": 15}, {"label": "made"}, {**chosen, "expected": 0}, {"lable": "x", "expected": 15}):
        assert client.delete("/v1/images", params=parameters).status_code == 422
    body = json.dumps({"where": ["n>=1"]}).encode()
    refused = client.request("DELETE", "/v1/images", params={"label": "made", "expected": 3}, content=body)
    assert_problem(refused, 422, "BadConfig")
    assert n_images(client) == 15
    expected = client.get("/v1/images", params=chosen).json()["total"]
    assert client.delete("/v1/images", params={**chosen, "expected": expected}).json() == {"removed": 2}
    assert [image["id"] for image in client.get("/v1/images?label=made").json()["images"]] == [13]
    assert (n_images(client), len(kept_files(own_collection))) == (13, 1)


def test_many_clients_at_once(client, own_collection):
    """Each adds images, finds them at once and removes some, while another searches all the time."""
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
            assert record["id"] in [hit["id"] for hit in hits(search(client, data, k=500)) if hit["distance"] == 0]
            if number % 2:
                assert client.delete(f"/v1/images/{record['id']}").status_code == 204
                assert record["id"] not in [hit["id"] for hit in hits(search(client, data, k=500))]

    looking = threading.Thread(target=look)
    looking.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
        records = list(pool.map(lambda _: add(client, png(2000)).json(), range(8)))
    stop.set()
    looking.join()
    assert failures == []
    assert len({record["id"] for record in records}) == 1
    assert sum(record["created"] for record in records) == 1
    assert n_images(client) == 12 + 8 + 1
    assert len(kept_files(own_collection)) == 9


@pytest.mark.parametrize("query", ["", "?size=32"])
def test_a_client_that_has_the_picture_is_not_sent_it_again(reader, query):
    url = f"/v1/images/1/file{query}"
    first = reader.get(url)
    again = reader.get(url, headers={"If-None-Match": f'"other", {first.headers["ETag"]}'})
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", first.headers["ETag"])
    assert reader.get(url, headers={"If-None-Match": '"other"'}).content == first.content
    assert "no-cache" in first.headers["Cache-Control"]  # another picture may take the same id


def test_a_picture_arrives_whole_if_its_file_is_deleted_while_it_is_sent(client, own_collection):
    record = add(client, png(541)).json()
    [kept] = kept_files(own_collection)

    async def deleting(scope, receive, send):
        async def delete_and_send(message):
            kept.unlink(missing_ok=True)
            await send(message)

        await client.app(scope, receive, delete_and_send)

    response = type(client)(deleting, base_url=client.base_url).get(f"/v1/images/{record['id']}/file")
    assert (response.status_code, response.content) == (200, png(541))
    assert int(response.headers["Content-Length"]) == record["bytes"]


@pytest.mark.parametrize(
    "path", ["/", "/healthz/live", "/v1/stats", "/v1/images/1", "/v1/images/1/file", "/v1/images/99"]
)
def test_head_answers_like_get_without_the_body(reader, path):
    head, get = reader.head(path), reader.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["Content-Type"] == get.headers["Content-Type"]
    assert head.headers["Content-Length"] == get.headers["Content-Length"]


def test_no_answer_tells_the_folders_of_the_server(own_collection, pictures, tmp_path):
    """Neither of pictures that are indexed in place, nor of those that are gone or cannot be read."""
    moved = tmp_path / "secret" / "pictures"
    shutil.copytree(pictures, moved)
    sql(own_collection / "catalog.sqlite", f"UPDATE images SET path = replace(path, '{pictures}', '{moved}')")
    with serving(own_collection) as client:
        files = {image["id"]: image["path"] for image in client.get("/v1/images").json()["images"]}
        assert sorted(files.values()) == sorted(path.name for path in moved.rglob("*") if path.is_file())
        (gone,) = moved.glob("picture 00.*")
        gone.unlink()
        (torn,) = moved.glob("picture 01.*")
        torn.write_bytes(torn.read_bytes()[:99])
        urls = [f"/v1/images/{image_id}" + rest for image_id in files for rest in ("", "/similar", "/file?size=64")]
        answers = [*map(client.get, ["/v1/stats", "/v1/images", *urls]), search(client, png(1)), add(client, png(1))]
        assert sorted({answer.status_code for answer in answers}) == [200, 201, 410, 422]
        for answer in answers:
            assert b"secret" not in answer.content, answer.text
            assert str(own_collection).encode() not in answer.content


@pytest.mark.parametrize(
    ("request_", "values"),
    [
        ({"url": "/v1/images", "files": {"image": ("a.png", png(1))}, "data": {"attributes": "no"}}, ["attributes is"]),
        ({"url": "/v1/images", "files": {"image": (None, "hello")}}, ["image: must be a file"]),
        ({"url": "/v1/encode", "files": {"image": (None, "hello")}}, ["image: must be a file"]),
        ({"url": "/v1/search", "files": {"image": (None, "hello")}}, ["image: must be a file"]),
        ({"url": "/v1/batch", "files": {"image": (None, "hello")}}, ["image: must be a file"]),
        ({"url": "/v1/search", "content": b'{"image_id": 1}'}, ["Content-Type", "application/json"]),
        (
            {"url": "/v1/images/1", "content": b'{"labels": []}', "method": "PATCH"},
            ["Content-Type", "application/json"],
        ),
        ({"url": "/v1/images", "json": {"labels": ["x"]}}, ["Content-Type", "multipart/form-data"]),
        (
            {"url": "/v1/images/1", "files": {"labels": (None, "x")}, "method": "PATCH"},
            ["Content-Type", "application/json"],
        ),
        ({"url": "/v1/search", "json": {}}, ["image_id", "queries"]),
        ({"url": "/v1/search", "json": {"image_id": None}}, ["image_id: input should be a valid integer"]),
        ({"url": "/v1/search", "json": {"image_id": 1, "k": -3}}, ["k is -3"]),
        ({"url": "/v1/search", "json": {"image_id": 1, "max_distance": False}}, ["body: true and false"]),
        ({"url": "/v1/search", "json": {"image_id": 1, "id": [True]}}, ["body: true and false"]),
        (
            {
                "url": "/v1/images/1",
                "content": b"{",
                "method": "PATCH",
                "headers": {"Content-Type": "application/json"},
            },
            ["character 1"],
        ),
    ],
)
def test_a_problem_names_the_field_and_what_is_wrong_with_it(unchanged, request_, values):
    client, _ = unchanged
    assert_problem(client.request(**{"method": "POST", **request_}), 422, "BadRequest", *values)
