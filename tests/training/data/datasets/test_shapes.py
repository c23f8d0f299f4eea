"""The built-in data set `shapes`: a seed gives the same files, labels say what is drawn, nothing is overwritten."""

import csv
import functools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hashseek.retrieval.errors import BadDataset
from hashseek.training.data.datasets import shapes, shapes_drawing

SMALL = {"n_query": 2, "n_train": 4, "n_database": 3, "size": 32}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def rows(listing: Path) -> list[dict[str, str]]:
    with listing.open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def plans(count: int = 1500) -> list[shapes_drawing.Scene]:
    return [shapes.plan_scene(np.random.default_rng([7, number])) for number in range(count)]


def share_of_hue(picture: Image.Image, colour: str) -> float:
    """Share of the pixels that are clearly of a palette colour; the cast of the light moves the hue a little."""
    hue, saturation, value = np.moveaxis(np.asarray(picture.convert("HSV"), dtype=float) / 255.0, 2, 0)
    low, high = shapes_drawing.PALETTE[colour][0]
    away = np.abs((hue - (low + high) / 2 + 0.5) % 1.0 - 0.5)
    # Pink is pale, so that the light changes its hue more; the other colours are full.
    full, drift = (0.28, 0.05) if colour == "pink" else (0.45, 0.02)
    return float(np.mean((away < (high - low) / 2 + drift) & (saturation > full) & (value > 0.25)))


def test_labels_are_uneven_and_guessing_does_not_pay():
    scenes = [shapes.scene_labels(plan) for plan in plans()]
    assert all(labels == tuple(sorted(set(labels), key=shapes.LABELS.index)) for labels in scenes)
    present = np.array([[label in labels for label in shapes.LABELS] for labels in scenes], dtype=float)
    frequency = present.mean(axis=0)
    assert frequency.min() > 0.05
    assert 0.30 < frequency.max() < 0.50
    assert present.sum(axis=1).min() >= 1
    assert 3.0 <= present.sum(axis=1).mean() <= 6.0
    share = (present @ present.T > 0)[np.triu_indices(len(scenes), 1)].mean()
    assert 0.45 < share < 0.65


def test_each_of_one_to_four_things_is_more_than_half_visible():
    for plan in plans()[:300]:
        assert 1 <= len(plan.things) <= 4
        masks = [np.asarray(shapes_drawing.outline(thing, 128)) > 127 for thing in plan.things]
        for number, mask in enumerate(masks):
            hidden = np.logical_or.reduce([np.zeros_like(mask), *masks[number + 1 :]])
            assert np.count_nonzero(mask & ~hidden) > 0.5 * np.count_nonzero(mask)


def test_a_colour_is_seen_exactly_where_it_is_a_label():
    seen = Counter[str]()
    for number in range(150):
        picture, labels = shapes.render_scene(np.random.default_rng([11, number]), size=96)
        for colour in shapes.COLOURS:
            if colour in labels:
                assert share_of_hue(picture, colour) > 0.008, (number, colour)
                seen[colour] += 1
            # Sky, grass and night have colours of their own, and a wall in the shade may be as dull as a dark pink.
            elif colour != "pink" and not set(labels) & {*shapes.BACKGROUNDS, "pink"}:
                assert share_of_hue(picture, colour) < 0.006, (number, colour)
    assert min(seen[colour] for colour in shapes.COLOURS) >= 7


def test_the_files_depend_on_the_seed_and_the_number_of_the_picture_alone(tmp_path):
    listing = shapes.render_shapes(tmp_path / "new" / "folder", **SMALL)
    found = rows(listing)
    assert [row["split"] for row in found] == ["query"] * 2 + ["train"] * 4 + ["database"] * 3
    for row in found:
        with Image.open(listing.parent / row["file"]) as picture:
            assert (picture.format, picture.size, picture.mode) == ("JPEG", (32, 32), "RGB")
        assert set(row["labels"].split(";")) <= set(shapes.LABELS)
    first = contents(listing.parent)
    assert set(first) == {"labels.csv", "shapes.json", *(row["file"] for row in found)}
    # More pictures begin with the same ones; another seed gives others.
    more = contents(shapes.render_shapes(tmp_path / "more", **{**SMALL, "n_database": 5}).parent)
    assert all(more[name] == data for name, data in first.items() if name.startswith("images/"))
    other = contents(shapes.render_shapes(tmp_path / "other", **SMALL, seed=1).parent)
    assert other["images/000000.jpg"] != first["images/000000.jpg"]


def test_a_second_call_draws_nothing_and_an_interrupted_one_is_completed(tmp_path):
    listing = shapes.render_shapes(tmp_path, **SMALL)
    complete = contents(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert shapes.render_shapes(tmp_path, **SMALL) == listing
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times
    listing.unlink()
    (tmp_path / "images/000005.jpg").write_bytes(b"half a picture")
    shapes.render_shapes(tmp_path, **SMALL)
    assert contents(tmp_path) == complete


@pytest.mark.parametrize("theirs", ["labels.csv", "images/000000.jpg", "shapes.json", None])
def test_other_files_are_never_overwritten(tmp_path, theirs):
    if theirs is None:  # shapes of another request
        shapes.render_shapes(tmp_path, **SMALL, seed=1)
    else:
        (tmp_path / theirs).parent.mkdir(exist_ok=True)
        (tmp_path / theirs).write_bytes(b"precious")
    before = contents(tmp_path)
    with pytest.raises(BadDataset):
        shapes.render_shapes(tmp_path, **SMALL, seed=2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("change", [{"n_query": -1}, {"size": 15}, {"size": 1025}, {"seed": -1}])
def test_a_number_outside_its_limits_is_refused(tmp_path, change):
    with pytest.raises(BadDataset, match=f"{next(iter(change))} .*{next(iter(change.values()))}"):
        shapes.render_shapes(tmp_path / "none", **{**SMALL, **change})
    assert not (tmp_path / "none").exists()
