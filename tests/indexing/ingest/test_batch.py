"""Indexing in batches: nothing lost, nothing stored twice, every bad file named; also after kill -9."""

import hashlib
import os
import shutil
import signal
from contextlib import closing
from dataclasses import replace

import pytest

from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.ingest import batch as module
from hashseek.indexing.ingest import loading
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.ingest.sources import find_sources
from hashseek.indexing.searcher import Searcher
from hashseek.indexing.uris import open_uri
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.tar_members import find_member
from support.collections import outcome
from support.dataset_files import write_tar
from support.pictures import N_PICTURES, draw, png, save


@pytest.fixture
def opened(tmp_path, checkpoint):
    """An empty collection and its encoder."""
    collection = open_or_create(tmp_path / "collection", checkpoint=checkpoint)
    yield collection, Searcher.open(collection, device="cpu").encoder
    collection.close()


def run(opened, sources, **options):
    """The last report, with the problems of all."""
    reports = list(ingest(*opened, sources, **options))
    return replace(reports[-1], problems=[problem for report in reports for problem in report.problems])


@pytest.mark.parametrize("limit", [("BATCH", 5), ("_MAX_PIXEL_BYTES", 5 * 3 * 64 * 64)])
def test_every_batch_is_stored_when_it_is_reported(limit, opened, pictures, monkeypatch):
    monkeypatch.setattr(module, *limit)
    reported = []
    for report in ingest(*opened, find_sources([pictures])):
        beside = Collection(opened[0].folder, read_only=True)
        assert len(beside) == report.added
        beside.close()
        reported.append(report.added)
    assert reported == [5, 10, 12]
    again = run(opened, find_sources([pictures]))
    assert (again.added, again.known, again.problems) == (0, 12, [])
    assert opened[0].verify() == []


def test_good_files_are_added_and_each_bad_file_is_named_once(opened, tmp_path):
    folder = tmp_path / "mixed"
    good = [save(folder / f"{seed}.png", seed) for seed in range(3)]
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("text")
    (folder / "cut.jpg").write_bytes(save(tmp_path / "x.jpg", 9).read_bytes()[:900])
    (folder / "gone.jpg").symlink_to(tmp_path / "nothing")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe.gif")
    (folder / "notes.txt").write_text("not looked at")
    (folder / ".hidden.jpg").write_text("not looked at")
    report = run(opened, find_sources([folder]))
    assert outcome(report) == (3, 0, 0, 6)
    assert sorted(image.path for image in opened[0].catalog.page(after=0, limit=99)) == sorted(map(str, good))
    bad = ["cut.jpg", "empty.jpg", "gone.jpg", "loop.png", "pipe.gif", "text.jpg"]
    assert sorted(problem.uri for problem in report.problems) == [f"{folder}/{name}" for name in bad]
    assert not any(problem.reason.startswith(str(folder)) for problem in report.problems)  # the name comes once


def test_on_error_stop_names_the_first_bad_file_and_keeps_earlier_batches(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 2)
    sources = [ImageSource(save(tmp_path / "many" / f"{seed}.png", seed)) for seed in range(4)]
    (tmp_path / "bad.png").write_bytes(b"x")
    sources.insert(3, ImageSource(tmp_path / "bad.png"))
    with pytest.raises(BadImage, match=r"bad\.png"):
        run(opened, sources, on_error="stop")
    assert len(opened[0]) == 2


