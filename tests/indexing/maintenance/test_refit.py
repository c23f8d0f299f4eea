"""Refitting the hash layer of a collection: codes are those of the new checkpoint, nothing is encoded twice."""

from contextlib import closing
from pathlib import Path

import pytest

import hashseek
from hashseek.indexing.collection import Collection
from hashseek.indexing.fit_options import FitOptions, network_for_refit
from hashseek.indexing.maintenance import reencode as reencode_module
from hashseek.indexing.maintenance.refit import change_codes, fit_to_collection
from hashseek.retrieval.errors import BadCollection, BadConfig, BadDataset
from hashseek.retrieval.images import load_file
from support.collections import sql

OPTIONS = {"device": "cpu", "precision": "fp32"}


@pytest.fixture
def collection(tmp_path, pictures, weights):
    preprocessing = {"size": 64, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    with hashseek.create_collection(
        tmp_path / "c",
        pictures,
        n_bits=6,
        backbone="squeezenet1_1",
        weights=weights,
        preprocessing=preprocessing,
        **OPTIONS,
    ) as made:
        yield made.searcher.collection


def refit(collection, n_bits):
    network = network_for_refit(collection, FitOptions(n_bits))
    return fit_to_collection(collection, network, **OPTIONS)


def test_the_codes_are_those_of_the_new_checkpoint_and_nothing_is_encoded_twice(collection, monkeypatch):
    fitting, codes = refit(collection, 5)
    assert (fitting.record["n_images"], fitting.fallback) == (12, "")

    def encode_nothing(*_, **__):
        raise AssertionError("an image was encoded twice")

    monkeypatch.setattr(reencode_module, "Encoder", encode_nothing)
    monkeypatch.setattr(reencode_module, "BATCH", 5)
    steps = change_codes(collection, fitting, codes)
    next(steps), next(steps)
    steps.close()  # interrupted; the same again continues in the space that was begun
    assert len(collection.catalog.spaces.all()) == 2
    *_, report = change_codes(collection, *refit(collection, 5))
    assert (report.switched, report.total, report.encoded) == (True, 7, 7)
    with closing(Collection(collection.folder)) as now:
        assert len(now.catalog.spaces.all()) == 2
        assert (now.n_bits, now.verify()) == (5, [])
        with hashseek.open_collection(now.folder, **OPTIONS) as opened:
            for record in now.catalog.page(after=0, limit=99):
                encoder = opened.searcher.encoder
                pixels = load_file(Path(record.path).read_bytes(), encoder.preprocessing).pixels
                assert encoder.encode_pixels(pixels[None]).tobytes() == now.catalog.code_of(record.id).code.tobytes()


def test_the_network_stays_unless_another_is_named_and_its_origin_is_remembered(collection, own_collection, tmp_path):
    fitting, codes = refit(collection, 4)
    *_, _ = change_codes(collection, fitting, codes)
    with closing(Collection(collection.folder)) as now:
        header = hashseek.load_checkpoint(now.checkpoint).header
        assert header.preprocessing == fitting.encoder.preprocessing
        assert header.training["fit"]["weights"] == "squeezenet.safetensors"
        assert list(change_codes(now, *refit(now, 4))) == []  # the same images give the same hash layer
        now.remove([record.id for record in now.catalog.page(after=1, limit=99)])
        with pytest.raises(BadDataset):
            refit(now, 4)
    with closing(Collection(own_collection)) as trained, pytest.raises(BadConfig):
        network_for_refit(trained, FitOptions(8))


def test_a_picture_that_cannot_be_read_is_left_out(collection):
    sql(collection.catalog.path, "UPDATE images SET path = '/nowhere.jpg' WHERE id = 1")
    fitting, codes = refit(collection, 5)
    assert (fitting.record["n_images"], len(codes)) == (11, 11)
    *_, report = change_codes(collection, fitting, codes, without_missing=True)
    assert (report.switched, report.encoded) == (True, 11)


def test_an_interrupted_refit_leaves_no_space_when_the_images_have_changed(collection):
    steps = change_codes(collection, *refit(collection, 5))
    next(steps)
    collection.remove([1])
    again = refit(collection, 5)
    with pytest.raises(BadCollection):  # the first is still at work
        list(change_codes(collection, *again))
    steps.close()
    *_, report = change_codes(collection, *again)
    assert report.switched
    spaces = collection.catalog.spaces.all()
    assert [space.state for space in spaces] == ["ready", "ready"]
    assert {path.name for path in collection.folder.glob("*.safetensors")} == {space.checkpoint for space in spaces}


def test_a_refit_keeps_the_codes_of_an_interrupted_reencoding(collection, other_checkpoint, monkeypatch):
    monkeypatch.setattr(reencode_module, "BATCH", 5)
    steps = reencode_module.reencode(collection, other_checkpoint, **OPTIONS)
    next(steps), next(steps)
    steps.close()
    *_, report = change_codes(collection, *refit(collection, 5))
    assert report.switched
    spaces = collection.catalog.spaces.all()
    assert [space.state for space in spaces] == ["ready", "building", "ready"]
    assert collection.catalog.spaces.n_missing(spaces[1].id) == 7
    assert (collection.folder / spaces[1].checkpoint).is_file()


def test_a_damaged_checkpoint_of_an_interrupted_refit_does_not_stop_another(collection):
    steps = change_codes(collection, *refit(collection, 5))
    next(steps)
    steps.close()
    collection.remove([1])
    [_, half] = collection.catalog.spaces.all()
    (collection.folder / half.checkpoint).write_bytes(b"damaged")
    *_, report = change_codes(collection, *refit(collection, 4))
    assert report.switched
    assert {space.fingerprint: space.state for space in collection.catalog.spaces.all()}[half.fingerprint] == "building"
