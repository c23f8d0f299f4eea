"""The index finds what the oracle finds: every width, every k, ties, deletions, and from a file."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashseek.indexing.index import code_layouts as rows
from hashseek.indexing.index import exact_scan as scan
from hashseek.indexing.index import hamming_index, multi_index
from hashseek.indexing.index.code_layouts import DistinctCodes, PlainCodes, Subset
from hashseek.indexing.index.hamming_index import build_index, load_index, save_index
from hashseek.retrieval.errors import BadCodes, BadCollection
from support import hamming_oracle as hamming
from support.collections import random_codes

WIDTHS = [1, 2, 7, 8, 9, 12, 16, 24, 31, 32, 33, 36, 48, 63, 64, 65, 127, 128, 129, 160, 256, 257, 512, 513, 1023, 1024]


def expected(xq, xb, ids, k, mask=None):
    """What the oracle finds among the rows of the mask."""
    if mask is not None:
        xb, ids = xb[mask], ids[mask]
    distances, positions = hamming.search(xq, xb, k=k)
    return distances, ids[positions]


def check(index, xq, xb, ids, k, mask=None):
    among = None if mask is None else Subset(mask)
    distances, found = index.search(xq, k=k, among=among)
    wanted = expected(xq, xb, ids, k, mask)
    assert np.array_equal(distances, wanted[0])
    assert np.array_equal(found, wanted[1])
    for radius in (0, int(distances[0, -1]) if distances.size else 1, index.n_bits):
        for row, (apart, near) in enumerate(index.range(xq, radius=radius, k=k, among=among)):
            within = wanted[0][row] <= radius
            assert np.array_equal(apart, wanted[0][row][within])
            assert np.array_equal(near, wanted[1][row][within])
    everything = expected(xq, xb, ids, len(ids), mask)
    found = [(radius, index.range(xq, radius=radius, k=k, among=among, ties=True)) for radius in (0, index.n_bits)]
    for radius, of_queries in (*found, (index.n_bits, index.search_ties(xq, k=k, among=among))):
        for row, (apart, near) in enumerate(of_queries):
            as_near = everything[0][row] <= min(radius, wanted[0][row, -1] if wanted[0].size else -1)
            assert np.array_equal(apart, everything[0][row][as_near])
            assert np.array_equal(near, everything[1][row][as_near])
            assert np.array_equal(index.codes_of(near), xb[np.searchsorted(ids, near)])


@pytest.mark.parametrize("kind", ["exact", "multi-index"])
@pytest.mark.parametrize("n_bits", WIDTHS)
def test_every_width_with_many_ties_and_few(n_bits, kind, monkeypatch):
    monkeypatch.setattr(multi_index, "_MOST", 1)  # so that not all searches are scans
    rng = np.random.default_rng(n_bits)
    for n_distinct in (3, None):
        xb, xq = random_codes(rng, 200, n_bits, n_distinct), random_codes(rng, 4, n_bits)
        ids = np.sort(rng.choice(10**12, 200, replace=False))
        index = build_index(xb, ids, n_bits=n_bits, kind=kind)
        assert isinstance(index.rows, DistinctCodes) == (n_distinct == 3 or n_bits < 8)
        assert np.array_equal(index.codes, xb)
        for k in (1, 7, 199, 200, 201, 10**9):
            check(index, xq, xb, ids, k)


@settings(max_examples=100, deadline=None)
@given(
    n_bits=st.integers(1, 1024),
    n=st.integers(0, 70),
    n_distinct=st.integers(1, 70),
    k=st.integers(1, 80),
    left_out=st.floats(0, 1),
    most=st.sampled_from([None, 1]),
    seed=st.integers(0, 2**32),
)
def test_any_width_size_k_and_subset(n_bits, n, n_distinct, k, left_out, most, seed):
    rng = np.random.default_rng(seed)
    xb, xq = random_codes(rng, n, n_bits, n_distinct), random_codes(rng, 3, n_bits, n_distinct)
    ids = np.cumsum(rng.integers(1, 9, n))
    index = build_index(xb, ids, n_bits=n_bits, kind="multi-index" if most else "exact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_index, "_MOST", most)
        check(index, xq, xb, ids, k, mask=rng.random(n) >= left_out)


# How the nearest of all are found: by our scan, or by FAISS with a heap or with counters (for one query at a time).
WAYS = {
    "scan": {"_CACHED": 0},
    "heap": {"_COUNTED": 0, "_COUNTED_FOR_ONE": 0},
    "counters": {"_COUNTED": 10**9, "_COUNTED_FOR_ONE": 10**9, "_COUNTERS": 1},
}


@pytest.mark.parametrize(
    ("n_distinct", "way"), [(40, "scan"), (2000, "scan"), (None, "scan"), (None, "heap"), (None, "counters")]
)
@pytest.mark.parametrize("n_cores", [1, 5])
def test_blocks_and_threads(n_distinct, way, n_cores, monkeypatch):
    monkeypatch.setattr(scan, "n_cores", lambda: n_cores)
    for name, value in {"_BYTES_PER_THREAD": 1, "_MAX_BLOCK": 1500, **WAYS[way]}.items():
        monkeypatch.setattr(scan, name, value)
    rng = np.random.default_rng(0)
    n, n_bits = 20_000, 48
    xb, xq, ids = random_codes(rng, n, n_bits, n_distinct), random_codes(rng, 7, n_bits), np.arange(n) * 3
    index = build_index(xb, ids, n_bits=n_bits)
    for share in (1, 0.7, 0.001):
        mask = rng.random(n) < share
        for k in (1, 30, 5000):
            for n_queries in (1, 2, 7):  # with 5 cores: the rows, both, and the queries are divided
                check(index, xq[:n_queries], xb, ids, k, mask=mask)


@pytest.mark.parametrize("way", WAYS)
def test_ties_across_blocks_and_threads_are_ranked_by_id(way, monkeypatch):
    for name, value in {"n_cores": lambda: 3, "_BYTES_PER_THREAD": 1, **WAYS[way]}.items():
        monkeypatch.setattr(scan, name, value)
    xb = np.arange(1, 65536, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    index = build_index(xb, np.arange(65535), n_bits=16)
    assert isinstance(index.rows, PlainCodes)
    distances, ids = index.search(np.zeros((1, 2), np.uint8), k=20)
    assert ids.tolist() == [[2**i - 1 for i in range(16)] + [2, 4, 5, 8]]  # 1 bit, then 3, 5, 6, 9 with 2
    assert distances.tolist() == [[1] * 16 + [2] * 4]


@pytest.mark.parametrize("size", scan._SIZES)
@pytest.mark.parametrize("way", ["heap", "counters"])
def test_faiss_keeps_the_first_of_equally_near_rows(size, way, monkeypatch):
    for name, value in {"n_cores": lambda: 3, "_BYTES_PER_THREAD": 1, **WAYS[way]}.items():
        monkeypatch.setattr(scan, name, value)
    rng = np.random.default_rng(size)
    xb = np.full((300, size), 255, np.uint8)
    xb[:, -1] = rng.integers(0, 4, 300)
    for xq in (np.zeros((1, size), np.uint8), ~xb[:1]):
        xb = xb[np.argsort(-hamming.distances(xq, xb)[0], kind="stable")]  # each further row replaces one
        for k in (1, 2, 50, 149, 299, 300):
            for found, of_oracle in zip(scan.nearest(xq, xb, k=k), hamming.search(xq, xb, k=k), strict=True):
                assert np.array_equal(found, of_oracle)


@pytest.mark.parametrize("size", scan._SIZES)
@pytest.mark.parametrize("is_arm", [False, True])
def test_codes_that_differ_in_all_bits_are_far_away(size, is_arm, monkeypatch):
    """On ARM, FAISS itself mistakes them for equal ones."""
    monkeypatch.setattr(scan, "_IS_ARM", is_arm or scan._IS_ARM)
    xb = random_codes(np.random.default_rng(size), 200, 8 * size)
    xq = ~xb[:2]
    wanted = hamming.distances(xq, xb)
    for found, row in zip(scan.candidates(xq, xb, k=200, limit=8 * size), wanted, strict=True):
        assert np.array_equal(found[0][np.argsort(found[1])], row)
    counts = scan.count_distances(xq[:1], xb, np.ones(200))
    assert np.array_equal(counts, np.bincount(wanted[0], minlength=8 * size + 1))
    for found, of_oracle in zip(scan.nearest(xq, xb, k=200), hamming.search(xq, xb, k=200), strict=True):
        assert np.array_equal(found, of_oracle)


@pytest.mark.parametrize("n_queries", [1, 2, 9])
@pytest.mark.parametrize("k", [1, 100, scan._MAX_K, scan._MAX_K + 1])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_around_the_sizes_at_which_the_way_changes(n_queries, k, beside, monkeypatch):
    rng = np.random.default_rng(k)
    n = 10_000 + beside
    monkeypatch.setattr(scan, "_CACHED", 80_000 // n_queries)
    monkeypatch.setattr(scan, "_COUNTED", 10_000 // k)
    monkeypatch.setattr(scan, "_COUNTED_FOR_ONE", 10_000 // k)
    monkeypatch.setattr(scan, "_BYTES_PER_THREAD", 40_000)
    xb, xq = random_codes(rng, n, 12, 4000), random_codes(rng, n_queries, 12)
    monkeypatch.setattr(rows, "COLLAPSE_BELOW", 0)
    index = build_index(xb, np.arange(n), n_bits=12)
    wanted = hamming.search(xq, xb, k=k)
    for found, of_oracle in zip(index.search(xq, k=k), wanted, strict=True):
        assert np.array_equal(found, of_oracle)


def test_searches_at_the_same_time_do_not_disturb_each_other(monkeypatch):
    compare = scan._compare
    monkeypatch.setattr(scan, "_compare", lambda *given: (compare(*given), time.sleep(1e-4)))  # lets others go on
    monkeypatch.setattr(scan, "_BYTES_PER_THREAD", 1)
    rng = np.random.default_rng(1)
    xb, xq, ids = random_codes(rng, 9000, 48, 800), random_codes(rng, 9, 48), np.arange(9000)
    index = build_index(xb, ids, n_bits=48)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(check, index, xq, xb, ids, k) for k in (5, 1200, 30, 1500) * 3]:
            future.result()


FORK = """
import os, signal
import numpy as np
from hashseek.indexing.index.hamming_index import build_index

