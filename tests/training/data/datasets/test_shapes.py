"""The built-in data set `shapes`: a seed gives the same files, labels say what is drawn, nothing is overwritten."""

import csv
import functools
import importlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hashseek.retrieval.errors import BadDataset
from hashseek.training.data.datasets import shapes_scene as _scene
from hashseek.training.data.datasets.shapes import BACKGROUNDS, COLOURS, LABELS, render_scene, render_shapes
from support.paths import ROOT

# `hashseek.training.data.datasets.shapes` as an attribute is the function of that name: the module must be asked for.
shapes = importlib.import_module("hashseek.training.data.datasets.shapes")

SMALL = {"n_query": 2, "n_train": 4, "n_database": 3, "size": 32}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def rows(listing: Path) -> list[dict[str, str]]:
    with listing.open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def plans(count: int = 1500) -> list[_scene.Scene]:
    return [shapes._plan_scene(np.random.default_rng([7, number])) for number in range(count)]


def share_of_hue(picture: Image.Image, colour: str) -> float:
    """Share of the pixels that are clearly of a palette colour; the cast of the light moves the hue a little."""
    hue, saturation, value = np.moveaxis(np.asarray(picture.convert("HSV"), dtype=float) / 255.0, 2, 0)
    low, high = _scene._PALETTE[colour][0]
    away = np.abs((hue - (low + high) / 2 + 0.5) % 1.0 - 0.5)
    # Pink is pale, so that the light changes its hue more; the other colours are full.
    full, drift = (0.28, 0.05) if colour == "pink" else (0.45, 0.02)
    return float(np.mean((away < (high - low) / 2 + drift) & (saturation > full) & (value > 0.25)))


# --- what is drawn ---------------------------------------------------------------------------------------


def test_a_seed_gives_one_scene() -> None:
    first, again, other = (render_scene(np.random.default_rng(seed), size=48) for seed in (3, 3, 4))
    assert first[1] == again[1]
    assert first[0].tobytes() == again[0].tobytes()
    assert first[0].tobytes() != other[0].tobytes()


@pytest.mark.parametrize("size", [16, 61, 1024])
def test_a_scene_has_the_size_asked_for_and_labels_in_order(size: int) -> None:
    picture, labels = render_scene(np.random.default_rng(1), size=size)
    assert picture.mode == "RGB"
    assert picture.size == (size, size)
    assert labels == tuple(sorted(set(labels), key=LABELS.index))


def test_labels_are_uneven_and_guessing_does_not_pay() -> None:
    scenes = [shapes._labels(plan) for plan in plans()]
    present = np.array([[label in labels for label in LABELS] for labels in scenes], dtype=float)
    frequency = present.mean(axis=0)
    assert frequency.min() > 0.05
    assert 0.30 < frequency.max() < 0.50
    assert present.sum(axis=1).min() >= 1
    assert 3.0 <= present.sum(axis=1).mean() <= 6.0
    share = (present @ present.T > 0)[np.triu_indices(len(scenes), 1)].mean()
    assert 0.45 < share < 0.65


def test_labels_come_in_company() -> None:
    things = Counter((thing.shape, thing.colour) for plan in plans() for thing in plan.things)
    assert things["star", "yellow"] > 5 * things["star", "blue"]
    assert things["square", "blue"] > 3 * things["square", "red"]
    night = [plan for plan in plans() if plan.background == "night"]
    assert sum(any(thing.shape == "star" for thing in plan.things) for plan in night) > 0.5 * len(night)


def test_a_scene_has_one_to_four_things_and_each_is_half_visible() -> None:
    side, edge = 128, 64
    overlapping = 0
    for plan in plans()[:150]:
        assert 1 <= len(plan.things) <= 4
        box = (-edge, -edge, side + edge, side + edge)
        masks = [np.asarray(_scene.mask(thing, side, box)) > 127 for thing in plan.things]
        top = np.full(masks[0].shape, -1)
        for number, mask in enumerate(masks):
            top[mask] = number
        frame = top[edge:-edge, edge:-edge]
        for number, mask in enumerate(masks):
            assert np.count_nonzero(frame == number) > 0.5 * np.count_nonzero(mask)
        overlapping += any(np.any(a & b) for a, b in itertools.combinations(masks, 2))
    assert overlapping > 0.3 * 150


def test_a_colour_is_seen_exactly_where_it_is_a_label() -> None:
    seen = Counter[str]()
    for number in range(220):
        picture, labels = render_scene(np.random.default_rng([11, number]), size=96)
        for colour in COLOURS:
            if colour in labels:
                assert share_of_hue(picture, colour) > 0.008, (number, colour)
                seen[colour] += 1
            # Sky, grass and night have colours of their own, and a wall in the shade may be as dull as a dark pink.
            elif colour != "pink" and not set(labels) & {*BACKGROUNDS, "pink"}:
                assert share_of_hue(picture, colour) < 0.006, (number, colour)
    assert min(seen[colour] for colour in COLOURS) >= 10


@pytest.mark.parametrize("texture", shapes.TEXTURES)
def test_a_texture_puts_two_colours_on_a_thing(texture: str) -> None:
    for seed in range(6):
        deviation = []
        for worn in ("", texture):
            thing = _scene.Thing("square", "blue", worn, 0.5, 0.5, 0.3, 0.4)
            picture = _scene.draw_scene(_scene.Scene("", (thing,)), np.random.default_rng(seed), 96)
            inside = np.asarray(picture, dtype=float)[34:62, 34:62]
            deviation.append(inside.std(axis=(0, 1)).max())
        assert deviation[1] > 2.0 * deviation[0]


