"""Copies that were mirrored or rotated by quarter turns (`index duplicates --flips`).

Every image is read again and encoded in six other orientations, and these codes are searched among the stored ones. The
seventh, a quarter turn clockwise, is left out: its pairs are found from the other image.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import StoredImage
from hashseek.indexing.collection import Collection
from hashseek.indexing.index.duplicates import groups
from hashseek.indexing.index.hamming_index import HammingIndex, Ids
from hashseek.indexing.maintenance.reencode import encode_stored
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.images import Pixels

_PAGE = 256


@dataclass(frozen=True)
class Orientation:
    """How two images differ: one is mirrored left to right, then rotated counter-clockwise by quarters (0 to 3)."""

    mirrored: bool = False
    quarters: int = 0

    def of(self, pixels: Pixels) -> Pixels:
        """Square images (B, 3, size, size), mirrored and turned."""
        mirrored = pixels[..., ::-1] if self.mirrored else pixels
        return np.rot90(mirrored, self.quarters, axes=(-2, -1))

    def after(self, first: "Orientation") -> "Orientation":
        """The combination of both: `first`, then this one."""
        quarters = self.quarters + (-first.quarters if self.mirrored else first.quarters)
        return Orientation(self.mirrored != first.mirrored, quarters % 4)

    def inverse(self) -> "Orientation":
        """The inverse."""
        return self if self.mirrored else Orientation(False, -self.quarters % 4)

    def __str__(self) -> str:
        turned = f"rotated {90 * self.quarters}° counter-clockwise" if self.quarters else ""
        return ", ".join(filter(None, ["mirrored" if self.mirrored else "", turned]))


_ENCODED = [Orientation(False, 1), Orientation(False, 2), *(Orientation(True, quarters) for quarters in range(4))]


def flipped_groups(
    collection: Collection,
    encoder: Encoder,
    *,
    radius: int,
    allow_private: bool = False,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> tuple[list[dict[int, Orientation]], dict[int, str]]:
    """Groups as in `hashseek.indexing.index.duplicates.groups` that also link mirrored and turned copies.

    Args:
        collection: may be open read-only.
        encoder: an encoder with its checkpoint.
        radius: bits by which the codes of two linked images may differ.
        allow_private: also fetch images from URLs in private networks.
        progress: called after each image with the number of images done, and of all.

    Returns:
        (groups by their first image, each as id -> orientation relative to the first; id -> why an image could not be
        read: it was compared by its stored code only, and some of its links may be missing).
    """
    index = collection.index.merged()
    upright = {int(ids[0]): ids for ids in groups(index, radius=radius)}
    first_of = index.ids.copy()  # of the group without flips, by row of the index
    for first, ids in upright.items():
        first_of[index.rows_of(ids)] = first
    links: dict[int, dict[int, Orientation]] = {}
    unreadable: dict[int, str] = {}

    def encode(pixels: Pixels) -> Codes:  # (B, 6, code_size)
        return np.stack([encoder.encode_pixels(orientation.of(pixels)) for orientation in _ENCODED], axis=1)

    images = _images(collection, index.ids)
    encoded = encode_stored(collection, encoder, images, encode, allow_private=allow_private)
    for done, (image, codes, problem) in enumerate(encoded, start=1):
        if codes is None:
            unreadable[image.id] = problem
        else:
            [first] = first_of[index.rows_of(np.array([image.id]))].tolist()
            for other, orientation in _links(index, codes, radius, first_of):
                if other != first:
                    links.setdefault(first, {}).setdefault(other, orientation)
                    links.setdefault(other, {}).setdefault(first, orientation.inverse())
        progress(done, len(index))
    return list(_joined(upright, links)), unreadable


def _images(collection: Collection, ids: Ids) -> Iterator[StoredImage]:
    for start in range(0, len(ids), _PAGE):
        page = collection.catalog.get(ids[start : start + _PAGE].tolist())
        yield from (image for image in page if image is not None)


def _links(
    index: HammingIndex, codes: NDArray[np.uint8], radius: int, first_of: Ids
) -> Iterator[tuple[int, Orientation]]:
    """(first image of a group, orientation) of the groups that hold the image in another orientation."""
    for orientation, (_, found) in zip(_ENCODED, index.range(codes, radius=radius), strict=True):
        for first in np.unique(first_of[index.rows_of(found)]):
            yield int(first), orientation


def _joined(upright: dict[int, Ids], links: dict[int, dict[int, Orientation]]) -> Iterator[dict[int, Orientation]]:
    """Groups of groups that are linked, by their first image."""
    seen: set[int] = set()
    for start in sorted({*upright, *links}):
        if start in seen:
            continue
        reached = {start: Orientation()}
        waiting = deque([start])
        while waiting:
            here = waiting.popleft()
            for other, orientation in links.get(here, {}).items():
                if other not in reached:
                    reached[other] = orientation.after(reached[here])
                    waiting.append(other)
        seen |= reached.keys()
        members = {int(i): reached[first] for first in reached for i in upright.get(first, [first])}
        yield dict(sorted(members.items()))
