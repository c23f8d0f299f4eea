"""The command line: output, exit codes, and one line for each mistake, never a traceback."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version

import pytest

from hashseek.api.cli import build
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig
from support.collections import index_folder, sql
from support.paths import ROOT
from support.pictures import N_PICTURES, draw, save

URL = "http://127.0.0.1:8000"


def test_adding_reports_counts_and_names_bad_files(hashseek, tmp_path, pictures, checkpoint):
    folder, bad, empty = tmp_path / "collection", tmp_path / "bad\n.jpg", tmp_path / "empty"
    bad.write_bytes(b"")
    empty.mkdir()
    shutil.copy(pictures / "picture 00.jpg", tmp_path / "copy.jpg")
    command = ("index", "add", folder, pictures, tmp_path / "copy.jpg", bad, "--device", "cpu")
    code, out, err = hashseek(*command, "--checkpoint", checkpoint)
    assert (code, out) == (0, f"added 12, already stored 1, skipped 1; {folder} holds 12 images\n")
    assert err.startswith(f"skipped: {tmp_path}/bad\\n.jpg: ")
    assert err.count("\n") == 1
    code, out, _ = hashseek(*command)
    assert (code, out) == (0, f"added 0, already stored 13, skipped 1; {folder} holds 12 images\n")
    for path, n_skipped, start in ((bad, 1, f"skipped: {tmp_path}/bad"), (empty, 0, f"note: {empty}: ")):
        code, out, err = hashseek("index", "add", folder, path)
        assert (code, out.split(";")[0]) == (1, f"added 0, already stored 0, skipped {n_skipped}")
        assert err.startswith(start)


def test_adding_a_list_takes_its_labels_and_split(hashseek, tmp_path, checkpoint):
    for seed in range(3):
        draw(seed).save(tmp_path / f"{seed}.png")
    manifest, folder = tmp_path / "labels.csv", tmp_path / "collection"
    manifest.write_text("file,labels,split\n0.png,a;b,database\n1.png,b,retrieval\n2.png,a,query\n9.png,a,database\n")
    command = ("index", "add", folder, manifest, "--split", "database", "--device", "cpu", "--checkpoint", checkpoint)
    code, _, err = hashseek(*command, "--on-error", "stop")
    assert code == 2
    assert "labels.csv line 5" in err
    assert not folder.exists()
    code, out, err = hashseek(*command)
    assert (code, out.split(";")[0]) == (0, "added 2, already stored 0, skipped 1")
    assert err.startswith("skipped: labels.csv line 5: ")
    content = json.loads(hashseek("index", "stats", folder, "--json")[1])
    assert (content["images"], content["bits"], content["labels"]) == (2, 48, {"a": 1, "b": 2})
    assert content["fingerprint"] == load_header(checkpoint).fingerprint
    assert (content["index"]["built"], content["index"]["fresh"], content["features"]) == (2, 0, "not stored")
    assert hashseek("index", "stats", folder)[1].splitlines()[0] == "images       2"


def test_searching_prints_a_table_or_json(hashseek, indexed, pictures):
    picture = pictures / "Höhle, 2 °C" / "picture 07.jpg"
    for rank, columns in (("hamming", []), ("asymmetric", ["score"])):
        code, out, err = hashseek("search", indexed, picture, "-k", 3, "--rank", rank, "--device", "cpu")
        assert (code, err) == (0, "")
        header, first, *others = out.splitlines()
        assert header.split() == ["rank", *columns, "bits", "id", "path", "labels"]
        assert (first.split()[0], first.split()[len(columns) + 1]) == ("1", "0")
        assert str(picture) in first
        assert first.endswith("odd")
        assert len(others) == 2
    code, _, err = hashseek("search", indexed, picture, "--rank", "float", "--device", "cpu")
    assert (code, "--keep-features" in err) == (2, True)
    code, out, _ = hashseek("search", indexed, picture, "-k", 1000, "--json", "--device", "cpu")
    content = json.loads(out)
    assert (code, content["n_bits"], len(content["hits"])) == (0, 48, N_PICTURES)
    scores = [hit["score"] for hit in content["hits"]]
    assert (content["ranked_by"], scores) == ("asymmetric", sorted(scores, reverse=True))
    best = content["hits"][0]
    assert (best["rank"], best["distance"], best["path"], best["labels"]) == (1, 0, str(picture), ["odd"])
    assert [hit["rank"] for hit in content["hits"]] == list(range(1, 13))
    far = content["hits"][5]["distance"]
    code, out, _ = hashseek("search", indexed, picture, "-k", 1000, "--max-distance", far, "--json", "--device", "cpu")
    assert [hit["distance"] for hit in json.loads(out)["hits"]] == [
        h["distance"] for h in content["hits"] if h["distance"] <= far
    ]


def test_searching_with_a_stored_image_leaves_it_out(hashseek, own_collection):
    with closing(Collection(own_collection)) as collection:
        record = collection.catalog.one(5)
        collection.catalog.give_keys({record.id: "my key"})
        [(distances, ids)] = collection.search(collection.catalog.code_of(5).code[None], k=99)
    others = [(d, i) for d, i in zip(distances.tolist(), ids.tolist(), strict=True) if i != record.id]
    for query in (("--id", 5), ("--of-key", "my key")):
        code, out, _ = hashseek("search", own_collection, *query, "-k", 4, "--json")
        hits = json.loads(out)["hits"]
        assert (code, [(hit["distance"], hit["id"]) for hit in hits]) == (0, others[:4])
        assert [hit["rank"] for hit in hits] == [1, 2, 3, 4]
    code, out, _ = hashseek("search", own_collection, "--id", 5, "-k", 99, "--json", "--max-distance", 20)
    assert [hit["id"] for hit in json.loads(out)["hits"]] == [i for d, i in others if d <= 20]
    out = hashseek("search", own_collection, "--id", 5, "-k", 2, "--json", "--without", record.labels[0])[1]
    assert len(json.loads(out)["hits"]) == 2  # itself does not match


def test_another_copy_of_the_checkpoint_may_be_used(hashseek, own_collection, pictures, checkpoint):
    (own_collection / "checkpoint.safetensors").unlink()
    search = ("search", own_collection, pictures / "picture 00.jpg", "--device", "cpu")
    assert hashseek(*search)[0] == 2
    assert hashseek(*search, "--checkpoint", checkpoint)[0] == 0
    assert hashseek("index", "stats", own_collection)[0] == 0


def test_removing_takes_all_or_none_and_verifying_lists_damage(hashseek, own_collection):
    code, out, _ = hashseek("index", "remove", own_collection, 3, 5, 3)
    assert (code, out) == (0, f"removed 2; {own_collection} holds 10 images\n")
    code, _, err = hashseek("index", "remove", own_collection, 4, 5)
    assert code == 2
    assert "image 5" in err
    assert hashseek("index", "verify", own_collection)[:2] == (0, "10 images, 0 problems\n")
    codes = index_folder(own_collection) / "codes.bin"
    content = bytearray(codes.read_bytes())
    content[-1] ^= 1
    codes.write_bytes(content)
    code, out, err = hashseek("index", "verify", own_collection)
    assert code == 1
    assert codes.name in out.splitlines()[0]
    assert out.endswith("10 images, 1 problem\n")
    assert err.startswith("hashseek: ")
    assert hashseek("index", "remove", own_collection, 1)[0] == 0
    assert hashseek("index", "verify", own_collection)[0] == 0


def test_commands_write_an_index_of_what_they_have_changed(hashseek, own_collection, tmp_path):
    save(tmp_path / "new.png", 100)
    assert hashseek("index", "export", own_collection, tmp_path / "all.parquet")[0] == 0
    for command in (
        ("add", own_collection, tmp_path / "new.png", "--device", "cpu"),
        ("remove", own_collection, 2),
        ("import", tmp_path / "all.parquet", own_collection),
    ):
        before = meta(own_collection)["generation"]
        assert hashseek("index", *command)[0] == 0
        after = meta(own_collection)
        assert int(before) < int(after["generation"]) == json.loads(after["index"])["generation"], command


def meta(folder):
    return dict(sql(folder / CATALOG, "SELECT key, value FROM meta"))


def test_removing_by_filter_needs_the_expected_number(hashseek, own_collection):
    with closing(Collection(own_collection, read_only=True)) as collection:
        records = [image for image in collection.catalog.get(list(range(1, N_PICTURES + 1))) if image is not None]
    kept = [image.id for image in records if not {"even", "three"} <= set(image.labels)]
    n = N_PICTURES - len(kept)
    assert 0 < n < N_PICTURES
    command = ("index", "remove", own_collection, "--label", "even", "--label", "three")
    for wrong in ((), ("--expected", n + 1)):
        code, _, err = hashseek(*command, *wrong)
        assert (code, f"--expected {n}" in err) == (2, True)
        assert hashseek("index", "verify", own_collection)[:2] == (0, f"{N_PICTURES} images, 0 problems\n")
    code, out, _ = hashseek(*command, "--expected", n)
    assert hashseek(*command, "--expected", n)[0] == 2  # done
    assert (code, out) == (0, f"removed {n}; {own_collection} holds {len(kept)} images\n")
    with closing(Collection(own_collection, read_only=True)) as collection:
        assert collection.catalog.all_codes().ids.tolist() == kept


# arguments, separated by spaces -> what the message must name: the value, the option or the remedy
MISTAKES = {
    "trian": "'train'",
    "index add {collection}": "--vectors",
    "index add {tmp}/new {picture}": "--checkpoint",
    "index add {tmp}/new {picture} --checkpoint {tmp}/no": "{tmp}/no",
    "index add {collection} {picture} --checkpoint {other}": "{theirs}",
    "index add {collection} {tmp}/no": "{tmp}/no",
    "index add {collection} {tmp} --prune": "--watch",
    "index add {collection} {tmp} --watch --dry-run": "--dry-run",
    "index add {collection} {tmp} --watch --allow-private": "--allow-private",
    "index add {collection} {tmp} --watch --strict": "--strict",
    "index add {collection} {tmp} --watch --split train": "--split",
    "index add {collection} {tmp} --watch --key-from name": "--key-from",
    "index add {collection} {tmp} --watch --trust-mtime": "--trust-mtime",
    "index add {collection} {picture} --watch": "{picture}",
    "index add {collection} {tmp} --every 0": "'--every'",
    "index add {collection} {tmp} --every 5": "--watch",
    "index add {collection} {tmp} --ray-workers 2": "--ray:",
    "index add {collection} {tmp} --shards {tmp}/shards": "--ray:",
    "index verify {collection} --engine openvino": "--engine",
    "index add {collection} {tmp} --errors {tmp}/no/x": "{tmp}/no",
    "index remove {collection}": "--key",
    "index remove {collection} 1 --label even": "--label",
    "index remove {collection} 1 --expected 1": "--expected",
    "index remove {collection} 99999999999999999999": "image 99999999999999999999",
    "index stats {tmp}": "hashseek index add {tmp} ",
    "index verify {collection} --repair --codes 5": "--codes",
    "index verify {collection} --checkpoint {other}": "--repair",
    "index verify {collection} --repair --checkpoint {other}": "{theirs}",
    "search {collection} {picture} -k 0": "got 0",
    "search {collection} {picture} --oversample 0": "got 0",
    "search {collection} {picture} --max-distance 5 --min-precision 0.5": "0.5",
    "search {collection}": "--id",
    "search {collection} {picture} --id 1": "--id",
    "search {collection} --id 99": "image 99",
    "search {collection} --of-key no": "'no'",
    "search {collection} --id 1 --rank asymmetric": "hamming",
    "search {collection} --id 1 --device cpu": "--device",
    "search {tmp}/none {picture}": "{tmp}/none",
    "search {picture} {picture}": "{picture}",
    "search {collection} {tmp}/none.jpg": "{tmp}/none.jpg",
    "search {collection} {tmp}/text.jpg": "{tmp}/text.jpg",
    "search {collection} {tmp}/no\nne": "{tmp}/no\\nne",
    "search {collection} {picture} --device abacus": "'abacus'",
    "search {collection} {picture} --device cuda:99": "cuda:99",
    "index add {collection} {picture} --device cuda:99": "cuda:99",
    "index verify {collection} --codes 1 --device cuda:99": "cuda:99",
    "index reencode {collection} --checkpoint {other} --device cuda:99": "cuda:99",
    "index duplicates {collection} --flips --device cuda:99": "cuda:99",
    "serve {collection} --port 0 --device cpu:1": "'cpu:1'",
    "serve {collection} --port 0 --device cuda:99": "cuda:99",
    "search {collection} {picture} --checkpoint {other}": "{theirs}",
    "serve {collection} --port 0 --checkpoint {other}": "{theirs}",
    "serve {collection} --port 99999": "99999",
    "serve {collection} --host no.such.host.invalid --port 0": "no.such.host.invalid",
    "serve {collection} --host .local --port 0": ".local",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_costs_one_line(line, hashseek, indexed, pictures, other_checkpoint, tmp_path):
    (tmp_path / "text.jpg").write_text("only text")
    values = {
        "tmp": tmp_path,
        "collection": indexed,
        "picture": pictures / "picture 00.jpg",
        "other": other_checkpoint,
        "theirs": load_header(other_checkpoint).fingerprint[:12],
    }
    code, out, err = hashseek(*(argument.format(**values) for argument in line.split(" ")))
    assert (code, out) == (2, "")
    assert err.startswith("hashseek: ")
    assert MISTAKES[line].format(**values) in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jpg"]


def test_an_empty_argument_is_refused(hashseek, indexed):
    for arguments, named in (
        (("index", "add", "", indexed), "index add"),
        (("index", "verify", indexed, "--checkpoint", ""), "--checkpoint"),
    ):
        code, _, err = hashseek(*arguments)
        assert code == 2
        assert named in err


def test_no_right_to_read_the_checkpoint_or_create_the_folder(hashseek, tmp_path, checkpoint, pictures):
    private = tmp_path / "private.safetensors"
    shutil.copy(checkpoint, private)
    private.chmod(0)
    (tmp_path / "closed").mkdir(mode=0o555)
    for place, file in ((tmp_path / "new", private), (tmp_path / "closed" / "new", checkpoint)):
        code, _, err = hashseek("index", "add", place, pictures, "--checkpoint", file, before="drop_rights()")
        assert (code, err.count("\n")) == (2, 1)
        assert str(file if file == private else place.parent) in err


def test_a_terminal_that_lacks_letters_shows_escapes(hashseek, indexed, pictures):
    before = "sys.stdout.reconfigure(encoding='iso8859-5', errors='strict')"
    command = ("search", indexed, pictures / "picture 00.jpg", "-k", 12, "--device", "cpu")
    code, out, err = hashseek(*command, before=before)
    assert (code, err) == (0, "")
    assert "H\\xf6hle, 2 \\xb0C/picture 03.jpg" in out


def test_help_at_every_level(hashseek):
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = hashseek(*arguments)
        assert (code, err) == (0, "")
        for name in ("train", "evaluate", "data", "index", "search", "serve", "demo"):
            assert f" {name} " in out
    for arguments, words in (
        (("index", "--help"), ("add", "remove", "stats", "verify")),
        (("search", "-h"), ("--max-distance", "--json")),
    ):
        code, out, _ = hashseek(*arguments)
        assert code == 0
        assert all(word in out for word in words)
    assert hashseek("--version")[:2] == (0, f"hashseek {version('hashseek')}\n")


def run_python(code):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=True
    ).stdout


def test_what_needs_no_model_does_not_load_torch(indexed, tmp_path):
    tmp, collection = str(tmp_path), str(indexed)
    commands = [
        ["index", "add", f"{tmp}/new", tmp],
        ["index", "add", collection, f"{tmp}/none"],
        ["index", "add", collection, tmp, "--device", "abacus"],
        ["index", "stats", collection],
        ["search", collection, f"{tmp}/none.jpg"],
        ["search", collection, "--id", "1"],
    ]
    out = run_python(
        "import contextlib, sys\nfrom hashseek.api.cli import main\n"
        "heavy = {'torch', 'openvino', 'scipy', 'sklearn', 'matplotlib', 'fastapi'}\n"
        f"for command in {commands!r}:\n"
        "    with contextlib.suppress(SystemExit): main(command)\n"
        "    print('\\nloaded', command[:2], heavy & {*sys.modules})"
    )
    loaded = [line for line in out.splitlines() if line.startswith("loaded ")]
    assert loaded == [f"loaded {command[:2]} set()" for command in commands]


def test_the_command_says_that_nothing_was_found(hashseek, own_collection, pictures):
    with closing(Collection(own_collection)) as opened:
        opened.remove(opened.catalog.ids_where(Filter()).tolist()[1:])
    search = ("search", own_collection, pictures / "picture 00.jpg", "--label", "none")
    for command in (search, ("index", "duplicates", own_collection)):
        code, out, err = hashseek(*command)
        assert (code, out.count("\n"), err) == (0, 1, "")
        assert "rank" not in out
        code, out, err = hashseek(*command, "--json")
        assert (code, json.loads(out or '{"hits": []}')["hits"], err) == (0, [], "")


@pytest.mark.parametrize("command", [("search", URL, "a.jpg"), ("index", "stats", URL), ("search", "c", URL)])
def test_a_url_is_no_folder_and_no_query(command):
    with pytest.raises(BadConfig):
        build(command)(args=command, standalone_mode=False)
