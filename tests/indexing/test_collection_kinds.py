"""A collection keeps the kind of index that was chosen, whatever happens to its files and images."""

import json
from contextlib import closing
from typing import get_args, get_type_hints

import numpy as np
import pytest

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.cli.collection import build
from hashseek.indexing.collection import Collection
from hashseek.indexing.index import collection_index, exact_scan, hamming_index, index_files, segments
from hashseek.indexing.index.approximate import APPROXIMATE
from hashseek.indexing.index.hamming_index import KINDS, SLOW_TO_BUILD, build_index
from hashseek.indexing.maintenance.optimize import optimize
from hashseek.indexing.maintenance.repair import repair
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically
from support import hamming_oracle as hamming
from support.collections import code_collection, index_folder, new_images, random_codes


@pytest.fixture
def filled(tmp_path):
    """A collection of 500 codes; ids are 1 to 500."""
    collection = code_collection(tmp_path, n_bits=48)
    codes = random_codes(np.random.default_rng(0), 500, 48)
    collection.add(new_images(codes))
    yield collection, codes
    collection.close()


def nearest(codes, query, k, ids):
    """What the oracle finds among these ids."""
    distances, at = hamming.search(query, codes[ids - 1], k=k)
    return distances[0], ids[at[0]]


@pytest.mark.parametrize("kind", SLOW_TO_BUILD)
def test_a_built_kind_stays_and_finds_later_changes(kind, filled, tmp_path):
    collection, codes = filled
    collection.build_index(kind)
    before = index_folder(tmp_path)
    assert (before / ("table_rows.bin" if kind == "multi-index" else f"{kind}.npz")).exists()
    query = codes[70:71]
    assert collection.search(query, k=1)[0][1].tolist() == [71]
    collection.add(new_images(query, start=900))
    collection.remove([71])
    collection.save_index()  # too little has changed to rebuild the structure
    assert index_folder(tmp_path) == before
    again = Collection(tmp_path)
    for opened in (collection, again):
        described = opened.describe_index()
        assert [described[key] for key in ("kind", "built", "fresh", "removed")] == [kind, 500, 1, 1]
        assert opened.search(query, k=1)[0][1].tolist() == [501]
        if kind in APPROXIMATE:
            assert opened.search(query, k=1, effort=2)[0][1].tolist() == [501]
        assert opened.finds_all == (kind not in APPROXIMATE)
    again.close()


@pytest.mark.parametrize("kind", ["exact", *SLOW_TO_BUILD])
@pytest.mark.parametrize("n_distinct", [None, 60])
@pytest.mark.parametrize("among", [None, "odd", "few"])
def test_a_histogram_counts_the_images_at_each_distance(kind, n_distinct, among, tmp_path, monkeypatch):
    monkeypatch.setattr(exact_scan, "_MAX_BLOCK", 150)
    with closing(code_collection(tmp_path, n_bits=36)) as collection:
        codes = random_codes(np.random.default_rng(0), 500, 36, n_distinct)
        collection.add(new_images(codes[:400]))
        collection.build_index(kind)
        collection.add(new_images(codes[400:], start=400))
        collection.remove([3, 77, 450])
        ids = {None: np.arange(1, 501), "odd": np.arange(1, 501, 2), "few": np.array([2, 3, 450, 499])}[among]
        alive = np.setdiff1d(ids, [3, 77, 450])
        for query in codes[:5]:
            counts = collection.histogram(query[None], among=None if among is None else Filter(ids=tuple(ids.tolist())))
            expected = np.bincount(hamming.distances(query[None], codes[alive - 1])[0], minlength=37)
            assert counts.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_a_search_among_most_images_is_exact(kind, tmp_path):
    with closing(code_collection(tmp_path, n_bits=48)) as collection:
        codes = random_codes(np.random.default_rng(0), 2000, 48)
        collection.add(new_images(codes))
        collection.build_index(kind)
        most, queries = np.arange(21, 2001), codes[:20]
        everywhere = [ids.tolist() for _, ids in collection.search(queries, k=30, effort=1)]
        exact = [nearest(codes, query[None], 30, np.arange(1, 2001))[1].tolist() for query in queries]
        assert everywhere != exact  # random codes are difficult for an approximate search
        for query, (distances, ids) in zip(
            queries, collection.search(queries, k=30, among=Filter(ids=tuple(most.tolist()))), strict=True
        ):
            assert np.array_equal((distances, ids), nearest(codes, query[None], 30, most))


