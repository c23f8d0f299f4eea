"""Hits ordered by real outputs or by features, compared with a loop over all images."""

import hashlib
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from hashseek.indexing import searcher as searcher_module
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.catalog.records import NewImage, StoredCode
from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.index.approximate import APPROXIMATE
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.maintenance.backup import restore, snapshot
from hashseek.indexing.maintenance.exchange import export
from hashseek.indexing.maintenance.reencode import reencode
from hashseek.indexing.maintenance.repair import repair
from hashseek.indexing.searcher import RANKS, Query, Searcher, SearchOptions
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import pack, unpack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.scores import cosines, stored_features
from support import hamming_oracle as hamming
from support.collections import file_of, import_export, random_codes, sql
from support.models import tiny_checkpoint
from support.pictures import draw, encoded

N, D = 400, 20
LABELS = {1: ("odd",), 0: ()}


@pytest.fixture(scope="module", params=[8, 12, 48, 256])
def filled(request, tmp_path_factory):
    """(searcher, ids, codes, features) of 400 images: some built, some fresh, some removed, many equal codes."""
    n_bits = request.param
    folder = tmp_path_factory.mktemp("ranking")
    checkpoint = tiny_checkpoint(folder / "tiny.safetensors", n_bits=n_bits, seed=1)
    rng = np.random.default_rng(n_bits)
    codes, features = random_codes(rng, N, n_bits, 150), stored_features(rng.exponential(size=(50, D)))
    features = features[rng.integers(0, 50, N)]
    with closing(open_or_create(folder / "collection", checkpoint=checkpoint, keep_features=True)) as collection:
        images = [
            NewImage(f"/nowhere/{i}", f"{i:064x}", 1, 1, 1, "image/png", LABELS[i % 2], code, feature=feature)
            for i, (code, feature) in enumerate(zip(codes, features, strict=True), start=1)
        ]
        collection.add(images[:300])
        collection.save_index()
        collection.add(images[300:])
        collection.remove([5, 120, 350])
        assert (collection.describe_index()["built"], collection.describe_index()["fresh"]) == (300, 99)
        ids = np.setdiff1d(np.arange(1, N + 1), [5, 120, 350])
        encoder = Encoder(load_checkpoint(checkpoint), device="cpu")
        yield Searcher(encoder, collection), ids, codes[ids - 1], features[ids - 1]


def a_query(n_bits, seed):
    """Its outputs are multiples of 1/4, so that equal scores are common."""
    rng = np.random.default_rng(seed)
    outputs = (rng.integers(-8, 9, n_bits) / 4).astype(np.float32)
    return Query(pack(outputs[None])[0], outputs, stored_features(rng.exponential(size=(1, D)))[0])


def by_hand(query, rank, ids, codes, features, n_bits):
    """(distance, score) of each id, by definition."""
    distances = hamming.distances(query.code[None], codes)[0]
    if rank == "asymmetric":
        scores = [float((query.outputs * (2.0 * bits - 1)).sum()) for bits in unpack(codes, n_bits)]
    else:
        q = query.feature.astype(float)
        scores = [float(f @ q / np.sqrt((f @ f) * (q @ q))) for f in features.astype(float)]
    return {int(i): (int(d), s) for i, d, s in zip(ids, distances, scores, strict=True)}


def first_by_hand(values, k, n, among, max_distance):
    """The k hits as (id, distance, score): candidates by distance, then by score, ties by id."""
    found = sorted(
        (d, i, s) for i, (d, s) in values.items() if i in among and (max_distance is None or d <= max_distance)
    )
    if len(found) > n:
        found = [one for one in found if one[0] <= found[n - 1][0]]
    return [(i, d, s) for d, i, s in sorted(found, key=lambda one: (-one[2], one[1]))[:k]]


