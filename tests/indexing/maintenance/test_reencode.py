"""Changing the model: every image gets its new code before the first search uses one, whatever happens meanwhile."""

import json
import re
import shutil
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.maintenance import reencode as module
from hashseek.indexing.maintenance.reencode import drop_space, reencode, switch_space
from hashseek.indexing.searcher import Searcher, SearchOptions
from hashseek.retrieval.checkpoint import load_checkpoint, load_header, save_checkpoint
from hashseek.retrieval.codes import pack, unpack
from hashseek.retrieval.errors import BadCheckpoint, BadCollection, BadConfig
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.truncation import truncate
from support.collections import codes_by_path, new_images, random_codes, sql
from support.commands import wait_until
from support.models import PREPROCESSING, tiny_checkpoint
from support.pictures import N_PICTURES, draw


def run(collection, checkpoint, **options):
    return list(reencode(collection, checkpoint, device="cpu", precision="fp32", **options))[-1]


def numbers(line):
    """The numbers at the beginning of a command's output."""
    return re.findall(r"\d+", line.split(";")[0])


def fresh(tmp_path, checkpoint, pictures, name="fresh"):
    """A collection that was made with `checkpoint` in the first place."""
    collection = open_or_create(tmp_path / name, checkpoint=checkpoint)
    encoder = Searcher.open(collection, device="cpu", precision="fp32").encoder
    list(ingest(collection, encoder, [ImageSource(path) for path in sorted(pictures.rglob("*")) if path.is_file()]))
    return collection


@pytest.fixture
def collection(own_collection):
    opened = Collection(own_collection)
    yield opened
    opened.close()


def test_the_new_codes_are_those_of_a_collection_made_with_the_new_checkpoint(
    collection, other_checkpoint, pictures, tmp_path
):
    before = [image.labels for image in collection.catalog.page(after=0, limit=99)]
    report = run(collection, other_checkpoint)
    assert (report.total, report.encoded, report.truncated, report.failed, report.switched) == (12, 12, 0, {}, True)
    with (
        closing(Collection(collection.folder)) as again,
        closing(fresh(tmp_path, other_checkpoint, pictures)) as expected,
    ):
        assert (again.n_bits, again.fingerprint) == (36, load_header(other_checkpoint).fingerprint)
        assert codes_by_path(again) == codes_by_path(expected)
        assert again.verify() == []
        assert [image.labels for image in again.catalog.page(after=0, limit=99)] == before
        assert again.catalog.spaces.engines() == expected.catalog.spaces.engines()
        searcher = Searcher.open(again, device="cpu")  # with its own copy of the checkpoint
        answer = searcher.search_files([(pictures / "picture 04.jpg").read_bytes()], SearchOptions(k=1))
        assert answer.hits[0].image.path.endswith("picture 04.jpg")


@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_a_change_that_was_killed_after_the_switch_is_completed_by_the_same_command(
    collection, other_checkpoint, monkeypatch, hashseek, kind
):
    collection.build_index(kind)
    with monkeypatch.context() as patch:
        patch.setattr(Collection, "__init__", lambda *_, **__: 1 / 0)  # what comes after the switch opens it anew
        with pytest.raises(ZeroDivisionError):
            run(collection, other_checkpoint)
    code, out, err = hashseek("index", "reencode", collection.folder, "--checkpoint", other_checkpoint)
    assert (code, "drop-space" in out) == (0, True), err
    with closing(Collection(collection.folder, read_only=True)) as again:
        assert again.fingerprint == load_header(other_checkpoint).fingerprint
        assert (again.kind, again.describe_index()["built"]) == (kind, 12)
        assert again.verify() == []


def test_switching_back_and_dropping_the_new_space(collection, other_checkpoint):
    old, before = collection.catalog.space, codes_by_path(collection)
    new = run(collection, other_checkpoint).space
    with pytest.raises(BadConfig):
        drop_space(collection, new.id)
    assert switch_space(collection, old.id).fingerprint == old.fingerprint
    with closing(Collection(collection.folder)) as again:
        assert codes_by_path(again) == before
        assert again.verify() == []
    drop_space(collection, new.id)
    assert [path.name for path in collection.folder.glob("*.safetensors")] == ["checkpoint.safetensors"]
    for missing in (new.id, 99):
        with pytest.raises(BadConfig):
            switch_space(collection, missing)
        with pytest.raises(BadConfig):
            drop_space(collection, missing)


