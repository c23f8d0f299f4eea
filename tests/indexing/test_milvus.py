"""Collections in Milvus through the commands and the service, and what happens when the server fails."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.batch import ingest
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import describe, find_sources
from hashseek.indexing.maintenance.exchange import export
from hashseek.indexing.milvus import connection
from hashseek.indexing.milvus.connection import StoreUnavailable
from hashseek.indexing.milvus.milvus_store import MilvusStore
from hashseek.indexing.milvus_uri import MilvusUri, parse_uri
from hashseek.indexing.opening import open_store
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadCollection, BadConfig, ForeignCodes
from support.collections import new_images, random_codes
from support.commands import wait_until
from support.milvus_server import free_port
from support.models import tiny_checkpoint
from support.pictures import save
from support.service import add, hits, search, serving

pytestmark = [pytest.mark.milvus, pytest.mark.xdist_group("milvus")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("milvus://db:1234/shop_1", MilvusUri("db", 1234, "shop_1")),
        ("milvus://db/shop", MilvusUri("db", 19530, "shop")),
        ("milvus://db:7/a?index=ivf&consistency=bounded&tls=on", MilvusUri("db", 7, "a", "ivf", "bounded", "on")),
        ("milvus://[::1]:7/a", None),
        ("milvus://db", None),
        ("milvus://db/a-b", None),
        ("milvus://db/a/b", None),
        ("milvus://user:secret@db/a", None),
        ("milvus://db:port/a", None),
        ("milvus://db/a?index=hnsw", None),
        ("milvus://db/a?k=1", None),
        ("milvus://db/a?index", None),
    ],
)
def test_uris(text, expected):
    for place in (text, Path(text)):  # a Path has one slash of the two
        if expected is not None:
            assert parse_uri(place) == expected
            continue
        with pytest.raises(BadConfig):
            parse_uri(place)


def test_what_needs_a_folder_is_refused_without_a_server(hashseek, checkpoint, pictures, tmp_path):
    uri = "milvus://localhost:1/x"
    for arguments in (
        ("index", "snapshot", uri, tmp_path / "x"),
        ("index", "restore", checkpoint, uri),
        ("index", "verify", uri, "--repair"),
        ("index", "build", uri),
        ("index", "add", uri, pictures),
        ("index", "add", uri, pictures, "--checkpoint", checkpoint, "--watch"),
        ("index", "add", uri, pictures, "--checkpoint", checkpoint, "--keep-features"),
    ):
        code, _, error = hashseek(*arguments)
        assert (code, error.count("\n")) == (2, 1), error
        assert "milvus://localhost:1/x" in error


def test_commands_find_the_same_in_milvus_as_in_a_folder(hashseek, milvus_name, checkpoint, pictures, indexed):
    options = ("--checkpoint", checkpoint, "--label", "mine", "--engine", "torch", "--device", "cpu")
    assert hashseek("index", "add", milvus_name, pictures, *options)[:2] == (
        0,
        f"added 12, already stored 0, skipped 0; {milvus_name} holds 12 images\n",
    )
    code, out, _ = hashseek("index", "add", milvus_name, pictures, *options)
    assert (code, out.split(";")[0]) == (0, "added 0, already stored 12, skipped 0")
    picture = min(pictures.glob("*.jpg"))
    answers = []
    for place in (indexed, milvus_name):
        found = hashseek("search", place, picture, "--checkpoint", checkpoint, "--device", "cpu", "-k", "5", "--json")
        answers.append([(hit["path"], hit["distance"], hit["score"]) for hit in json.loads(found[1])["hits"]])
    assert answers[0] == answers[1]
    assert answers[0][0][1] == 0
    stats = json.loads(hashseek("index", "stats", milvus_name, "--json")[1])
    assert (stats["images"], stats["bits"], stats["labels"]) == (12, 48, {"mine": 12})
    assert "spaces" not in stats
    with closing(open_store(Path(milvus_name), read_only=True)) as reader:
        first = reader.browse(None, limit=1).images[0].id
        for change in (lambda: reader.remove([first]), lambda: reader.update(first, labels=["other"])):
            with pytest.raises(BadCollection):
                change()
    assert hashseek("index", "remove", milvus_name, first)[1] == f"removed 1; {milvus_name} holds 11 images\n"
    assert hashseek("search", milvus_name, picture)[0] == 2  # it keeps no checkpoint


def test_what_ray_encoded_is_stored_like_what_one_process_encoded(
    hashseek, milvus_name, checkpoint, pictures, indexed, tmp_path
):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'hashseek[ray]'")
    options = ("--checkpoint", checkpoint, "--label", "mine", "--engine", "torch", "--device", "cpu")
    ray = ("--ray", "local", "--ray-workers", "1", "--shards", tmp_path / "shards", "--shard-size", "5")
    for counts in ("added 12, already stored 0", "added 0, already stored 12"):
        code, out, error = hashseek("index", "add", milvus_name, pictures, *options, *ray)
        assert (code, counts in out) == (0, True), (out, error)
    with (
        closing(MilvusStore(parse_uri(milvus_name))) as store,
        closing(Collection(indexed, read_only=True)) as collection,
    ):
        expected = {image.sha256: collection.code_of(image.id) for image in collection.browse(None, limit=20).images}
        found = {image.sha256: store.code_of(image.id) for image in store.browse(None, limit=20).images}
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[content].code, expected[content].code) for content in found)
        assert store.label_counts() == {"mine": 12}


@pytest.fixture
def encrypted(milvus_name, tmp_path):
    """(URI of a collection, certificate of the authority): Caddy with TLS in front of Milvus."""
    if shutil.which("caddy") is None:
        pytest.skip("caddy is not installed")
    uri, port = parse_uri(milvus_name), free_port()
    (tmp_path / "Caddyfile").write_text(
        "{\n admin off\n skip_install_trust\n auto_https disable_redirects\n}\n"
        f"https://localhost:{port} {{\n tls internal\n reverse_proxy h2c://{uri.server}\n}}\n"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    command = ("caddy", "run", "--config", tmp_path / "Caddyfile")
    authority = tmp_path / "caddy" / "pki" / "authorities" / "local" / "root.crt"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: authority.is_file() and answers(port))
        yield f"milvus://localhost:{port}/{uri.name}?tls=on", authority
    finally:
        process.terminate()
        process.wait()


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_connection_can_be_encrypted(encrypted, checkpoint, pictures):
    uri, authority = encrypted
    command = [sys.executable, "-m", "hashseek", "index", "add", uri, pictures, "--checkpoint", checkpoint]
    trusting = {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority)}
    done = subprocess.run([*command, "--device", "cpu"], env=trusting, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:8]) == (0, "added 12"), done.stderr
    for plain, environment in ((uri.removesuffix("?tls=on"), trusting), (uri, os.environ)):  # or an unknown authority
        words = [plain if word == uri else word for word in command]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].startswith("hashseek: ")


def test_an_export_of_a_folder_is_imported(hashseek, milvus_name, checkpoint, other_checkpoint, indexed, tmp_path):
    with closing(Collection(indexed, read_only=True)) as collection:
        export(collection, tmp_path / "x.parquet")
        code, *_ = hashseek("index", "import", tmp_path / "x.parquet", milvus_name, "--checkpoint", other_checkpoint)
        assert code == 2  # no collection is created for the wrong checkpoint
        for outcome in ("added 12, updated 0, already stored 0", "added 0, updated 0, already stored 12"):
            code, out, _ = hashseek("index", "import", tmp_path / "x.parquet", milvus_name, "--checkpoint", checkpoint)
            assert (code, out.split(";")[0]) == (0, outcome)
        with closing(MilvusStore(parse_uri(milvus_name))) as store:
            for image in store.browse(None, limit=20).images:
                [same] = [one for one in collection.browse(None, limit=20).images if one.sha256 == image.sha256]
                assert (image.path, image.labels) == (collection.uri_of(same), same.labels)
                assert store.code_of(image.id).code.tolist() == collection.code_of(same.id).code.tolist()


def test_only_a_key_that_occurs_twice_in_a_run_is_noted(milvus_name, checkpoint, tmp_path):
    def problems(*keys: str, first: int) -> list[str]:
        sources = [ImageSource(save(tmp_path / f"{first + n}.png", first + n), key=key) for n, key in enumerate(keys)]
        reports = list(ingest(store, encoder, sources))
        assert sum(report.skipped for report in reports) == 0
        return [problem.uri for report in reports for problem in report.problems]

    with closing(open_store(Path(milvus_name), checkpoint=checkpoint, create=True)) as store:
        encoder = Searcher.open(store, device="cpu").image_encoder
        stored = [f"k{number}" for number in range(8)]  # their ids are hashes, above and below that of the new one
        assert problems(*stored, first=0) == []
        assert problems("new", *stored, first=20) == []
        assert problems("newer", *stored, "newer", first=40) == [str(tmp_path / "49.png")]


def test_the_service_answers_from_milvus_and_refuses_uploads(milvus_name, checkpoint, pictures):
    place = Path(milvus_name)
    with closing(open_store(place, checkpoint=checkpoint, create=True)) as store:
        encoder = Searcher.open(store, device="cpu").image_encoder
        list(ingest(store, encoder, describe(find_sources([pictures]), labels=["x"], key_from="name")))
    data = min(pictures.glob("*.jpg")).read_bytes()
    with serving(place, checkpoint=checkpoint) as client:
        found = hits(search(client, data, k=3, include="histogram"))
        assert found[0]["distance"] == 0
        assert search(client, data, include="histogram").json()["histogram"] is None
        image_id = found[0]["id"]
        assert client.patch(f"/v1/images/{image_id}", json={"labels": ["new"]}).json()["labels"] == ["new"]
        assert [hit["id"] for hit in hits(search(client, data, label="new"))] == [image_id]
        assert client.get("/v1/images", params={"label": "x", "limit": 4}).json()["total"] == 11
        assert client.get(f"/v1/images/{image_id}/file").content == data
        assert client.get("/v1/stats").json()["index"] == {"kind": "BIN_FLAT", "consistency": "strong"}
        refused = add(client, (pictures / "picture 02.png").read_bytes() + b" ")
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:hashseek:BadConfig")
        assert "milvus://" not in refused.json()["detail"]
        assert client.delete("/v1/images", params={"label": "x", "expected": 11}).json() == {"removed": 11}
        assert client.get("/v1/images").json()["total"] == 1


def test_what_does_not_fit_is_refused(milvus_name, checkpoint, other_checkpoint):
    uri = parse_uri(milvus_name)
    with pytest.raises(BadCollection):
        MilvusStore(uri, checkpoint=checkpoint)
    with pytest.raises(StoreUnavailable):
        MilvusStore(MilvusUri("127.0.0.1", 1, "x"))
    with closing(MilvusStore(uri, checkpoint=checkpoint, create=True)) as store:
        with pytest.raises(ForeignCodes):
            MilvusStore(uri, checkpoint=other_checkpoint, create=True)
        images = new_images(random_codes(np.random.default_rng(0), 1, 36))
        with pytest.raises(BadCollection):
            store.add(images)  # codes of another length
        started = time.monotonic()
        for call, arguments in (
            ("query", {"filter": "id >>> 0"}),
            ("query", {"filter": "missing > 0"}),
            ("query", {"filter": "id > 0", "limit": 10**6}),
            ("upsert", {"data": [{"id": 1}]}),
        ):
            with pytest.raises(BadCollection):
                store._connection.read(call, **arguments)
        assert time.monotonic() - started < connection.READ_SECONDS  # none was tried again


def test_nothing_is_read_from_a_collection_that_took_the_place_of_another(milvus_name, checkpoint, tmp_path):
    uri = parse_uri(milvus_name)
    same_length = tiny_checkpoint(tmp_path / "other.safetensors", n_bits=48, seed=3)
    before, after, checked = (MilvusStore(uri, checkpoint=checkpoint, create=True) for _ in range(3))
    assert checked.is_current()
    before._connection.write("drop_collection")
    assert not checked.is_current()
    with closing(MilvusStore(uri, checkpoint=same_length, create=True)) as other:
        other.add(new_images(random_codes(np.random.default_rng(0), 1, 48)))
    assert not after.is_current()
    for store in (checked, after):
        with pytest.raises(StoreUnavailable):
            store.search(np.zeros((1, 6), np.uint8), k=1)
        assert not store.is_current()  # until another one is opened
    last = MilvusStore(uri, checkpoint=same_length)
    last._connection.write("drop_collection")
    MilvusStore(uri, checkpoint=same_length, create=True).close()
    assert not last.is_current()
    for store in (before, after, checked, last):
        store.close()


def test_a_service_whose_collection_is_dropped_answers_again_when_it_is_back(
    milvus_name, checkpoint, pictures, caplog, monkeypatch
):
    monkeypatch.setattr("hashseek.api.collections.service.RETRY_SECONDS", 0.5)
    place, data = Path(milvus_name), min(pictures.glob("*.jpg")).read_bytes()
    with (
        closing(open_store(place, checkpoint=checkpoint, create=True)) as store,
        serving(place, checkpoint=checkpoint) as client,
    ):
        store._connection.write("drop_collection")
        answers = []
        wait_until(lambda: answers.append(search(client, data)) or answers[-1].status_code == 503)
        assert all(parse_uri(place).server not in answer.text for answer in answers)
        assert client.get("/healthz/ready").status_code == 503
        wait_until(lambda: "could not be loaded" in caplog.text)
        with closing(open_store(place, checkpoint=checkpoint, create=True)):
            wait_until(lambda: client.get("/healthz/ready").status_code == 200)
        assert hits(search(client, data)) == []
    assert [record for record in caplog.records if record.exc_info] == []


def test_an_index_add_goes_on_when_the_server_starts_again(start, milvus_process, checkpoint, pictures):
    uri = f"{milvus_process.uri}/added"
    wait_before_a_lookup = """