def test_the_same_content_is_stored_once_and_other_labels_are_noted(opened, tmp_path):
    first, second = save(tmp_path / "a.png"), tmp_path / "copy.png"
    shutil.copy(first, second)
    labelled = [ImageSource(first, ("cat",)), ImageSource(second, ("dog",)), ImageSource(first, ("cat",))]
    report = run(opened, [*labelled, ImageSource(second)])
    assert outcome(report) == (1, 0, 3, 0)
    assert [(problem.where, problem.skipped) for problem in report.problems] == [(str(second), False)]
    report = run(opened, [ImageSource(second, ("dog",), "labels.csv line 7")])
    assert outcome(report) == (0, 0, 1, 0)
    assert [problem.where for problem in report.problems] == ["labels.csv line 7"]
    assert opened[0].catalog.one(1).labels == ("cat",)
    described = [ImageSource(first, attributes={"year": 2015}), ImageSource(first, ("cat",), attributes={"year": 1})]
    report = run(opened, described)
    assert [(problem.where, problem.skipped) for problem in report.problems] == [(str(first), False)] * 2
    # The note's remedy.
    assert outcome(run(opened, [replace(described[0], key="k")])) == (0, 1, 0, 0)
    assert opened[0].catalog.one(1).attributes == {"year": 2015}
    assert run(opened, described[:1]).problems == []
    second.rename(tmp_path / "moved.png")
    first.unlink()
    report = run(opened, [ImageSource(tmp_path / "moved.png", ("dog",))])
    assert (outcome(report), len(report.problems)) == ((0, 1, 0, 0), 1)


def test_names_with_anything_in_them(opened, tmp_path):
    folder = tmp_path / "names"
    names = ["a b.png", "ümläut 日本.png", "new\nline.png", "quote'\".png", "-k.png", "%20#?.png", " lead.png", "B.PNG"]
    for seed, name in enumerate(names):
        save(folder / name, seed, format="PNG")
    with open(os.fsencode(folder) + b"/not utf-8 \xff.png", "wb") as file:  # noqa: PTH123
        draw(99).save(file, "PNG")
    (folder / "labels in it.jsonl").write_text('{"file": "-k.png", "labels": ["\\ud800"]}\n')
    report = run(opened, find_sources([folder, folder / "labels in it.jsonl"]))
    assert report.added == len(names)
    assert {image.path for image in opened[0].catalog.page(after=0, limit=99)} == {str(folder / name) for name in names}
    assert [problem.where for problem in report.problems] == [
        f"{folder}/not utf-8 \udcff.png",
        "labels in it.jsonl line 1",
    ]


class Counting:
    """An encoder that counts the images that it encodes."""

    def __init__(self, encoder):
        self.n, self._encoder = 0, encoder

    def __getattr__(self, name):
        return getattr(self._encoder, name)

    def features_and_outputs(self, pixels):
        self.n += len(pixels)
        return self._encoder.features_and_outputs(pixels)


def test_no_content_is_encoded_twice_whatever_its_keys(opened, tmp_path):
    collection, encoder = opened[0], Counting(opened[1])
    first, second = save(tmp_path / "a.png", 1), save(tmp_path / "b.png", 2)
    same = [ImageSource(first, key=f"key {number}") for number in range(40)] + [
        ImageSource(second),
        ImageSource(second),
    ]
    assert outcome(run((collection, encoder), same)) == (41, 0, 1, 0)
    assert encoder.n == 2
    assert outcome(run((collection, encoder), [ImageSource(first, key="another"), *same])) == (1, 0, 42, 0)
    assert encoder.n == 2
    assert len({collection.catalog.code_of(i).code.tobytes() for i in range(1, 41)}) == 1
    assert collection.catalog.by_key("another").width == 96
    assert collection.catalog.spaces.engines() == {encoder.engine: 42}
    assert collection.verify() == []


def test_other_content_labels_or_attributes_under_a_key_update_its_record(opened, tmp_path):
    path = save(tmp_path / "a.png", 1)
    assert outcome(run(opened, [ImageSource(path, ("x",), key="k", attributes={"year": 1})])) == (1, 0, 0, 0)
    before = opened[0].catalog.code_of(1).code
    assert outcome(run(opened, [ImageSource(path, ("y",), key="k")])) == (0, 1, 0, 0)
    save(path, 2)
    assert outcome(run(opened, [ImageSource(path, key="k")])) == (0, 1, 0, 0)
    assert outcome(run(opened, [ImageSource(path, key="k")])) == (0, 0, 1, 0)
    record = opened[0].catalog.by_key("k")
    assert (record.id, record.labels, record.attributes) == (1, ("y",), {"year": 1})
    assert opened[0].catalog.code_of(1).code.tobytes() != before.tobytes()


