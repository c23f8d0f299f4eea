"""Drawn pictures."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

N_PICTURES = 12


def draw(seed: int, size: tuple[int, int] = (96, 72)) -> Image.Image:
    """A picture that no other seed gives: a shaded background with figures on it."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3)).astype(np.uint8)
    image = Image.fromarray(corners).resize(size, Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = (int(rng.integers(0, side)) for side in size)
        radius = int(rng.integers(6, max(7, min(size) // 3)))
        figure = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        figure((x - radius, y - radius, x + radius, y + radius), fill=tuple(int(c) for c in rng.integers(0, 256, 3)))
    return image


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """The image as a file of this kind."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return buffer.getvalue()


def png(seed: int, size: tuple[int, int] = (96, 72)) -> bytes:
    """A drawn picture as a PNG file."""
    return encoded(draw(seed, size))


def save(path: Path, seed: int = 0, **options: str | int) -> Path:
    """Save a drawn picture, and create its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(seed).save(path, **options)
    return path


def labels_of(path: Path) -> tuple[str, ...]:
    """Labels of a drawn picture."""
    seed = int(path.stem.split()[-1])
    return ("odd" if seed % 2 else "even", *(("three",) if seed % 3 == 0 else ()))