# --- what is written -------------------------------------------------------------------------------------


def test_files_are_the_same_whatever_the_number_of_workers(tmp_path: Path) -> None:
    request = {"n_query": 20, "n_train": 90, "n_database": 90, "size": 24, "seed": 5}  # enough to start processes
    render_shapes(tmp_path / "one", **request, n_workers=1)
    render_shapes(tmp_path / "two", **request, n_workers=2)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert len(one) == 202
    assert one == two


def test_a_picture_does_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    few = render_shapes(tmp_path / "few", n_query=1, n_train=1, n_database=1, size=32)
    many = render_shapes(tmp_path / "many", n_query=2, n_train=2, n_database=2, size=32)
    for a, b in zip(rows(few), rows(many), strict=False):
        assert (a["file"], a["labels"]) == (b["file"], b["labels"])
        assert (few.parent / a["file"]).read_bytes() == (many.parent / b["file"]).read_bytes()


def test_another_seed_gives_other_pictures(tmp_path: Path) -> None:
    for seed in (0, 1):
        render_shapes(tmp_path / str(seed), **SMALL, seed=seed)
    assert contents(tmp_path / "0")["images/000000.jpg"] != contents(tmp_path / "1")["images/000000.jpg"]


def test_the_list_names_every_file_with_its_labels_and_split(tmp_path: Path) -> None:
    listing = render_shapes(tmp_path / "new" / "folder", **SMALL)
    assert listing == tmp_path / "new" / "folder" / "labels.csv"
    assert listing.read_text().splitlines()[0] == "file,labels,split"
    found = rows(listing)
    assert [row["split"] for row in found] == ["query"] * 2 + ["train"] * 4 + ["database"] * 3
    assert [row["file"] for row in found] == [f"images/{number:06d}.jpg" for number in range(9)]
    for row in found:
        with Image.open(listing.parent / row["file"]) as picture:
            assert (picture.format, picture.size) == ("JPEG", (32, 32))
        assert row["labels"]
        assert set(row["labels"].split(";")) <= set(LABELS)
    assert set(contents(listing.parent)) == {"labels.csv", "shapes.json", *(row["file"] for row in found)}


def test_a_second_call_renders_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render_shapes(tmp_path, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(shapes, "_render_all", None)  # a call would raise
    assert render_shapes(tmp_path, **SMALL) == tmp_path / "labels.csv"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_interrupted_run_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_at_five(rng: np.random.Generator, *, size: int) -> tuple[Image.Image, tuple[str, ...]]:
        if len(list((tmp_path / "stopped" / "images").iterdir())) == 5:
            raise KeyboardInterrupt
        return render_scene(rng, size=size)

    with monkeypatch.context() as patch:
        patch.setattr(shapes, "render_scene", stop_at_five)
        with pytest.raises(KeyboardInterrupt):
            render_shapes(tmp_path / "stopped", **SMALL)
    assert not (tmp_path / "stopped" / "labels.csv").exists()
    render_shapes(tmp_path / "stopped", **SMALL)
    render_shapes(tmp_path / "straight", **SMALL)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [True, False], ids=["complete", "interrupted"])
def test_a_changed_request_is_refused_and_nothing_touched(tmp_path: Path, listed: bool) -> None:
    render_shapes(tmp_path, **SMALL, seed=1)
    if not listed:
        (tmp_path / "labels.csv").unlink()
    before = contents(tmp_path)
    with pytest.raises(BadDataset, match=r"seed 1, size 32; asked for: seed 2, size 48.*another folder"):
        render_shapes(tmp_path, **{**SMALL, "size": 48}, seed=2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("theirs", ["labels.csv", "images/000000.jpg", "shapes.json"])
def test_files_of_others_are_never_overwritten(tmp_path: Path, theirs: str) -> None:
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_bytes(b"precious")
    with pytest.raises(BadDataset, match="choose another folder, or delete it"):
        render_shapes(tmp_path, **SMALL)
    assert contents(tmp_path) == {theirs: b"precious"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_query": -1}, "n_query is -1"),
        ({"n_train": -2}, "n_train is -2"),
        ({"n_database": -3}, "n_database is -3"),
        ({"n_query": 0, "n_train": 0, "n_database": 0}, "at least 1 picture"),
        ({"size": 15}, r"size is 15 pixels: it must be within 16\.\.1024"),
        ({"size": 1025}, r"size is 1025 pixels: it must be within 16\.\.1024"),
        ({"seed": -1}, "seed is -1: it must be 0 or more"),
        ({"n_workers": 0}, "n_workers is 0: it must be at least 1"),
    ],
)
def test_a_bad_number_is_named_with_its_limit(tmp_path: Path, change: dict[str, int], message: str) -> None:
    with pytest.raises(BadDataset, match=message):
        render_shapes(tmp_path / "none", **{**SMALL, **change})
    assert not (tmp_path / "none").exists()


def test_a_scene_of_a_bad_size_is_refused() -> None:
    with pytest.raises(BadDataset, match=r"size is 8 pixels: it must be within 16\.\.1024"):
        render_scene(np.random.default_rng(0), size=8)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadDataset, match="cannot be written"):
        render_shapes(tmp_path / "file", **SMALL)


def test_the_worker_processes_need_no_torch() -> None:
    code = "import sys, hashseek.training.data.datasets.shapes; sys.exit('torch' in sys.modules)"
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=False).returncode == 0
