"""The contract of a store, for collections in a folder and in Milvus: both answer the same."""

import hashlib
import io
import os
import shutil
import tarfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.catalog.filters import Filter, make_filter
from hashseek.indexing.collection import open_or_create
from hashseek.indexing.milvus import milvus_store, nearest
from hashseek.indexing.milvus.milvus_store import MilvusStore
from hashseek.indexing.milvus.rows import CODE, ids_of
from hashseek.indexing.milvus_uri import parse_uri
from hashseek.retrieval.errors import BadConfig, UnknownImage
from hashseek.retrieval.tar_members import list_members
from support import hamming_oracle as hamming
from support.collections import ATTRIBUTES, new_images, random_codes
from support.models import tiny_checkpoint

MILVUS = (pytest.mark.milvus, pytest.mark.xdist_group("milvus"))
KINDS = ["folder", pytest.param("milvus", marks=MILVUS)]


@pytest.fixture
def open_new(request, tmp_path):
    """A function that opens a new collection of a kind for codes of so many bits; all are closed at the end."""
    opened = []

    def open_kind(kind, n_bits, options=""):
        checkpoint = tiny_checkpoint(tmp_path / f"{n_bits}.safetensors", n_bits=n_bits, seed=1)
        if kind == "folder":
            opened.append(open_or_create(tmp_path / "collection", checkpoint=checkpoint))
        else:
            uri = parse_uri(request.getfixturevalue("milvus_name") + options)
            opened.append(MilvusStore(uri, checkpoint=checkpoint, create=True))
        return opened[-1]

    yield open_kind
    for store in opened:
        store.close()


def settled(store):
    """The same collection for fast reads, once they see everything that was written."""
    if not isinstance(store, MilvusStore):
        return store
    n = len(store)
    reader = MilvusStore(replace(store.uri, consistency="bounded"))
    until = time.monotonic() + 60
    while len(reader) != n and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(1)
    return reader


def clustered_codes(rng):
    """6,000 codes of 64 bits around 60 centres, with many ties."""
    bits = np.repeat(rng.integers(0, 2, (60, 64)), 100, axis=0)
    return np.packbits(bits ^ (rng.random(bits.shape) < 0.06), axis=1, bitorder="little")


def indexed(store):
    """Wait until Milvus searches the collection by its index: the last images are otherwise in a part without one."""
    from pymilvus import MilvusClient

    client, n = MilvusClient(uri=f"http://{store.uri.server}"), len(store)
    client.flush(store.uri.name)
    until = time.monotonic() + 120
    while True:
        about = client.describe_index(store.uri.name, CODE)
        if about["pending_index_rows"] == 0 and about["indexed_rows"] >= n:
            break
        assert time.monotonic() < until, about
        time.sleep(0.5)
    client.refresh_load(store.uri.name)
    client.close()


def labelled(codes):
    """Images; the first half has the label a, every third one the label "b, c", and every fifth one a key."""
    return [
        replace(
            image,
            labels=("a",) * (i < len(codes) / 2) + ("b, c",) * (i % 3 == 0),
            key=f"key/{i}" if i % 5 == 0 else None,
        )
        for i, image in enumerate(new_images(codes))
    ]


def nearest_of(query, codes, ids, k, radius=None):
    """What the oracle finds: (distances, ids), by distance, then by id."""
    order = np.argsort(ids)
    distances, at = hamming.search(query, codes[order], k=min(k, len(ids)))
    within = distances[0] <= (10**6 if radius is None else radius)
    return distances[0][within].tolist(), ids[order][at[0]][within].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_bits", [12, 48, 64])
