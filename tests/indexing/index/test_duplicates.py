"""Groups of near-duplicates are the connected parts of the graph of all near pairs, however they are looked for."""

import tracemalloc
from itertools import combinations

import numpy as np
import pytest

from hashseek.indexing.index import code_layouts as rows
from hashseek.indexing.index import duplicates
from hashseek.indexing.index.duplicates import build_table, flips, groups, substring
from hashseek.indexing.index.hamming_index import build_index
from hashseek.retrieval.codes import pad
from hashseek.retrieval.errors import BadConfig
from support import hamming_oracle as hamming
from support.collections import code_collection, new_images, random_codes


def expected(codes, ids, radius):
    """Connected parts by walking along the pairs, one image at a time."""
    near, left, found = hamming.distances(codes, codes) <= radius, set(range(len(codes))), []
    while left:
        start = min(left)
        part, front = {start}, {start}
        while front:
            front = set(np.flatnonzero(near[sorted(front)].any(axis=0)).tolist()) - part
            part |= front
        left -= part
        if len(part) > 1:
            found.append(ids[sorted(part)].tolist())
    return found


def copies(rng, n, n_bits, n_flipped):
    """Half of the codes are copies of others with up to `n_flipped` bits changed."""
    bits = rng.integers(0, 2, (n, n_bits), dtype=np.uint8)
    for i in range(n // 2):
        bits[i] = bits[rng.integers(i + 1, n)]
        bits[i, rng.integers(0, n_bits, rng.integers(0, n_flipped + 1))] ^= 1
    return np.packbits(bits, axis=1, bitorder="little")


@pytest.mark.parametrize("way", ["as planned", "by tables", "by comparing all"])
@pytest.mark.parametrize(
    ("n_bits", "radius"), [(64, 0), (64, 1), (64, 5), (48, 3), (36, 7), (12, 1), (128, 9), (1000, 2)]
)
def test_groups_are_what_a_walk_along_all_pairs_finds(n_bits, radius, way, monkeypatch):
    if way != "as planned":
        monkeypatch.setattr(duplicates, "_SCATTERED", 1e-9 if way == "by tables" else 1e9)
        monkeypatch.setattr(duplicates, "_BATCH", 64)
        monkeypatch.setattr(duplicates, "_CHUNK", 50)
    rng = np.random.default_rng(n_bits + radius)
    for codes in (copies(rng, 400, n_bits, 2 * radius), copies(rng, 300, n_bits, 1)[rng.integers(0, 300, 400)]):
        ids = np.cumsum(rng.integers(1, 5, 400))
        index = build_index(codes, ids, n_bits=n_bits)
        for parallel in (True, False):
            found = [group.tolist() for group in groups(index, radius=radius, parallel=parallel)]
            assert found == expected(codes, ids, radius)


def test_pairs_that_link_nothing_new_may_be_dropped_at_any_time(monkeypatch):
    monkeypatch.setattr(duplicates, "_SCATTERED", 1e-9)
    monkeypatch.setattr(duplicates, "_KEPT", 0)
    codes = copies(np.random.default_rng(0), 400, 64, 3)
    codes[200:] = codes[0]
    codes[np.arange(200, 400), np.arange(200) % 8] ^= 2 ** (np.arange(200) // 8 % 8).astype(np.uint8)
    found = [group.tolist() for group in groups(build_index(codes, np.arange(400), n_bits=64), radius=3)]
    assert found == expected(codes, np.arange(400), 3)


def test_similar_codes_take_memory_for_their_number_and_not_for_their_pairs():
    bits = np.zeros((4000, 128), np.uint8)
    for row, flipped in zip(bits, combinations(range(88, 128), 3), strict=False):  # all within 6 bits of each other
        row[list(flipped)] = 1
    table = build_table(np.packbits(bits, axis=1, bitorder="little"), 0, 20)
    tracemalloc.start()
    found = duplicates._links(len(bits), duplicates._pairs_of_table((table, 0), radius=6))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(np.concatenate([codes for pair in found for codes in pair]))) == len(bits)
    assert peak < 5 * len(bits) ** 2  # the pairs alone would take 8 bytes for each two codes


def test_a_chain_is_one_group():
    codes = np.array([[0b11111], [0b0], [0b1], [0b11], [0b111], [0xF0], [0xF0]], np.uint8)
    index = build_index(codes, np.arange(7) + 10, n_bits=8)
    assert [group.tolist() for group in groups(index, radius=1)] == [[11, 12, 13, 14], [15, 16]]
    assert [group.tolist() for group in groups(index, radius=2)] == [[10, 11, 12, 13, 14], [15, 16]]


def test_an_invalid_radius_is_refused_and_0_or_1_images_have_no_groups():
    for n in (0, 1, 2):
        index = build_index(np.zeros((n, 1), np.uint8), np.arange(n), n_bits=8)
        assert len(list(groups(index, radius=3))) == (n == 2)
        for radius in (-1, 8, 100):
            with pytest.raises(BadConfig):
                list(groups(index, radius=radius))


def test_codes_that_share_a_key_are_still_told_apart(monkeypatch):
    monkeypatch.setattr(rows, "_keys", lambda codes: codes.view(np.uint64)[:, 0].copy())
    codes = copies(np.random.default_rng(0), 60, 128, 3)
    codes[:, :8] = 0
    index = build_index(codes, np.arange(60), n_bits=128)
    assert [group.tolist() for group in groups(index, radius=3)] == expected(codes, np.arange(60), 3)


def test_duplicates_of_a_collection_after_changes(tmp_path):
    collection = code_collection(tmp_path, n_bits=12)
    collection.add(new_images(np.array([[0, 0], [255, 0], [1, 0], [0, 15]], np.uint8)))
    collection.save_index()
    collection.add(new_images(np.array([[0, 15], [3, 0]], np.uint8), start=10))
    assert [group.tolist() for group in collection.duplicates(radius=1)] == [[1, 3, 6], [4, 5]]
    collection.remove([3])
    assert [group.tolist() for group in collection.duplicates(radius=1)] == [[4, 5]]
    assert [group.tolist() for group in collection.duplicates(radius=2)] == [[1, 6], [4, 5]]
    collection.close()


def test_the_command_prints_a_group_per_block_or_line(own_collection, hashseek):
    code, out, err = hashseek("index", "duplicates", own_collection, "--radius", 47, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert out.count('"id"') == 12
    blocks = hashseek("index", "duplicates", own_collection, "--radius", 47)[1].split("\n\n")
    assert [len(block.splitlines()) for block in blocks] == [12, 0]
    assert hashseek("index", "duplicates", own_collection, "--radius", 0, "--json")[:2] == (0, "")
    code, _, err = hashseek("index", "duplicates", own_collection, "--radius", 48)
    assert (code, err.count("\n"), "48" in err) == (2, 1, True)


@pytest.mark.parametrize(("first", "width"), [(0, 1), (3, 8), (45, 20), (60, 10), (64, 22), (119, 9)])
def test_tables_list_every_row_under_its_substring(first, width):
    xb = pad(random_codes(np.random.default_rng(first), 500, 128), 16)
    bits = np.unpackbits(xb, axis=1, bitorder="little")[:, first : first + width]
    values = bits.astype(np.int64) @ (1 << np.arange(width))
    assert np.array_equal(substring(xb, first, width), values)
    table = build_table(xb, first, width)
    for value in np.unique(values):
        rows = table.rows[table.starts[value] : table.starts[value + 1]]
        assert np.array_equal(rows, np.flatnonzero(values == value))
    assert table.starts[-1] == 500


def test_flips_are_all_numbers_of_so_few_bits():
    assert flips(5, 0) == [0]
    assert sorted(flips(4, 2)) == [v for v in range(16) if v.bit_count() <= 2]
    assert sorted(flips(3, 9)) == list(range(8))
