"""Draws the scenes of the data set `shapes`. Which things a scene holds is decided in `shapes`.

Lengths are fractions of the picture's side, angles are radians, and y grows downwards. Everything random comes from the
generator that is passed in.
"""

import colorsys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter

Array = NDArray[np.float32]
Colour = tuple[int, int, int]  # red, green, blue in 0..255
Four = tuple[float, float, float, float]
Ranges = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]  # of hue, saturation and value

PALETTE: dict[str, Ranges] = {  # "" is white, grey and black
    "red": ((-0.025, 0.015), (0.70, 0.90), (0.62, 0.98)),
    "yellow": ((0.120, 0.150), (0.66, 0.90), (0.84, 1.00)),
    "green": ((0.37, 0.44), (0.62, 0.90), (0.42, 0.80)),
    "blue": ((0.565, 0.62), (0.70, 0.92), (0.52, 0.98)),
    "purple": ((0.74, 0.79), (0.50, 0.75), (0.48, 0.88)),
    "pink": ((0.91, 0.945), (0.34, 0.52), (0.90, 1.00)),
    "": ((0.05, 0.15), (0.00, 0.07), (0.14, 0.96)),
}
_SHADOW = [round(0.35 * value) for value in range(256)]
_SKIES: tuple[tuple[Ranges, Ranges], ...] = (  # at the top and at the bottom: noon, evening, overcast
    (((0.56, 0.61), (0.38, 0.52), (0.65, 0.95)), ((0.55, 0.58), (0.10, 0.24), (0.85, 1.00))),
    (((0.64, 0.68), (0.20, 0.32), (0.60, 0.75)), ((0.05, 0.12), (0.20, 0.34), (0.90, 1.00))),
    (((0.57, 0.60), (0.08, 0.16), (0.55, 0.68)), ((0.57, 0.60), (0.02, 0.08), (0.78, 0.90))),
)


@dataclass(frozen=True)
class Thing:
    """One object: labels (colour "" is white, grey or black; texture "" is plain), centre, radius and rotation."""

    shape: str
    colour: str
    texture: str
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True)
class Scene:
    """A background ("" is a wall, which has no label) and its things; later ones lie in front."""

    background: str
    things: tuple[Thing, ...]


def draw_scene(scene: Scene, rng: np.random.Generator, size: int) -> Image.Image:
    """An RGB picture of `size` x `size` pixels."""
    canvas = _BACKGROUNDS[scene.background](rng, 2 * size)  # drawn twice as large, for smooth edges
    _add_clutter(canvas, rng)
    for thing in scene.things:
        _draw_thing(canvas, thing, rng)
    # Exposure, a faint cast and grain: a colour is never one exact value.
    pixels = np.asarray(canvas.reduce(2), np.float32)
    pixels = pixels * (rng.uniform(0.96, 1.04, 3) * rng.uniform(0.80, 1.06)).astype(np.float32)
    pixels += rng.standard_normal((size, size, 1), dtype=np.float32) * np.float32(rng.uniform(1.5, 5.5))
    return Image.fromarray(np.clip(pixels + 0.5, 0.0, 255.0).astype(np.uint8))


# --- things ------------------------------------------------------------------------------------------------


def _star_points(radii: tuple[float, ...], count: int) -> Array:
    """A polygon with `count` corners whose distances from the centre alternate; (count, 2)."""
    angles = np.arange(count) * (2 * np.pi / count) - np.pi / 2
    points: Array = (np.resize(radii, count) * np.stack((np.cos(angles), np.sin(angles)))).T.astype(np.float32)
    return points


def _heart_points() -> Array:
    t = np.linspace(0.0, 2 * np.pi, 48, endpoint=False)
    x, y = 16 * np.sin(t) ** 3, 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return (np.stack((x, 2.5 - y)).T / 16).astype(np.float32)


