"""Collections of vectors: from files to hits, what is refused, and commands that need images."""

import json
import re
import shlex
import signal
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors import safe_open

import hashseek
from hashseek.indexing.collection import CHECKPOINT, Collection, open_or_create
from hashseek.indexing.vectors import read_entries, read_parquet
from hashseek.retrieval.errors import BadCheckpoint, BadCollection, BadDataset
from support.collections import sql
from support.commands import wait_until
from support.in_process import run_command
from support.vector_files import WIDTH, clustered, save_vectors

N, BITS = 1300, 16  # more than one batch


@pytest.fixture(scope="module")
def indexed_vectors(tmp_path_factory):
    """(folder of a collection, its vectors)."""
    folder, vectors = tmp_path_factory.mktemp("vectors"), clustered(N)
    entries = {"labels": [("even",) if i % 2 == 0 else ("odd",) for i in range(N)]}
    with hashseek.create_vector_collection(
        folder / "c", vectors, [f"v{i}" for i in range(N)], n_bits=BITS, keep_features=True, **entries
    ) as made:
        assert (made.report.added, len(made)) == (N, N)
    return folder / "c", vectors


def own_outputs(folder, vectors):
    """Outputs by the definition: a linear layer on vectors of length 1, with the weights in the checkpoint."""
    with safe_open(folder / CHECKPOINT, framework="np") as file:
        weight, bias = (file.get_tensor(f"head.{name}").astype(np.float64) for name in ("weight", "bias"))
    rows = vectors.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) @ weight.T + bias


@pytest.mark.parametrize("rank", ["hamming", "asymmetric", "float"])
def test_hits_are_those_of_brute_force_over_the_vectors(indexed_vectors, rank):
    folder, vectors = indexed_vectors
    queries = np.concatenate([clustered(20, seed=5), vectors[:5]])
    bits, outputs = own_outputs(folder, vectors) >= 0, own_outputs(folder, queries)
    with hashseek.open_collection(folder, read_only=True) as opened:
        for query, output in zip(queries, outputs, strict=True):
            # All are candidates, so that the order is exact.
            found = opened.search_vector(query, k=30, rank=rank, oversample=100)
            distances = (bits != (output >= 0)).sum(axis=1)
            if rank == "float":
                scores = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
            else:
                scores = -distances if rank == "hamming" else (2 * bits - 1) @ output
            rows = [int(hit.image.key[1:]) for hit in found]
            assert [hit.distance for hit in found] == distances[rows].tolist()
            # Scores instead of rows: the features are rounded to float16.
            np.testing.assert_allclose(scores[rows], np.sort(scores)[::-1][:30], atol=2e-3 if rank == "float" else 1e-5)
            if rank == "hamming":
                assert rows == np.lexsort((np.arange(N), distances))[:30].tolist()


def test_a_code_does_not_depend_on_the_batch(indexed_vectors):
    folder, vectors = indexed_vectors
    with hashseek.open_collection(folder, read_only=True) as opened:
        encoder = opened.searcher.vector_encoder
        together = encoder.features_and_outputs(vectors[:64])[1]
        alone = np.concatenate([encoder.features_and_outputs(row[None])[1] for row in vectors[:64]])
        np.testing.assert_array_equal(together, alone)


def test_a_stopped_run_stores_its_batch_and_the_next_run_continues(start, hashseek, tmp_path):
    file, ids = save_vectors(tmp_path, clustered(60))
    command = ("index", "add", tmp_path / "c", "--vectors", file, "--ids", ids, "--bits", 8)
    slow = """
import time, hashseek.indexing.vectors, hashseek.indexing.catalog
hashseek.indexing.vectors.BATCH = 4
add = hashseek.indexing.catalog.Catalog.add
hashseek.indexing.catalog.Catalog.add = lambda *a: (time.sleep(0.15), add(*a))[1]
"""
    process = start(*command, before=slow)

    def n_stored():
        with closing(Collection(tmp_path / "c", read_only=True)) as opened:
            return len(opened)

    wait_until(lambda: (tmp_path / "c" / "catalog.sqlite").exists() and n_stored() >= 4)
    process.send(signal.SIGINT)
    assert process.wait() == 130
    n = n_stored()
    assert 4 <= n < 60
    assert f"added {n}, " in process.out
    assert [line.partition(" ")[0] for line in process.err.splitlines()] == ["stopping", "stopped:"]
    assert f"added {60 - n}, updated 0, already stored {n}" in hashseek(*command)[1]


