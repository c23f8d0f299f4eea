"""How a scene of the `shapes` data set looks: `draw_scene` turns a plan into pixels, `mask` shows one thing's outline.

Lengths in a plan are fractions of the picture's side; angles are radians; colours are red, green, blue in 0..1; y grows
downwards. All randomness comes from the generator that is handed in. What a scene holds is decided in `shapes`.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Array = NDArray[np.float32]
Colour = tuple[float, float, float]
Points = list[tuple[float, float]]
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, right and bottom excluded


@dataclass(frozen=True)
class Thing:
    """One object: labels (colour "" is white, grey or black; texture "" is plain), place, radius and rotation."""

    shape: str
    colour: str
    texture: str
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True)
class Scene:
    """A background ("" carries no label) and its things, hindmost first."""

    background: str
    things: tuple[Thing, ...]


def draw_scene(scene: Scene, rng: np.random.Generator, size: int) -> Image.Image:
    """Draw a plan as an RGB picture of `size` x `size` pixels."""
    canvas = _DRAW_BACKGROUND[scene.background](rng, size)
    for thing in scene.things:
        _draw_thing(canvas, thing, rng, dark=scene.background == "night")
    _add_clutter(canvas, rng, count=int(rng.integers(0, 3)), strength=0.18)
    canvas *= _dappled_light(rng, size)
    grain = rng.standard_normal((size, size, 1), dtype=np.float32) * np.float32(rng.uniform(0.006, 0.022))
    pixels = np.clip((canvas + grain) * 255.0 + 0.5, 0.0, 255.0).astype(np.uint8)
    return Image.fromarray(pixels)


# --- outlines ----------------------------------------------------------------------------------------------


def _polar(radii: Sequence[float], count: int) -> Points:
    angles = np.arange(count) * (2 * np.pi / count) - np.pi / 2
    return [
        (radii[i % len(radii)] * float(np.cos(a)), radii[i % len(radii)] * float(np.sin(a)))
        for i, a in enumerate(angles)
    ]


def _heart() -> Points:
    t = np.linspace(0.0, 2 * np.pi, 48, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return [(float(a) / 16.0, float(b + 2.5) / 16.0) for a, b in zip(x, y, strict=True)]


_OUTLINES: dict[str, Points] = {  # unit radius, upright
    "circle": _polar((0.95,), 72),
    "square": [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)],
    "triangle": _polar((1.15,), 3),
    "star": _polar((1.15, 0.52), 10),
    "heart": _heart(),
    "ring": _polar((1.0,), 72),
}
_RING_HOLE = _polar((0.54,), 60)


def mask(thing: Thing, size: int, box: Box) -> Image.Image:
    """The filled outline (mode L, 0 or 255) on a picture of side `size`, of which only `box` is made."""
    picture = Image.new("L", (box[2] - box[0], box[3] - box[1]))
    draw = ImageDraw.Draw(picture)
    draw.polygon(_moved(_OUTLINES[thing.shape], thing, size, box), fill=255)
    if thing.shape == "ring":
        draw.polygon(_moved(_RING_HOLE, thing, size, box), fill=0)
    return picture


def _moved(points: Points, thing: Thing, size: int, box: Box) -> Points:
    c, s = float(np.cos(thing.angle)) * thing.radius, float(np.sin(thing.angle)) * thing.radius
    x, y = thing.x * size - box[0], thing.y * size - box[1]
    return [(x + (c * px - s * py) * size, y + (s * px + c * py) * size) for px, py in points]


# --- things ------------------------------------------------------------------------------------------------

_SAMPLES = 3  # per pixel and side, for smooth edges
_PALETTE = {  # the ranges of hue, saturation and value
    "red": ((-0.025, 0.015), (0.70, 0.90), (0.62, 0.98)),
    "yellow": ((0.120, 0.150), (0.66, 0.90), (0.84, 1.00)),
    "green": ((0.37, 0.44), (0.62, 0.90), (0.42, 0.80)),
    "blue": ((0.565, 0.62), (0.70, 0.92), (0.52, 0.98)),
    "purple": ((0.74, 0.79), (0.50, 0.75), (0.48, 0.88)),
    "pink": ((0.91, 0.945), (0.34, 0.52), (0.90, 1.00)),
    "": ((0.05, 0.15), (0.00, 0.07), (0.14, 0.96)),
}


def _draw_thing(whole: Array, thing: Thing, rng: np.random.Generator, *, dark: bool) -> None:
    """Draw one thing, its shadow, shading and texture, into the canvas `whole` (size, size, 3), in place."""
    size = whole.shape[0]
    reach = 1.3 * thing.radius + 0.08  # the outline and its shadow
    left, right = max(0, int((thing.x - reach) * size)), min(size, int((thing.x + reach) * size) + 1)
    top, bottom = max(0, int((thing.y - reach) * size)), min(size, int((thing.y + reach) * size) + 1)
    canvas = whole[top:bottom, left:right]  # a view: only this part changes
    fine = (_SAMPLES * left, _SAMPLES * top, _SAMPLES * right, _SAMPLES * bottom)
    outline = mask(thing, _SAMPLES * size, fine).reduce(_SAMPLES)
    alpha = _as_array(outline)
    soft = _as_array(outline.filter(ImageFilter.GaussianBlur(0.022 * size)))
    shift = max(1, round(0.02 * size))
    shadow = _moved_by(soft, shift, shift // 2) * np.float32(0.30 if dark else 0.38)
    canvas *= (1.0 - shadow * (1.0 - alpha))[..., None]

    y, x = _pixel_grid(size)
    dy, dx = y[top:bottom] - np.float32(thing.y * size), x[:, left:right] - np.float32(thing.x * size)
    base = _shade(rng, thing.colour)
    paint = np.asarray(base, np.float32)
    if thing.texture:
        c, s = np.float32(np.cos(thing.angle)), np.float32(np.sin(thing.angle))
        u, v = c * dx + s * dy, c * dy - s * dx  # pixels along the thing's own axes
        pattern = _TEXTURE[thing.texture](rng, u, v, thing.radius, size)
        paint = paint + pattern[..., None] * (np.asarray(_ink(rng, base), np.float32) - paint)
    # Light falls from the upper left: a slope over the whole thing, and rims that catch or lose it.
    slope = (dx + dy) / np.float32(thing.radius * size)
    relief = soft - _moved_by(soft, shift, shift)
    light = 0.90 - 0.09 * slope + 0.42 * relief + 0.10 * soft
    canvas += alpha[..., None] * (np.clip(paint * light[..., None], 0.0, 1.0) - canvas)


def _shade(rng: np.random.Generator, colour: str) -> Colour:
    hue, saturation, value = (rng.uniform(*limits) for limits in _PALETTE[colour])
    return colorsys.hsv_to_rgb(hue % 1.0, saturation, value)


def _ink(rng: np.random.Generator, base: Colour) -> Colour:
    """The second colour of a texture: cream, or a deep shade of the same hue, whichever is told apart."""
    light = 0.3 * base[0] + 0.59 * base[1] + 0.11 * base[2]
    if light > 0.62 or (light > 0.42 and rng.random() < 0.3):
        return (base[0] * 0.42, base[1] * 0.36, base[2] * 0.42)
    return (0.97, 0.95, 0.90)


def _stripes(rng: np.random.Generator, u: Array, _v: Array, radius: float, size: int) -> Array:
    """How much ink (0..1) lies at each pixel; `u`, `v` are its place on the thing's own axes, in pixels."""
    period = np.float32(max(0.062, radius * rng.uniform(0.26, 0.42)) * size)
    ink: Array = np.clip((0.25 - _wave(u, period, rng)) * period + 0.5, 0.0, 1.0)
    return ink