_OUTLINES = {  # of radius 1, upright
    "circle": _star_points((0.95,), 72),
    "square": _star_points((1.19,), 4),
    "triangle": _star_points((1.15,), 3),
    "star": _star_points((1.15, 0.52), 10),
    "heart": _heart_points(),
    "ring": _star_points((1.0,), 72),
}


def outline(thing: Thing, side: int) -> Image.Image:
    """The area that a thing covers (mode L, 0 or 255) of a picture of `side` x `side` pixels."""
    mask = Image.new("L", (side, side))
    pen = ImageDraw.Draw(mask)
    cos, sin = np.cos(thing.angle), np.sin(thing.angle)
    points = thing.radius * _OUTLINES[thing.shape] @ np.array([[cos, sin], [-sin, cos]])
    for scale, ink in ((1.0, 255), (0.54, 0))[: 2 if thing.shape == "ring" else 1]:
        pen.polygon([(x, y) for x, y in (side * (scale * points + (thing.x, thing.y))).tolist()], fill=ink)
    return mask


def _draw_thing(canvas: Image.Image, thing: Thing, rng: np.random.Generator) -> None:
    """Draw one thing and its shadow into `canvas`."""
    whole = outline(thing, canvas.width)
    box = whole.getbbox()
    if box is None:
        return
    mask = whole.crop(box)
    shift = canvas.width // 50
    canvas.paste((0, 0, 0), (box[0] + shift, box[1] + shift), mask.point(_SHADOW))
    paint = _colour(rng, PALETTE[thing.colour])
    canvas.paste(paint, box, mask)
    if thing.texture:
        # Cream on a dark colour, a deep shade of the same hue on a bright one.
        bright = 0.3 * paint[0] + 0.59 * paint[1] + 0.11 * paint[2] > 150
        ink = _scaled(paint, 0.42) if bright else (247, 242, 230)
        canvas.paste(ink, box, ImageChops.multiply(mask, _texture(thing, canvas.width, box, rng)))


def _texture(thing: Thing, side: int, box: tuple[int, int, int, int], rng: np.random.Generator) -> Image.Image:
    """Where in `box` a texture's second colour lies (mode L, 0 or 255); it is rotated with the thing."""
    left, top, right, bottom = box
    y, x = (axis.astype(np.float32) / np.float32(side) for axis in np.ogrid[top:bottom, left:right])
    cos, sin = np.float32(np.cos(thing.angle)), np.float32(np.sin(thing.angle))
    frequency = np.float32(2 * np.pi / max(0.07, 0.34 * thing.radius))
    u, v = (
        np.sin(frequency * axis + np.float32(rng.uniform(0, 2 * np.pi)))
        for axis in (cos * x + sin * y, cos * y - sin * x)
    )
    height = {"striped": u, "checked": u * v, "dotted": u + v - np.float32(0.9)}[thing.texture]
    return Image.fromarray((height > 0).astype(np.uint8) * 255)


# --- backgrounds -------------------------------------------------------------------------------------------

# Light and tint vary so widely that the mean colour says little about the labels: a wall may be as blue as the sky or
# as dark as the night. Clouds, blades of grass and stars are what make the three labelled backgrounds.


def _draw_wall(rng: np.random.Generator, side: int) -> Image.Image:
    near = _colour(rng, ((0.0, 1.0), (0.03, 0.25), (0.25, 0.95)))
    canvas = _gradient(side, near, _scaled(near, rng.uniform(0.7, 0.95)))
    if rng.random() < 0.5:  # boards
        step = rng.uniform(0.13, 0.30)
        for x in np.arange(step / 2, 1.0, step).tolist():
            _line(canvas, (x, 0.0, x + rng.uniform(-0.02, 0.02), 1.0), 0.01, (0, 0, 0), 0.2)
    return canvas