@pytest.mark.parametrize("rank", ["asymmetric", "float"])
@pytest.mark.parametrize("oversample", [1, 4, 1000])
def test_hits_are_those_of_a_loop_over_all_images(rank, oversample, filled, monkeypatch):
    monkeypatch.setattr(searcher_module, "_FEATURES_AT_ONCE", 7)
    searcher, ids, codes, features = filled
    n_bits = searcher.collection.n_bits
    odd = {int(i) for i in ids if i % 2}
    for seed in range(3):
        query = a_query(n_bits, seed)
        values = by_hand(query, rank, ids, codes, features, n_bits)
        nearest = sorted(d for d, _ in values.values())
        for k in (1, 10, 500):
            for max_distance in (None, nearest[20]):
                for among, allowed in ((None, {*ids.tolist()}), (Filter(any_labels=("odd",)), odd)):
                    options = SearchOptions(k, max_distance, among=among, rank=rank, oversample=oversample)
                    answer = searcher.answer([query], options)
                    found = [(hit.image.id, hit.distance, hit.score) for hit in answer.hits]
                    assert found == first_by_hand(values, k, oversample * k, allowed, max_distance)
                    assert [hit.rank for hit in answer.hits] == list(range(1, len(found) + 1))
                    assert answer.rank == rank


@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_hits_are_exact_if_all_images_were_reordered(difference, filled):
    searcher = filled[0]
    options = SearchOptions(k=len(searcher.collection) + difference, oversample=1, rank="asymmetric")
    answer = searcher.answer([a_query(searcher.collection.n_bits, 0)], options)
    assert answer.is_exact == (difference >= 0)


@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("k", "oversample"), [(23, 1), (23, 3), (40, 1000)])
def test_pages_neither_overlap_nor_leave_anything_out(rank, k, oversample, n_queries, filled):
    """The first page is the search without an offset, and all pages together are one order of all images.

    In a union, each image counts with its least distance and its highest score.
    """
    searcher, ids, codes, features = filled
    queries = [a_query(searcher.collection.n_bits, seed) for seed in range(1, n_queries + 1)]
    of_each = [by_hand(query, rank, ids, codes, features, searcher.collection.n_bits) for query in queries]
    values = {i: (min(one[i][0] for one in of_each), max(one[i][1] for one in of_each)) for i in ids.tolist()}
    pages, offset = [], 0
    while not pages or pages[-1].is_full:
        pages.append(searcher.answer(queries, SearchOptions(k, rank=rank, oversample=oversample, offset=offset)))
        offset += k
    hits = [hit for page in pages for hit in page.hits]
    assert [hit.rank for hit in hits] == list(range(1, len(ids) + 1))
    assert sorted(hit.image.id for hit in hits) == ids.tolist()
    assert pages[0].hits == searcher.answer(queries, SearchOptions(k, rank=rank, oversample=oversample)).hits
    scores = [hit.score for hit in hits]
    assert scores == [None if rank == "hamming" else values[hit.image.id][1] for hit in hits]
    assert [page.is_exact for page in pages] == [rank == "hamming" or oversample == 1000] * len(pages)
    found = [(hit.image.id, hit.distance) for hit in hits]
    if rank == "hamming":
        assert found == sorted(((i, d) for i, (d, _) in values.items()), key=lambda one: (one[1], one[0]))
        return
    rest, expected = dict(values), []  # block after block of the nearest candidates, each by score
    while rest:
        nearest = sorted(d for d, _ in rest.values())
        limit = nearest[min(oversample * k, len(nearest)) - 1]
        block = first_by_hand(rest, len(rest), len(rest), set(rest), limit)
        expected += [(i, d) for i, d, _ in block]
        rest = {i: value for i, value in rest.items() if value[0] > limit}
    assert found == expected


def test_hamming_hits_have_no_score_and_are_the_default_without_outputs(filled):
    searcher, ids, codes, _ = filled
    query = replace(a_query(searcher.collection.n_bits, 0), outputs=None)
    answer = searcher.answer([query], SearchOptions(20))
    distances, at = hamming.search(query.code[None], codes, k=20)
    assert [(hit.distance, hit.image.id, hit.score) for hit in answer.hits] == [
        (d, i, None) for d, i in zip(distances[0].tolist(), ids[at[0]].tolist(), strict=True)
    ]
    assert answer.rank == "hamming"
    with pytest.raises(BadConfig):
        searcher.answer([query], SearchOptions(20, rank="asymmetric"))


