"""`index verify --repair` fixes what can be derived, and names or refuses the rest."""

import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from hashseek.indexing.catalog import CatalogDamaged
from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.repair import repair
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import ForeignCodes
from support.collections import code_collection, index_folder, new_images, random_codes, sql
from support.faults import content
from support.models import tiny_checkpoint


def damage_catalog(folder, *statements):
    sql(folder / "catalog.sqlite", *statements, "PRAGMA wal_checkpoint(TRUNCATE)")


def run_repair(folder, **options):
    return repair(folder, device="cpu", **options)


def state(folder):
    with closing(Collection(folder, read_only=True)) as collection:
        return content(collection), collection.verify()


def test_an_intact_collection_is_not_changed(own_collection, hashseek):
    before = {
        path: path.read_bytes() for path in own_collection.rglob("*") if path.is_file() and "sqlite-" not in path.name
    }
    assert hashseek("index", "verify", own_collection, "--repair")[:2] == (0, "0 repairs, 0 problems left\n")
    assert {path: path.read_bytes() for path in before} == before


ROWS = {
    "a code that is missing": "DELETE FROM codes WHERE image_id = 5",
    "a code that is too short": "UPDATE codes SET code = x'0102' WHERE image_id = 5",
    "a code that is text": "UPDATE codes SET code = 'abcdef' WHERE image_id = 5",
    "a code of no image": "INSERT INTO codes VALUES (1, 99, x'010203040506', NULL)",
    "a label of no image": "INSERT INTO image_labels VALUES ('cat', 99)",
    "a code of no space": "INSERT INTO codes VALUES (7, 5, x'010203040506', NULL)",
}


@pytest.mark.parametrize("damage", ROWS)
def test_damaged_rows_are_deleted_or_recomputed(own_collection, hashseek, damage):
    expected, _ = state(own_collection)
    damage_catalog(own_collection, "PRAGMA foreign_keys = OFF", ROWS[damage])
    code, _, _ = hashseek("index", "verify", own_collection)
    assert code in (1, 2)
    code, out, err = hashseek("index", "verify", own_collection, "--repair", "--device", "cpu")
    assert (code, "0 problems left" in out) == (0, True), (out, err)
    (images, codes, _), problems = state(own_collection)
    assert (images, problems) == (expected[0], [])
    assert {i: code for i, (code, _) in codes.items()} == {i: code for i, (code, _) in expected[1].items()}


def test_bits_beyond_the_length_of_a_code_are_malformed(tmp_path):
    with closing(code_collection(tmp_path, n_bits=12)) as collection:
        collection.add(new_images(random_codes(np.random.default_rng(0), 3, 12)))
    damage_catalog(tmp_path, "UPDATE codes SET code = x'01F0' WHERE image_id = 2")
    report = run_repair(tmp_path)
    assert any("1 images have no code" in problem for problem in report.left)


def test_an_open_collection_does_not_find_images_that_lost_their_code(own_collection, tmp_path):
    with closing(Collection(own_collection)) as beside:
        query = beside.catalog.code_of(5).code[None]
        damage_catalog(
            own_collection, "UPDATE codes SET code = x'0102' WHERE image_id = 5", "UPDATE images SET path = '/nowhere'"
        )
        report = run_repair(own_collection)
        assert any(problem.startswith("image 5 (/nowhere): ") for problem in report.left)
        [(_, ids)] = beside.search(query, k=99)
        assert sorted(ids.tolist()) == [1, 2, 3, 4, *range(6, 13)]


def test_a_lost_checkpoint_is_copied_from_the_one_that_is_given(own_collection, checkpoint, other_checkpoint, hashseek):
    (own_collection / "checkpoint.safetensors").write_bytes(b"torn")
    command = ("index", "verify", own_collection, "--repair")
    code, out, err = hashseek(*command)
    assert (code, err.count("\n"), out) == (1, 1, "0 repairs, 1 problem left\n")
    code, out, err = hashseek(*command, "--checkpoint", other_checkpoint)
    assert (code, out) == (2, "")
    assert load_header(other_checkpoint).fingerprint[:12] in err
    assert (own_collection / "checkpoint.safetensors").read_bytes() == b"torn"
    code, out, _ = hashseek(*command, "--checkpoint", checkpoint)
    assert (code, str(checkpoint) in out) == (0, True)
    assert (own_collection / "checkpoint.safetensors").read_bytes() == checkpoint.read_bytes()


