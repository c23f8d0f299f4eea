"""Changing the model: encodes all stored images with another checkpoint, then switches searches to the new codes.

Searches and additions use the old codes until every image has a new one. What was encoded is kept: if the
process is killed, running it again continues where it stopped. If the new checkpoint is a truncation of one whose codes
are stored (`hashseek.retrieval.truncation`), no image is read: its codes are the first bits of those.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack

import numpy as np

from hashseek.indexing.catalog import Catalog, StoredImage
from hashseek.indexing.catalog.records import Space, StoredCode
from hashseek.indexing.catalog.spaces import CodesMissing
from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.batch import encode
from hashseek.indexing.remote import MAX_BYTES
from hashseek.indexing.uris import open_uri
from hashseek.retrieval.checkpoint import Header, check_intact, load_checkpoint, load_header
from hashseek.retrieval.codes import pack, unpack
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.engines import check_engine
from hashseek.retrieval.errors import BadCheckpoint, BadCollection, BadConfig, BadImage
from hashseek.retrieval.files import locked, write_atomically
from hashseek.retrieval.images import Pixels, load_file
from hashseek.retrieval.truncation import truncate

T = TypeVar("T")

BATCH = 256


@dataclass
class Reencoded:
    """Progress of a re-encoding.

    Args:
        space: the new code space.
        total: images without a code in it at the start.
        encoded: how many of these were encoded.
        truncated: how many got the first bits of a longer code.
        failed: id -> the reason why the image cannot be encoded.
        switched: whether searches use the new space.
    """

    space: Space
    total: int
    encoded: int = 0
    truncated: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    switched: bool = False


def reencode(
    collection: Collection,
    checkpoint: Path,
    *,
    without_missing: bool = False,
    allow_private: bool = False,
    encoder: Encoder | None = None,
    known: Mapping[str, StoredCode] | None = None,
    **options: Unpack[EncoderOptions],
) -> Iterator[Reencoded]:
    """Encode all images of `collection` with `checkpoint`, then switch searches to the new codes; yields progress.

    Yields nothing if the checkpoint is already in use: an interrupted switch is then completed.

    Args:
        collection: the collection to re-encode.
        checkpoint: the new one.
        without_missing: switch even if images cannot be encoded, because their files are missing or changed; searches
            no longer find those. Without it, the re-encoding ends without the switch.
        allow_private: also fetch images from URLs in private networks.
        encoder: an encoder with the new checkpoint; None: create one with `options`.
        known: codes of the checkpoint by content hash; these images are not encoded again.
        options: where and how to encode.

    Raises:
        BadCheckpoint: the checkpoint cannot be used.
        BadCollection: another process is re-encoding the collection with this checkpoint.
    """
    header = load_header(checkpoint)
    collection.check_holds_images()
    header.image_preprocessing()
    check_engine(**options)
    catalog = collection.catalog
    if header.fingerprint == catalog.spaces.active().fingerprint:
        collection.save_index()
        return
    with _locked_space(collection, checkpoint, header) as space:
        report = Reencoded(space, catalog.spaces.n_missing(space.id))
        yield report
        source = _space_to_truncate(collection, space)
        if source is not None:
            yield from _truncate_codes(catalog, source, report)
        while not report.switched:
            if encoder is None and catalog.spaces.n_missing(space.id):
                encoder = Encoder(load_checkpoint(checkpoint), **options)
            if encoder is not None:
                yield from encode_missing(collection, encoder, report, known=known, allow_private=allow_private)
            if report.failed and not without_missing:
                return
            with suppress(CodesMissing):  # an image was added just now
                catalog.spaces.switch(space.id, allow_missing=len(report.failed))
                report.switched = True
        if encoder is not None:  # images that were added just before the switch, in place of failed ones
            yield from encode_missing(collection, encoder, report, allow_private=allow_private)
        _save_new_index(collection)
        yield report


@contextmanager
def _locked_space(collection: Collection, checkpoint: Path, header: Header) -> Iterator[Space]:
    """The space to be filled, created by this process or an earlier one; no other process fills it at the same time."""
    name = f"checkpoint-{header.fingerprint[:16]}.safetensors"
    with ExitStack() as stack:
        with locked(collection.folder):
            spaces = collection.catalog.spaces
            known = [space for space in spaces.all() if space.fingerprint == header.fingerprint]
            path = collection.folder / (known[0].checkpoint if known else name)
            if not _is_intact(path):
                load_checkpoint(checkpoint)  # checks that the weights match the header
                write_atomically(path, checkpoint.read_bytes())
            file = stack.enter_context(path.open("rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadCollection(
                    f"another process is re-encoding {collection.folder} with this checkpoint: wait until it is done"
                ) from None
            space = known[0] if known else spaces.begin(header.fingerprint, header.n_bits, name)
        yield space


def _is_intact(path: Path) -> bool:
    with suppress(BadCheckpoint):
        check_intact(path)
        return True
    return False


def _space_to_truncate(collection: Collection, space: Space) -> Space | None:
    """A space whose codes begin with those of `space`, if there is one."""
    for other in collection.catalog.spaces.all():
        if other.state != "ready" or other.n_bits <= space.n_bits:
            continue
        try:
            truncated = truncate(load_checkpoint(collection.folder / other.checkpoint), space.n_bits)
        except (BadCheckpoint, BadConfig):  # missing, not trained for this length, or without its package
            continue
        if truncated.header.fingerprint == space.fingerprint:
            return other
    return None


def _truncate_codes(catalog: Catalog, source: Space, report: Reencoded) -> Iterator[Reencoded]:
    """Give images the first bits of their codes in `source`."""
    space, after = report.space, 0
    while page := catalog.spaces.missing(space.id, after=after, limit=BATCH):
        longer = catalog.spaces.codes_of([image.id for image in page], space_id=source.id)
        found = [image for image in page if image.id in longer]
        if found:
            bits = unpack(np.stack([longer[image.id].code for image in found]), source.n_bits)
            codes = pack(bits[:, : space.n_bits])
            shorter = [(image, longer[image.id]._replace(code=code)) for image, code in zip(found, codes, strict=True)]
            report.truncated += catalog.spaces.add_codes(space.id, shorter)
            yield report
        after = page[-1].id


def read_image(collection: Collection, encoder: Encoder, image: StoredImage, *, allow_private: bool) -> Pixels:
    """The pixels of a stored image, prepared for `encoder`.

    Raises:
        BadImage: its file is missing, damaged, or has changed since the image was added.
    """
    most = max(MAX_BYTES, image.bytes)  # `index add --url-megabytes` may have allowed more
    data = open_uri(collection.uri_of(image), allow_private=allow_private, max_bytes=most)
    if hashlib.sha256(data).hexdigest() != image.sha256:
        raise BadImage("its file has changed since it was added")
    return load_file(data, encoder.preprocessing, name=image.path).pixels


def encode_stored(
    collection: Collection,
    encoder: Encoder,
    images: Iterable[StoredImage],
    function: Callable[[Pixels], Iterable[T]],
    *,
    allow_private: bool,
) -> Iterator[tuple[StoredImage, T | None, str]]:
    """Read stored images again and encode them, see `Encoder.stream`.

    Yields:
        (image, the result of `function` for it, ""), or (image, None, why it cannot be read).
    """

    def load(image: StoredImage) -> tuple[tuple[StoredImage, str], Pixels | None]:
        try:
            return (image, ""), read_image(collection, encoder, image, allow_private=allow_private)
        except BadImage as error:
            return (image, str(error)), None

    for (image, problem), found in encoder.stream(images, load, function):
        yield image, found, problem


def encode_missing(
    collection: Collection,
    encoder: Encoder,
    report: Reencoded,
    *,
    known: Mapping[str, StoredCode] | None = None,
    allow_private: bool,
) -> Iterator[Reencoded]:
    """Encode images that have no code in the space and have not failed, unless the code is known; yields progress."""
    after, known = 0, known or {}
    while page := collection.catalog.spaces.missing(report.space.id, after=after, limit=BATCH):
        after = page[-1].id
        todo = [image for image in page if image.id not in report.failed]
        encoded = [(image, known[image.sha256]) for image in todo if image.sha256 in known]
        fresh = [image for image in todo if image.sha256 not in known]
        encoded_now = encode_stored(collection, encoder, fresh, partial(encode, encoder), allow_private=allow_private)
        for image, code, problem in encoded_now:
            if code is None:
                reason = problem.removeprefix(f"{image.path} ")
                report.failed[image.id] = f"image {image.id} ({image.path}): {reason}"
            else:
                encoded.append((image, code))
        if encoded:
            report.encoded += collection.catalog.spaces.add_codes(report.space.id, encoded)
        if todo:
            yield report


def switch_space(collection: Collection, space_id: int) -> Space:
    """Switch searches of a collection, when it is opened again, to the codes of another space.

    Raises:
        BadConfig: there is no such space.
        CodesMissing: an image has no code in it.
        BadCheckpoint: its checkpoint is missing or damaged.
    """
    space = collection.catalog.spaces.one(space_id)
    load_checkpoint(collection.folder / space.checkpoint)  # without it, nothing could be searched any more
    collection.catalog.spaces.switch(space_id)
    _save_new_index(collection)
    return space


def _save_new_index(collection: Collection) -> None:
    """Write the index of the space that is active now; `collection` itself keeps to the one it was opened with."""
    with closing(Collection(collection.folder)) as switched:
        switched.save_index()


def drop_half_built(collection: Collection, *, but: str) -> None:
    """Delete the half-built spaces of fitted hash layers, except the one with the fingerprint `but`.

    One whose checkpoint is damaged stays: `index verify` reports it, and `index drop-space` deletes it.

    Raises:
        BadCollection: another process is filling one.
    """
    for space in collection.catalog.spaces.all():
        if space.state == "building" and space.fingerprint != but:
            path = collection.folder / space.checkpoint
            try:
                header = load_header(path)
            except BadCheckpoint:
                continue
            if "fit" in header.training:
                with _locked_space(collection, path, header):
                    drop_space(collection, space.id)


def drop_space(collection: Collection, space_id: int) -> None:
    """Delete a space, its codes and its checkpoint.

    Raises:
        BadConfig: there is no such space, or it is the active one.
    """
    spaces = collection.catalog.spaces
    name = spaces.one(space_id).checkpoint
    spaces.drop(space_id)
    if name not in {space.checkpoint for space in spaces.all()}:
        (collection.folder / name).unlink(missing_ok=True)
