"""Runs drawn at random: a dry run says what the run does, and trusted times lead to what reading everything does."""

import hashlib
import os
import random
import sqlite3
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hashseek.indexing.catalog import DiskFull, create_catalog
from hashseek.indexing.catalog.database import CatalogLocked
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.ingest import batch as module
from hashseek.indexing.ingest import loading
from hashseek.indexing.ingest.batch import Report, Source, ingest, preview
from hashseek.indexing.ingest.dry_run import Rehearsal
from hashseek.indexing.ingest.sources import describe, find_sources
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.label_files import Problem
from support.models import PREPROCESSING

N_BITS = 16


class Stub:
    """An encoder of what `decode` makes of a file."""

    engine, batch_size, preprocessing = "stub", 1, PREPROCESSING

    def decoding(self):
        return nullcontext()

    def encode_pixels(self, pixels):
        return pixels[:, 0, 0]


def decode(data, preprocessing, *, name):
    """Any bytes are a picture, but for bad ones."""
    if data.startswith(b"bad"):
        raise BadImage(f"{name} is bad")
    pixels = np.frombuffer(hashlib.sha256(data).digest(), np.uint8)[: N_BITS // 8]
    return SimpleNamespace(width=1, height=1, media_type="image/png"), pixels[None, None]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """What is done together is little, so that there is much before and after it."""
    monkeypatch.setattr(loading, "decode_for", decode)
    monkeypatch.setattr(loading, "_LOOKED_UP", 4)
    monkeypatch.setattr(loading, "_DOWNLOADS", 1)
    monkeypatch.setattr(module, "BATCH", 3)


@pytest.fixture
def make(tmp_path):
    """Makes collections, and closes them in the end."""
    made = []

    def one(name):
        folder = tmp_path / name
        folder.mkdir()
        create_catalog(folder / CATALOG, fingerprint="f" * 64, n_bits=N_BITS)
        made.append(Collection(folder))
        return made[-1]

    yield one
    for collection in made:
        collection.close()


def summed(reports):
    """The last report with all problems, or the sentence of a refusal."""
    report, problems = Report(), []
    try:
        for report in reports:
            problems += report.problems
    except BadImage as error:
        return str(error)
    return replace(report, problems=problems)


def run(collection, sources, **options):
    return summed(ingest(collection, Stub(), sources, **options))


def rehearse(collection, sources, **options):
    return summed(preview(None if collection is None else collection.catalog, PREPROCESSING, sources, **options))


def without_notes(report):
    if isinstance(report, str):
        return report
    return replace(report, problems=[problem for problem in report.problems if problem.skipped])


def outcome(report):
    return report.added, report.updated, report.known, report.skipped


def holds(collection):
    """What the collection says of its images, but for times."""
    records = collection.catalog.page(after=0, limit=1000)
    return [
        (r.id, r.key, r.path, r.sha256, r.labels, r.attributes, collection.catalog.code(r.id).tobytes())
        for r in records
    ]


class World:
    """Some files whose contents change now and then, and sources that name them in every way."""

    def __init__(self, folder, seed):
        self.draw = random.Random(seed)
        folder.mkdir()
        self._paths = [folder / name for name in ("a", "b", "c", "d")]
        self._time = 10**18
        for path in self._paths:
            self._write(path)

    def change(self):
        for path in self._paths:
            if self.draw.random() < 0.25:
                self._write(path)

    def sources(self):
        return [self._source() for _ in range(self.draw.randrange(1, 20))]

    def _write(self, path):
        path.write_bytes(self.draw.choice((b"one", b"two", b"three", b"four", b"five", b"bad one")))
        self._time += 10**9
        os.utime(path, ns=(self._time, self._time))

    def _source(self):
        pick = self.draw.choice
        if self.draw.random() < 0.02:
            return Problem("list line 7", "torn")
        return Source(
            pick(self._paths),
            pick(((), (), ("x",), ("y",), ("y", "x"))),
            key=pick((None, None, "k", "l", "m")),
            attributes=pick(({}, {}, {"n": 1}, {"n": 1.0}, {"n": True}, {"m": "x"})),
        )


def forget_one(world, *collections):
    """Remove an image now and then; its id is not given again."""
    ids = [record.id for record in collections[0].catalog.page(after=0, limit=1000)]
    if ids and world.draw.random() < 0.2:
        gone = world.draw.choice(ids)
        for collection in collections:
            collection.remove([gone])


@pytest.mark.parametrize("seed", range(6))
def test_a_dry_run_says_exactly_what_the_run_does(make, tmp_path, seed):
    world = World(tmp_path / "files", seed)
    collection = make("collection")
    for number in range(60):
        sources = world.sources()
        options = {"on_error": world.draw.choice(("skip", "skip", "stop")), "trust_mtime": world.draw.random() < 0.3}
        before = holds(collection), collection.catalog.generation()
        said = rehearse(collection, sources, **options)
        assert (holds(collection), collection.catalog.generation()) == before
        done = run(collection, sources, **options)
        if options["trust_mtime"]:  # a file that is not read has no note on where else its content is
            said, done = without_notes(said), without_notes(done)
        assert said == done, (number, sources)
        world.change()
        forget_one(world, collection)


@pytest.mark.parametrize("seed", range(6))
def test_trusted_times_end_in_what_reading_everything_ends_in(make, tmp_path, seed):
    world = World(tmp_path / "files", seed)
    reading, trusting = make("reading"), make("trusting")
    n_trusted = 0
    for number in range(40):
        sources = world.sources()
        done = run(trusting, sources, trust_mtime=True)
        assert without_notes(done) == without_notes(run(reading, sources)), (number, sources)
        assert holds(trusting) == holds(reading), (number, sources)
        steps = loading.load_sources(
            sources, catalog=trusting.catalog, preprocessing=PREPROCESSING, depth=1, trust_mtime=True
        )
        n_trusted += sum(isinstance(step, loading.Loaded) and step.trusted is not None for step, _ in steps)
        world.change()
        forget_one(world, trusting, reading)
    assert n_trusted > 20


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_dry_runs_of_what_meets_itself(make, tmp_path):
    first, same, other = (write(tmp_path / name, name[:1].encode()) for name in ("a1", "a2", "b"))
    stored = [Source(first, ("x",), key="k")]
    cases = [
        ([], [Source(first, key="1"), Source(same, key="1")], (1, 1, 0, 0)),
        ([], [Source(first, ("x",), key="k"), Source(first, ("y",), key="k")], (1, 1, 0, 0)),
        ([], [Source(first, key="k", attributes={"y": 1}), Source(first, key="k", attributes={"y": 2})], (1, 1, 0, 0)),
        ([], [Source(first, key="k"), Source(same)], (1, 0, 1, 0)),
        (stored, [Source(other, key="k"), Source(first)], (1, 1, 0, 0)),
        (stored, [Source(first, key="k"), Source(first, ("y",), key="k")], (0, 1, 1, 0)),
        (stored, [Source(same, ("y",))], (0, 0, 1, 0)),
    ]
    for number, (before, sources, expected) in enumerate(cases):
        collection = make(f"collection {number}")
        run(collection, before)
        said = rehearse(collection, sources)
        assert outcome(said) == expected, number
        assert said == run(collection, sources), number
    assert str(said.problems[0]) == f"{same}: its content is stored as image 1 with other labels, which were kept"


def test_a_dry_run_knows_the_files_that_the_collection_keeps(make, tmp_path):
    collection, path = make("collection"), write(tmp_path / "a", b"one")
    [step] = loading.load_sources([Source(path, key="k")], catalog=None, preprocessing=PREPROCESSING, depth=1)
    image = replace(step[0].image, code=np.zeros(N_BITS // 8, np.uint8))
    collection.add_with_file(image, b"one", suffix=".png")
    own = Source(collection.file_of(collection.catalog.one(1)), key="k")
    assert outcome(rehearse(collection, [own])) == outcome(run(collection, [own])) == (0, 0, 1, 0)


def test_a_kept_file_that_the_run_replaces_may_be_named_later_in_it(make, tmp_path):
    collection, other, named = make("collection"), write(tmp_path / "other", b"two"), write(tmp_path / "named", b"one")
    [step] = loading.load_sources([Source(named, key="a")], catalog=None, preprocessing=PREPROCESSING, depth=1)
    image = replace(step[0].image, code=np.zeros(N_BITS // 8, np.uint8))
    collection.add_with_file(image, b"one", suffix=".png")
    kept = collection.file_of(collection.catalog.one(1))
    between = [Source(write(tmp_path / str(number), f"{number}".encode())) for number in range(5)]  # other batches
    sources = [Source(other, key="a"), *between, Source(kept, key="b"), Source(named, key="b")]
    assert outcome(rehearse(collection, sources)) == outcome(run(collection, sources)) == (6, 1, 1, 0)
    assert collection.file_of(collection.catalog.by_key("b")) == kept
    assert kept.read_bytes() == b"one"
    assert outcome(run(collection, [Source(other, key="b")])) == (0, 1, 0, 0)
    assert not kept.exists()  # at the end of the run


def test_a_run_ends_with_its_own_reason_though_replaced_files_cannot_be_deleted(make, tmp_path, monkeypatch, caplog):
    collection, bad = make("collection"), write(tmp_path / "bad", b"bad")

    def locked(_):
        raise CatalogLocked("another process is writing")

    monkeypatch.setattr(collection, "drop_files", locked)
    with pytest.raises(BadImage, match="is bad"):
        list(ingest(collection, Stub(), [Source(bad)], on_error="stop"))
    assert "were not deleted (`hashseek index optimize` will): another process is writing" in caplog.text


def test_an_image_without_a_code_is_known_to_a_dry_run_and_read_in_spite_of_its_time(make, tmp_path):
    collection, path = make("collection"), write(tmp_path / "a", b"one")
    run(collection, [Source(path)])
    with sqlite3.connect(collection.catalog.path) as db:
        db.execute("DELETE FROM codes")
    db.close()
    assert outcome(rehearse(collection, [Source(path)])) == (0, 0, 1, 0)
    [(step, pixels)] = loading.load_sources(
        [Source(path)], catalog=collection.catalog, preprocessing=PREPROCESSING, depth=1, trust_mtime=True
    )
    assert (step.trusted, pixels is not None) == (None, True)


def test_a_dry_run_bears_what_others_store_meanwhile(make, tmp_path):
    collection, path, other = make("collection"), write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    more = [Source(write(tmp_path / f"{number}", b"%d" % number)) for number in range(3)]
    reports = preview(collection.catalog, PREPROCESSING, [*more, Source(path, key="k"), Source(other)])
    next(reports)
    # Under ids that the dry run has given, and beyond.
    run(collection, [Source(other), *(Source(path, key=f"key {n}") for n in range(4)), Source(path, key="k")])
    assert outcome(list(reports)[-1]) == (5, 0, 0, 0)


def test_a_dry_run_without_room_is_one_sentence(make, tmp_path):
    rehearsal = Rehearsal(make("collection").catalog)
    rehearsal._db.execute("PRAGMA max_page_count = 1")
    paths = (write(tmp_path / f"{number}", b"%d" % number) for number in range(900))
    steps = loading.load_sources(map(Source, paths), catalog=None, preprocessing=PREPROCESSING, depth=1)
    with pytest.raises(DiskFull, match=r"the temporary database of the dry run answered .*full.*SQLITE_TMPDIR"):
        rehearsal.add([step.image for step, _ in steps])
    rehearsal.close()


def test_of_two_files_with_one_name_the_last_stays_though_times_are_trusted(make, tmp_path):
    write(tmp_path / "files" / "1.png", b"one")
    last = write(tmp_path / "files" / "deeper" / "1.png", b"two")
    collection = make("collection")
    for _ in range(4):
        found = describe(find_sources([tmp_path / "files"]), key_from="name")
        run(collection, found, trust_mtime=True)
        assert [record[1:4] for record in holds(collection)] == [
            ("1.png", str(last), hashlib.sha256(b"two").hexdigest())
        ]


@pytest.mark.parametrize("n_between", [0, 2, 9])
def test_a_file_whose_record_the_run_itself_takes_is_read_in_spite_of_its_time(make, tmp_path, n_between):
    collection, first, other = make("collection"), write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    run(collection, [Source(first, key="k")])
    between = [Source(write(tmp_path / f"{number}", b"%d" % number)) for number in range(n_between)]
    report = run(collection, [Source(other, key="k"), *between, Source(first)], trust_mtime=True)
    assert outcome(report) == (1 + n_between, 1, 0, 0)
    assert [(record[1], record[2]) for record in holds(collection)][:: n_between + 1] == [
        ("k", str(other)),
        (None, str(first)),
    ]


def test_a_key_that_comes_twice_in_a_run_is_noted(make, tmp_path):
    collection, first, other = make("collection"), write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    run(collection, [Source(first, key="old")])
    plan = [
        Source(other, key="old"),
        Source(first, key="new"),
        Source(first, key="new"),
        Source(first, key="another"),
        Source(other, key="new", where="list line 5"),
    ]
    said = rehearse(collection, plan)
    done = run(collection, plan)
    assert said == done
    [note] = done.problems
    assert str(note) == "list line 5: the key 'new' came earlier in this run, and this later one counts"
    assert (note.skipped, note.uri) == (False, str(other))
    assert collection.catalog.by_key("new").path == str(other)


def test_what_is_read_after_all_may_take_the_record_of_another_file_in_its_batch(make, tmp_path):
    collection, first, other = make("collection"), write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    sources = [Source(first, key="k"), Source(other, key="k")]
    run(collection, sources[:1])
    old, generation = collection.catalog.one(1), collection.catalog.generation()
    run(collection, sources[1:])
    new = collection.catalog.one(1)
    trusted = [loading.Trusted(old, generation), loading.Trusted(new, collection.catalog.generation())]
    batch = [loading.Loaded(source, trusted=one) for source, one in zip(sources, trusted, strict=True)]

    def read(some):
        steps = loading.load_sources(some, catalog=collection.catalog, preprocessing=PREPROCESSING, depth=1)
        return [replace(step, image=replace(step.image, code=collection.catalog.code(1)[0])) for step, _ in steps]

    report = module._Run(module._Stored(collection), read, "skip").store(batch)
    assert outcome(report) == (0, 2, 0, 0)  # the second file agreed with the record until the first one was stored
    assert collection.catalog.one(1).path == str(other)