def test_a_space_without_checkpoint_or_with_missing_codes_cannot_be_used(collection, other_checkpoint, pictures):
    old = collection.catalog.space
    run(collection, other_checkpoint)
    with closing(Collection(collection.folder)) as again:
        encoder = Searcher.open(again, device="cpu").encoder
        draw(50).save(collection.folder.parent / "new.png")
        list(ingest(again, encoder, [ImageSource(collection.folder.parent / "new.png")]))
    with pytest.raises(BadCollection):
        switch_space(collection, old.id)
    (collection.folder / "checkpoint.safetensors").write_bytes(b"torn")
    with pytest.raises(BadCheckpoint):
        switch_space(collection, old.id)


def test_a_damaged_copy_of_the_checkpoint_is_replaced_by_the_intact_one(collection, checkpoint, other_checkpoint):
    run(collection, other_checkpoint)
    copy = collection.folder / "checkpoint.safetensors"
    copy.write_bytes(copy.read_bytes()[:5000])
    with closing(Collection(collection.folder)) as again:
        run(again, checkpoint)
    with closing(Collection(collection.folder)) as again:
        assert load_checkpoint(again.checkpoint).header.n_bits == 48


def test_changes_during_a_reencoding_are_included(collection, other_checkpoint, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 3)
    writer = Collection(collection.folder)
    encoder = Searcher.open(writer, device="cpu").encoder
    for number, _ in enumerate(reencode(collection, other_checkpoint, device="cpu", precision="fp32")):
        if number in (1, 3):
            draw(60 + number).save(tmp_path / f"{number}.png")
            list(ingest(writer, encoder, [ImageSource(tmp_path / f"{number}.png", key="k")]))  # the second replaces it
            writer.remove([number, 13 - number])
    writer.close()
    with closing(Collection(collection.folder)) as again:
        assert again.fingerprint == load_header(other_checkpoint).fingerprint
        assert len(again) == 9
        assert again.verify() == []
        model = Searcher.open(again, device="cpu", precision="fp32")
        _, query = model.encode_file((tmp_path / "3.png").read_bytes())
        assert codes_by_path(again)[str(tmp_path / "3.png")] == query.code.tobytes()


@pytest.mark.parametrize("without_missing", [False, True])
def test_an_image_added_just_before_the_switch_is_encoded(
    collection, other_checkpoint, tmp_path, monkeypatch, without_missing
):
    if without_missing:
        collection.add(new_images(random_codes(np.random.default_rng(0), 1, 48)))  # its file does not exist
    writer = Collection(collection.folder)
    encoder = Searcher.open(writer, device="cpu").encoder
    draw(70).save(tmp_path / "late.png")
    switch = collection.catalog.spaces.switch

    def late(space_id, **options):
        list(ingest(writer, encoder, [ImageSource(tmp_path / "late.png")]))
        return switch(space_id, **options)

    monkeypatch.setattr(collection.catalog.spaces, "switch", late)
    report = run(collection, other_checkpoint, without_missing=without_missing)
    writer.close()
    assert (report.encoded, list(report.failed)) == (13, [13] * without_missing)
    with closing(Collection(collection.folder)) as again:
        assert (len(again), len(again.catalog)) == (13, 13 + without_missing)
        listed = again.browse(None, limit=100)
        assert len(listed.images) == listed.total == 13 + without_missing


def test_images_whose_file_is_gone_or_changed_keep_the_old_codes_in_use(
    collection, other_checkpoint, pictures, tmp_path, hashseek
):
    own = tmp_path / "pictures"
    shutil.copytree(pictures, own)
    with closing(Collection(collection.folder)) as moved, moved.catalog._db.writing() as (db, _):
        db.execute("UPDATE images SET path = replace(path, ?, ?)", (str(pictures), str(own)))
    (own / "picture 00.jpg").rename(own / "hidden")
    draw(99).save(own / "picture 01.jpg")
    (own / "picture 02.png").write_bytes(b"no picture")
    command = ("index", "reencode", collection.folder, "--checkpoint", other_checkpoint, "--device", "cpu")
    code, out, err = hashseek(*command)
    assert code == 1
    assert numbers(out) == ["9", "3"]  # encoded, failed
    assert [err.count(str(own / name)) for name in ("picture 00.jpg", "picture 01.jpg", "picture 02.png")] == [1] * 3
    assert err.count("\n") == 3
    with closing(Collection(collection.folder)) as same:
        assert same.n_bits == 48
    (own / "hidden").rename(own / "picture 00.jpg")
    code, out, err = hashseek(*command, "--drop-old")
    assert (code, numbers(out)) == (1, ["1", "2"])
    code, out, err = hashseek(*command, "--without-missing", "--drop-old")
    assert (code, numbers(out), err.count("\n")) == (0, ["0", "2"], 2)
    with closing(Collection(collection.folder)) as again:
        assert (again.n_bits, len(again)) == (36, 10)
        assert "2 images have no code, so searches do not find them" in again.verify()
        assert len(again.catalog.spaces.all()) == 1
    assert json.loads(hashseek("index", "stats", collection.folder, "--json")[1])["without_code"] == 2
    assert len(list(collection.folder.glob("*.safetensors"))) == 1