def test_searches_agree_with_the_oracle_whatever_the_ties(kind, n_bits, open_new, monkeypatch):
    monkeypatch.setattr(nearest, "MOST", 60)  # of 300 images: so all ways to complete a distance are taken
    monkeypatch.setattr(milvus_store, "MOST", 60)
    codes = random_codes(np.random.default_rng(n_bits), 300, n_bits, n_distinct=12)
    store = open_new(kind, n_bits)
    ids = np.array([image_id for image_id, _ in store.add(labelled(codes))])
    gone = ids[[3, 50, 299]]
    store.remove(gone.tolist())
    reader = settled(store)
    alive = ~np.isin(ids, gone)
    has_a = np.arange(300) < 150
    both = Filter(all_labels=("a",), no_labels=("b, c",))
    cases = {
        None: alive,
        Filter(any_labels=("a", "nothing")): alive & has_a,
        both: alive & has_a & (np.arange(300) % 3 != 0),
        Filter(keys=("key/5", "key/10", "key/50", "")): alive & np.isin(np.arange(300), [5, 10]),
    }
    queries = np.concatenate([codes[:2], random_codes(np.random.default_rng(9), 1, n_bits)])
    for among, chosen in cases.items():
        assert (reader.ids_where(among or Filter())).tolist() == sorted(ids[chosen].tolist())
        for k, radius in ((1, None), (7, None), (40, n_bits // 3), (1000, None), (1000, 0)):
            found = reader.search(queries, k=k, max_distance=radius, among=among)
            for query, (distances, hits) in zip(queries, found, strict=True):
                expected = nearest_of(query[None], codes[chosen], ids[chosen], k, radius)
                assert (distances.tolist(), hits.tolist()) == expected
        for n in (1, 25):
            distances, hits, of_hits = reader.candidates(queries[:1], n=n, among=among)
            everything, order = nearest_of(queries[:1], codes[chosen], ids[chosen], 1000)
            with_ties = sum(distance <= everything[min(n, len(everything)) - 1] for distance in everything)
            assert (distances.tolist(), hits.tolist()) == (everything[:with_ties], order[:with_ties])
            by_id = dict(zip(ids.tolist(), codes.tolist(), strict=True))
            assert of_hits.tolist() == [by_id[hit] for hit in hits.tolist()]
    assert reader.candidates(queries[:1], n=5, among=Filter(keys=("nothing",)))[2].shape == (0, codes.shape[1])
    assert len(reader) == 297
    assert reader.label_counts() == {"a": 148, "b, c": 99}
    with pytest.raises(BadConfig):
        reader.search(queries[:1], k=1, effort=3)
    reader.close()


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_added_updated_known_and_removed(kind, open_new):
    codes = random_codes(np.random.default_rng(0), 8, 48)
    first, second, third, *_ = plain = new_images(codes)
    store = open_new(kind, 48)
    keyed = replace(first, key="k", labels=("x",), attributes={"n": 1}, engine="torch")
    outcome = store.add([keyed, first, second, second])
    # Content that is stored under a key is known without one, but a key of its own makes a record.
    assert [change for _, change in outcome] == ["added", "known", "added", "known"]
    (key_id, _), (same_id, _), (second_id, _), _ = outcome
    assert same_id == key_id != second_id
    assert store.add([replace(second, key="second")])[0][1] == "added"
    assert store.add([replace(keyed, labels=(), attributes={})]) == [(key_id, "known")]
    assert store.add([replace(keyed, labels=("y", "x"))]) == [(key_id, "updated")]
    assert store.add([replace(keyed, path="/moved.jpg", labels=(), mtime_ns=5)]) == [(key_id, "updated")]
    record = store.one(key_id)
    assert (record.path, record.labels, record.attributes, record.key) == ("/moved.jpg", ("x", "y"), {"n": 1}, "k")
    assert record.added_at <= record.changed_at
    stored = store.records_by_path(["/moved.jpg", "/nowhere"])
    assert {path: (file.id, file.key, file.mtime_ns) for path, file in stored.items()} == {
        "/moved.jpg": (key_id, "k", 5)
    }
    # New content under a known key takes its place.
    assert store.add([replace(third, key="k")]) == [(key_id, "updated")]
    assert store.code_of(key_id).code.tolist() == codes[2].tolist()
    assert store.one(key_id).sha256 == third.sha256
    assert store.search(codes[2:3], k=1)[0][1].tolist() == [key_id]
    assert store.ids_by_key(["k", "second", "no"]) == {"k": key_id, "second": store.by_key("second").id}
    updated = store.update(second_id, labels=["z"], attributes={"a": {"b": [1, None]}})
    assert updated == store.one(second_id)
    assert (updated.labels, updated.attributes) == (("z",), {"a": {"b": [1, None]}})
    assert store.search(codes[1:2], k=5, among=Filter(any_labels=("z",)))[0][1].tolist() == [second_id]
    everything = store.browse(None, limit=3)
    ids = [one.id for one in everything.images]
    assert (ids, everything.next, everything.total) == (sorted(ids), None, 3)
    assert [store.browse(among, limit=2).next for among in (None, Filter(no_labels=("nothing",)))] == [ids[1]] * 2
    page = store.browse(Filter(no_labels=("nothing",)), after=ids[0], offset=1, limit=5)
    assert ([one.id for one in page.images], page.next, page.total) == ([ids[2]], None, 3)
    with pytest.raises(UnknownImage):
        store.remove([key_id, 12345])
    assert len(store) == 3
    store.remove([key_id, key_id])
    store.remove([key_id, 12345], missing_ok=True)
    assert store.get([key_id, second_id])[0] is None
    for missing in (lambda: store.one(key_id), lambda: store.by_key("k"), lambda: store.code_of(-1)):
        with pytest.raises(UnknownImage):
            missing()
    with pytest.raises(BadConfig):
        store.add([plain[5], replace(plain[6], key="")])
    assert len(store) == 2
    assert store.engines() == {"": 2}


def in_tar(image, place, contents):
    """One image per content of a tar that is written at `place`."""
    with tarfile.open(place, "w") as packed:
        for content in contents:
            member = tarfile.TarInfo(content.decode())
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return [
        replace(image, path=f"{place}::{at.offset}+{at.size}/{name}", sha256=hashlib.sha256(name.encode()).hexdigest())
        for name, at in list_members(place)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_without_a_key_follows_its_content_to_another_file(kind, open_new, tmp_path):
    store = open_new(kind, 48)
    [plain] = new_images(random_codes(np.random.default_rng(0), 1, 48))
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"content")
    plain = replace(plain, bytes=7, sha256=hashlib.sha256(b"content").hexdigest())
    [(image_id, _)] = store.add([replace(plain, path=str(first), mtime_ns=first.stat().st_mtime_ns)])
    moved = replace(plain, path=str(second), mtime_ns=2, labels=("new",))
    assert store.add([moved]) == [(image_id, "known")]  # to nowhere
    shutil.copy(first, second)
    os.utime(first)
    assert store.add([moved]) == [(image_id, "known")]  # a copy
    assert store.one(image_id).path == str(first)
    first.unlink()
    assert store.add([moved, moved]) == [(image_id, "updated"), (image_id, "known")]
    assert (store.one(image_id).path, store.one(image_id).labels) == (str(second), ())
    assert store.records_by_path([str(second)])[str(second)].mtime_ns == 2
    # Two files were exchanged.
    shutil.move(second, first)
    second.write_bytes(b"another")
    assert store.add([replace(moved, path=str(first))]) == [(image_id, "updated")]
    assert store.one(image_id).path == str(first)
    # In a tar, what was at the place may be something else now.
    place = tmp_path / "a.tar"
    one, other = in_tar(plain, place, [b"one", b"other"])
    assert [change for _, change in store.add([one, other])] == ["added", "added"]
    other, one, again = in_tar(plain, place, [b"other", b"one", b"other"])
    assert [change for _, change in store.add([other, one, again])] == ["updated", "updated", "known"]
    assert {record.path for record in store.browse(None, limit=9).images} == {str(first), other.path, one.path}


CONDITIONS = [
    *("camera=X", "year=2015", "year>=2015", "year<2016", "year>2015.2", "title^=ab", "title^=", "title>=abc"),
    *("camera.model=X", "camera.model^=x", 'zip="01234"', "zip=1234", "flag=true", "flag=false", "title=5"),
    *("year=unknown", "date>=2015-06-01", "date<2016-01-01", "title^=Ä", "year<=3000", "flag=1", "zip>=1000"),
    *("with space=q", "back\\slash=t", "slash/tilde~=1", "quote='", "emoji=😀", "missing=1"),
]


@pytest.mark.milvus
@pytest.mark.xdist_group("milvus")
def test_filters_let_the_same_images_through_in_both_stores(open_new):
    odd = [
        {"with space": "q", "back\\slash": "t", "slash/tilde~": 1, "quote": "'", "emoji": "😀", "line\nbreak": 'a"b'},
        {"year": "2015.0", "spelt": {"n": " 7 "}, "big": 2**53 + 1},
        {"year": "1e3", "spelt": {"n": "x7"}, "big": 2**53},
    ]
    attributes = [*ATTRIBUTES, *odd]
    images = [
        replace(image, key=str(i), attributes=value)
        for i, (image, value) in enumerate(
            zip(new_images(random_codes(np.random.default_rng(0), len(attributes), 48)), attributes, strict=True)
        )
    ]
    readers = []
    for kind in ("folder", "milvus"):
        store = open_new(kind, 48)
        store.add(images)
        readers.append(settled(store))
    extra = [
        "spelt.n>=6",
        "spelt.n= 7",
        f"big>{2**53}",
        f"big={2**53 + 1}",
        'line\nbreak="a\\"b"',
        'year<"3"',
        "year.=1",
    ]
    letting_something = 0
    for text in [*CONDITIONS, *extra]:
        with suppress(BadConfig):
            chosen = make_filter(where=[text])
            keys = [{one.key for one in reader.browse(chosen, limit=100).images} for reader in readers]
            assert keys[0] == keys[1], text
            letting_something += bool(keys[0])
    assert letting_something > 25
    day = readers[0].one(1).added_at[:10]
    for chosen in (
        make_filter(added_after="2000-01-01", where=["year>=2015", "camera.model=X"]),
        make_filter(added_before=day),
        make_filter(keys=["1", "7", "x"], where=["year^="]),
    ):
        keys = [{one.key for one in reader.browse(chosen, limit=100).images} for reader in readers]
        assert keys[0] == keys[1]
    readers[1].close()


@pytest.mark.milvus
@pytest.mark.xdist_group("milvus")
class TestMilvus:
    def test_several_writers_and_a_repeated_add_store_nothing_twice(self, open_new):
        images = labelled(random_codes(np.random.default_rng(1), 200, 48))
        first = open_new("milvus", 48)
        first.add(images[:70])  # an add that was interrupted
        with closing(MilvusStore(first.uri)) as second, ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda store: [store.add(images[at : at + 50]) for at in range(0, 200, 50)], [first, second]))
        assert len(first) == 200
        assert Counter(change for _, change in first.add(images)) == {"known": 200}
        assert len(first.ids_where(Filter())) == 200

    def test_an_id_that_another_image_has_taken_is_not_overwritten(self, open_new, monkeypatch):
        codes = random_codes(np.random.default_rng(2), 3, 48)
        images = new_images(codes)
        taken = ids_of(images[0])[0]
        monkeypatch.setattr(milvus_store.of_rows, "ids_of", lambda image: (taken, ids_of(image)[1]))
        store = open_new("milvus", 48)
        outcome = store.add(images[:2])
        assert outcome == [(taken, "added"), (ids_of(images[1])[1], "added")]
        assert store.add(images) == [(taken, "known"), (*outcome[1][:1], "known"), (ids_of(images[2])[1], "added")]
        assert [one.sha256 for one in store.get([outcome[0][0], outcome[1][0]])] == [one.sha256 for one in images[:2]]

    @pytest.mark.parametrize("kind", ["flat", "ivf"])
    def test_a_search_by_the_index_is_exact_with_a_filter_or_a_radius(self, kind, open_new, monkeypatch):
        rng = np.random.default_rng(3)
        codes = clustered_codes(rng)
        images = [
            replace(image, labels=("rare",) * (i % 50 == 0) + ("all",)) for i, image in enumerate(new_images(codes))
        ]
        store = open_new("milvus", 64, f"?index={kind}")
        ids = np.array([image_id for image_id, _ in store.add(images)])
        indexed(store)
        reader = settled(store)
        assert (reader.kind, reader.finds_all) == {"flat": ("BIN_FLAT", True), "ivf": ("BIN_IVF_FLAT", False)}[kind]
        is_rare, queries = np.arange(len(codes)) % 50 == 0, codes[rng.integers(0, len(codes), 8)]
        every_one = np.ones_like(is_rare)

        def found(k, **options):
            answers = reader.search(queries, k=k, **options)
            return [(distances.tolist(), hits.tolist()) for distances, hits in answers]

        for chosen, k, options in (
            (is_rare, 50, {"among": Filter(all_labels=("rare",))}),
            (every_one, 50, {"max_distance": 9}),
            (every_one, 1000, {"among": Filter(all_labels=("all",))}),  # beyond the clusters of the queries
            (every_one, 50, {"effort": 1024} if kind == "ivf" else {}),
        ):
            expected = [
                nearest_of(q[None], codes[chosen], ids[chosen], k, options.get("max_distance")) for q in queries
            ]
            assert found(k, **options) == expected
        with_ties = reader.candidates(queries[:1], n=3, among=Filter(all_labels=("all",)))
        every = nearest_of(queries[:1], codes, ids, len(codes))
        last = every[0][2]
        assert with_ties[1].tolist() == every[1][: np.searchsorted(every[0], last, side="right")]
        other = "ivf" if kind == "flat" else "flat"
        with pytest.raises(BadConfig):
            MilvusStore(parse_uri(f"{store.uri}?index={other}"))
        if kind == "ivf":
            assert found(1000, effort=1) != found(1000, effort=1024), "one list does not have them all"
            monkeypatch.setattr(nearest, "MOST", 999)
            for k, options in ((1000, {"effort": 1024}), (999, {"among": Filter(all_labels=("all",))})):
                with pytest.raises(BadConfig):  # more images may be at the last distance
                    found(k, **options)
            rare = {"among": Filter(all_labels=("rare",))}
            assert found(1000, **rare) == found(999, **rare), "no more match"
        reader.close()


def test_nothing_beyond_the_protocol_is_needed_of_an_image():
    image = NewImage("p", "0" * 64, 1, 1, 1, "image/png", (), np.zeros(6, np.uint8))
    assert ids_of(image) != ids_of(replace(image, key="0" * 64))
    assert all(0 < one < 2**53 for one in ids_of(image))
