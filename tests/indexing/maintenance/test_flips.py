"""Mirrored and turned copies are found, and their orientation is named."""

import json
from contextlib import closing
from itertools import product

import numpy as np
import pytest
from PIL import Image

from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.ingest.batch import ingest
from hashseek.indexing.ingest.sources import find_sources
from hashseek.indexing.maintenance.flips import Orientation, flipped_groups
from hashseek.indexing.searcher import Searcher
from support.pictures import draw

ALL = [Orientation(mirrored, quarters) for mirrored, quarters in product((False, True), range(4))]
RADIUS = 1


def turned(image: Image.Image, orientation: Orientation) -> Image.Image:
    """By Pillow, whose rotations are counter-clockwise too."""
    if orientation.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image.rotate(90 * orientation.quarters, expand=True)


@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("second", ALL)
def test_orientations_compose_and_invert_as_arrays_do(first, second):
    pixels = np.arange(2 * 3 * 16).reshape(2, 3, 4, 4).astype(np.uint8)
    np.testing.assert_array_equal(second.after(first).of(pixels), second.of(first.of(pixels)))
    np.testing.assert_array_equal(first.inverse().of(first.of(pixels)), pixels)


@pytest.fixture
def flipped(tmp_path, checkpoint):
    """A collection: eight orientations of one picture, 2 copies and a turned copy of another, and two single ones."""
    files = [(f"a{number}", turned(draw(0), orientation)) for number, orientation in enumerate(ALL)]
    files += [("b0", draw(1)), ("b1", draw(1)), ("b2", turned(draw(1), Orientation(False, 3)))]
    files += [("c", draw(2)), ("d", turned(draw(3), Orientation(True, 1)))]
    (tmp_path / "files").mkdir()
    for number, (name, image) in enumerate(files):
        image.save(tmp_path / "files" / f"{name}.png", compress_level=number % 9)  # equal pixels, other bytes
    collection = open_or_create(tmp_path / "collection", checkpoint=checkpoint)
    list(ingest(collection, Searcher.open(collection, device="cpu").encoder, find_sources([tmp_path / "files"])))
    collection.save_index()
    collection.close()
    return tmp_path


def test_copies_in_every_orientation_are_one_group(flipped):
    collection = Collection(flipped / "collection", read_only=True)
    encoder = Searcher.open(collection, device="cpu").encoder
    found, unreadable = flipped_groups(collection, encoder, radius=RADIUS)
    b = {9: Orientation(), 10: Orientation(), 11: Orientation(False, 3)}
    assert found == [dict(enumerate(ALL, start=1)), b]
    assert unreadable == {}
    (flipped / "files" / "a0.png").unlink()
    found, unreadable = flipped_groups(collection, encoder, radius=RADIUS)
    assert unreadable.keys() == {1}
    assert found == [dict(enumerate(ALL, start=1)), b]  # linked from the others
    collection.close()


def test_the_command_names_orientations(flipped, hashseek):
    code, out, err = hashseek("index", "duplicates", flipped / "collection", "--radius", RADIUS, "--flips", "--json")
    assert (code, err) == (0, "")
    first, second = (json.loads(line) for line in out.splitlines())
    assert [(entry["mirrored"], entry["turned"]) for entry in first] == [
        (orientation.mirrored, 90 * orientation.quarters) for orientation in ALL
    ]
    assert [entry["id"] for entry in second] == [9, 10, 11]
    code, out, err = hashseek("index", "duplicates", flipped / "collection", "--radius", RADIUS, "--flips")
    assert (code, err, out.count("mirrored"), out.count("270°")) == (0, "", 4, 3)
    with closing(Collection(flipped / "collection")) as collection:
        collection.catalog.keep_group([9, 10, 11])
    for radius, sizes in ((RADIUS, [8]), (47, [13])):
        out = hashseek("index", "duplicates", flipped / "collection", "--radius", radius, "--flips", "--json")[1]
        assert [len(json.loads(line)) for line in out.splitlines()] == sizes
    code, _, _ = hashseek("index", "duplicates", flipped / "collection", "--radius", RADIUS, "--engine", "torch")
    assert code == 2