def test_a_killed_reencoding_continues(start, hashseek, own_collection, other_checkpoint, monkeypatch):
    slow = (
        "import hashseek.indexing.maintenance.reencode, time; hashseek.indexing.maintenance.reencode.BATCH = 2\n"
        "from hashseek.indexing.catalog.spaces import CodeSpaces; original = CodeSpaces.add_codes\n"
        "batches = iter([0, 600])\n"
        "CodeSpaces.add_codes = lambda *a, **k: (original(*a, **k), time.sleep(next(batches)))[0]"
    )
    command = ("index", "reencode", own_collection, "--checkpoint", other_checkpoint, "--device", "cpu")
    process = start(*command, before=slow)

    def n_done():
        with closing(Collection(own_collection, read_only=True)) as looking:
            spaces = looking.catalog.spaces.all()
            return 12 - looking.catalog.spaces.n_missing(spaces[1].id) if len(spaces) > 1 else 0

    wait_until(lambda: n_done() == 4)
    second = hashseek(*command)
    assert (second[0], str(own_collection) in second[2]) == (2, True)
    process.send(signal.SIGKILL)
    process.wait()
    with closing(Collection(own_collection, read_only=True)) as looking:
        assert looking.n_bits == 48
        assert looking.verify() == []
    code, out, _ = hashseek(*command)
    assert (code, out.split(";")[0]) == (0, "encoded 8")
    with closing(Collection(own_collection, read_only=True)) as again:
        assert (again.n_bits, again.verify()) == (36, [])
        assert len(again.catalog.spaces.all()) == 2


# ---------------------------------------------------------------- nested checkpoints


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """A checkpoint of 40 bits that is also one of 12 and of 17, and those two."""
    folder = tmp_path_factory.mktemp("nested")
    first = load_checkpoint(tiny_checkpoint(folder / "plain.safetensors", n_bits=40, seed=5))
    training = {"loss": {"name": "hyp2", "nested": {"lengths": [12, 17, 40]}}}
    save_checkpoint(folder / "40.safetensors", first.model, PREPROCESSING, label_names=("a",), training=training)
    whole = load_checkpoint(folder / "40.safetensors")
    for n_bits in (12, 17):
        short = truncate(whole, n_bits)
        save_checkpoint(
            folder / f"{n_bits}.safetensors",
            short.model,
            PREPROCESSING,
            label_names=("a",),
            training=short.header.training,
        )
    return folder


def test_a_truncation_cuts_the_codes_and_reads_no_image(nested, pictures, tmp_path, monkeypatch):
    with closing(fresh(tmp_path, nested / "40.safetensors", pictures)) as collection:
        long = codes_by_path(collection)
        monkeypatch.setattr(module, "open_uri", None)
        for n_bits in (17, 12):  # the second from the first, or from the whole
            report = run(collection, nested / f"{n_bits}.safetensors")
            assert (report.truncated, report.encoded, report.switched) == (N_PICTURES, 0, True)
            with closing(Collection(collection.folder)) as short:
                assert short.n_bits == n_bits
                assert short.verify() == []
                bits = {path: unpack(np.frombuffer(code, np.uint8)[None], 40)[0] for path, code in long.items()}
                assert codes_by_path(short) == {
                    path: pack(row[None, :n_bits] - 0.5)[0].tobytes() for path, row in bits.items()
                }
                assert list(short.catalog.spaces.engines()) == list(collection.catalog.spaces.engines())


