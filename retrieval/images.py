"""Reading, decoding and preprocessing images: every command that reads an image uses these functions."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, JpegImagePlugin, TiffImagePlugin, UnidentifiedImageError

from hashseek.retrieval.errors import BadConfig, BadImage
from hashseek.retrieval.tar_members import find_member, read_member

if TYPE_CHECKING:
    import torch

# Pillow also knows formats that start other programs, so only these are allowed. Naming a format that this build of
# Pillow lacks would make it refuse all others. MPO has no entry of its own: JPEG opens it.
Image.init()
with suppress(ImportError):
    import pillow_heif

    # Without thumbnails, which may differ from the picture; one thread, because pictures are decoded in threads.
    pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
FORMATS = tuple(kind for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF") if kind in Image.OPEN)
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo")
SUFFIXES = frozenset(
    (*_JPEG_SUFFIXES, ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".hif")
)
INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_JPEG = ("JPEG", "MPO")  # MPO: several JPEGs in one file, of which the first is read
MAX_PIXELS = 100_000_000
MAX_BYTES = 256 * 2**20
# Of a JPEG. Progressive ones have about ten scans. Each adds 60 bytes to the file, and a pass over all pixels: 100
# scans of 100 megapixels took 6 s on one core, 20 scans 1 s.
MAX_SCANS = 100
MAX_SCANNED = 20 * MAX_PIXELS  # pixels times scans
# Pixels of a run-length encoded BMP. Pillow decodes them in Python: 100 megapixels from 41 KB took 11 s.
MAX_RUN_LENGTH = 10_000_000
_RUN_LENGTH = (1, 2)  # in the header of a BMP
MAX_PROFILES = 10  # colour profiles of a PNG; Pillow decompresses each: opening 1 MiB of them took 2 s
# Of a JPEG. Pillow takes some microseconds of Python for each marker or stray byte in the header: 31 MiB of them took
# 40 s. For each Exif segment it copies those before it: 4 MiB of small ones took 8 s.
MAX_MARKERS = 50_000
MAX_EXIF = 10
_BAND = 64  # rows

# `decode` checks the size in the header itself, with a clearer error.
Image.MAX_IMAGE_PIXELS = None

_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SCAN, _END = 0xDA, 0xD9
_WITHOUT_SEGMENT = {0x01} | {kind & 0xFF for kind, (_, _, read) in JpegImagePlugin.MARKER.items() if read is None}
_HEIC = re.compile(rb".{4}ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """A decoded image: RGB, upright, with the size (pixels) and media type of the file it came from."""

    image: Image.Image
    width: int
    height: int
    media_type: str


class LoadedFile(NamedTuple):
    """The network's input for an image, and what is known about its file."""

    pixels: Pixels
    width: int
    height: int
    media_type: str


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes a network's input; part of the model, stored in every checkpoint.

    The central square of `crop_fraction` times the shorter side is resized to `size` x `size` pixels (`interpolation`,
    antialiased), scaled to [0, 1], and normalised per channel as (value - mean) / std.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop_fraction: float = 0.875
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if not 16 <= self.size <= 2048:
            raise BadConfig(f"the input size must be 16 to 2048 pixels, got {self.size}")
        if not 0 < self.crop_fraction <= 1:
            raise BadConfig(f"crop_fraction must be above 0 and at most 1, got {self.crop_fraction}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise BadConfig("mean and std must have three numbers each (red, green, blue), with std above 0")
        if self.interpolation not in INTERPOLATIONS:
            raise BadConfig(f"interpolation must be {' or '.join(INTERPOLATIONS)}, got {self.interpolation!r}")

    @property
    def shorter_side(self) -> int:
        """The smallest shorter side, in pixels, of a picture that need not be enlarged."""
        return round(self.size / self.crop_fraction)

    def as_dict(self) -> dict[str, Any]:
        """JSON form, for `from_dict`. Fingerprints hash it, so the default interpolation must stay left out."""
        values = asdict(self)
        if self.interpolation == "bilinear":
            del values["interpolation"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocessing:
        """Build from the JSON form."""
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})


