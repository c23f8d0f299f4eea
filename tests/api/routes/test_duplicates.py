"""Groups of near-duplicates over HTTP: computed once, and left out once somebody kept them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from hashseek.api.client import Client
from hashseek.api.collections import computed
from hashseek.api.collections.computed import Computed
from hashseek.api.messages.problems import StillComputing
from hashseek.api.routes import duplicates
from hashseek.indexing.collection import Collection
from support.collections import code_collection, new_images
from support.commands import wait_until
from support.pictures import draw, encoded
from support.service import add, assert_problem, serving


@pytest.fixture
def copies(own_collection):
    """A collection of 12 pictures and three whose codes are copies: [1, 13, 14] within 1 bit, and [2, 15]."""
    collection = Collection(own_collection)
    codes = [collection.catalog.code_of(image_id).code.copy() for image_id in (1, 1, 2)]
    codes[0][0] ^= 1
    collection.add(new_images(np.array(codes), start=100, labels=("copy",)))
    collection.close()
    return own_collection


def groups(client, radius=1, **options):
    answer = client.get("/v1/duplicates", params={"radius": radius, **options})
    assert answer.status_code == 200, answer.text
    return [[image["id"] for image in group["images"]] for group in answer.json()["groups"]]


def test_a_kept_group_comes_back_only_with_another_image(copies):
    with serving(copies) as client:
        assert groups(client) == [[1, 13, 14], [2, 15]]
        assert groups(client, radius=0) == [[1, 14], [2, 15]]
        assert groups(client, limit=1) == [[1, 13, 14]]
        assert client.get("/v1/duplicates?radius=1&limit=1").json()["next_offset"] == 1
        answer = client.get("/v1/duplicates?radius=1&limit=1&offset=1").json()
        assert (answer["total"], answer["next_offset"], answer["groups"][0]["size"]) == (2, None, 2)
        assert answer["groups"][0]["images"][1] == client.get("/v1/images/15").json()
        for _ in range(2):  # sent again
            assert client.post("/v1/duplicates/kept", json={"ids": [14, 1, 13]}).status_code == 204
        assert groups(client) == groups(client, radius=0) == [[2, 15]]
        client.delete("/v1/images/13")
        assert groups(client) == [[2, 15]]
        assert_problem(client.post("/v1/duplicates/kept", json={"ids": [2, 15, 99]}), 404, "UnknownImage", "99")
        assert groups(client) == [[2, 15]]
    collection = Collection(copies)
    assert collection.catalog.kept_groups() == [[1, 13, 14]]
    collection.add(new_images(collection.catalog.code_of(1).code[None], start=200))
    collection.close()
    with serving(copies) as client:
        assert groups(client) == [[1, 14, 16], [2, 15]]


def test_nobody_has_decided_about_a_picture_that_replaced_a_kept_one(own_collection):
    with closing(Collection(own_collection)) as collection:
        code = collection.catalog.code_of(1).code[None]
        pictures = [
            replace(image, key=f"k{n}") for n, image in enumerate(new_images(code.repeat(3, axis=0), start=100))
        ]
        ids = [image_id for image_id, _ in collection.add(pictures)]
        kept = [ids, [1, 2], [1, ids[0]]]
        for group in kept:
            collection.catalog.keep_group(group)
        collection.add([replace(pictures[1], labels=("a",)), replace(pictures[2], path="/moved.jpg")])
        assert collection.catalog.kept_groups() == [sorted(group) for group in kept]
        collection.add([replace(pictures[0], sha256="f" * 64)])
        assert collection.catalog.kept_groups() == [ids[1:], [1, 2]]


def test_the_client_and_the_command_leave_kept_groups_out(copies, serve, hashseek):
    _, service = serve(copies)
    with Client(str(service.base_url)) as client:
        assert [group.size for group in client.duplicates(1, limit=1, offset=1).groups] == [2]
        first = client.duplicates(1, limit=1).groups[0]
        client.keep_duplicates([image.id for image in first.images])
        assert [group.size for group in client.duplicates(1).groups] == [2]
    command = ("index", "duplicates", copies, "--radius", 1, "--json")
    assert hashseek(*command)[1].count("\n") == 1
    assert hashseek(*command, "--all")[1].count("\n") == 2


def test_a_radius_or_collection_beyond_the_limits_is_refused(copies, monkeypatch):
    with serving(copies, read_only=True) as client:
        with monkeypatch.context() as limited:
            limited.setattr(duplicates, "MAX_IN_GROUP", 2)
            found = client.get("/v1/duplicates?radius=1").json()["groups"]
            assert [(group["size"], len(group["images"])) for group in found] == [(3, 2), (2, 2)]
            limited.setattr(duplicates, "MAX_IMAGES", 14)
            assert_problem(client.get("/v1/duplicates?radius=1"), 422, "BadConfig")
        for query in ("", "?radius=-1", "?radius=9"):
            assert_problem(client.get(f"/v1/duplicates{query}"), 422, "BadRequest", "radius")
        assert_problem(client.post("/v1/duplicates/kept", json={"ids": [2, 15]}), 403, "ReadOnly")


def test_groups_are_computed_once_for_each_state_and_radius(copies, monkeypatch):
    asked, compute = [], Collection.duplicates
    monkeypatch.setattr(
        Collection,
        "duplicates",
        lambda self, radius, **more: asked.append(radius) or compute(self, radius=radius, **more),
    )
    with serving(copies) as client:
        for radius in (1, 0, 1, 0):
            groups(client, radius=radius)
        assert asked == [1, 0]
        assert client.post("/v1/duplicates/kept", json={"ids": [2, 15]}).status_code == 204
        assert (groups(client), asked) == ([[1, 13, 14]], [1, 0])
        add(client, encoded(draw(0), "PNG"))
        wait_until(lambda: groups(client) and len(asked) == 3)


def test_a_group_that_was_deleted_since_it_was_computed_is_left_out(copies, monkeypatch):
    found = [np.array([1, 13, 14]), np.array([2, 15])]
    monkeypatch.setattr(Computed, "get", lambda *_: found)  # as while it computes the new ones
    with serving(copies) as client:
        for image_id in (2, 15, 13):
            assert client.delete(f"/v1/images/{image_id}").status_code == 204
        assert groups(client) == [[1, 14]]


def test_one_thing_is_computed_at_a_time_and_a_slow_one_is_answered_though_the_collection_changes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(computed, "WAIT_SECONDS", 0.01)
    collection, results, go = code_collection(tmp_path, n_bits=8), Computed(), threading.Event()
    started, has_started = [], threading.Event()

    def compute():
        started.append(len(collection))
        has_started.set()
        go.wait(60)
        return started[-1]

    for name in ("a", "b", "a", "a"):
        with pytest.raises(StillComputing):
            results.get(name, collection.catalog, compute)
        assert has_started.wait(60)
        collection.add(new_images(np.zeros((1, 1), np.uint8), start=len(collection)))
    assert started == [0]
    monkeypatch.setattr(computed, "WAIT_SECONDS", 60)
    threading.Timer(0.2, go.set).start()
    assert results.get("a", collection.catalog, compute) == 0
    assert results.get("b", collection.catalog, compute) == 4
    collection.add(new_images(np.zeros((1, 1), np.uint8), start=9))
    wait_until(lambda: results.get("b", collection.catalog, compute) == 5)
    results.get("c", collection.catalog, lambda: None)
    with pytest.raises(ZeroDivisionError):
        results.get("d", collection.catalog, lambda: 1 / 0)
    assert results.get("d", collection.catalog, lambda: 1) == 1
    go.clear()
    monkeypatch.setattr(computed, "WAIT_SECONDS", 0.01)

    def fail():
        go.wait(60)
        raise ZeroDivisionError

    with pytest.raises(StillComputing):
        results.get("e", collection.catalog, fail)
    go.set()
    monkeypatch.setattr(computed, "WAIT_SECONDS", 60)
    with pytest.raises(ZeroDivisionError):  # of the earlier request
        results.get("e", collection.catalog, lambda: 2)
    assert results.get("e", collection.catalog, lambda: 2) == 2
    collection.close()


def test_results_that_are_asked_for_at_the_same_time_are_computed_once_each(tmp_path, monkeypatch):
    go, started = threading.Event(), []
    with closing(code_collection(tmp_path, n_bits=8)) as collection:
        results = Computed()

        def get(name):
            return results.get(name, collection.catalog, lambda: go.wait(60) and (started.append(name) or name))

        monkeypatch.setattr(computed, "WAIT_SECONDS", 0.001)
        for name in 2 * [*range(10)]:  # more than are kept
            with pytest.raises(StillComputing):
                get(name)
        go.set()
        monkeypatch.setattr(computed, "WAIT_SECONDS", 60)
        assert [get(name) for name in range(10)] == started == [*range(10)]


def test_few_requests_wait_for_one_result(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(computed, "_WAITING", threading.BoundedSemaphore(2))
    monkeypatch.setattr(computed, "WAIT_SECONDS", 60)
    with closing(code_collection(tmp_path, n_bits=8)) as collection, ThreadPoolExecutor(3) as pool:
        results = Computed()

        def get():
            return results.get("a", collection.catalog, lambda: go.wait(60))

        answers = [pool.submit(get) for _ in range(3)]
        wait_until(lambda: any(answer.done() for answer in answers))
        assert sorted(answer.done() for answer in answers) == [False, False, True]
        go.set()
        assert sorted(isinstance(answer.exception(), StillComputing) for answer in answers) == [False, False, True]
        assert get() is True