@pytest.mark.parametrize("key", [None, "k"])
def test_the_record_of_a_file_that_was_edited_is_noted(opened, tmp_path, key):
    path, other = save(tmp_path / "a.png", 1), save(tmp_path / "b.png", 2)
    run(opened, [ImageSource(path), ImageSource(other, key="other")])
    save(path, 3)
    edited = [ImageSource(path, key=key), ImageSource(other, key="another")]
    report = run(opened, edited)
    assert outcome(report) == (2, 0, 0, 0)
    [note] = report.problems
    assert (note.where, note.skipped, "image 1 " in note.reason) == (str(path), False, True)
    assert run(opened, edited).problems == []


def test_records_follow_a_series_that_was_renumbered(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 2)  # a record follows in a later batch than the one that takes its path
    paths = [tmp_path / f"{number}.png" for number in range(8)]
    run(opened, [ImageSource(save(path, number)) for number, path in enumerate(paths[:5])])
    for number in (4, 3, 2, 1, 0):
        paths[number].rename(paths[number + 3])
    for number in (0, 1, 2):
        save(paths[number], 10 + number)
    report = run(opened, map(ImageSource, paths))
    assert (outcome(report), report.problems) == ((3, 5, 0, 0), [])
    for record in opened[0].catalog.page(after=0, limit=9):
        assert hashlib.sha256(open_uri(record.path)).hexdigest() == record.sha256
    assert outcome(run(opened, map(ImageSource, paths))) == (0, 0, 8, 0)


def test_a_second_key_for_one_file_is_not_taken_for_other_content(opened, tmp_path):
    path = save(tmp_path / "a.png")
    run(opened, [ImageSource(path)])
    report = run(opened, [ImageSource(path, key="shirt"), ImageSource(path, key="shirt in red")])
    assert (outcome(report), report.problems) == ((1, 1, 0, 0), [])


def test_a_modification_time_too_late_for_the_catalog(opened, tmp_path):
    path = save(tmp_path / "a.png")
    os.utime(path, ns=(0, 2**63 + 10**9))
    assert outcome(run(opened, [ImageSource(path)])) == (1, 0, 0, 0)
    assert outcome(run(opened, [ImageSource(path)], trust_mtime=True)) == (0, 0, 1, 0)


def test_a_key_given_later_goes_to_the_record_of_the_same_file_and_content(opened, tmp_path):
    paths = [save(tmp_path / "many" / f"{seed}.png", seed) for seed in range(3)]
    first = [ImageSource(path, ("x",), attributes={"year": 1}) for path in paths]
    run(opened, first)
    copy = tmp_path / "copy.png"
    shutil.copy(paths[1], copy)
    save(paths[2], 9)
    keyed = [ImageSource(paths[0], ("y",), key="0"), ImageSource(copy, key="copy"), ImageSource(paths[2], key="2")]
    report = run(opened, keyed)
    assert (outcome(report), [note.where for note in report.problems]) == ((2, 1, 0, 0), [str(paths[2])])
    assert outcome(run(opened, [ImageSource(paths[1], key="1")])) == (0, 1, 0, 0)
    assert outcome(run(opened, [*keyed, ImageSource(paths[1], key="1")])) == (0, 0, 4, 0)
    records = opened[0].catalog.page(after=0, limit=9)
    assert [(one.key, one.labels) for one in records] == [
        ("0", ("y",)),
        ("1", ("x",)),
        (None, ("x",)),
        ("copy", ()),
        ("2", ()),
    ]
    assert [one.attributes for one in records] == [{"year": 1}] * 3 + [{}] * 2
    assert outcome(run(opened, [ImageSource(paths[1], key="another")])) == (1, 0, 0, 0)  # there is one already
    assert opened[0].verify() == []