def test_the_most_frequent_labels_are_shown(capsys, tmp_path):
    labels = [[f"label {i}", "all"] for i in range(40)]
    hashseek.create_vector_collection(
        tmp_path / "c", clustered(40), [f"v{i}" for i in range(40)], n_bits=8, labels=labels
    ).close()
    last = run_command(capsys, "index", "stats", tmp_path / "c")[1].splitlines()[-1]
    assert "all 40, label " in last
    assert (last.count("label "), "21 more" in last) == (19, True)


def test_from_files_to_hits_on_the_command_line(capsys, tmp_path):
    vectors = clustered(60)
    file, ids = save_vectors(tmp_path, vectors.astype(np.float64))
    folder = tmp_path / "c"
    command = ("index", "add", folder, "--vectors", file, "--ids", ids, "--label", "more", "--bits", BITS)
    code, out, err = run_command(capsys, *command, "--keep-features")
    assert (code, err) == (0, "")
    assert "added 60, updated 0, already stored 0" in out
    assert json.loads(run_command(capsys, "index", "stats", folder, "--json")[1])["index"]["built"] == 60
    *_, search, serve = out.splitlines()  # the printed commands
    assert run_command(capsys, *shlex.split(search)[1:])[0] == 0
    assert serve == f"  hashseek serve {folder}"
    # Again; with an id per line; and with one vector and one id changed.
    assert "added 0, updated 0, already stored 60" in run_command(capsys, *command)[1]
    (tmp_path / "plain.txt").write_text("".join(f"v{i}\n" for i in range(60)))
    plain = ("index", "add", folder, "--vectors", file, "--ids", tmp_path / "plain.txt")
    assert "added 0, updated 0, already stored 60" in run_command(capsys, *plain)[1]
    code, _, err = run_command(capsys, *command[:-1], BITS + 1)
    assert (code, "index refit" in err) == (2, False)  # which is only for images
    vectors[3] = -vectors[3]
    np.save(tmp_path / "vectors.npy", vectors)
    (tmp_path / "plain.txt").write_text("".join(f"{'new' if i == 4 else f'v{i}'}\n" for i in range(60)))
    assert "added 1, updated 1, already stored 58" in run_command(capsys, *plain)[1]
    # One query gives one answer, several give a list.
    np.save(tmp_path / "one.npy", vectors[3])
    np.save(tmp_path / "three.npy", vectors[:3])
    code, out, _ = run_command(capsys, "search", folder, "--vector", tmp_path / "one.npy", "-k", 1, "--json")
    [hit] = json.loads(out)["hits"]
    assert (code, hit["key"], hit["distance"], hit["labels"]) == (0, "v3", 0, ["more", "odd", "other"])
    assert (hit["path"], hit["attributes"]) == ("", {"year": 2003})
    options = ("--where", "year=2001", "-k", 50, "--json")
    found = json.loads(run_command(capsys, "search", folder, "--vector", tmp_path / "three.npy", *options)[1])
    assert [len(answer["hits"]) for answer in found] == [12] * 3
    assert "v3" in run_command(capsys, "search", folder, "--vector", tmp_path / "one.npy")[1].splitlines()[1]
    np.save(tmp_path / "one near.npy", [vectors[3], -vectors[3]])
    out = run_command(capsys, "search", folder, "--vector", tmp_path / "one near.npy", "--max-distance", 0)[1]
    assert "v3" in out
    for rank in ("hamming", "asymmetric", "float"):
        code, out, _ = run_command(capsys, "search", folder, "--vector", tmp_path / "three.npy", "--rank", rank)
        assert (code, re.findall("^row (.+):$", out, re.MULTILINE)) == (0, ["0", "1", "2"])
    # What works on collections of images works here.
    assert run_command(capsys, "index", "verify", folder)[:2] == (0, "61 images, 0 problems\n")
    code, out, _ = run_command(capsys, "index", "duplicates", folder, "--radius", 0, "--json")
    assert any({"v4", "new"} <= {one["key"] for one in json.loads(line)} for line in out.splitlines())
    assert run_command(capsys, "index", "export", folder, tmp_path / "all.parquet")[0] == 0
    copy = ("index", "import", tmp_path / "all.parquet", tmp_path / "copy", "--checkpoint", folder / CHECKPOINT)
    assert run_command(capsys, *copy)[0] == 0
    with closing(Collection(folder)) as first, closing(Collection(tmp_path / "copy")) as second:
        for one, other in zip(
            first.catalog.page(after=0, limit=99), second.catalog.page(after=0, limit=99), strict=True
        ):
            assert (one.key, one.sha256, one.labels, one.attributes) == (
                other.key,
                other.sha256,
                other.labels,
                other.attributes,
            )
        np.testing.assert_array_equal(first.catalog.all_codes().codes, second.catalog.all_codes().codes)