def _dots(rng: np.random.Generator, u: Array, v: Array, radius: float, size: int) -> Array:
    period = np.float32(max(0.085, radius * rng.uniform(0.34, 0.46)) * size)
    row = v / period + np.float32(rng.uniform())
    column = u / period + np.float32(rng.uniform()) + 0.5 * (np.floor(row) % 2)  # every other row is set off by half
    away = np.hypot(row % 1.0 - 0.5, column % 1.0 - 0.5)
    ink: Array = np.clip((0.27 - away) * period + 0.5, 0.0, 1.0)
    return ink


def _checks(rng: np.random.Generator, u: Array, v: Array, radius: float, size: int) -> Array:
    period = np.float32(max(0.115, radius * rng.uniform(0.5, 0.75)) * size)
    across, down = (np.clip((0.25 - _wave(axis, period, rng)) * period, -0.5, 0.5) for axis in (u, v))
    ink: Array = 0.5 + 2.0 * across * down
    return ink


def _wave(place: Array, period: np.float32, rng: np.random.Generator) -> Array:
    """Distance, in periods, from the middle of the nearest stripe: 0..0.5, with a random phase."""
    wave: Array = np.abs((place / period + np.float32(rng.uniform())) % 1.0 - 0.5)
    return wave


_TEXTURE = {"striped": _stripes, "dotted": _dots, "checked": _checks}


