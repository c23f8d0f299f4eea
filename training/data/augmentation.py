"""Augmentation: random changes of a training image, all drawn from one generator of (seed, epoch, row).

PyTorch's global generator is not used, because threads would share it in no fixed order: a resumed run must see the
same pixels as an uninterrupted one.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.random import Generator
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from hashseek.training.config import TrainSection

MAX_MAGNITUDE = 30


def generators(seed: tuple[int, ...], row: int, *, views: int) -> list[Generator]:
    """A generator for each view of an image in one epoch."""
    return [np.random.default_rng((*seed, row, view)) for view in range(views)]


def augment(pixels: Tensor, rng: Generator, settings: TrainSection) -> Tensor:
    """One image (3, size, size) uint8 after flip, crop, RandAugment and jitter, in this order, as `settings` say."""
    if settings.flip and rng.random() < 0.5:
        pixels = pixels.flip(-1)
    if settings.min_crop < 1:
        pixels = _resized(pixels, *_part(rng, pixels.shape[-1], settings.min_crop))
    if only_flips_and_crops(settings):
        return pixels
    # Most of these operations are two to six times as fast on a Pillow image as on a tensor.
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
    image = rand_augment(image, rng, n=settings.rand_augment, magnitude=settings.rand_augment_magnitude)
    if settings.jitter:
        image = _jitter(image, rng, settings.jitter)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def only_flips_and_crops(settings: TrainSection) -> bool:
    """Whether `flip_and_crop` does all that `augment` does."""
    return settings.rand_augment == 0 and settings.jitter == 0


def flip_and_crop(pixels: Tensor, rngs: Sequence[Generator], settings: TrainSection) -> Tensor:
    """Like `augment` for each image of a batch (B, 3, size, size) uint8, but vectorised, for a GPU.

    Returns float32, not rounded.
    """
    size, device = pixels.shape[-1], pixels.device
    flips, parts = [], []
    for rng in rngs:
        flips.append(settings.flip and rng.random() < 0.5)
        parts.append(_part(rng, size, settings.min_crop) if settings.min_crop < 1 else (0, 0, size, size))
    flipped = torch.tensor(flips, device=device)[:, None]
    top, left, height, width = torch.tensor(parts, dtype=torch.float32, device=device).T[..., None]
    places = (torch.arange(size, device=device) + 0.5) / size
    # Clamp to the crop, so that no pixel outside it is sampled.
    y = (top + places * height - 0.5).clamp(top, top + height - 1)
    x = (left + places * width - 0.5).clamp(left, left + width - 1)
    x = torch.where(flipped, size - 1 - x, x)
    grid = torch.stack((x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)), dim=-1)
    return F.grid_sample(pixels.float(), (2 * grid + 1) / size - 1, mode="bilinear", align_corners=False)


def _part(rng: Generator, size: int, min_crop: float) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part, of aspect ratio 3/4 to 4/3 (Szegedy et al., 2015)."""
    area, ratio = rng.uniform(min_crop, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    width = min(size, max(1, round(size * np.sqrt(area * ratio))))
    height = min(size, max(1, round(size * np.sqrt(area / ratio))))
    return int(rng.integers(size - height + 1)), int(rng.integers(size - width + 1)), height, width


def _resized(pixels: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A part, resized to the whole."""
    size = pixels.shape[-1]
    if height == width == size:
        return pixels
    part = pixels[None, :, top : top + height, left : left + width]
    return F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)[0]


def rand_augment(image: Image.Image, rng: Generator, *, n: int, magnitude: int) -> Image.Image:
    """`n` operations drawn from `OPERATIONS`, each with `magnitude` (0 to 30) and a random sign.

    Source: RandAugment (Cubuk et al., 2020), with the operations and magnitudes of torchvision's.
    """
    operations = tuple(OPERATIONS.values())
    for _ in range(n):
        operation = operations[int(rng.integers(len(operations)))]
        sign = -1 if rng.random() < 0.5 else 1
        image = operation(image, sign * magnitude / MAX_MAGNITUDE)
    return image


def _affine(image: Image.Image, *, move: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0, 0)) -> Image.Image:
    moved: Image.Image = transforms.affine(
        image,
        angle=0.0,
        translate=list(move),
        scale=1.0,
        shear=[math.degrees(math.atan(slope)) for slope in shear],
        interpolation=InterpolationMode.NEAREST,
        center=[0, 0] if any(shear) else None,
    )
    return moved


# name -> function of an image and a strength from -1 to 1. The sign is ignored where it has no meaning.
OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "Identity": lambda image, _: image,
    "ShearX": lambda image, s: _affine(image, shear=(0.3 * s, 0)),
    "ShearY": lambda image, s: _affine(image, shear=(0, 0.3 * s)),
    "TranslateX": lambda image, s: _affine(image, move=(int(150 / 331 * image.width * s), 0)),
    "TranslateY": lambda image, s: _affine(image, move=(0, int(150 / 331 * image.height * s))),
    "Rotate": lambda image, s: transforms.rotate(image, 30 * s, interpolation=InterpolationMode.NEAREST),
    "Brightness": lambda image, s: transforms.adjust_brightness(image, 1 + 0.9 * s),
    "Color": lambda image, s: transforms.adjust_saturation(image, 1 + 0.9 * s),
    "Contrast": lambda image, s: transforms.adjust_contrast(image, 1 + 0.9 * s),
    "Sharpness": lambda image, s: transforms.adjust_sharpness(image, 1 + 0.9 * s),
    "Posterize": lambda image, s: transforms.posterize(image, round(8 - 4 * abs(s))),
    "Solarize": lambda image, s: transforms.solarize(image, 255 * (1 - abs(s))),
    "AutoContrast": lambda image, _: transforms.autocontrast(image),
    "Equalize": lambda image, _: transforms.equalize(image),
}


def _jitter(image: Image.Image, rng: Generator, jitter: float) -> Image.Image:
    changes = (transforms.adjust_brightness, transforms.adjust_contrast, transforms.adjust_saturation)
    for i in rng.permutation(len(changes)):
        image = changes[i](image, float(rng.uniform(1 - jitter, 1 + jitter)))
    return image