@pytest.mark.parametrize("kind", SLOW_TO_BUILD)
def test_enough_changes_rebuild_the_structure(kind, filled, monkeypatch, tmp_path):
    monkeypatch.setattr(segments, "FRESH_LIMIT", 20)
    collection, _ = filled
    collection.build_index(kind)
    collection.add(new_images(random_codes(np.random.default_rng(1), 40, 48), start=1000))
    assert (collection.describe_index()["built"], collection.describe_index()["fresh"]) == (500, 40)
    collection.remove(list(range(1, 12)))
    assert collection.describe_index()["built"] == 500  # searches do not wait for it
    collection.merge_segments()
    described = collection.describe_index()
    assert (described["kind"], described["built"], described["fresh"], described["removed"]) == (kind, 529, 0, 0)
    collection.save_index()
    again = Collection(tmp_path)
    assert again.describe_index()["generation"] == again.catalog.generation() == saved_index(tmp_path)["generation"]
    assert again.describe_index()["kind"] == kind
    again.close()


def saved_index(folder):
    with closing(Catalog(folder / "catalog.sqlite", read_only=True)) as catalog:
        return json.loads(catalog.saved_index())


@pytest.mark.parametrize("kind", SLOW_TO_BUILD)
def test_a_kind_that_another_process_built_stays(kind, filled, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FRESH_LIMIT", 20)
    adder, codes = filled
    adder.save_index()
    adder.add(new_images(random_codes(np.random.default_rng(1), 9, 48), start=600))
    other = Collection(tmp_path)
    other.build_index(kind)
    other.close()
    before = saved_index(tmp_path)
    adder.add(new_images(random_codes(np.random.default_rng(2), 2, 48), start=700))
    adder.save_index()
    assert saved_index(tmp_path) == before  # too little has changed to rebuild the structure
    adder.add(new_images(random_codes(np.random.default_rng(3), 60, 48), start=800))
    adder.save_index()
    assert saved_index(tmp_path)["kind"] == adder.describe_index()["kind"] == kind
    assert saved_index(tmp_path)["generation"] == adder.describe_index()["generation"]
    assert adder.search(codes[3:4], k=1)[0][1].tolist() == [4]
    assert adder.index.verify() == []


def test_a_kind_that_another_process_builds_while_this_one_merges_stays(filled, tmp_path, monkeypatch):
    adder, _ = filled
    merge, merged = collection_index.merge, []

    def beside(view, kind):
        merged.append(kind)
        if len(merged) == 1:
            with closing(Collection(tmp_path)) as other:
                other.build_index("ivf")
        return merge(view, kind)

    monkeypatch.setattr(collection_index, "merge", beside)
    adder.save_index()
    assert merged == ["exact", "ivf"]
    assert saved_index(tmp_path)["kind"] == "ivf"
    assert adder.describe_index()["kind"] == "ivf"
    adder.build_index("exact")
    assert saved_index(tmp_path)["kind"] == "exact"


def test_a_damaged_index_of_another_process_is_replaced(filled, tmp_path):
    adder, codes = filled
    adder.save_index()
    adder.add(new_images(random_codes(np.random.default_rng(1), 9, 48), start=600))
    with closing(Collection(tmp_path)) as other:
        other.build_index("ivf")
    (index_folder(tmp_path) / "codes.bin").write_bytes(b"torn")
    adder.save_index()
    assert saved_index(tmp_path)["kind"] == "ivf"
    assert adder.index.verify() == []
    with closing(Collection(tmp_path)) as again:
        assert again.describe_index()["built"] == 509
        assert again.search(codes[3:4], k=1)[0][1].tolist() == [4]


def test_a_service_loads_an_index_of_another_kind_that_another_process_built(filled, tmp_path):
    adder, codes = filled
    adder.save_index()
    with closing(Collection(tmp_path, read_only=True)) as service:
        adder.build_index("ivf")
        assert service.describe_index()["kind"] == "exact"
        service.merge_segments()
        assert (service.describe_index()["kind"], service.describe_index()["built"]) == ("ivf", 500)
        assert service.search(codes[3:4], k=1)[0][1].tolist() == [4]


@pytest.mark.parametrize("fault", ["gone", "torn"])
def test_searches_are_exact_until_a_damaged_structure_is_rebuilt(fault, filled, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(segments, "FRESH_LIMIT", 20)
    collection, codes = filled
    collection.build_index("hnsw")
    path = index_folder(tmp_path) / "hnsw.npz"
    path.unlink() if fault == "gone" else path.write_bytes(path.read_bytes()[:-9])
    again = Collection(tmp_path)
    assert len(caplog.records) == 1
    described = again.describe_index()
    assert [described[key] for key in ("kind", "built", "fresh")] == ["hnsw", 0, 500]
    distances, ids = again.search(codes[3:4], k=50, effort=1)[0]
    wanted = nearest(codes, codes[3:4], 50, np.arange(1, 501))
    assert (distances.tolist(), ids.tolist()) == (wanted[0].tolist(), wanted[1].tolist())
    again.save_index()
    assert again.describe_index()["built"] == 500
    assert again.index.verify() == []
    again.close()


def test_no_search_waits_for_an_approximate_index(filled, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FRESH_LIMIT", 20)
    collection, codes = filled
    collection.build_index("hnsw")
    with closing(Collection(tmp_path)) as other:
        other.remove([7])
        optimize(other)  # what was removed is forgotten
        other.add(new_images(codes[:1], start=5000))
    built = []

    def count(*of, kind, **how):
        built.append(kind if len(of[0]) else "")
        return build_index(*of, kind=kind, **how)

    monkeypatch.setattr(segments, "build_index", count)
    assert collection.search(codes[6:7], k=1)[0][1].tolist() != [7]
    assert len(collection) == 500
    assert collection.describe_index()["fresh"] == 500
    assert "hnsw" not in built
    collection.merge_segments()  # takes over the graph that the other one has built
    assert "hnsw" not in built
    assert [collection.describe_index()[part] for part in ("built", "fresh")] == [499, 1]


@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_an_index_is_written_after_an_earlier_failure(kind, filled, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FRESH_LIMIT", 20)
    collection, codes = filled
    collection.build_index(kind)
    collection.add(new_images(random_codes(np.random.default_rng(1), 90, 48), start=1000))
    before = index_folder(tmp_path)

    def full(path, content):
        if path.name == "ids.bin":
            write_atomically(path, content)
        else:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hamming_index, "write_atomically", full)
        with pytest.raises(OSError, match="No space") as caught:
            collection.save_index()
        assert (caught.value.errno, caught.value.filename) == (28, str(tmp_path / "index"))
    assert index_folder(tmp_path) == before
    with closing(Collection(tmp_path)) as again:
        assert [again.describe_index()[key] for key in ("kind", "built", "fresh")] == [kind, 500, 90]
        assert again.search(codes[3:4], k=1)[0][1].tolist() == [4]
    collection.save_index()
    assert index_folder(tmp_path) != before
    with closing(Collection(tmp_path)) as again:
        assert [again.describe_index()[key] for key in ("kind", "built")] == [kind, 590]
        assert again.index.verify() == []


def test_a_kind_that_could_not_be_written_is_written_later(filled, tmp_path, monkeypatch):
    collection, _ = filled
    collection.save_index()

    def full(index, folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(index_files, "save_index", full)
        with pytest.raises(OSError, match="No space"):
            collection.build_index("ivf")
    assert saved_index(tmp_path)["kind"] == "exact"
    collection.save_index()
    assert saved_index(tmp_path)["kind"] == "ivf"


def test_an_unsupported_kind_falls_back_to_exact(filled, tmp_path, monkeypatch, caplog):
    collection, codes = filled
    collection.build_index("exact")
    collection.catalog.set_saved_index(json.dumps(saved_index(tmp_path) | {"kind": "gpu"}))
    monkeypatch.setattr("hashseek.indexing.index.gpu.is_available", lambda: False)
    again = Collection(tmp_path)
    assert (again.index.verify(), caplog.records) == ([], [])
    assert again.search(codes[3:4], k=1)[0][1].tolist() == [4]
    with pytest.raises(BadConfig, match="gpu"):
        again.build_index("gpu")
    again.catalog.set_index_kind("gpu")  # as it was built on another machine
    again.add(new_images(codes[:1], start=9000))
    again.save_index()
    assert again.describe_index()["kind"] == again.kind == saved_index(tmp_path)["kind"] == "exact"
    assert again.catalog.index_kind() == "gpu"
    again.close()


def test_a_kind_that_was_removed_is_exact(filled, tmp_path):
    collection, codes = filled
    collection.catalog.set_index_kind("multihash")
    collection.close()
    with closing(Collection(tmp_path)) as again:
        assert again.kind == "exact"
        assert again.search(codes[3:4], k=1)[0][1].tolist() == [4]
        again.save_index()
    assert saved_index(tmp_path)["kind"] == "exact"


def test_maintenance_without_a_gpu_keeps_the_kind_gpu(filled, tmp_path, monkeypatch):
    collection, _ = filled
    monkeypatch.setattr("hashseek.indexing.index.gpu.is_available", lambda: False)
    collection.catalog.set_index_kind("gpu")  # as it was built on another machine
    optimize(collection)
    assert (collection.catalog.index_kind(), saved_index(tmp_path)["kind"]) == ("gpu", "exact")
    (index_folder(tmp_path) / "ids.bin").write_text("damaged")
    assert "rebuilt the index" in repair(tmp_path).done
    assert (collection.catalog.index_kind(), saved_index(tmp_path)["kind"]) == ("gpu", "exact")


@pytest.mark.parametrize("n_chosen", [0, 1, 7, 300, 503])
@pytest.mark.parametrize("kind", ["exact", "ivf"])
def test_searches_among_ids_are_exact_after_additions_and_removals(kind, n_chosen, filled):
    collection, codes = filled
    collection.build_index(kind)
    added = random_codes(np.random.default_rng(2), 3, 48)
    collection.add(new_images(added, start=5000))
    codes = np.concatenate([codes, added])
    gone = [5, 77, 502]
    collection.remove(gone)
    rng = np.random.default_rng(n_chosen)
    chosen = rng.choice(np.arange(1, 504), n_chosen, replace=False)
    alive = np.setdiff1d(chosen, gone)
    query, among = random_codes(rng, 1, 48), Filter(ids=tuple(chosen.tolist()))
    for k in (1, 9, 1000):
        [(distances, ids)] = collection.search(query, k=k, among=among)
        wanted = nearest(codes, query, k, alive)
        assert np.array_equal(distances, wanted[0])
        assert np.array_equal(ids, wanted[1])
        [(distances, ids)] = collection.search(query, k=k, among=among, max_distance=20)
        assert np.array_equal(ids, wanted[1][wanted[0] <= 20])


def test_the_build_command(own_collection, pictures, hashseek):
    picture = next(pictures.glob("*.jpg"))
    for kind in ("ivf", "exact"):
        code, out, err = hashseek("index", "build", own_collection, "--kind", kind)
        assert (code, err) == (0, "")
        assert f"kind {kind}," in out
        _, out, _ = hashseek("index", "stats", own_collection, "--json")
        assert json.loads(out)["index"]["kind"] == kind
        code, out, err = hashseek("search", own_collection, picture, "-k", 1, "--device", "cpu", "--effort", 1)
        if kind == "exact":
            assert (code, err.count("\n"), "effort" in err) == (2, 1, True)
        else:
            assert code == 0
            assert picture.name in out
    assert hashseek("index", "verify", own_collection)[0] == 0


def test_the_command_offers_all_kinds():
    assert get_args(get_type_hints(build)["kind"]) == KINDS
