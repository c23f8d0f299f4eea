"""Storing an uploaded image; called by the route `POST /v1/images`."""

import hashlib
from collections.abc import Mapping
from typing import Any

from hashseek.indexing.catalog import Change, NewImage, StoredImage
from hashseek.indexing.catalog.records import StoredCode
from hashseek.indexing.searcher import LoadedFile, Searcher

SUFFIX = {
    "image/jpeg": ".jpg",
    "image/mpo": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/bmp": ".bmp",
    "image/tiff": ".tif",
    "image/avif": ".avif",
    "image/heif": ".heic",
}


def store_upload(
    searcher: Searcher,
    data: bytes,
    *,
    filename: str,
    labels: tuple[str, ...],
    key: str | None,
    attributes: Mapping[str, Any],
) -> tuple[StoredImage, Change]:
    """Store an uploaded image. Returns its record, and whether it was added, updated or known already.

    The file's name becomes the attribute `filename`, where attributes are stored; the file itself is named by its hash.

    Raises:
        BadImage: it cannot be decoded; nothing is stored.
        BadConfig: key or attributes are outside their limits; nothing is stored.
        BadCheckpoint: the collection holds vectors.
    """
    collection, encoder = searcher.collection, searcher.image_encoder
    sha256 = hashlib.sha256(data).hexdigest()
    stored, encoded = collection.by_hash(sha256), collection.code_by_hash(sha256)
    if stored is not None and encoded is not None:
        if key is None:
            return stored, "known"
        image: StoredImage | LoadedFile = stored  # one content has one code, whatever the engine is now
    else:
        image, query = searcher.encode_file(data, name="the upload")
        encoded = StoredCode(query.code, encoder.engine, query.feature)
    keeps_attributes = not attributes and key is not None and collection.ids_by_key([key])
    if (name := _base_name(filename)) and not keeps_attributes:
        attributes = {"filename": name, **attributes}
    new = NewImage(
        path="",
        sha256=sha256,
        width=image.width,
        height=image.height,
        bytes=len(data),
        media_type=image.media_type,
        labels=labels,
        key=key,
        attributes=attributes,
        **encoded._asdict(),
    )
    image_id, change = collection.add_with_file(new, data, suffix=SUFFIX.get(image.media_type, ""))
    return collection.one(image_id), change


def _base_name(filename: str) -> str:
    """A file's name without folders and without characters that cannot be shown, at most 255 characters."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(filter(str.isprintable, name))[-255:]