# --- backgrounds -------------------------------------------------------------------------------------------

# Light, tint and weather vary so widely that a picture's mean colour says little about its labels: a wall may be
# as blue as the sky or as dark as the night. Clouds, blades and stars are what make the three labelled backgrounds.


def _draw_wall(rng: np.random.Generator, size: int) -> Array:
    hue, value = rng.uniform(), rng.uniform(0.24, 0.96)
    saturation = rng.uniform(0.05, 0.32) * (1.15 - 0.6 * value)  # a bright wall that is not pale would be pink or green
    near = colorsys.hsv_to_rgb(hue, saturation, value)
    far = colorsys.hsv_to_rgb((hue + rng.uniform(-0.06, 0.06)) % 1.0, saturation * 1.2, value * rng.uniform(0.75, 0.9))
    canvas = _gradient(size, near, far, rng.uniform(-np.pi, np.pi))
    seams = Image.new("L", (2 * size, 2 * size))
    turn = rng.uniform(-np.pi, np.pi)
    for direction in (turn, turn + np.pi / 2)[: int(rng.integers(3))]:  # bare, boards or tiles
        _draw_seams(ImageDraw.Draw(seams), rng, 2 * size, direction)
    canvas *= 1.0 - _as_array(seams.reduce(2))[..., None] * np.float32(rng.uniform(0.12, 0.30))
    _add_clutter(canvas, rng, count=int(rng.integers(2, 9)), strength=rng.uniform(0.14, 0.30))
    return canvas