def read_bytes(path: Path) -> bytes:
    """The content of an image file, or of an image in a tar (`hashseek.retrieval.tar_members`).

    Raises:
        BadImage: the file is missing, unreadable, empty, or larger than `MAX_BYTES`.
    """
    member = find_member(path)
    try:
        size = path.stat().st_size if member is None else member.size
        if size > MAX_BYTES:
            raise BadImage(f"{path} has {size:,} bytes; an image may have at most {MAX_BYTES:,}")
        if member is not None:
            data: bytes | None = read_member(member, name=str(path))
        else:
            data = path.read_bytes() if path.is_file() else None
    except FileNotFoundError:
        raise BadImage(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: the path contains NUL
        raise BadImage(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data is None:
        raise BadImage(f"{path} is not a file")
    if not data:
        raise BadImage(f"{path} is empty (0 bytes)")
    return data


def decode(data: bytes, *, name: str = "the image", at_least: int = 0) -> Picture:
    """Decode image bytes to upright 8-bit RGB; of an animation the first frame, transparency over white.

    A JPEG may be decoded smaller than it is (DCT scaling) as long as both sides keep `at_least` pixels; 0 keeps all.

    Raises:
        BadImage: empty, not an image, damaged, of more than `MAX_PIXELS` pixels (of a TIFF, also in a tile), a JPEG of
            too many scans, markers or Exif segments, a PNG of too many colour profiles, or a large run-length encoded
            BMP.
    """
    if not data:
        raise BadImage(f"{name} is empty (0 bytes)")
    try:
        with _open(data, name) as opened:
            _refuse_costly(opened, data, name)
            width, height = opened.size
            is_jpeg = opened.format in _JPEG  # browsers do not know the type image/mpo
            media_type = "image/jpeg" if is_jpeg else Image.MIME.get(opened.format or "", "application/octet-stream")
            if at_least:
                opened.draft("RGB", (at_least, at_least))
            # Stored on its side; Pillow has exchanged those of a TIFF.
            if _orientation(opened) in (5, 6, 7, 8) and opened.format != "TIFF":
                width, height = height, width
            ImageOps.exif_transpose(opened, in_place=True)
            return Picture(to_rgb(opened, name=name), width, height, media_type)
    except BadImage:
        raise
    except UnidentifiedImageError:
        if "HEIF" not in FORMATS and _HEIC.match(data):
            raise BadImage(f"{name} is a HEIC picture: to read it, run pip install 'hashseek[heif]'") from None
        kinds = ", ".join(FORMATS)
        raise BadImage(f"{name} is not an image in a supported format ({kinds})") from None
    except Exception as error:  # decoders raise nearly anything on damaged data
        raise BadImage(f"{name} is damaged and cannot be decoded: {error}") from None


def _refuse_costly(opened: Image.Image, data: bytes, name: str) -> None:
    """Raise `BadImage` for an image whose header says that decoding takes too much memory or time."""
    width, height = opened.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"{name} has {width} x {height} = {width * height:,} pixels; the limit is {MAX_PIXELS:,}")
    if (n_in_tile := _pixels_of_tile(opened)) > MAX_PIXELS:
        raise BadImage(
            f"{name} is a TIFF with tiles of {n_in_tile:,} pixels; the limit is {MAX_PIXELS:,}: save it again"
        )
    if opened.format in _JPEG:
        most = min(MAX_SCANS, MAX_SCANNED // (width * height))
        if (n_scans := _count_scans(data, most, name)) > most:
            raise BadImage(
                f"{name} is a JPEG with {n_scans:,} scans; the limit for {width} x {height} pixels is {most}: "
                "save it again"
            )
    if opened.format == "BMP" and opened.info["compression"] in _RUN_LENGTH and width * height > MAX_RUN_LENGTH:
        raise BadImage(
            f"{name} is a run-length encoded BMP of {width} x {height} pixels; the limit is "
            f"{MAX_RUN_LENGTH:,}: save it as PNG"
        )


def _orientation(image: Image.Image) -> object:
    """The EXIF orientation of an open image, 1 to 8. Damaged metadata does not matter, here and in `exif_transpose`."""
    with suppress(Exception):  # it raises nearly anything; Pillow keeps what it could read
        image.getexif()
    for name in ("exif", "Raw profile type exif"):  # exif_transpose would write it again, which may fail
        image.info.pop(name, None)
    return image.getexif().get(ExifTags.Base.Orientation)


def _open(data: bytes, name: str) -> Image.Image:
    if data.startswith(b"\x89PNG") and (n_profiles := data.count(b"iCCP")) > MAX_PROFILES:
        raise BadImage(
            f"{name} is a PNG with {n_profiles:,} colour profiles; the limit is {MAX_PROFILES}: save it again"
        )
    if data.startswith(b"\xff\xd8\xff"):
        header = takewhile(lambda marker: marker[0] != _SCAN, _jpeg_markers(data, name))
        if (n_exif := sum(data.startswith(b"Exif\0\0", place + 2) for _, place in header)) > MAX_EXIF:
            raise BadImage(f"{name} is a JPEG with {n_exif:,} Exif segments; the limit is {MAX_EXIF}: save it again")
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _pixels_of_tile(image: Image.Image) -> int:
    """Pixels of a tile of a TIFF, which may exceed those of the picture; 0 if it has none."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return 0
    return int(image.tag_v2.get(TiffImagePlugin.TILEWIDTH, 0) * image.tag_v2.get(TiffImagePlugin.TILELENGTH, 0))


def _count_scans(data: bytes, most: int, name: str) -> int:
    """Scans of a JPEG: up to the end of the image, none of a thumbnail or a video with it.

    If it has at most `most`, the number may be too large, but not above `most`.
    """
    n_scans = data.count(b"\xff\xda")  # an upper bound, and fast
    return n_scans if n_scans <= most else sum(kind == _SCAN for kind, _ in _jpeg_markers(data, name))


def _jpeg_markers(data: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Kind of each marker of a JPEG, and place of what follows it, as Pillow and libjpeg find them.

    Raises:
        BadImage: markers, and bytes outside all segments of the header, are together more than `MAX_MARKERS`.
    """
    n, place, in_header = 0, 2, True
    while True:
        found = _JPEG_MARKER.search(data, place)
        n += 1
        if in_header:
            n += (found.start() if found else len(data)) - place
        if n > MAX_MARKERS:
            raise BadImage(f"{name} is a JPEG with more than {MAX_MARKERS:,} markers and stray bytes: save it again")
        if not found:
            return
        kind, place = data[found.end() - 1], found.end()
        yield kind, place
        in_header &= kind != _SCAN
        if kind == _END and not in_header:
            return
        if kind not in _WITHOUT_SEGMENT:
            place += max(2, int.from_bytes(data[place : place + 2]))


def memory_to_decode(data: bytes, *, at_least: int = 0) -> int:
    """About the most memory that `decode` needs, in bytes, by the header; 0 for an image that it would refuse."""
    try:
        with _open(data, "the image") as opened:
            whole = max(opened.width * opened.height, _pixels_of_tile(opened))
            if at_least:
                opened.draft("RGB", (at_least, at_least))
            decoded = opened.width * opened.height
            if opened.format in _JPEG:  # a progressive one keeps the coefficients of all pixels
                return 10 * decoded + (6 * whole if opened.info.get("progressive") else 0)
            return (17 if opened.format == "WEBP" else 10) * whole
    except Exception:
        return 0


def as_decoded(image: Image.Image) -> Image.Image:
    """An open image as `decode` returns it: upright 8-bit RGB.

    Raises:
        BadImage: it is not a Pillow image, is damaged or closed, or holds floating-point values.
    """
    if not isinstance(image, Image.Image):
        raise BadImage(f"{type(image).__name__} is not an image: use a path, the bytes of a file or a Pillow image")
    try:
        return to_rgb(ImageOps.exif_transpose(image))
    except (OSError, ValueError) as error:
        raise BadImage(f"the image cannot be decoded: {error}") from None


def to_rgb(image: Image.Image, *, name: str = "the image") -> Image.Image:
    """The image in RGB; other modes are converted in bands, because some conversions need many bytes per pixel.

    Raises:
        BadImage: it holds floating-point values, whose range is unknown.
    """
    if image.mode == "F":
        raise BadImage(f"{name} holds floating-point values: convert it to 8 bits per channel")
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND):
        band = image.crop((0, top, image.width, min(top + _BAND, image.height)))
        rgb.paste(_band_to_rgb(band), (0, top))
    return rgb


def _band_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255 instead of scaling
        grey = np.asarray(image).astype(np.int64)
        return Image.fromarray(np.clip(grey // 257, 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def preprocess(image: Image.Image, preprocessing: Preprocessing) -> Pixels:
    """The network's input (3, size, size) as uint8, before normalisation."""
    side = max(1.0, min(image.size) * preprocessing.crop_fraction)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    square = image.resize(
        (preprocessing.size, preprocessing.size),
        INTERPOLATIONS[preprocessing.interpolation],
        box=(left, top, left + side, top + side),
        reducing_gap=3.0,
    )
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def load_file(data: bytes, preprocessing: Preprocessing, *, name: str = "the image") -> LoadedFile:
    """The network's input for an image file, decoded no larger than `preprocessing` needs."""
    picture = decode(data, name=name, at_least=preprocessing.shorter_side)
    return LoadedFile(preprocess(picture.image, preprocessing), picture.width, picture.height, picture.media_type)


def normalizer(preprocessing: Preprocessing, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that turns uint8 pixels (B, 3, H, W) into normalised float32 on `device`, channels last."""
    import torch

    mean = torch.tensor(preprocessing.mean, device=device).view(1, 3, 1, 1) * 255
    std = torch.tensor(preprocessing.std, device=device).view(1, 3, 1, 1) * 255

    def normalize(pixels: torch.Tensor) -> torch.Tensor:
        return ((pixels.to(device) - mean) / std).contiguous(memory_format=torch.channels_last)

    return normalize
