"""Data set `shapes`: scenes of simple things, rendered by code, so that every step can be tried without a download.

A scene has 1 to 4 things (shape, colour, perhaps a texture), most of them overlapping, on a background; `_scene` draws
it. Labels come in company (hearts are mostly red or pink, stars yellow and at night) and are uneven: a label is in 8 to
35 % of the pictures, a picture has 3.5 labels on average (2 to 6 as a rule), and two pictures taken at random share a
label in 54 % of the cases: that is the precision of guessing.
"""

import csv
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.files import write_atomically
from hashseek.training.data.datasets.shapes_scene import Scene, Thing, draw_scene, mask

__all__ = ["LABELS", "VERSION", "render_scene", "render_shapes"]

SHAPES = ("circle", "square", "triangle", "star", "heart", "ring")
COLOURS = ("red", "yellow", "green", "blue", "purple", "pink")
TEXTURES = ("striped", "dotted", "checked")
BACKGROUNDS = ("sky", "grass", "night")
LABELS: tuple[str, ...] = (*SHAPES, *COLOURS, *TEXTURES, *BACKGROUNDS)
VERSION = 1  # counts up whenever the same seed gives other pictures or labels

_LEAST_SIZE, _MOST_SIZE = 16, 1024  # pixels: below, textures vanish; above, nothing is gained
_FEW = 200  # pictures that are done sooner than processes start
_CHUNK = 32  # pictures handed to a process at a time

# Co-occurrence is uneven on purpose: real labels come in company. "" is a wall, a plain surface: no label.
_BACKGROUND_ODDS = {"": 0.53, "sky": 0.23, "grass": 0.16, "night": 0.08}
_THING_COUNT_ODDS = (0.30, 0.36, 0.23, 0.11)  # of 1, 2, 3, 4
_SHAPE_ODDS = {  # in the order of SHAPES
    "": (0.28, 0.36, 0.14, 0.05, 0.05, 0.12),
    "sky": (0.32, 0.06, 0.08, 0.06, 0.44, 0.04),
    "grass": (0.20, 0.08, 0.60, 0.03, 0.04, 0.05),
    "night": (0.08, 0.04, 0.04, 0.66, 0.04, 0.14),
}
_COLOUR_ODDS = {  # in the order of COLOURS, and last for white, grey and black, which have no label
    "circle": (0.30, 0.10, 0.10, 0.24, 0.06, 0.06, 0.14),
    "square": (0.08, 0.06, 0.14, 0.50, 0.04, 0.02, 0.16),
    "triangle": (0.08, 0.32, 0.40, 0.06, 0.02, 0.02, 0.10),
    "star": (0.06, 0.66, 0.03, 0.06, 0.05, 0.04, 0.10),
    "heart": (0.50, 0.03, 0.02, 0.03, 0.07, 0.27, 0.08),
    "ring": (0.08, 0.12, 0.06, 0.10, 0.42, 0.06, 0.16),
}
_TEXTURE_ODDS = {  # in the order of TEXTURES, and last for plain
    "circle": (0.06, 0.22, 0.04, 0.68),
    "square": (0.18, 0.03, 0.26, 0.53),
    "triangle": (0.24, 0.05, 0.04, 0.67),
    "star": (0.05, 0.07, 0.02, 0.86),
    "heart": (0.08, 0.16, 0.05, 0.71),
    "ring": (0.24, 0.03, 0.05, 0.68),
}
_SAME_SHAPE, _SAME_COLOUR, _SAME_TEXTURE = 0.50, 0.50, 0.60  # chance that a thing copies the one before it
_LEAST_VISIBLE = 0.6  # share of a thing's area that neither other things nor the frame hide
_GRID, _EDGE = 64, 24  # visibility is counted on a coarse raster: cells a side, and a rim outside the frame
_Placed = tuple[Thing, NDArray[np.bool_], int]  # a thing, the raster cells where it is in front, its area in cells


def render_scene(rng: np.random.Generator, *, size: int = 160) -> tuple[Image.Image, tuple[str, ...]]:
    """One scene: an RGB picture of `size` x `size` pixels and its labels in the order of `LABELS`.

    Raises:
        BadDataset: `size` is not within 16..1024.
    """
    _check_size(size)
    scene = _plan_scene(rng)
    return draw_scene(scene, rng, size), _labels(scene)