def test_a_stored_image_ranks_by_its_features(filled):
    searcher, ids, _, features = filled
    answer = searcher.similar(7, SearchOptions(30, rank="float", oversample=100))
    expected = sorted(zip(-cosines(features, features[ids.tolist().index(7)]), ids.tolist(), strict=True))[:30]
    assert [(-hit.score, hit.image.id) for hit in answer.hits] == expected
    with pytest.raises(BadConfig):
        searcher.similar(7, SearchOptions(rank="asymmetric"))


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_approximate_kinds_order_what_they_find_and_are_exact_with_a_limit(kind, filled, tmp_path):
    searcher, ids, codes, features = filled
    snapshot(searcher.collection, tmp_path / "file")
    restore(tmp_path / "file", tmp_path / "own")
    with closing(Collection(tmp_path / "own")) as collection:
        collection.build_index(kind)
        own = Searcher(searcher.encoder, collection)
        query = a_query(collection.n_bits, 3)
        values = by_hand(query, "asymmetric", ids, codes, features, collection.n_bits)
        answer = own.answer([query], SearchOptions(10))
        hits = answer.hits
        assert (len(hits), answer.is_exact) == (10, False)
        for rank in ("hamming", "asymmetric"):
            for limit in (None, collection.n_bits):
                everything = SearchOptions(500, limit, rank=rank, oversample=1)
                assert own.answer([query], everything).is_exact == (limit is not None)
        assert all(values[hit.image.id] == (hit.distance, hit.score) for hit in hits)
        assert [(-hit.score, hit.image.id) for hit in hits] == sorted((-hit.score, hit.image.id) for hit in hits)
        limited = own.answer([query], SearchOptions(10, collection.n_bits)).hits
        wanted = first_by_hand(values, 10, 100, {*ids.tolist()}, None)
        assert [(hit.image.id, hit.distance, hit.score) for hit in limited] == wanted


def test_unknown_rankings_and_factors_are_refused():
    for options in ({"rank": "cosine"}, {"oversample": 0}):
        with pytest.raises(BadConfig):
            SearchOptions(**options)


# ---------------------------------------------------------------- collections that keep features


@pytest.fixture
def keeping(pictures, checkpoint, tmp_path):
    """A collection of all pictures that keeps features, and its encoder."""
    files = sorted(path for path in pictures.rglob("*") if path.is_file())
    with closing(open_or_create(tmp_path / "keeping", checkpoint=checkpoint, keep_features=True)) as collection:
        encoder = Searcher.open(collection, device="cpu").encoder
        list(ingest(collection, encoder, [ImageSource(file) for file in files]))
        yield collection, encoder


def features_by_hand(collection, encoder, ids):
    """The features of stored files, encoded again."""
    images = [file_of(collection, collection.catalog.one(i)).read_bytes() for i in ids]
    searcher = Searcher(encoder, collection)
    return stored_features(encoder.features(np.stack([searcher.encode_file(data)[0].pixels for data in images])))


def n_features(collection):
    return sql(collection.catalog.path, "SELECT count(*) FROM features")[0][0]


def test_features_of_every_added_image_are_stored_and_go_with_it(keeping, tmp_path):
    collection, encoder = keeping
    ids, stored = collection.catalog.spaces.features_of(list(range(1, 13)))
    assert sorted(ids.tolist()) == list(range(1, 13))
    order = np.argsort(ids)
    np.testing.assert_allclose(
        stored[order].astype(float), features_by_hand(collection, encoder, range(1, 13)).astype(float), atol=2e-3
    )
    collection.remove([3, 4])
    assert sorted(collection.catalog.spaces.features_of(list(range(1, 13)))[0].tolist()) == [1, 2, *range(5, 13)]
    assert n_features(collection) == 10
    # Two files swap their contents under their keys: each feature moves with its content.
    places = [tmp_path / name for name in ("a.png", "b.png")]
    contents = [encoded(draw(seed), "PNG") for seed in (30, 31)]
    for order in (contents, contents[::-1]):
        for place, content in zip(places, order, strict=True):
            place.write_bytes(content)
        list(ingest(collection, encoder, [ImageSource(place, key=place.name) for place in places]))
        keyed = [collection.catalog.by_key(place.name).id for place in places]
        for image_id, content in zip(keyed, order, strict=True):
            found = collection.catalog.by_content(hashlib.sha256(content).hexdigest())[1]
            assert np.array_equal(collection.catalog.spaces.features_of([image_id])[1][0], found.feature)
            expected = features_by_hand(collection, encoder, [image_id])[0]
            np.testing.assert_allclose(found.feature.astype(float), expected.astype(float), atol=2e-3)
    assert collection.verify() == []


