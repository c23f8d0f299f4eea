"""`index verify --codes`: stored codes are compared with new ones."""

import re
from contextlib import closing

import numpy as np

from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.recheck import recheck
from hashseek.indexing.searcher import Searcher
from support.collections import sql
from support.pictures import N_PICTURES, draw


def flip(collection: Collection, image_id: int, n_bits: int) -> None:
    """Flip the first bits of a stored code."""
    code = collection.catalog.code_of(image_id).code
    bits = np.unpackbits(code, bitorder="little")
    bits[:n_bits] ^= 1
    flipped = np.packbits(bits, bitorder="little").tobytes().hex()
    sql(collection.catalog.path, f"UPDATE codes SET code = x'{flipped}' WHERE image_id = {image_id}")


def test_wrong_codes_are_found_and_small_differences_are_counted(own_collection, hashseek):
    command = ("index", "verify", own_collection, "--codes", 1000, "--device", "cpu")
    code, out, err = hashseek(*command)
    assert (code, err, out.splitlines()[-1]) == (0, "", f"{N_PICTURES} images, 0 problems")
    with closing(Collection(own_collection)) as collection:
        encoder = Searcher.open(collection, device="cpu").encoder
        assert recheck(collection, encoder, 5) == ([0] * 5, [])
        flip(collection, 2, 3)
        flip(collection, 3, 20)
        differ, problems = recheck(collection, encoder, 1000)
        assert differ == [0, 3, 20] + [0] * (N_PICTURES - 3)
        [problem] = problems
        assert "image 3 " in problem
    code, out, _ = hashseek(*command)
    *lines, counts, last = out.splitlines()
    assert any("image 3 " in line for line in lines)
    assert re.findall(r"\d+", counts.partition(": ")[2]) == ["23", str(48 * N_PICTURES), "20"]
    assert (code, last) == (1, f"{N_PICTURES} images, 2 problems")  # the index differs, too


def test_missing_files_are_left_out_and_changed_ones_cannot_be_checked(own_collection, tmp_path):
    draw(95).save(tmp_path / "changed.jpg")
    sql(
        own_collection / "catalog.sqlite",
        "UPDATE images SET path = '/nowhere.jpg' WHERE id = 1",
        f"UPDATE images SET path = '{tmp_path}/changed.jpg' WHERE id = 2",
    )
    with closing(Collection(own_collection)) as collection:
        differ, problems = recheck(collection, Searcher.open(collection, device="cpu").encoder, 1000)
        assert len(differ) == N_PICTURES - 2
        [problem] = problems
        assert "image 2 " in problem