@pytest.mark.parametrize("damaged", ["codes.bin", "ids.bin", None])
def test_an_index_that_is_damaged_or_gone_is_rebuilt(own_collection, damaged):
    if damaged:
        (index_folder(own_collection) / damaged).write_bytes(b"torn")
    else:
        shutil.rmtree(own_collection / "index")
    report = run_repair(own_collection)
    assert (len(report.done), report.left) == (1, [])
    with closing(Collection(own_collection, read_only=True)) as collection:
        assert collection.verify() == []
        assert collection.describe_index()["built"] == 12


def test_problems_that_cannot_be_repaired_are_reported(own_collection, hashseek):
    damage_catalog(
        own_collection,
        "UPDATE images SET path = '/nowhere/' || id WHERE id IN (2, 3)",
        "DELETE FROM codes WHERE image_id = 3",
    )
    expected = ("image 3 (/nowhere/3): ", "1 images have no code", "the file of image 2 ", "the file of image 3 ")
    for problem, start in zip(run_repair(own_collection).left, expected, strict=True):
        assert problem.startswith(start)
    code, _, err = hashseek("index", "verify", own_collection, "--repair", "--device", "cpu")
    assert (code, err.count("\n"), "Traceback" in err) == (1, 4, False)


def test_the_checkpoint_of_any_code_space_is_restored(own_collection, other_checkpoint, checkpoint, tmp_path, hashseek):
    assert hashseek("index", "reencode", own_collection, "--checkpoint", other_checkpoint, "--device", "cpu")[0] == 0
    copies = sorted(own_collection.glob("*.safetensors"))
    contents = [copy.read_bytes() for copy in copies]
    assert len(copies) == 2
    for copy in copies:
        copy.unlink()
    code, out, _ = hashseek("index", "verify", own_collection)
    assert (code, out.count("--repair --checkpoint")) == (1, 2)
    assert len(run_repair(own_collection, checkpoint=checkpoint).left) == 1
    assert run_repair(own_collection, checkpoint=other_checkpoint).left == []
    assert [copy.read_bytes() for copy in copies] == contents
    with pytest.raises(ForeignCodes):
        run_repair(own_collection, checkpoint=tiny_checkpoint(tmp_path / "third.safetensors", n_bits=36, seed=3))


# ---------------------------------------------------------------- a damaged catalog


def destroy(folder, table_or_index):
    """Overwrite the pages of a table or an index of the catalog."""
    damage_catalog(folder)
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as db:
        [(page,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table_or_index,)).fetchall()
        [(size,)] = db.execute("PRAGMA page_size").fetchall()
    with (folder / "catalog.sqlite").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)


def test_damaged_pages_of_the_catalog_are_refused_and_the_file_is_not_touched(own_collection, hashseek):
    destroy(own_collection, "images")
    before = (own_collection / "catalog.sqlite").read_bytes()
    with pytest.raises(CatalogDamaged):
        run_repair(own_collection)
    code, _, err = hashseek("index", "verify", own_collection, "--repair")
    assert (code, err.count("\n"), "Traceback" in err) == (2, 1, False)
    assert ".recover" in err
    assert (own_collection / "catalog.sqlite").read_bytes() == before


def test_an_sqlite_index_that_lost_rows_is_rebuilt(own_collection):
    expected, _ = state(own_collection)
    with closing(sqlite3.connect(own_collection / "catalog.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        [(statement,)] = db.execute("SELECT sql FROM sqlite_master WHERE name = 'images_by_path'").fetchall()
        db.execute("DROP INDEX images_by_path")
        db.execute("CREATE INDEX images_by_path ON images(path) WHERE id > 5")
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'images_by_path'", (statement,))
    damage_catalog(own_collection)
    assert [problem.partition(": ")[0] for problem in state(own_collection)[1]] == ["SQLite"] * 6
    assert run_repair(own_collection).left == []
    assert state(own_collection) == (expected, [])