import os, time
from hashseek.indexing.milvus import connection
from hashseek.indexing.milvus.milvus_store import MilvusStore
connection.READ_SECONDS = 1.0
look_up = MilvusStore.by_content
def wait(store, sha256):
    open("before", "w").close()
    while not os.path.exists("killed"):
        time.sleep(0.01)
    return look_up(store, sha256)
MilvusStore.by_content = wait
"""
    arguments = ("index", "add", uri, pictures, "--checkpoint", checkpoint, "--device", "cpu")
    command = start(*arguments, before=wait_before_a_lookup)
    wait_until((command.folder / "before").exists)
    milvus_process.kill()
    (command.folder / "killed").touch()
    time.sleep(3)
    milvus_process.start()
    assert command.wait() == 0, command.err
    with closing(MilvusStore(parse_uri(uri))) as store:
        assert len(store) == 12
        store._connection.write("drop_collection")


def test_a_collection_of_another_program_is_refused(milvus_name, checkpoint):
    import pymilvus

    uri = parse_uri(milvus_name)
    client = pymilvus.MilvusClient(uri=f"http://{uri.server}")
    for description in ("", "[]", json.dumps({"hashseek": 1, "fingerprint": "f" * 64, "n_bits": 64})):
        schema = client.create_schema(description=description)
        schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
        schema.add_field("code", pymilvus.DataType.BINARY_VECTOR, dim=16)
        client.create_collection(uri.name, schema=schema)
        with pytest.raises(BadCollection):
            MilvusStore(uri)
        client.drop_collection(uri.name)
    client.close()


def test_an_add_goes_on_when_the_server_starts_again(milvus_process, checkpoint, monkeypatch):
    images = new_images(random_codes(np.random.default_rng(0), 300, 48))
    uri = parse_uri(f"{milvus_process.uri}/restarted")
    with closing(MilvusStore(uri, checkpoint=checkpoint, create=True)) as store:
        store.add(images[:100])
        with closing(MilvusStore(uri)) as reader:
            milvus_process.kill()
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                reader.check_readable()
            assert time.monotonic() - started < 5  # as long as a probe waits
            monkeypatch.setattr(reader._connection, "_read_seconds", 2.0)
            with pytest.raises(StoreUnavailable):
                reader.one(1)
            assert time.monotonic() - started < 10
        outcome: list[object] = []
        adding = threading.Thread(target=lambda: outcome.extend(store.add(images[100:])))
        adding.start()
        time.sleep(1)
        milvus_process.start()
        adding.join()
        assert len(outcome) == 200
        assert len(store) == 300
        [(distances, _)] = store.search(images[7].code[None], k=1)
        assert distances.tolist() == [0]
        store._connection.write("drop_collection")
