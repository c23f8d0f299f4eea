"""Random runs: a dry run reports what the run does, and trusted times give the same records as reading everything."""

import hashlib
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hashseek.indexing import dry_run as dry_run_module
from hashseek.indexing.catalog import create_catalog
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.dry_run import dry_run
from hashseek.indexing.ingest import batch as module
from hashseek.indexing.ingest import loading
from hashseek.indexing.ingest.batch import ImageSource, IngestReport, ingest
from hashseek.indexing.remote import fetch
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import LoadedFile
from hashseek.retrieval.label_files import Problem
from support.collections import file_of, outcome, sql
from support.models import PREPROCESSING

N_BITS = 16


class Stub:
    """An encoder for the pixels of `decode`."""

    engine, batch_size, preprocessing = "stub", 1, PREPROCESSING

    def features_and_outputs(self, pixels):
        return pixels[:, 0, 0], np.unpackbits(pixels[:, 0, 0], axis=1, bitorder="little")


def decode(data, preprocessing, *, name):
    """Any bytes are a picture, except those that start with "bad"."""
    if data.startswith(b"bad"):
        raise BadImage(f"{name} is bad")
    pixels = np.frombuffer(hashlib.sha256(data).digest(), np.uint8)[: N_BITS // 8]
    return LoadedFile(pixels[None, None], 1, 1, "image/png")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small batches, so that a run has many."""
    header = SimpleNamespace(image_preprocessing=lambda: PREPROCESSING, n_bits=N_BITS)
    monkeypatch.setattr(dry_run_module, "check_checkpoint", lambda *_: header)
    monkeypatch.setattr(loading, "load_file", decode)
    monkeypatch.setattr(loading, "_LOOKED_UP", 4)
    monkeypatch.setattr(loading, "_DOWNLOADS", 1)
    monkeypatch.setattr(module, "BATCH", 3)


@pytest.fixture
def make(tmp_path):
    """A function that creates collections, which are closed at the end."""
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
    """The last report with all problems, or the message of the error."""
    report, problems = IngestReport(), []
    try:
        for report in reports:
            problems += report.problems
    except BadImage as error:
        return str(error)
    return replace(report, problems=problems)


def run(collection, sources, **options):
    return summed(ingest(collection, Stub(), sources, **options))


def run_dry(collection, sources, **options):
    with dry_run(collection.folder, checkpoint=None) as (target, encoder):
        return summed(ingest(target, encoder, sources, **options))


def load(collection, sources):
    """The loaded images of the sources."""
    return list(loading.Loader(collection, Stub(), fetch).load(sources))


def without_notes(report):
    if isinstance(report, str):
        return report
    return replace(report, problems=[problem for problem in report.problems if problem.skipped])


def holds(collection):
    """The records and codes of the collection, without times."""
    records = collection.catalog.page(after=0, limit=1000)
    return [
        (r.id, r.key, r.path, r.sha256, r.labels, r.attributes, collection.catalog.code_of(r.id).code.tobytes())
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

    def distinct_sources(self):
        """Sources of different files, each with its own key or none."""
        sources = {source.uri: source for source in self.sources() if isinstance(source, ImageSource)}
        return [replace(source, key=source.key and f"{source.key} {path}") for path, source in sources.items()]

    def _write(self, path):
        path.write_bytes(self.draw.choice((b"one", b"two", b"three", b"four", b"five", b"bad one")))
        self._time += 10**9
        os.utime(path, ns=(self._time, self._time))

    def _source(self):
        pick = self.draw.choice
        if self.draw.random() < 0.02:
            return Problem("list line 7", "torn")
        return ImageSource(
            pick(self._paths),
            pick(((), (), ("x",), ("y",), ("y", "x"))),
            key=pick((None, None, "k", "l", "m")),
            attributes=pick(({}, {}, {"n": 1}, {"n": 1.0}, {"n": True}, {"m": "x"})),
        )


def forget_one(world, *collections):
    """Remove an image now and then; its id is not used again."""
    ids = [record.id for record in collections[0].catalog.page(after=0, limit=1000)]
    if ids and world.draw.random() < 0.2:
        removed = world.draw.choice(ids)
        for collection in collections:
            collection.remove([removed])


@pytest.mark.parametrize("seed", range(2))
def test_a_dry_run_reports_what_the_run_does(make, tmp_path, seed):
    world = World(tmp_path / "files", seed)
    collection = make("collection")
    for number in range(60):
        sources = world.sources()
        on_error = world.draw.choice(("skip", "skip", "stop"))
        before = holds(collection), collection.catalog.generation()
        dry = run_dry(collection, sources, on_error=on_error)
        assert (holds(collection), collection.catalog.generation()) == before
        assert dry == run(collection, sources, on_error=on_error), (number, sources)
        world.change()
        forget_one(world, collection)


@pytest.mark.parametrize("seed", range(2))
def test_trusted_times_give_the_same_records_as_reading_everything(make, tmp_path, seed):
    world = World(tmp_path / "files", seed)
    reading, trusting = make("reading"), make("trusting")
    n_trusted = 0
    for number in range(40):
        sources = world.distinct_sources()
        done = run(trusting, sources, trust_mtime=True)
        assert without_notes(done) == without_notes(run(reading, sources)), (number, sources)
        assert holds(trusting) == holds(reading), (number, sources)
        steps = load(trusting, loading.mark_unchanged(trusting, sources))
        n_trusted += sum(isinstance(step, loading.LoadedImage) and step.image is None for step in steps)
        world.change()
        forget_one(world, trusting, reading)
    assert n_trusted > 20


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def add_kept(collection, path, key="a"):
    """Store a file under a key as an upload, of which the collection keeps the file; returns the kept file."""
    [step] = load(collection, [ImageSource(path, key=key)])
    image = replace(step.image, code=np.zeros(N_BITS // 8, np.uint8))
    collection.add_with_file(image, path.read_bytes(), suffix=".png")
    return file_of(collection, collection.catalog.one(1))


def test_a_kept_file_that_the_run_replaces_may_be_named_later_in_it(make, tmp_path):
    collection, other, named = make("collection"), write(tmp_path / "other", b"two"), write(tmp_path / "named", b"one")
    kept = add_kept(collection, named)
    own = [ImageSource(kept, key="a")]
    assert outcome(run(collection, own)) == (0, 0, 1, 0)
    between = [ImageSource(write(tmp_path / str(number), f"{number}".encode())) for number in range(5)]  # other batches
    sources = [ImageSource(other, key="a"), *between, ImageSource(kept, key="b"), ImageSource(named, key="b")]
    assert outcome(run(collection, sources)) == (6, 1, 1, 0)
    assert file_of(collection, collection.catalog.by_key("b")) == kept
    assert kept.read_bytes() == b"one"


def test_content_of_which_the_kept_file_is_lost_gets_the_file_that_is_added(make, tmp_path):
    collection, path = make("collection"), write(tmp_path / "a", b"one")
    kept = add_kept(collection, path, key=None)
    for expected, file in (((0, 0, 1, 0), kept), ((0, 1, 0, 0), path)):
        assert outcome(run_dry(collection, [ImageSource(path)])) == expected
        assert outcome(run(collection, [ImageSource(path)])) == expected
        assert file_of(collection, collection.catalog.one(1)) == file
        kept.unlink(missing_ok=True)


def test_an_image_without_a_code_is_read_even_with_trusted_times(make, tmp_path):
    collection, path = make("collection"), write(tmp_path / "a", b"one")
    run(collection, [ImageSource(path)])
    sql(collection.catalog.path, "DELETE FROM codes")
    [step] = load(collection, loading.mark_unchanged(collection, [ImageSource(path)]))
    assert step.pixels is not None


def test_a_key_that_occurs_twice_in_a_run_is_noted(make, tmp_path):
    collection, first, other = make("collection"), write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    run(collection, [ImageSource(first, key="old")])
    plan = [
        ImageSource(other, key="old"),
        ImageSource(first, key="new"),
        ImageSource(first, key="new"),
        ImageSource(first, key="another"),
        ImageSource(other, key="new", where="list line 5"),
    ]
    [note] = run(collection, plan).problems
    assert (note.where, note.skipped, note.uri) == ("list line 5", False, str(other))
    assert collection.catalog.by_key("new").path == str(other)


def test_a_key_that_occurs_twice_is_noted_in_every_run_however_old_its_record_is(make, tmp_path):
    collection, first, other = make("collection"), write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    run(collection, [ImageSource(first), ImageSource(other)])
    for _ in range(2):
        report = run(collection, [ImageSource(first, key="k"), ImageSource(other, key="k")])
        assert [note.uri for note in report.problems] == [str(other)]
        assert (report.added, report.skipped) == (0, 0)