def _draw_sky(rng: np.random.Generator, side: int) -> Image.Image:
    top, bottom = _SKIES[int(rng.integers(len(_SKIES)))]
    canvas = _gradient(side, _colour(rng, top), _colour(rng, bottom))
    for x, y, r in rng.uniform((0.0, 0.05, 0.05), (1.0, 0.95, 0.11), (5, 3)).tolist():
        for dx in (-1.2, 0.0, 1.2):
            _ellipse(canvas, (x + dx * r, y, 1.3 * r, 0.5 * r), (255, 255, 255), 0.7)
    return canvas.filter(ImageFilter.BoxBlur(0.02 * side))


def _draw_grass(rng: np.random.Generator, side: int) -> Image.Image:
    lawn = _colour(rng, ((0.15, 0.29), (0.36, 0.55), (0.36, 0.78)))  # from straw to lush
    canvas = _gradient(side, lawn, _scaled(lawn, 0.8))
    for tint in (0.5, 1.4):  # blades in the shade, then blades in the sun
        for x, y, dx, dy in rng.uniform((0.0, 0.0, -0.05, 0.06), (1.0, 1.1, 0.05, 0.19), (140, 4)).tolist():
            _line(canvas, (x, y, x + dx, y - dy), 0.007, _scaled(lawn, tint), 0.6)
    return canvas


def _draw_night(rng: np.random.Generator, side: int) -> Image.Image:
    top = _colour(rng, ((0.52, 0.76), (0.45, 0.70), (0.10, 0.20)))
    bottom = _colour(rng, ((0.56, 0.80), (0.30, 0.52), (0.24, 0.46)))
    canvas = _gradient(side, top, bottom)
    for x, y, r in rng.uniform((0.0, 0.0, 0.003), (1.0, 1.0, 0.009), (int(rng.integers(30, 60)), 3)).tolist():
        _ellipse(canvas, (x, y, r, r), (255, 247, 224), 0.9)
    return canvas


_BACKGROUNDS = {"": _draw_wall, "sky": _draw_sky, "grass": _draw_grass, "night": _draw_night}


def _add_clutter(canvas: Image.Image, rng: np.random.Generator) -> None:
    """Draw a few faint dark lines and bright blobs."""
    for x0, y0, x1, y1 in rng.uniform(0.0, 1.0, (int(rng.integers(4)), 4)).tolist():
        _line(canvas, (x0, y0, x1, y1), 0.008, (0, 0, 0), 0.2)
    for x, y, rx, ry in rng.uniform((0.0, 0.0, 0.03, 0.03), (1.0, 1.0, 0.15, 0.15), (int(rng.integers(4)), 4)).tolist():
        _ellipse(canvas, (x, y, rx, ry), (255, 255, 255), 0.15)


# --- small helpers -----------------------------------------------------------------------------------------


def _colour(rng: np.random.Generator, ranges: Ranges) -> Colour:
    hue, saturation, value = (rng.uniform(*limits) for limits in ranges)
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1.0, saturation, value))
    return red, green, blue


def _scaled(colour: Colour, factor: float) -> Colour:
    red, green, blue = (min(255, round(factor * part)) for part in colour)
    return red, green, blue


def _gradient(side: int, top: Colour, bottom: Colour) -> Image.Image:
    rows = np.linspace(top, bottom, side)[:, None]
    return Image.fromarray(np.repeat(rows, side, axis=1).astype(np.uint8))


def _line(canvas: Image.Image, ends: Four, width: float, colour: Colour, opacity: float) -> None:
    points = [canvas.width * value for value in ends]
    width = max(1, round(canvas.width * width))
    ImageDraw.Draw(canvas, "RGBA").line(points, fill=(*colour, round(255 * opacity)), width=width)


def _ellipse(canvas: Image.Image, centre_and_radii: Four, colour: Colour, opacity: float) -> None:
    x, y, rx, ry = centre_and_radii
    box = [canvas.width * value for value in (x - rx, y - ry, x + rx, y + ry)]
    ImageDraw.Draw(canvas, "RGBA").ellipse(box, fill=(*colour, round(255 * opacity)))
