"""A contact sheet: pictures of every split with their labels beneath, to see whether labels fit."""

import io
import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from hashseek.retrieval.errors import BadConfig, BadImage
from hashseek.retrieval.files import write_atomically
from hashseek.training.data.splits import NAMES, Split, Splits

_SIDE, _GAP, _LINE, _LINES, _TITLE = 176, 12, 15, 4, 26  # pixels; lines of a caption
_CHARACTERS = 26  # in a line of a caption
_INK, _FAINT, _PAPER = (32, 33, 36), (95, 99, 104), (255, 255, 255)


def contact_sheet(splits: Splits, out: Path, *, columns: int = 6, rows: int = 2, seed: int = 0) -> int:
    """Write a PNG with `columns` x `rows` pictures of each split, drawn at random; gives how many could not be decoded.

    Raises:
        BadConfig: the data set has vectors, or the sheet would be too large.
        OSError: `out` cannot be written.
    """
    from hashseek.retrieval.images import decode, read_bytes  # late: it loads torch

    if splits.train.vectors is not None:
        raise BadConfig("this data set has vectors and no pictures: leave --out away")
    if not (1 <= columns <= 20 and 1 <= rows <= 20):
        raise BadConfig(f"a contact sheet has 1 to 20 columns and rows, not {columns} and {rows}")
    tile = _SIDE + _LINES * _LINE + _GAP
    width, block = columns * (_SIDE + _GAP) + _GAP, _TITLE + rows * tile
    sheet = Image.new("RGB", (width, len(NAMES) * block + _GAP), _PAPER)
    pen = ImageDraw.Draw(sheet)
    font, bold = ImageFont.load_default(12), ImageFont.load_default(15)
    rng = np.random.default_rng(seed)
    n_broken = 0
    for number, name in enumerate(NAMES):
        split: Split = getattr(splits, name)
        top = number * block + _GAP // 2
        pen.text((_GAP, top), f"{name}: {len(split):,} images", fill=_INK, font=bold)
        chosen = rng.permutation(len(split))[: columns * rows]
        for place, row in enumerate(chosen.tolist()):
            x, y = _GAP + place % columns * (_SIDE + _GAP), top + _TITLE + place // columns * tile
            path = split.paths[row]
            try:
                picture = decode(read_bytes(path), name=str(path), at_least=2 * _SIDE).image
                picture = ImageOps.contain(picture, (_SIDE, _SIDE))
                sheet.paste(picture, (x + (_SIDE - picture.width) // 2, y + (_SIDE - picture.height) // 2))
            except BadImage:
                n_broken += 1
                pen.rectangle((x, y, x + _SIDE - 1, y + _SIDE - 1), outline=_FAINT)
                pen.text((x + 8, y + _SIDE // 2 - 8), "cannot be decoded", fill=_FAINT, font=font)
            labels = [splits.label_names[column] for column in np.flatnonzero(split.labels[row]).tolist()]
            text = textwrap.wrap(
                ", ".join(labels) or "(no label)", _CHARACTERS, max_lines=_LINES - 1, placeholder=" ..."
            )
            for line, words in enumerate([path.name[-_CHARACTERS:], *text]):
                colour = _FAINT if line == 0 else _INK
                pen.text((x, y + _SIDE + 3 + line * _LINE), words, fill=colour, font=font)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    write_atomically(out, buffer.getvalue())
    return n_broken