def _draw_seams(draw: ImageDraw.ImageDraw, rng: np.random.Generator, side: int, direction: float) -> None:
    c, s = float(np.cos(direction)) * side, float(np.sin(direction)) * side
    step = rng.uniform(0.13, 0.30)
    for away in np.arange(rng.uniform(-0.8, -0.8 + step), 0.8, step).tolist():
        x, y = 0.5 * side - away * s, 0.5 * side + away * c
        draw.line((x - c, y - s, x + c, y + s), fill=255, width=max(1, side // 90))


_SKIES = (  # hue, saturation, value at the top and at the bottom
    ((0.57, 0.42, 0.92), (0.55, 0.12, 0.98)),  # noon
    ((0.60, 0.50, 0.66), (0.57, 0.22, 0.88)),  # deep blue
    ((0.66, 0.26, 0.68), (0.07, 0.30, 0.97)),  # evening
    ((0.58, 0.12, 0.62), (0.58, 0.05, 0.84)),  # overcast
    ((0.52, 0.34, 0.82), (0.14, 0.16, 0.97)),  # morning
)


def _draw_sky(rng: np.random.Generator, size: int) -> Array:
    top, low = _SKIES[int(rng.integers(len(_SKIES)))]
    drift = rng.uniform(-0.015, 0.015)
    first, last = (colorsys.hsv_to_rgb(h + drift, s * rng.uniform(0.8, 1.1), v) for h, s, v in (top, low))
    canvas = _gradient(size, first, last, np.pi / 2)
    clouds = Image.new("L", (size, size))
    draw = ImageDraw.Draw(clouds)
    for _ in range(int(rng.integers(4, 7))):
        x, y, width = rng.uniform(0.0, 1.0), rng.uniform(0.05, 0.95), rng.uniform(0.06, 0.14)
        for _ in range(6):  # a cloud is a heap of puffs on a level base
            dx, rise = rng.uniform(-1.5, 1.5) * width, rng.uniform(0.35, 0.9) * width
            _ellipse(draw, size, x + dx, y - 0.4 * rise, width * 0.8, rise * 0.8, 255)
    fluff = _as_array(clouds.filter(ImageFilter.GaussianBlur(0.016 * size)))
    canvas += fluff[..., None] * np.float32(0.85) * (1.0 - canvas)
    _add_clutter(canvas, rng, count=int(rng.integers(0, 4)), strength=0.14)
    return canvas


def _draw_grass(rng: np.random.Generator, size: int) -> Array:
    hue, value = rng.uniform(0.15, 0.29), rng.uniform(0.36, 0.78)  # from straw to lush
    top = colorsys.hsv_to_rgb(hue, rng.uniform(0.36, 0.52), value)
    low = colorsys.hsv_to_rgb(hue + 0.02, rng.uniform(0.42, 0.58), value * 0.8)
    canvas = _gradient(size, top, low, np.pi / 2)
    for tint in (0.50, 1.40):  # blades in the shade, then blades in the sun
        blades = Image.new("L", (2 * size, 2 * size))
        draw = ImageDraw.Draw(blades)
        place = rng.uniform(0.0, 2.0 * size, (140, 2))
        bend = rng.uniform(-0.05, 0.05, 140) * size
        tall = rng.uniform(0.06, 0.19, 140) * size
        for (x, y), dx, dy in zip(place.tolist(), bend.tolist(), tall.tolist(), strict=True):
            draw.line((x, y, x + dx, y - dy), fill=190, width=max(1, round(0.014 * size)))
        cover = _as_array(blades.reduce(2))[..., None] * np.float32(0.75)
        canvas += cover * (np.minimum(canvas * np.float32(tint), 1.0) - canvas)
    _add_clutter(canvas, rng, count=int(rng.integers(0, 4)), strength=0.14)
    return canvas


def _draw_night(rng: np.random.Generator, size: int) -> Array:
    hue = rng.uniform(0.52, 0.76)  # teal, navy, plum
    top = colorsys.hsv_to_rgb(hue, rng.uniform(0.45, 0.70), rng.uniform(0.10, 0.20))
    low = colorsys.hsv_to_rgb(hue + 0.04, rng.uniform(0.30, 0.52), rng.uniform(0.24, 0.46))
    canvas = _gradient(size, top, low, np.pi / 2 + rng.uniform(-0.3, 0.3))
    _add_clutter(canvas, rng, count=int(rng.integers(1, 5)), strength=0.10)
    lights = Image.new("L", (2 * size, 2 * size))
    draw = ImageDraw.Draw(lights)
    for x, y, r in rng.uniform((0, 0, 0.003), (1, 1, 0.009), (int(rng.integers(30, 60)), 3)).tolist():
        _ellipse(draw, 2 * size, x, y, r, r, int(110 + 16000 * r))
    canvas += _as_array(lights.reduce(2))[..., None] * (np.asarray((1.0, 0.97, 0.88), np.float32) - canvas)
    return canvas


_DRAW_BACKGROUND = {"": _draw_wall, "sky": _draw_sky, "grass": _draw_grass, "night": _draw_night}


def _dappled_light(rng: np.random.Generator, size: int) -> Array:
    """What to multiply a canvas with: patches of light and shade, an exposure and a faint cast (size, size, 3)."""
    coarse = rng.uniform(-1.0, 1.0, (4, 4)).astype(np.float32) * np.float32(rng.uniform(0.05, 0.26))
    patches = np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC))
    cast = rng.uniform(0.96, 1.04, 3).astype(np.float32) * np.float32(rng.uniform(0.80, 1.06))
    light: Array = (1.0 + patches)[..., None] * cast
    return light