def test_a_key_for_a_file_that_the_same_run_added_without_one_is_no_second_use(opened, tmp_path):
    path = save(tmp_path / "a.png")
    both = [ImageSource(path), ImageSource(path, key="k"), ImageSource(path, ("x",), key="k", where="line 3")]
    report = run(opened, both)
    assert outcome(report) == (1, 2, 0, 0)
    assert [problem.where for problem in report.problems] == ["line 3"]


def test_every_run_notes_that_two_files_have_one_key(opened, tmp_path):
    first, second = (ImageSource(save(tmp_path / f"{n}.png", n), key="k") for n in range(2))
    assert run(opened, [first]).problems == []
    for expected in ((0, 1, 1, 0), (0, 2, 0, 0)):  # known at first
        report = run(opened, [first, second])
        assert (outcome(report), [note.where for note in report.problems]) == (expected, [str(second.uri)])


def test_a_file_that_changes_while_it_is_read_is_left_out(opened, tmp_path, monkeypatch):
    path, other = save(tmp_path / "a.png", 1), save(tmp_path / "b.png", 2)
    read = loading.open_uri

    def read_while_it_is_written(uri):
        data = read(uri)
        if uri == str(path):
            path.write_bytes(data + b"more")
        return data

    monkeypatch.setattr(loading, "open_uri", read_while_it_is_written)
    report = run(opened, [ImageSource(path), ImageSource(other)])
    assert outcome(report) == (1, 0, 0, 1)
    [problem] = report.problems
    assert problem.uri == str(path)


def test_with_trusted_times_only_changed_files_are_read(opened, tmp_path, monkeypatch):
    paths = [save(tmp_path / "many" / f"{seed}\n.png", seed) for seed in range(6)]
    sources = [ImageSource(path, ("x",), key=path.name) for path in paths]
    run(opened, sources)
    was_read = []
    read = loading.open_uri
    monkeypatch.setattr(loading, "open_uri", lambda uri: was_read.append(uri) or read(uri))
    assert outcome(run(opened, sources, trust_mtime=True)) == (0, 0, 6, 0)
    assert was_read == []
    save(paths[2], 99)
    os.utime(paths[3])
    paths[4].unlink()
    sources[5] = replace(sources[5], labels=("other",))  # its record does not say that yet
    assert outcome(run(opened, sources, trust_mtime=True)) == (0, 2, 3, 1)
    assert sorted(was_read) == [str(path) for path in paths[2:]]  # by several threads
    was_read.clear()
    # The new time of the touched file was stored.
    assert outcome(run(opened, sources, trust_mtime=True)) == (0, 0, 5, 1)
    assert was_read == [str(paths[4])]


def test_images_in_a_tar_are_stored_and_found_again(opened, tmp_path, monkeypatch):
    write_tar(tmp_path / "a.tar", {f"x/{seed}.png": png(seed) for seed in range(6)})
    sources = list(find_sources([tmp_path / "a.tar"]))
    assert outcome(run(opened, sources, trust_mtime=True)) == (6, 0, 0, 0)
    with monkeypatch.context() as patched:
        patched.delattr(loading, "open_uri")  # nothing is read
        assert outcome(run(opened, sources, trust_mtime=True)) == (0, 0, 6, 0)
    os.utime(tmp_path / "a.tar")
    assert outcome(run(opened, sources, trust_mtime=True)) == (0, 0, 6, 0)
    for record in opened[0].catalog.page(after=0, limit=10):
        assert hashlib.sha256(open_uri(record.path)).hexdigest() == record.sha256
    assert opened[0].verify() == []
    os.truncate(tmp_path / "a.tar", find_member(sources[3].uri).offset + 50)
    assert outcome(run(opened, find_sources([tmp_path / "a.tar"])))[:3] == (0, 0, 3)