def render_shapes(
    root: Path,
    *,
    n_query: int = 400,
    n_train: int = 3000,
    n_database: int = 3600,
    size: int = 160,
    seed: int = 0,
    n_workers: int | None = None,
) -> Path:
    """Render the data set into `root` unless it is there, and return the path of its `labels.csv`.

    Writes `images/000000.jpg` and so on (JPEG, quality 92) and, last, `labels.csv` with the columns `file`, `labels`
    and `split`. A picture depends on `seed`, `size` and its number alone, so the same request gives the same bytes with
    any `n_workers`. `shapes.json` records the request: a second call returns at once, an interrupted one starts over.

    Args:
        root: folder to write to; made if missing.
        n_query: pictures of the query split, numbered first.
        n_train: pictures of the training split, numbered next.
        n_database: pictures of the database split, numbered last.
        size: side of a picture in pixels, 16..1024.
        seed: 0 or more.
        n_workers: processes; None is one per core. Fewer than 200 pictures are rendered in this process.

    Raises:
        BadDataset: a number outside its limits, `root` holds another data set or files that are not ours, it cannot be
            written, or a process died.
    """
    counts = {"query": n_query, "train": n_train, "database": n_database}
    for split, count in counts.items():
        if count < 0:
            raise BadDataset(f"n_{split} is {count}: a split cannot have fewer than 0 pictures")
    if not any(counts.values()):
        raise BadDataset("n_query, n_train and n_database are all 0: a data set needs at least 1 picture")
    _check_size(size)
    if seed < 0:
        raise BadDataset(f"seed is {seed}: it must be 0 or more")
    if n_workers is not None and n_workers < 1:
        raise BadDataset(f"n_workers is {n_workers}: it must be at least 1, or None for one per core")

    listing = root / "labels.csv"
    request = {
        "version": VERSION,
        "n_query": n_query,
        "n_train": n_train,
        "n_database": n_database,
        "size": size,
        "seed": seed,
    }
    try:
        ours = _holds(root, request)
        if ours and listing.exists():
            return listing
        # The stamp goes first and the list last: a folder with a stamp and no list is an interrupted run of ours.
        write_atomically(root / "shapes.json", (json.dumps(request, indent=2) + "\n").encode())
        (root / "images").mkdir(exist_ok=True)
        splits = [split for split, count in counts.items() for _ in range(count)]
        labels = _render_all(root / "images", len(splits), size=size, seed=seed, n_workers=n_workers)
        write_atomically(listing, _as_csv(labels, splits).encode())
    except OSError as error:
        raise BadDataset(f"the shapes cannot be written to {root}: {error}") from error
    return listing


def _check_size(size: int) -> None:
    if not _LEAST_SIZE <= size <= _MOST_SIZE:
        raise BadDataset(f"size is {size} pixels: it must be within {_LEAST_SIZE}..{_MOST_SIZE}")


def _labels(scene: Scene) -> tuple[str, ...]:
    present = {scene.background}
    for thing in scene.things:
        present |= {thing.shape, thing.colour, thing.texture}
    return tuple(label for label in LABELS if label in present)


def _plan_scene(rng: np.random.Generator) -> Scene:
    """Choose a background and 1 to 4 things, each of which stays at least about 60 % visible."""
    background = _pick(rng, tuple(_BACKGROUND_ODDS), tuple(_BACKGROUND_ODDS.values()))
    count = 1 + int(rng.choice(len(_THING_COUNT_ODDS), p=_THING_COUNT_ODDS))
    placed: list[_Placed] = []
    shape = colour = texture = ""
    for number in range(count):
        if number == 0 or rng.random() >= _SAME_SHAPE:
            shape = _pick(rng, SHAPES, _SHAPE_ODDS[background])
        if number == 0 or rng.random() >= _SAME_COLOUR:
            colour = _pick(rng, (*COLOURS, ""), _COLOUR_ODDS[shape])
        if number == 0 or rng.random() >= _SAME_TEXTURE:
            texture = _pick(rng, (*TEXTURES, ""), _TEXTURE_ODDS[shape])
        _place(rng, placed, (shape, colour, texture), count)
    return Scene(background, tuple(thing for thing, _, _ in placed))


def _pick(rng: np.random.Generator, names: Sequence[str], odds: Sequence[float]) -> str:
    return names[int(rng.choice(len(names), p=odds))]