def _add_clutter(canvas: Array, rng: np.random.Generator, *, count: int, strength: float) -> None:
    """Blend specks, lines, arcs and blobs into `canvas`, in place: they lighten or darken, never tint."""
    size = canvas.shape[0]
    for ink in (0.0, 1.0):
        layer = Image.new("L", (2 * size, 2 * size))
        draw = ImageDraw.Draw(layer)
        for _ in range(int(rng.binomial(count, 0.5))):
            _draw_clutter(draw, rng, 2 * size)
        cover = _as_array(layer.reduce(2))[..., None] * np.float32(strength)
        canvas += cover * (np.float32(ink) - canvas)


def _draw_clutter(draw: ImageDraw.ImageDraw, rng: np.random.Generator, side: int) -> None:
    x0, y0, x1, y1 = rng.uniform(0.0, 1.0, 4).tolist()
    kind = int(rng.integers(4))
    if kind == 0:
        for dx, dy, r in rng.normal(0.0, (0.1, 0.1, 0.004), (12, 3)).tolist():
            _ellipse(draw, side, x0 + dx, y0 + dy, 0.003 + abs(r), 0.003 + abs(r), 255)
    elif kind == 1:
        draw.line((x0 * side, y0 * side, x1 * side, y1 * side), fill=220, width=max(1, side // 140))
    elif kind == 2:
        r = 0.3 + 0.6 * x1
        box = ((x0 - r) * side, (y0 - r) * side, (x0 + r) * side, (y0 + r) * side)
        draw.arc(box, 360 * y1, 360 * y1 + 120, fill=220, width=max(1, side // 120))
    else:
        _ellipse(draw, side, x0, y0, 0.05 + 0.13 * x1, 0.05 + 0.13 * y1, 110)


# --- small helpers -----------------------------------------------------------------------------------------


def _ellipse(draw: ImageDraw.ImageDraw, side: int, x: float, y: float, rx: float, ry: float, ink: int) -> None:
    draw.ellipse(((x - rx) * side, (y - ry) * side, (x + rx) * side, (y + ry) * side), fill=ink)


def _as_array(mask: Image.Image) -> Array:
    return np.asarray(mask, np.float32) / np.float32(255.0)


def _moved_by(image: Array, down: int, right: int) -> Array:
    """The image moved by whole pixels; the first row and column fill what comes free."""
    height, width = image.shape
    return np.pad(image, ((down, 0), (right, 0)), mode="edge")[:height, :width]


def _pixel_grid(size: int) -> tuple[Array, Array]:
    along = np.arange(size, dtype=np.float32) + np.float32(0.5)
    return along[:, None], along[None, :]


def _gradient(size: int, start: Colour, end: Colour, direction: float) -> Array:
    """A canvas (size, size, 3) from `start` to `end` along `direction` (radians, pi / 2 is down)."""
    y, x = _pixel_grid(size)
    c, s = np.float32(np.cos(direction)), np.float32(np.sin(direction))
    along = c * (x / size - 0.5) + s * (y / size - 0.5)
    share = np.clip(along + 0.5, 0.0, 1.0)[..., None]
    first, last = np.asarray(start, np.float32), np.asarray(end, np.float32)
    canvas: Array = first + share * (last - first)
    return canvas