def near():  # by threads of ours
    return index.range(queries[:1], radius=20)[0][1]

def nearest():  # by those of OpenMP
    return index.search(queries, k=10)[1]

rng = np.random.default_rng(0)
for kind, n_codes in (("exact", 10**6), ("multi-index", 6000), ("ivf", 6000), ("hnsw", 3000)):
    codes, queries = (rng.integers(0, 256, (n, 8), np.uint8) for n in (n_codes, 64))
    index = build_index(codes, np.arange(n_codes), n_bits=64, kind=kind)
    before = near(), nearest()
    child = os.fork()
    if not child:
        signal.alarm(60)
        after = nearest(), near()
        os._exit(not all(map(np.array_equal, before, after[::-1])))
    print(kind, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_searches_without_the_threads_of_its_parent():
    """As in a pool of `multiprocessing`; threads that are gone must not be waited for."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, env=environment, check=True, timeout=240, capture_output=True, text=True)
    assert done.stdout.split() == ["exact", "0", "multi-index", "0", "ivf", "0", "hnsw", "0"]


@pytest.mark.parametrize("n_distinct", [2000, None])
@pytest.mark.parametrize("most", [40, 1e-9])
def test_tables_find_what_a_scan_finds_among_thousands(n_distinct, most, monkeypatch):
    monkeypatch.setattr(multi_index, "_MOST", most)
    rng = np.random.default_rng(0)
    n, n_bits = 8000, 60
    centres = random_codes(rng, 200, n_bits)[rng.integers(0, 200, n)]  # most searches compare few codes
    xb = centres ^ np.packbits(rng.random((n, n_bits)) < 0.05, axis=1, bitorder="little")
    if n_distinct:
        xb = xb[rng.integers(0, n_distinct, n)]
    index = build_index(xb, np.arange(n), n_bits=n_bits, kind="multi-index")
    looked_up = []
    search = multi_index.Tables._search
    monkeypatch.setattr(multi_index.Tables, "_search", lambda *of: looked_up.append(search(*of)) or looked_up[-1])
    for share in (1, 0.7, 0.001):
        for k in (1, 30, 1000):
            check(index, xb[:5], xb, np.arange(n), k, mask=rng.random(n) < share)
    scanned = [found is None for found in looked_up]
    assert (any(scanned), all(scanned)) == (most == 40, False)


def test_tables_compare_few_codes():
    rng = np.random.default_rng(0)
    xb, n_bits = random_codes(rng, 100_000, 64), 64
    xb[:9] = xb[0] ^ np.packbits(np.eye(9, n_bits, dtype=np.uint8), axis=1, bitorder="little")
    index = build_index(xb, np.arange(len(xb)), n_bits=n_bits, kind="multi-index")
    query = multi_index.words(xb[:1] ^ np.eye(1, 8, dtype=np.uint8))[0]
    lookups = index.tables._lookups(query, xb)
    found = [next(lookups) for _ in range(8)]
    n_compared = sum(len(rows) for _, rows in found)
    assert n_compared < 300, "those with up to one differing bit in a substring"
    assert {*range(9)} <= {*np.concatenate([rows for _, rows in found])}


def test_ids_choose_rows_in_any_order_and_unknown_ones_are_left_out():
    xb = np.array([[0], [1], [3], [7]], np.uint8)
    index = build_index(xb, np.array([10, 20, 30, 2**40]), n_bits=8)
    chosen = index.subset_of(np.array([2**40, 5, 20, 20, 2**50]))
    assert chosen.mask.tolist() == [False, True, False, True]
    assert index.search(np.zeros((1, 1), np.uint8), k=9, among=chosen)[1].tolist() == [[20, 2**40]]


def test_radius_is_inclusive():
    index = build_index(np.array([[0], [1], [3], [7], [1]], np.uint8), np.arange(5), n_bits=8)
    for radius, ids in ((0, [0]), (1, [0, 1, 4]), (2, [0, 1, 4, 2]), (10**9, [0, 1, 4, 2, 3])):
        [(_, found)] = index.range(np.zeros((1, 1), np.uint8), radius=radius)
        assert found.tolist() == ids


def test_describe_gives_layout_and_size():
    rng = np.random.default_rng(0)
    few, many = random_codes(rng, 1000, 48, 10), random_codes(rng, 1000, 48)
    collapsed, plain = (build_index(codes, np.arange(1000), n_bits=48).describe() for codes in (few, many))
    assert (collapsed["codes_compared"], plain["codes_compared"]) == (10, 1000)
    assert (collapsed["arrangement"], plain["arrangement"]) == (
        "distinct codes with lists of images",
        "one code per image",
    )
    assert plain["bytes"] == 1000 * (8 + 8)
    assert collapsed["bytes"] == 10 * 8 + 11 * 8 + 1000 * 4 + 10 * 8 + 1000 * 8


def test_codes_of_several_words_that_share_a_key_stay_apart(monkeypatch):
    monkeypatch.setattr(rows, "_keys", lambda codes: codes.view(np.uint64)[:, 0].copy())
    xb = np.repeat(np.eye(16, dtype=np.uint8), 3, axis=0)  # those that differ beyond the first word only look equal
    index = build_index(xb, np.arange(48), n_bits=128)
    assert len(index.rows.compared) == 16
    check(index, xb[:40:7], xb, np.arange(48), 5)


def test_nothing_is_found_in_an_empty_index_or_subset():
    query = np.zeros((2, 2), np.uint8)
    index = build_index(np.zeros((0, 2), np.uint8), np.zeros(0, np.int64), n_bits=12)
    assert index.search(query, k=5)[1].shape == (2, 0)
    index = build_index(np.zeros((3, 2), np.uint8), np.arange(3), n_bits=12)
    assert index.search(query, k=5, among=Subset(np.zeros(3, bool)))[1].shape == (2, 0)
    assert index.search(query[:0], k=2)[0].shape == (0, 2)


def test_invalid_queries_and_ids_are_refused():
    index = build_index(np.zeros((1, 2), np.uint8), np.zeros(1, np.int64), n_bits=12)
    for query in (np.zeros((1, 3), np.uint8), np.full((1, 2), 255, np.uint8), np.zeros((1, 2), np.int32)):
        with pytest.raises(BadCodes):
            index.search(query, k=1)
    for ids in ([1, 1], [2, 1], [1], [1, 2, 3]):
        with pytest.raises(BadCodes):
            build_index(np.zeros((2, 1), np.uint8), np.array(ids), n_bits=8)


@pytest.mark.parametrize("kind", ["exact", "multi-index"])
@pytest.mark.parametrize("mapped", [0, 2**30])
@pytest.mark.parametrize("n_distinct", [9, None])
@pytest.mark.parametrize("n_bits", [1, 12, 48, 1024])
def test_a_saved_index_finds_the_same(n_bits, n_distinct, mapped, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(multi_index, "_MOST", 1)
    monkeypatch.setattr(hamming_index, "MAPPED", mapped)
    rng = np.random.default_rng(n_bits)
    xb, ids = random_codes(rng, 50, n_bits, n_distinct), np.arange(50) + 10
    index = build_index(xb, ids, n_bits=n_bits, kind=kind)
    files = save_index(index, tmp_path)
    loaded = load_index(files, n_bits=n_bits, kind=kind)
    assert (loaded.kind, loaded.n_bytes) == (kind, index.n_bytes)
    assert (type(loaded.rows), isinstance(loaded.ids.base, np.memmap)) == (type(index.rows), mapped == 0)
    check(loaded, random_codes(rng, 3, n_bits), xb, ids, 20)
    assert {*tmp_path.iterdir()} == {*files}


@pytest.mark.parametrize("n_distinct", [2, None])
def test_files_that_do_not_make_up_an_index_are_refused(n_distinct, tmp_path):
    xb = random_codes(np.random.default_rng(0), 30, 48, n_distinct)
    files = save_index(build_index(xb, np.arange(30), n_bits=48), tmp_path)
    with pytest.raises(BadCollection):
        load_index(files, n_bits=128)
    for file in files:
        content = file.read_bytes()
        for damaged in (b"", b"text", content[:-1], content[:-8]):
            file.write_bytes(damaged)
            with pytest.raises(BadCollection):
                load_index(files, n_bits=48)
        file.unlink()
        with pytest.raises(BadCollection):
            load_index(files, n_bits=48)
        with pytest.raises(BadCollection):
            load_index([other for other in files if other != file], n_bits=48)
        file.write_bytes(content)


def test_of_many_codes_a_sample_chooses_the_layout(monkeypatch):
    monkeypatch.setattr(rows, "_SAMPLED", 0)
    rng = np.random.default_rng(0)
    for n_distinct, layout in ((5000, DistinctCodes), (None, PlainCodes)):
        xb = random_codes(rng, 30_000, 48, n_distinct)
        index = build_index(xb, np.arange(30_000), n_bits=48)
        assert isinstance(index.rows, layout)
        assert np.array_equal(index.codes, xb)


def test_threads_run_at_most_one_item_per_core_ahead():
    started: list[int] = []

    def run(item: int) -> int:
        started.append(item)
        return item

    results = scan.in_threads(run, range(100))
    assert next(results) == 0
    assert len(started) <= scan.n_cores()
    assert list(results) == list(range(1, 100))
