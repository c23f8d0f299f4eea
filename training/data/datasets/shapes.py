"""Data set `shapes`: scenes of simple things, drawn by code, so that every step can be tried without a download.

A scene has 1 to 4 things (shape, colour, perhaps a texture) on a background. Labels are uneven and correlated, as real
ones are (hearts are mostly red or pink, stars yellow and at night): a picture has 3.5 labels on average, and two random
pictures share a label in about 54 % of the cases, which is the precision of guessing.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.label_files import write_label_file
from hashseek.training.data.datasets.folder import folder
from hashseek.training.data.datasets.shapes_drawing import Scene, Thing, draw_scene
from hashseek.training.data.paths import expand
from hashseek.training.data.splits import Seed, Splits

SHAPES = ("circle", "square", "triangle", "star", "heart", "ring")
COLOURS = ("red", "yellow", "green", "blue", "purple", "pink")
TEXTURES = ("striped", "dotted", "checked")
BACKGROUNDS = ("sky", "grass", "night")
LABELS: tuple[str, ...] = (*SHAPES, *COLOURS, *TEXTURES, *BACKGROUNDS)
VERSION = 2  # increased whenever the same seed gives other pictures or labels

# Co-occurrence is uneven on purpose, as with real labels. "" is a wall, a plain surface: no label.
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


def shapes(
    *,
    root: str = ".demo/shapes",
    n_query: int = 400,
    n_train: int = 3000,
    n_database: int = 3600,
    size: int = 128,
    seed: Seed = 0,
) -> Splits:
    """The built-in set: scenes of simple things, 18 labels, drawn on first use.

    Args:
        root: folder that the images and their list are written to.
        n_query: number of queries.
        n_train: number of training images.
        n_database: number of database images.
        size: side of an image in pixels.
        seed: another seed gives other images.

    Raises:
        BadDataset: `root` holds something else.
    """
    target = expand(root)
    render_shapes(target, n_query=n_query, n_train=n_train, n_database=n_database, size=size, seed=seed)
    return folder(root=str(target))


def render_shapes(root: Path, *, n_query: int, n_train: int, n_database: int, size: int, seed: int = 0) -> Path:
    """Draw the data set into `root` unless it already exists, and return the path of its `labels.csv`.

    Writes `images/000000.jpg` and so on, queries first and the database last, and at the end `labels.csv` with the
    columns `file`, `labels` and `split`. An image depends on `seed`, `size` and its number alone. `shapes.json` records
    the request: the same request returns at once, and starts over if it was interrupted.

    Raises:
        BadDataset: a number is outside its limits, `root` holds other files, or it cannot be written.
    """
    request = {"n_query": n_query, "n_train": n_train, "n_database": n_database, "size": size, "seed": seed}
    for name, value in request.items():
        least, most = (16, 1024) if name == "size" else (0, 10**7)
        if not least <= value <= most:
            raise BadDataset(f"{name} must be {least} to {most}, got {value}")
    request["version"] = VERSION
    stamp, listing, images = root / "shapes.json", root / "labels.csv", root / "images"
    try:
        if stamp.is_file() and stamp.read_text(encoding="utf-8", errors="replace") == json.dumps(request):
            if listing.is_file():
                return listing
        elif any(path.exists() for path in (stamp, listing, images)):
            raise BadDataset(
                f"{root} has files other than the shapes {json.dumps(request)}: choose another folder, or delete it"
            )
        # The request is written first and the list last: a folder with a request and no list was interrupted.
        write_atomically(stamp, json.dumps(request).encode())
        images.mkdir(exist_ok=True)
        rows: list[tuple[str, Sequence[str], str]] = []
        splits = ["query"] * n_query + ["train"] * n_train + ["database"] * n_database
        for number, split in enumerate(splits):
            image, labels = render_scene(np.random.default_rng([seed, number]), size=size)
            file = f"images/{number:06d}.jpg"
            image.save(root / file, "JPEG", quality=92)
            rows.append((file, labels, split))
        write_label_file(listing, rows)
    except OSError as error:
        raise BadDataset(f"the shapes cannot be written to {root}: {error}") from error
    return listing


def render_scene(rng: np.random.Generator, *, size: int) -> tuple[Image.Image, tuple[str, ...]]:
    """One scene: an RGB picture of `size` x `size` pixels and its labels in the order of `LABELS`."""
    scene = plan_scene(rng)
    return draw_scene(scene, rng, size), scene_labels(scene)


def scene_labels(scene: Scene) -> tuple[str, ...]:
    """The labels of everything in the scene, in the order of `LABELS`."""
    present = {scene.background}
    for thing in scene.things:
        present |= {thing.shape, thing.colour, thing.texture}
    return tuple(label for label in LABELS if label in present)


def plan_scene(rng: np.random.Generator) -> Scene:
    """Choose a background and 1 to 4 things that hide at most a part of each other."""
    background = _pick(rng, tuple(_BACKGROUND_ODDS), tuple(_BACKGROUND_ODDS.values()))
    count = 1 + int(rng.choice(len(_THING_COUNT_ODDS), p=_THING_COUNT_ODDS))
    things: list[Thing] = []
    shape = colour = texture = ""
    for number in range(count):
        if number == 0 or rng.random() >= _SAME_SHAPE:
            shape = _pick(rng, SHAPES, _SHAPE_ODDS[background])
        if number == 0 or rng.random() >= _SAME_COLOUR:
            colour = _pick(rng, (*COLOURS, ""), _COLOUR_ODDS[shape])
        if number == 0 or rng.random() >= _SAME_TEXTURE:
            texture = _pick(rng, (*TEXTURES, ""), _TEXTURE_ODDS[shape])
        # A heart that is upside down is hard to recognise; the other shapes may be rotated freely.
        angle = float(rng.uniform(-0.6, 0.6) if shape == "heart" else rng.uniform(-np.pi, np.pi))
        for _ in range(32):
            radius = rng.uniform(0.165, 0.30) * (1.0, 0.94, 0.86, 0.80)[count - 1]
            x, y = rng.uniform(0.8 * radius, 1.0 - 0.8 * radius, 2)
            # Discs at this distance overlap by a tenth of their area, so most of each thing stays visible.
            if all(np.hypot(x - other.x, y - other.y) > 0.8 * (radius + other.radius) for other in things):
                things.append(Thing(shape, colour, texture, float(x), float(y), float(radius), angle))
                break  # a thing without room is left out
    return Scene(background, tuple(things))


def _pick(rng: np.random.Generator, names: Sequence[str], odds: Sequence[float]) -> str:
    return names[int(rng.choice(len(names), p=odds))]
