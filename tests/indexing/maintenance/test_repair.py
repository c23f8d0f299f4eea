"""`index verify --repair` mends what can be mended, saves what can be read of a damaged catalog, and names the rest."""

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from hashseek.indexing.catalog import attributes
from hashseek.indexing.catalog.filters import make_filter
from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.repair import repair
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadCollection
from support.collections import code_collection, new_images, random_codes
from support.faults import content, fill


def sql(folder, *statements):
    with closing(sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def mend(folder, **options):
    return repair(folder, device="cpu", **options)


def state(folder):
    with closing(Collection(folder, read_only=True)) as collection:
        return content(collection), collection.verify()


def test_nothing_is_done_to_a_sound_collection(own_collection, hashseek):
    before = {
        path: path.read_bytes() for path in own_collection.rglob("*") if path.is_file() and "sqlite-" not in path.name
    }
    assert hashseek("index", "verify", own_collection, "--repair")[:2] == (0, "0 repairs, 0 problems left\n")
    assert {path: path.read_bytes() for path in before} == before


ROWS = {
    "attributes that are no JSON": "UPDATE images SET attributes = '{x' WHERE id = 5",
    "a code that is missing": "DELETE FROM codes WHERE image_id = 5",
    "a code that is too short": "UPDATE codes SET code = x'0102' WHERE image_id = 5",
    "a code that is text": "UPDATE codes SET code = 'abcdef' WHERE image_id = 5",
    "a code of no image": "INSERT INTO codes VALUES (1, 99, x'010203040506', NULL)",
    "a label of no image": "INSERT INTO image_labels VALUES ('cat', 99)",
    "a code of no space": "INSERT INTO codes VALUES (7, 5, x'010203040506', NULL)",
}


@pytest.mark.parametrize("damage", ROWS)
def test_rows_are_dropped_or_made_again(own_collection, hashseek, damage):
    expected, _ = state(own_collection)
    sql(own_collection, "PRAGMA foreign_keys = OFF", ROWS[damage])
    code, _, _ = hashseek("index", "verify", own_collection)
    assert code in (1, 2)
    code, out, err = hashseek("index", "verify", own_collection, "--repair", "--device", "cpu")
    assert (code, "0 problems left" in out) == (0, True), (out, err)
    (images, codes, _), problems = state(own_collection)
    assert (images, problems) == (expected[0], [])
    assert {i: code for i, (code, _) in codes.items()} == {i: code for i, (code, _) in expected[1].items()}


def test_indexes_on_attributes_are_made_again(tmp_path):
    with closing(code_collection(tmp_path, n_bits=12)) as collection:
        images = new_images(random_codes(np.random.default_rng(0), 3, 12))
        collection.add([replace(image, attributes={"n": i}) for i, image in enumerate(images)])
    sql(tmp_path, "DROP INDEX images_by_attribute_1", "UPDATE images SET attributes = '{torn' WHERE id = 2")
    report = mend(tmp_path)
    assert "emptied the attributes of 1 images, which could not be read: 2" in report.done
    with closing(Collection(tmp_path, read_only=True)) as collection:
        assert collection.catalog.ids_where(make_filter(where=["n>=0"])).tolist() == [1, 3]
        with collection.catalog._db.reading() as db:
            assert attributes.known_paths(db) == {'$."n"'}


def test_indexes_and_triggers_that_were_dropped_or_altered_are_made_again(own_collection):
    sql(
        own_collection,
        "DROP TRIGGER codes_go_with_their_image",
        "DROP INDEX images_by_path",
        "CREATE INDEX images_by_path ON images(path) WHERE id > 5",
        "DROP INDEX images_by_key",
    )
    before, problems = state(own_collection)
    names = ["index images_by_key", "index images_by_path", "trigger codes_go_with_their_image"]
    assert sorted(problems) == [f"the {name} of the catalog is missing, or was altered" for name in names]
    report = mend(own_collection)
    assert sorted(report.done)[-3:] == [f"made the {name} of the catalog again" for name in names]
    assert report.left == []
    assert state(own_collection) == (before, [])
    with closing(Collection(own_collection)) as collection:
        collection.remove([5])
        assert collection.verify() == []


def test_keys_that_were_given_twice_are_named_and_stay(own_collection):
    twice = "UPDATE images SET key = 'twice' WHERE id IN (2, 3)"
    sql(own_collection, "DROP INDEX images_by_key", twice)
    left = [
        "the index images_by_key of the catalog is missing, or was altered",
        "1 keys belong to several images each, as 'twice' does: remove all but one of them",
    ]
    assert mend(own_collection).left == left
    with closing(Collection(own_collection)) as collection:
        collection.remove([3])
    assert mend(own_collection).left == []


def test_bits_beyond_the_length_of_a_code_are_malformed(tmp_path):
    with closing(code_collection(tmp_path, n_bits=12)) as collection:
        collection.add(new_images(random_codes(np.random.default_rng(0), 3, 12)))
    sql(tmp_path, "UPDATE codes SET code = x'01F0' WHERE image_id = 2")
    report = mend(tmp_path)
    assert "dropped 1 malformed codes" in report.done
    assert any("1 images have no code" in problem for problem in report.left)


def test_a_search_that_is_under_way_does_not_find_what_lost_its_code(own_collection, tmp_path):
    with closing(Collection(own_collection)) as beside:
        query = beside.catalog.code(5)
        sql(own_collection, "UPDATE codes SET code = x'0102' WHERE image_id = 5", "UPDATE images SET path = '/nowhere'")
        report = mend(own_collection)
        assert any("image 5 (/nowhere): does not exist" in problem for problem in report.left)
        [(_, ids)] = beside.search(query, k=99)
        assert sorted(ids.tolist()) == [1, 2, 3, 4, *range(6, 13)]


def test_a_lost_checkpoint_is_copied_from_the_one_that_is_given(own_collection, checkpoint, other_checkpoint, hashseek):
    (own_collection / "checkpoint.safetensors").write_bytes(b"torn")
    command = ("index", "verify", own_collection, "--repair")
    code, out, err = hashseek(*command)
    assert (code, "truncated" in err, out) == (1, True, "0 repairs, 1 problems left\n")
    code, out, err = hashseek(*command, "--checkpoint", other_checkpoint)
    assert (code, out) == (2, "")
    assert f"and {other_checkpoint} is {load_header(other_checkpoint).fingerprint[:12]} (36 bits): name a file" in err
    assert (own_collection / "checkpoint.safetensors").read_bytes() == b"torn"
    code, out, _ = hashseek(*command, "--checkpoint", checkpoint)
    assert code == 0
    assert f"copied the checkpoint {checkpoint}" in out
    assert (own_collection / "checkpoint.safetensors").read_bytes() == checkpoint.read_bytes()


@pytest.mark.parametrize("name", ["codes.faiss", "ids.bin", "manifest.json"])
def test_a_damaged_index_is_built_again(own_collection, name):
    (own_collection / "index" / name).write_bytes(b"torn")
    assert mend(own_collection).done == ["built the index again"]
    with closing(Collection(own_collection, read_only=True)) as collection:
        assert collection.verify() == []
        assert collection.describe_index()["built"] == 12


def test_what_cannot_be_mended_is_named(own_collection, hashseek):
    sql(
        own_collection,
        "UPDATE images SET path = '/nowhere/' || id WHERE id IN (2, 3)",
        "DELETE FROM codes WHERE image_id = 3",
    )
    code, _, err = hashseek("index", "verify", own_collection, "--repair", "--device", "cpu")
    assert code == 1
    assert "image 3 (/nowhere/3): does not exist" in err
    assert "the file of image 2 is gone: '/nowhere/2'" in err
    assert "1 images have no code" in err
    assert "Traceback" not in err


# ---------------------------------------------------------------- a damaged catalog

N = 3000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A catalog of many pages, and what it holds."""
    folder = tmp_path_factory.mktemp("large")
    with closing(code_collection(folder, n_bits=48)) as collection:
        images = new_images(random_codes(np.random.default_rng(0), N, 48), labels=("cat",))
        collection.add([replace(image, attributes={"n": i}) for i, image in enumerate(images)])
        collection.remove([N])
        expected = content(collection)
    return folder, expected


def damaged(large, tmp_path):
    folder = tmp_path / "collection"
    shutil.copytree(large[0], folder)
    return folder, large[1]


def root_of(folder, table):
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as db:
        [(page,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchall()
        [(size,)] = db.execute("PRAGMA page_size").fetchall()
    return page, size


def destroy(folder, pages, size=4096):
    with (folder / "catalog.sqlite").open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * size)
            file.write(b"\xff" * size)


@pytest.mark.parametrize("seed", range(4))
def test_what_can_be_read_of_a_damaged_catalog_is_saved_and_the_damaged_one_kept(large, tmp_path, seed):
    folder, expected = damaged(large, tmp_path)
    rng, (_, size) = np.random.default_rng(seed), root_of(folder, "images")
    n_pages = (folder / "catalog.sqlite").stat().st_size // size
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as db:
        keep = {row[0] for row in db.execute("SELECT rootpage FROM sqlite_master")}
    pages = [page for page in range(2, n_pages + 1) if page not in keep]
    destroy(folder, rng.choice(pages, 4, replace=False), size)
    before = (folder / "catalog.sqlite").read_bytes()
    report = mend(folder)
    assert "the catalog was damaged" in report.done[0]
    assert (folder / "catalog.sqlite.damaged-1").read_bytes() == before
    with closing(Collection(folder)) as collection:
        images, codes, _ = content(collection)
        assert len(images) > N / 2
        known = {image.id: image for image in expected[0]}
        for image in images:  # no label, nor anything else, that it did not have
            assert replace(image, labels=()) == replace(known[image.id], labels=())
            assert set(image.labels) <= {"cat"}
            assert image.id not in codes or codes[image.id][0] == expected[1][image.id][0]
        saved = [image.id for image in images if image.attributes.get("n", -1) >= 7]
        assert collection.catalog.ids_where(make_filter(where=["n>=7"])).tolist() == saved
        with collection.catalog._db.reading() as db:
            assert attributes.known_paths(db) == {'$."n"'}
        assert collection.catalog.integrity_problems() in (
            [],
            [f"{len(images) - len(codes)} images have no code, so that no search finds them"],
        )
        [(new_id, _)] = collection.add(new_images(random_codes(np.random.default_rng(1), 1, 48), start=10**6))
        assert new_id > N  # not even that of the removed one is given again
    assert mend(folder).done == []


def test_half_a_catalog_is_saved(large, tmp_path):
    folder, expected = damaged(large, tmp_path)
    whole = (folder / "catalog.sqlite").read_bytes()
    (folder / "catalog.sqlite").write_bytes(whole[: len(whole) // 2 // 4096 * 4096])
    report = mend(folder)
    assert "saved" in report.done[0]
    with closing(Collection(folder)) as collection:
        known = {image.sha256 for image in expected[0]}
        images = collection.catalog.page(after=0, limit=10**6)
        assert 0 < len(images) < N
        assert {image.sha256 for image in images} < known


@pytest.mark.parametrize("content", [b"", b"no catalog at all" * 999])
def test_of_what_is_no_catalog_any_more_nothing_is_saved_and_nothing_touched(own_collection, hashseek, content):
    (own_collection / "catalog.sqlite").write_bytes(content)
    code, _, err = hashseek("index", "verify", own_collection, "--repair")
    assert (code, err.count("\n")) == (2, 1)
    assert "Traceback" not in err
    assert "--repair" not in err
    if content:
        assert "nothing of it can be read (file is not a database): restore a snapshot into a new folder, or" in err
    assert (own_collection / "catalog.sqlite").read_bytes() == content


def test_a_damaged_catalog_that_is_in_use_is_left_alone(large, tmp_path):
    folder, _ = damaged(large, tmp_path)
    destroy(folder, [root_of(folder, "images_by_path")[0]])
    reader = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('BEGIN')\n"
        "db.execute('SELECT count(*) FROM meta').fetchall(); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", reader, str(folder / "catalog.sqlite")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    try:
        with pytest.raises(BadCollection, match="another process has it open: stop"):
            mend(folder)
    finally:
        other.communicate(b"")
    [said, *_] = mend(folder).done
    assert "saved 2999 images, 2999 of them with their codes" in said
    assert "***" not in said


def test_kept_files_and_codes_are_found_again_after_a_salvage(own_collection):
    with closing(Collection(own_collection)) as collection:
        fill(collection, 4, start=50, keep=lambda number: True)
        expected = content(collection)
    page, size = root_of(own_collection, "codes")
    destroy(own_collection, [page], size)
    report = mend(own_collection)
    (images, codes, kept), _ = state(own_collection)
    assert (images, kept) == (expected[0], expected[2])
    pictures = {image.id for image in images if not image.path.startswith("files/")}
    assert {i: codes[i][0] for i in pictures} == {i: expected[1][i][0] for i in pictures}  # encoded again
    assert len([problem for problem in report.left if "is not an image" in problem]) == 4


def test_a_full_disk_is_no_damage(small_disk):
    folder = small_disk / "collection"
    code_collection(folder, n_bits=12).close()
    before = (folder / "catalog.sqlite").read_bytes()
    with suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(2**20))
    with pytest.raises(BadCollection, match="bytes of room, and a repair needs 65,536: make room first"):
        repair(folder)
    assert (folder / "catalog.sqlite").read_bytes() == before
    assert not list(folder.glob("*damaged*"))