def test_parquet_gives_the_same_codes(capsys, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    vectors = clustered(40)
    file, ids = save_vectors(tmp_path, vectors)
    columns = {"id": [f"v{i}" for i in range(40)], "vector": list(vectors), "year": list(range(40))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "v.parquet")
    assert run_command(capsys, "index", "add", tmp_path / "a", "--vectors", file, "--ids", ids, "--bits", 8)[0] == 0
    assert run_command(capsys, "index", "add", tmp_path / "b", "--vectors", tmp_path / "v.parquet", "--bits", 8)[0] == 0
    both = ("--vectors", tmp_path / "v.parquet", "--ids", ids, "--bits", 8)
    assert run_command(capsys, "index", "add", tmp_path / "both", *both)[0] == 2
    with closing(Collection(tmp_path / "a")) as first, closing(Collection(tmp_path / "b")) as second:
        np.testing.assert_array_equal(first.catalog.all_codes().codes, second.catalog.all_codes().codes)
        assert second.catalog.by_key("v7").attributes == {"year": 7}
    for kind in (pyarrow.list_, pyarrow.large_list, lambda of: pyarrow.list_(of, WIDTH)):
        column = pyarrow.array([row.tolist() for row in vectors], kind(pyarrow.float32()))
        parquet.write_table(pyarrow.table({"vector": column}), tmp_path / "kind.parquet", row_group_size=7)
        np.testing.assert_array_equal(read_parquet(tmp_path / "kind.parquet"), vectors)
    ragged = pyarrow.table({"id": ["a", "b", "c"], "vector": [[1.0, 2.0], [3.0], None]})
    parquet.write_table(ragged, tmp_path / "ragged.parquet")
    with pytest.raises(BadDataset, match="row 2"):  # which has none
        read_parquet(tmp_path / "ragged.parquet")
    parquet.write_table(ragged.slice(0, 2), tmp_path / "ragged.parquet")
    with pytest.raises(BadDataset, match="row 1"):
        read_parquet(tmp_path / "ragged.parquet")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ids.txt", "a\n#b\n\nc\n"),
        ("ids.csv", 'Key\na\n"#b"\nc\n'),
        ("ids.csv", "ID,Labels\na,\n#b,\nc,\n"),
    ],
)
def test_lists_of_ids(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    entries, notes = read_entries(tmp_path / name)
    assert ([entry.key for entry in entries], notes) == (["a", "#b", "c"], [])


def test_a_table_of_ids_must_name_its_columns(tmp_path):
    (tmp_path / "ids.csv").write_text("a\nb\n")
    with pytest.raises(BadDataset, match=r"`id` or `key`.*`a`"):
        read_entries(tmp_path / "ids.csv")


def _with(row: int, value: float):
    vectors = clustered(30)
    vectors[row, 5] = value
    return vectors


@pytest.mark.parametrize(
    ("vectors", "ids", "named"),
    [
        (_with(17, np.nan), None, "row 17"),
        (_with(0, -np.inf), None, "row 0"),
        (_with(29, 1e30), None, "row 29"),
        (np.where(np.arange(30)[:, None] == 11, 0, clustered(30)), None, "row 11"),
        (clustered(30)[0], None, "(24,)"),
        (clustered(30).astype(str), None, "(30, 24)"),
        (clustered(30)[:0], None, "(0, 24)"),
        (clustered(30), [*range(29), 3], "rows 3 and 29"),
        (clustered(30), range(29), "29"),
        (clustered(30), ["name", *range(30)], ".txt"),
        (clustered(30), ["x" * 600, *range(29)], "row 0"),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_what_cannot_be_stored_is_refused_by_row_and_nothing_is_stored(
    capsys, tmp_path, indexed_vectors, vectors, ids, named, is_new
):
    np.save(tmp_path / "v.npy", vectors)
    (tmp_path / "ids.txt").write_text("".join(f"{one}\n" for one in ids or range(30)))
    folder = tmp_path / "c" if is_new else indexed_vectors[0]
    command = ("index", "add", folder, "--vectors", tmp_path / "v.npy", "--ids", tmp_path / "ids.txt")
    code, out, err = run_command(capsys, *command)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert named in err
    if is_new:
        assert not folder.exists()
    else:
        with closing(Collection(folder, read_only=True)) as opened:
            assert len(opened) == N


def test_a_bad_label_in_a_later_batch_is_refused_before_anything_is_stored(capsys, tmp_path):
    file, ids = save_vectors(tmp_path, clustered(1100))
    ids.write_text(ids.read_text().replace("v1099,odd", f"v1099,{'x' * 300}"))
    code, out, err = run_command(
        capsys, "index", "add", tmp_path / "c", "--vectors", file, "--ids", ids, "--bits", BITS
    )
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "row 1099" in err
    assert not (tmp_path / "c").exists()


def test_vectors_all_alike_and_objects_are_refused(capsys, tmp_path):
    (tmp_path / "ids.txt").write_text("a\nb\n")
    for number, content in enumerate((np.ones((2, 3)), np.array([[1], None], object))):
        np.save(tmp_path / "v.npy", content)
        command = ("index", "add", tmp_path / "c", "--vectors", tmp_path / "v.npy", "--ids", tmp_path / "ids.txt")
        assert run_command(capsys, *command)[0] == 2, number
        assert not (tmp_path / "c").exists()


def test_vectors_may_be_lists_or_tensors(tmp_path):
    rows = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    with pytest.raises(BadDataset):
        hashseek.create_vector_collection(tmp_path / "c", [[1.0, 2.0], [3.0]], ["a", "b"], n_bits=16)
    names = [f"v{i}" for i in range(20)]
    with hashseek.create_vector_collection(tmp_path / "c", rows.tolist(), names, n_bits=16) as opened:
        opened.add_vectors(torch.from_numpy(rows[:1] + 1), ["another"], labels=[["new"]], attributes=[{"year": 2024}])
        found = opened.search_vector(rows[0] + 1, k=1)[0].image
        assert (found.key, found.labels, found.attributes) == ("another", ("new",), {"year": 2024})
        assert opened.search_vector(rows[7].tolist(), k=1)[0].image.key == "v7"
        assert len(opened) == 21
    with pytest.raises(BadCollection):
        hashseek.create_vector_collection(tmp_path / "c", rows, names, n_bits=16)


def test_queries_of_another_width_or_with_nan_are_refused(capsys, tmp_path, indexed_vectors):
    folder, vectors = indexed_vectors
    with hashseek.open_collection(folder, read_only=True) as opened:
        for query in (vectors[0, :7], np.full(WIDTH, np.nan), vectors[:2]):
            with pytest.raises(BadDataset):
                opened.search_vector(query)
    file, ids = save_vectors(tmp_path, vectors[:3, :7], name="q")
    assert run_command(capsys, "index", "add", folder, "--vectors", file, "--ids", ids)[0] == 2
    assert run_command(capsys, "search", folder, "--vector", tmp_path / "q.npy")[0] == 2


def test_images_and_vectors_do_not_mix(capsys, tmp_path, indexed_vectors, own_collection, checkpoint, pictures):
    folder, vectors = indexed_vectors
    picture = pictures / "picture 00.jpg"
    needs_images = [
        ("index", "add", folder, pictures),
        ("index", "add", folder, pictures, "--dry-run"),
        ("index", "add", folder, pictures, "--watch"),
        ("index", "reencode", folder, "--checkpoint", checkpoint),
        ("index", "refit", folder),
        ("index", "duplicates", folder, "--radius", 1, "--flips"),
        ("index", "verify", folder, "--codes", 3),
        ("search", folder, picture),
    ]
    file, ids = save_vectors(tmp_path, vectors[:10])
    needs_vectors = [
        ("index", "add", own_collection, "--vectors", file, "--ids", ids),
        ("search", own_collection, "--vector", file),
        ("index", "add", tmp_path / "new", "--vectors", file, "--ids", ids, "--checkpoint", checkpoint),
    ]
    for command in (*needs_images, *needs_vectors):
        code, _, err = run_command(capsys, *command)
        assert (code, len(err.splitlines())) == (2, 1), (command, err)
    assert not (tmp_path / "new").exists()
    with closing(Collection(folder, read_only=True)) as opened:
        assert (len(opened), opened.verify()) == (N, [])
        assert [space.state for space in opened.catalog.spaces.all()] == ["ready"]
    with hashseek.open_collection(own_collection, device="cpu") as opened, pytest.raises(BadCheckpoint):
        opened.add_vectors(vectors[:1], ["a"])
    with hashseek.open_collection(folder) as opened, pytest.raises(BadCheckpoint):
        opened.add(picture)


def test_a_trained_checkpoint_of_vectors_makes_a_collection(tmp_path):
    from support.vector_models import save_vector_model

    trained = save_vector_model(tmp_path / "model.safetensors", n_bits=12)
    vectors = np.random.default_rng(0).standard_normal((50, 6))
    with hashseek.open_collection(tmp_path / "c", checkpoint=trained) as opened:
        opened.add_vectors(vectors, [str(i) for i in range(50)])
        opened.add_vectors(np.zeros((1, 6)), ["zeros"])  # the trained layers see more than directions
        for row in (0, 49):
            nearest = opened.search_vector(vectors[row], rank="hamming", k=50)
            assert str(row) in [hit.image.key for hit in nearest if hit.distance == 0]
            assert opened.similar(row + 1)[0].distance == 0
    with closing(open_or_create(tmp_path / "c", checkpoint=trained)) as opened:
        assert opened.verify() == []


def test_options_of_images_are_refused_beside_vectors(capsys, tmp_path):
    file, ids = save_vectors(tmp_path, clustered(10))
    start = ("index", "add", tmp_path / "c", "--vectors", file, "--ids", ids)
    for options in (
        (tmp_path,),
        ("--errors", tmp_path / "e"),
        ("--watch",),
        ("--backbone", "resnet18"),
        ("--dry-run",),
        ("--device", "cpu"),
        ("--bits", 0),
    ):
        assert run_command(capsys, *start, *options)[0] == 2, options
    for options in (("--on-error", "skip"), ("--allow-private",), ("--url-seconds", 3), ("--url-megabytes", 3)):
        assert run_command(capsys, *start, *options)[0] == 2, options
    assert run_command(capsys, *start[:5])[0] == 2
    assert run_command(capsys, *start[:3], "--ids", ids)[0] == 2
    assert run_command(capsys, *start[:3])[0] == 2
    assert not (tmp_path / "c").exists()


def test_vectors_that_lost_their_codes_get_them_again_when_they_are_added_again(capsys, tmp_path):
    folder, (file, ids) = tmp_path / "c", save_vectors(tmp_path, clustered(60))
    command = ("index", "add", folder, "--vectors", file, "--ids", ids)
    assert run_command(capsys, *command, "--bits", 8)[0] == 0
    codes = sql(folder / "catalog.sqlite", "SELECT image_id, code FROM codes")
    sql(folder / "catalog.sqlite", "DELETE FROM codes WHERE image_id % 7 = 0")
    code, out, err = run_command(capsys, "index", "verify", folder, "--repair")
    assert code == 1
    assert shlex.join(("hashseek", *map(str, command[:4]))) in out + err  # the advice
    assert run_command(capsys, *command)[0] == 0
    assert sql(folder / "catalog.sqlite", "SELECT image_id, code FROM codes") == codes
    assert run_command(capsys, "index", "verify", folder)[0] == 0
