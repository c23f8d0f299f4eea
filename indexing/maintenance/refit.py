"""Fits the hash layer of a collection anew to the images that it holds by now, and changes to the new codes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import Catalog, StoredImage
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import CHECKPOINT, Collection
from hashseek.indexing.fit_options import Network
from hashseek.indexing.fitting import Fitting, Progress, sample, too_few
from hashseek.indexing.maintenance.reencode import EncodedImage, Reencoded, read_image, reencode
from hashseek.retrieval import scores
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.errors import BadConfig, BadImage
from hashseek.retrieval.images import Pixels


@dataclass(frozen=True)
class Refit:
    """A hash layer that was fitted anew.

    Args:
        fitting: with the fitted layer.
        n_images: images to which it was fitted, all different.
        fallback: why it was not fitted by weighted ITQ; empty if it was.
        encoded: these images with their codes.
    """

    fitting: Fitting
    n_images: int
    fallback: str
    encoded: Sequence[EncodedImage]


def fit_to_collection(
    collection: Collection,
    network: Network,
    n_bits: int,
    *,
    allow_private: bool = False,
    progress: Progress = lambda *_: None,
    **options: Unpack[EncoderOptions],
) -> Refit:
    """Fit a hash layer of `n_bits` bits to the stored images; of many, to a random sample. Changes nothing.

    Images that cannot be read are left out; `change_codes` reports them.

    Raises:
        BadDataset: no two images differ.
    """
    fitting = Fitting(network, n_bits, **options)
    ids = collection.catalog.ids_where(Filter())
    chosen = ids[sample(len(ids))]

    def load(image: StoredImage) -> tuple[StoredImage, Pixels | None]:
        try:
            return image, read_image(collection, fitting.encoder, image, allow_private=allow_private)
        except BadImage:
            return image, None

    images, features = list[StoredImage](), list[NDArray[np.float32]]()
    stored = (image for image in _records(collection.catalog, chosen.tolist()))
    for done, (image, row) in enumerate(fitting.encoder.stream(stored, load, fitting.encoder.features), start=1):
        if row is not None:
            images.append(image)
            features.append(row)
        progress(done, len(chosen))
    different = {image.sha256: place for place, image in enumerate(images)}
    if len(different) < 2:
        raise too_few(len(images))
    rows = np.stack(features)
    fallback = fitting.fit(rows[list(different.values())])
    name = fitting.encoder.engine
    parts = zip(images, fitting.codes(rows), scores.normalized(rows), strict=True)
    encoded = [(image, code, feature, name) for image, code, feature in parts]
    return Refit(fitting, len(different), fallback, encoded)


def change_codes(
    collection: Collection,
    refit: Refit,
    *,
    without_missing: bool = False,
    allow_private: bool = False,
    **options: Unpack[EncoderOptions],
) -> Iterator[Reencoded]:
    """Change the collection to the codes of `refit`, see `reencode`; images that were encoded are not encoded again.

    Raises:
        BadConfig: the collection has this hash layer already.
    """
    with TemporaryDirectory(prefix="hashseek-") as scratch:
        path = Path(scratch) / CHECKPOINT
        refit.fitting.save(path)
        if refit.fitting.encoder.fingerprint == collection.catalog.spaces.active().fingerprint:
            raise BadConfig(f"fitting anew gives the hash layer that {collection.folder} has: there is nothing to do")
        yield from reencode(
            collection,
            path,
            without_missing=without_missing,
            allow_private=allow_private,
            encoded=refit.encoded,
            **options,
        )


def _records(catalog: Catalog, ids: Sequence[int]) -> Iterator[StoredImage]:
    for start in range(0, len(ids), 1000):
        yield from (image for image in catalog.get(ids[start : start + 1000]) if image is not None)