# ---------------------------------------------------------------- processes

FAULT = """
import os, signal
from contextlib import contextmanager
import hashseek.indexing.ingest.batch, hashseek.indexing.catalog, hashseek.indexing.collection
import hashseek.indexing.catalog.storing, hashseek.retrieval.files
hashseek.indexing.ingest.batch.BATCH = 4
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def patch(owner, name, wrapper):
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: wrapper(original, *a, **k))
def after(original, *a, **k): original(*a, **k); die()
calls = []
def at_image_7(original, *a):
    calls.append(1)
    return original(*a) if len(calls) < 7 else die()
def after_batch_2(original, self, images):
    calls.append(1)
    outcome = original(self, images)
    return outcome if len(calls) < 2 else die()
"""

# when the process is killed -> how many images it has stored by then
MOMENTS = {
    "the checkpoint is half copied": ("hashseek.retrieval.files.os.fsync = die", None),
    "the checkpoint is copied and no catalog begun": ("hashseek.indexing.collection.create_catalog = die", None),
    "the catalog is written and not yet in its place": (
        "patch(hashseek.indexing.collection, 'create_catalog', after)",
        None,
    ),
    "the collection was created": ("patch(hashseek.indexing.collection, '_create', after)", 0),
    "the second batch is half stored": ("patch(hashseek.indexing.catalog.storing.Storing, 'store', at_image_7)", 4),
    "the second batch is stored and not reported": (
        "patch(hashseek.indexing.catalog.Catalog, 'add', after_batch_2)",
        8,
    ),
    "all is stored and the index half written": ("patch(hashseek.indexing.index.index_files, 'save_index', after)", 12),
    "all is written": ("patch(hashseek.indexing.index.collection_index.CollectionIndex, 'save', after)", 12),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_when(moment, hashseek, tmp_path, pictures, checkpoint):
    fault, n_stored = MOMENTS[moment]
    folder = tmp_path / "collection"
    command = ("index", "add", folder, pictures, "--checkpoint", checkpoint, "--device", "cpu")
    code, _, err = hashseek(*command, before=FAULT + fault)
    assert code == -signal.SIGKILL, err
    if n_stored is not None:
        check_complete(folder, n_stored)
    code, out, err = hashseek(*command)
    assert (code, "Traceback" in err) == (0, False), err
    assert out.startswith(f"added {12 - (n_stored or 0)}, already stored {n_stored or 0}, skipped 0;")
    check_complete(folder)


def check_complete(folder, n=N_PICTURES):
    """There are n images, each once, and all parts of the collection agree."""
    with closing(Collection(folder, read_only=True)) as collection:
        images = collection.catalog.page(after=0, limit=1000)
        assert len({image.sha256 for image in images}) == len({image.path for image in images}) == len(images) == n
        assert len(collection) == n
        assert collection.verify() == []


def test_of_several_processes_with_two_checkpoints_one_creates_the_collection(
    start, tmp_path, pictures, checkpoint, other_checkpoint
):
    command = ("index", "add", tmp_path / "collection", pictures, "--device", "cpu", "--checkpoint")
    small = "import hashseek.indexing.ingest.batch; hashseek.indexing.ingest.batch.BATCH = 2"
    processes = [start(*command, file, before=small) for file in (checkpoint, other_checkpoint) * 2]
    done = [process for process in processes if process.wait() == 0]
    refused = [process for process in processes if process.wait() == 2]
    assert (len(done), len(refused)) == (2, 2), [process.err for process in processes]
    assert sum(int(process.out.split()[1].rstrip(",")) for process in done) == N_PICTURES
    fingerprints = [load_header(file).fingerprint[:12] for file in (checkpoint, other_checkpoint)]
    assert all(name in process.err for process in refused for name in fingerprints)
    check_complete(tmp_path / "collection")