def _place(rng: np.random.Generator, placed: list[_Placed], labels: tuple[str, str, str], count: int) -> None:
    """Add a thing with these labels in front of those in `placed`; leave it out if there is no room."""
    shape, colour, texture = labels
    least = 0.16 if texture else 0.11  # stripes and dots need room to be read
    radius = max(least, rng.uniform(0.165, 0.30) * (1.0, 0.94, 0.86, 0.80)[count - 1])
    for attempt in range(32):
        if attempt and attempt % 8 == 0:
            radius = max(least, 0.88 * radius)
        x, y = rng.uniform(0.75 * radius, 1.0 - 0.75 * radius, 2)
        if placed and rng.random() < 0.6:  # beside an earlier thing, so that overlaps are the rule
            near = placed[int(rng.integers(len(placed)))][0]
            direction = rng.uniform(0.0, 2 * np.pi)
            distance = rng.uniform(0.7, 1.1) * (near.radius + radius)
            x, y = near.x + distance * np.cos(direction), near.y + distance * np.sin(direction)
        # Turned at will, the other shapes stay what they are; a heart on its head is hard to name.
        turn = rng.uniform(-0.6, 0.6) if shape == "heart" else rng.uniform(-np.pi, np.pi)
        thing = Thing(shape, colour, texture, float(x), float(y), float(radius), float(turn))
        wide = np.asarray(mask(thing, _GRID, (-_EDGE, -_EDGE, _GRID + _EDGE, _GRID + _EDGE))) > 127
        inside = wide[_EDGE:-_EDGE, _EDGE:-_EDGE]
        whole = int(np.count_nonzero(wide))
        behind = [(other, cells & ~inside, area) for other, cells, area in placed]
        if np.count_nonzero(inside) >= 0.92 * whole and all(
            np.count_nonzero(cells) >= _LEAST_VISIBLE * area for _, cells, area in behind
        ):
            placed[:] = [*behind, (thing, inside, whole)]
            return


def _holds(root: Path, request: dict[str, int]) -> bool:
    """Whether `root` was written, in whole or in part, for this very request; False if it is free.

    Raises:
        BadDataset: it holds something else.
    """
    remedy = "choose another folder, or delete it"
    stamp = root / "shapes.json"
    if stamp.exists():
        try:
            found = json.loads(stamp.read_bytes())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BadDataset(f"{stamp} is not the record of a shapes data set: {remedy}")
        if found == request:
            return True
        differing = sorted(name for name in found.keys() | request.keys() if found.get(name) != request.get(name))
        there = ", ".join(f"{name} {found.get(name)}" for name in differing)
        asked = ", ".join(f"{name} {request.get(name)}" for name in differing)
        raise BadDataset(f"{root} holds shapes of another request ({there}; asked for: {asked}): {remedy}")
    for name in ("labels.csv", "images"):
        if (root / name).exists():
            raise BadDataset(
                f"{root} has a {name} that this renderer did not write, and a shapes data set was asked for: {remedy}"
            )
    return False


def _render_all(images: Path, total: int, *, size: int, seed: int, n_workers: int | None) -> list[tuple[str, ...]]:
    """Write all pictures; their labels by number."""
    one = partial(_render_one, str(images), size=size, seed=seed)
    n_workers = min(n_workers or os.cpu_count() or 1, -(-total // _CHUNK))
    if total < _FEW or n_workers == 1:
        return [one(number) for number in range(total)]
    # A forked process would inherit the locks of other threads, torch's among them, and may hang on them.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(n_workers, mp_context=context, initializer=_leave_interrupts_to_parent) as pool:
            return list(pool.map(one, range(total), chunksize=_CHUNK))
    except BrokenProcessPool as error:
        raise BadDataset(f"a process that rendered shapes died ({error}): try again with n_workers=1") from error


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one message on Ctrl-C, not one a process


def _render_one(images: str, number: int, *, size: int, seed: int) -> tuple[str, ...]:
    picture, labels = render_scene(np.random.default_rng([seed, number]), size=size)
    path = Path(images) / f"{number:06d}.jpg"
    # Renamed into place, so that a second process rendering the same never shows a reader half a picture.
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    picture.save(temporary, "JPEG", quality=92)
    temporary.replace(path)
    return labels


def _as_csv(labels: list[tuple[str, ...]], splits: list[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("file", "labels", "split"))
    for number, (names, split) in enumerate(zip(labels, splits, strict=True)):
        writer.writerow((f"images/{number:06d}.jpg", ";".join(names), split))
    return text.getvalue()
