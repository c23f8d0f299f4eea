"""Finds images that cannot be decoded, before they are used. Does not load torch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hashseek.retrieval.errors import BadDataset, BadImage
from hashseek.retrieval.files import cached_file, write_atomically
from hashseek.retrieval.images import Preprocessing, load_file, read_bytes
from hashseek.retrieval.label_files import Problem, refuse
from hashseek.retrieval.load_ahead import load_ahead
from hashseek.training.data.file_digests import digest_files
from hashseek.training.data.splits import NAMES, Split, Splits

# Decoding to a small size is fast and still reads the whole file, so that it finds truncated ones.
_TINY = Preprocessing(size=16, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_fraction=1.0)


def without_broken(splits: Splits, names: Sequence[str] = NAMES, *, source: str) -> Splits:
    """The splits without the broken images of the splits `names`, which become problems; vectors are not checked.

    The cache records that a list of files has no broken image, until a file or Pillow changes.

    Raises:
        BadDataset: an image is broken and on_error is "stop", or a split has no other image.
    """
    parts: dict[str, Any] = {}
    broken: list[Problem] = []
    for name in names:
        split: Split = getattr(splits, name)
        problems = _broken_images(split) if len(split) and split.vectors is None else {}
        if problems and splits.on_error == "stop":
            refuse(Path(f"{source} ({name})"), list(problems.values()))
        if problems and len(problems) == len(split):
            raise BadDataset(
                f"none of the {len(split)} {name} images of {source} can be decoded; the first: {problems[0]}"
            )
        parts[name] = split.take([row for row in range(len(split)) if row not in problems]) if problems else split
        broken += problems.values()
    different = dict.fromkeys(broken)  # training images may be in the database too
    return replace(splits, **parts, problems=(*splits.problems, *different))


def _broken_images(split: Split) -> dict[int, Problem]:
    """The images of `split` that cannot be decoded, by row."""

    def check(row: int) -> str | None:
        try:
            load_file(read_bytes(split.paths[row]), _TINY, name=str(split.paths[row]))
        except BadImage as error:
            return str(error)
        return None

    known = _known_to_decode(split.paths)
    if known is not None and known.is_file():
        return {}
    reasons = load_ahead(range(len(split)), check, depth=64)
    problems = {row: Problem(split.where[row], reason) for row, reason in enumerate(reasons) if reason}
    if known is not None and not problems:
        with suppress(OSError):  # a full or read-only disk: they are decoded again next time
            write_atomically(known, b"")
    return problems


def _known_to_decode(paths: Sequence[Path]) -> Path | None:
    """The file that exists if all images could be decoded; None if a file is missing."""
    try:
        return cached_file("decoded", digest_files(paths), version("pillow"), version("hashseek"))
    except BadDataset:
        return None