def test_a_checkpoint_that_only_looks_like_a_truncation_is_encoded(nested, pictures, tmp_path):
    with closing(fresh(tmp_path, nested / "40.safetensors", pictures)) as collection:
        torch.manual_seed(0)
        save_checkpoint(
            tmp_path / "x.safetensors",
            HashModel(backbone="squeezenet1_1", n_bits=12).eval(),
            PREPROCESSING,
            label_names=("a",),
        )
        report = run(collection, tmp_path / "x.safetensors")
        assert (report.truncated, report.encoded) == (0, N_PICTURES)
    with closing(Collection(tmp_path / "fresh")) as switched:  # an image that was added since has no longer code
        sql(switched.catalog.path, "DELETE FROM codes WHERE image_id = 3 AND space_id = 1")
        report = run(switched, nested / "12.safetensors")
        assert (report.truncated, report.encoded) == (N_PICTURES - 1, 1)


# ---------------------------------------------------------------- refusals


def test_an_old_checkpoint_that_cannot_be_loaded_here_is_no_obstacle(checkpoint, other_checkpoint, tmp_path):
    model = load_checkpoint(checkpoint).model
    model.backbone_name = "gone"  # such as one of a package that is not installed here
    save_checkpoint(tmp_path / "old.safetensors", model, PREPROCESSING, label_names=())
    with closing(open_or_create(tmp_path / "c", checkpoint=tmp_path / "old.safetensors")) as collection:
        assert run(collection, other_checkpoint).switched


def test_refusals(collection, checkpoint, other_checkpoint, tmp_path):
    with pytest.raises(BadCheckpoint):
        run(collection, tmp_path / "none.safetensors")
    whole = other_checkpoint.read_bytes()
    for torn in (b"torn", whole[:-1] + bytes([whole[-1] ^ 1])):
        (tmp_path / "torn.safetensors").write_bytes(torn)
        with pytest.raises(BadCheckpoint):
            run(collection, tmp_path / "torn.safetensors")
    with pytest.raises(BadConfig):
        list(reencode(collection, other_checkpoint, engine="steam"))
    assert len(collection.catalog.spaces.all()) == 1
    assert [path.name for path in collection.folder.glob("*.safetensors")] == ["checkpoint.safetensors"]


def test_an_image_without_a_code_gets_one_when_its_content_is_added_again(
    collection, other_checkpoint, pictures, tmp_path
):
    content = Path(collection.catalog.one(1).path).read_bytes()
    for path in (tmp_path / "kept.jpg", tmp_path / "found.jpg"):
        path.write_bytes(content)
    with collection.catalog._db.writing() as (db, _):
        db.execute("UPDATE images SET path = '/nowhere.jpg' WHERE id = 1")
        db.execute("UPDATE images SET path = '/gone.jpg', key = 'mine' WHERE id = 2")
    second = Path(pictures / "picture 01.jpg")
    assert run(collection, other_checkpoint, without_missing=True).switched
    with closing(Collection(collection.folder)) as again:
        assert len(again) == 10
        encoder = Searcher.open(again, device="cpu", precision="fp32").encoder
        sources = [ImageSource(tmp_path / "found.jpg"), ImageSource(second, key="mine")]
        *_, report = ingest(again, encoder, sources)
        assert (report.added, report.updated, report.known) == (0, 2, 0)  # both follow their content
        assert len(again) == 12
        assert again.search(again.catalog.code_of(1).code[None], k=1)[0][1].tolist() == [1]
        assert not any("no code" in problem for problem in again.verify())


def test_the_commands(own_collection, other_checkpoint, hashseek):
    code, out, err = hashseek("index", "reencode", own_collection, "--checkpoint", other_checkpoint, "--device", "cpu")
    assert (code, "Traceback" in err) == (0, False)
    assert out.startswith("encoded 12;")
    assert f"`hashseek index drop-space {own_collection} 1`" in out
    content = json.loads(hashseek("index", "stats", own_collection, "--json")[1])
    assert content["bits"] == 36
    assert [line.partition(" ")[2] for line in content["spaces"].values()] == ["(48 bits, ready)", "(36 bits, in use)"]
    assert hashseek("index", "switch", own_collection, 1)[0] == 0
    assert hashseek("index", "drop-space", own_collection, 2)[0] == 0
    code, _, err = hashseek("index", "drop-space", own_collection, 1)
    assert (code, err.count("\n")) == (2, 1)