def test_a_stored_file_is_found_by_its_stored_code_and_first(keeping):
    """Even if another engine would compute another code for it now."""
    collection, encoder = keeping
    searcher = Searcher(encoder, collection)
    image = collection.catalog.one(6)
    data = file_of(collection, image).read_bytes()
    flipped = collection.catalog.code_of(6).code ^ np.uint8(0b101)
    feature = -collection.catalog.spaces.features_of([6])[1][0]
    collection.catalog.spaces.add_codes(1, [(image, StoredCode(flipped, "another", feature))])
    for rank in RANKS:
        first = searcher.search_files([data], SearchOptions(3, rank=rank)).hits[0]
        assert (first.image.id, first.distance) == (6, 0)
    assert np.array_equal(searcher.query_of(data).feature, feature)
    new = searcher.search_files([encoded(draw(40), "PNG")], SearchOptions(3)).hits
    assert [hit.image.id for hit in new] == [h.image.id for h in searcher.search(draw(40), SearchOptions(3)).hits]


def test_features_survive_a_snapshot_and_a_change_of_the_model(keeping, other_checkpoint, tmp_path):
    collection, _ = keeping
    before = collection.catalog.spaces.features_of(list(range(1, 13)))
    snapshot(collection, tmp_path / "file")
    restore(tmp_path / "file", tmp_path / "restored")
    with closing(Collection(tmp_path / "restored")) as restored:
        after = restored.catalog.spaces.features_of(list(range(1, 13)))
        assert restored.catalog.keeps_features
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
        *_, report = reencode(restored, other_checkpoint, device="cpu")
        assert report.switched
        assert n_features(restored) == 24
    with closing(Collection(tmp_path / "restored")) as switched:
        new = Searcher.open(switched, device="cpu")
        found, features = switched.catalog.spaces.features_of(list(range(1, 13)))
        expected = features_by_hand(switched, new.encoder, found.tolist())
        np.testing.assert_allclose(features.astype(float), expected.astype(float), atol=2e-3)
        switched.catalog.spaces.drop(1)
        assert n_features(switched) == 12
        assert switched.verify() == []


def test_lost_and_damaged_features_are_found_and_repaired(keeping):
    collection, _ = keeping
    path = collection.catalog.path
    before = collection.catalog.spaces.features_of([2, 3])
    sql(
        path,
        "DELETE FROM features WHERE image_id = 2",
        "UPDATE features SET feature = substr(feature, 3) WHERE image_id = 3",
        "INSERT INTO features VALUES (7, 1, x'00')",
    )
    assert collection.verify() == [
        "1 rows of the table features belong to no image or code space",
        "2 images have no usable features, though the collection stores them",
    ]
    assert repair(collection.folder, device="cpu").left == []
    after = collection.catalog.spaces.features_of([2, 3])
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert collection.verify() == []


def test_what_has_no_features_is_refused(keeping, indexed, checkpoint, tmp_path):
    collection, _ = keeping
    with closing(Collection(indexed, read_only=True)) as without:
        export(without, tmp_path / "export.parquet")
        with pytest.raises(BadConfig):
            Searcher.open(without, device="cpu").similar(1, SearchOptions(rank="float"))
    collection.remove([1])
    generation = collection.catalog.generation()
    with pytest.raises(BadConfig):
        import_export(tmp_path / "export.parquet", collection.folder, checkpoint=None)
    assert (collection.catalog.generation(), n_features(collection)) == (generation, 11)
    with pytest.raises(BadConfig):
        open_or_create(indexed, checkpoint=checkpoint, keep_features=True)


def test_a_killed_addition_leaves_a_feature_for_every_code(start, pictures, checkpoint, tmp_path):
    """Killed after the second batch of 4 images, in the middle of its transaction."""
    command = start(
        "index", "add", tmp_path / "killed", pictures, "--checkpoint", checkpoint, "--keep-features", "--device", "cpu",
        before="import os, signal; import hashseek.indexing.ingest.batch as b; b.BATCH = 4\n"
        "import hashseek.indexing.catalog.storing as s; original, seen = s.insert_feature, []\n"
        "def insert(*a):\n"
        "    original(*a); seen.append(a)\n"
        "    if len(seen) == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "s.insert_feature = insert",
    )  # fmt: skip
    assert command.wait() == -9
    with closing(Collection(tmp_path / "killed")) as collection:
        assert (len(collection), n_features(collection)) == (4, 4)
        assert collection.verify() == []
