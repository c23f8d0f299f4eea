"""Refits the hash layer of a collection to the images that it now holds, and switches to the new codes."""

from collections.abc import Iterator, Mapping
from typing import Unpack

from hashseek.indexing.catalog import StoredImage
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.catalog.records import StoredCode
from hashseek.indexing.collection import Collection
from hashseek.indexing.fit_options import FeatureNetwork
from hashseek.indexing.fitting import Fitting, Progress, sample
from hashseek.indexing.maintenance.reencode import Reencoded, drop_half_built, read_image, reencode
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import Pixels
from hashseek.retrieval.load_ahead import load_ahead


def fit_to_collection(
    collection: Collection,
    network: FeatureNetwork,
    *,
    allow_private: bool = False,
    progress: Progress = lambda *_: None,
    **options: Unpack[EncoderOptions],
) -> tuple[Fitting, dict[str, StoredCode]]:
    """Fit a hash layer to the stored images; of many, to a random sample. Changes nothing.

    Images that cannot be read are left out; `change_codes` reports them.

    Returns:
        (the hash layer, the codes of the images by content hash), for `change_codes`.

    Raises:
        BadDataset: no two images differ.
    """
    fitting = Fitting(network, **options)
    ids = collection.catalog.ids_where(Filter())
    chosen = [image for image in collection.catalog.get(ids[sample(len(ids))].tolist()) if image is not None]

    def load(image: StoredImage) -> tuple[str, Pixels] | str:
        try:
            return image.sha256, read_image(collection, fitting.encoder, image, allow_private=allow_private)
        except BadImage as error:
            return str(error)

    images = load_ahead(chosen, load, depth=2 * fitting.encoder.batch_size)
    return fitting, fitting.fit(images, len(chosen), progress)


def change_codes(
    collection: Collection,
    fitting: Fitting,
    codes: Mapping[str, StoredCode],
    *,
    without_missing: bool = False,
    allow_private: bool = False,
) -> Iterator[Reencoded]:
    """Switch the collection to the codes of `fitting`, see `reencode`; content that has one is not encoded again.

    Yields nothing if the collection already has this hash layer. The codes of an interrupted refit are deleted, unless
    it was fitted to the same images.

    Raises:
        BadCollection: another process is switching the collection to the codes of another refit.
    """
    with fitting.checkpoint() as path:
        fingerprint = fitting.encoder.fingerprint
        drop_half_built(collection, but=fingerprint)
        yield from reencode(
            collection,
            path,
            without_missing=without_missing,
            allow_private=allow_private,
            encoder=fitting.encoder,
            known=codes,
        )
