"""Changing the model: another checkpoint's codes of all stored images, built beside the old ones, then the switch.

Searches and additions go on with the old codes until every image has a new one. What was encoded is kept: a process
killed at any moment goes on where it stopped when it is run again. If the new checkpoint is a truncation of one whose
codes are there (`hashseek.retrieval.models.truncation`), no image is read: its codes are the first bits of those.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.catalog.records import Space, StoredImage
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.ingest.uris import open_uri
from hashseek.retrieval.checkpoint import Header, load_checkpoint, load_header
from hashseek.retrieval.codes import Codes, code_size
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.engines import check_engine
from hashseek.retrieval.errors import BadCheckpoint, BadCollection, BadConfig, BadImage
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.images import Pixels, decode_for
from hashseek.retrieval.label_files import Problem
from hashseek.retrieval.models.truncation import truncate

BATCH = 256


@dataclass
class Reencoded:
    """How far it is.

    Args:
        space: the new code space.
        total: images that lacked a code in it at the start.
        encoded: of these, how many were encoded, or took over the code of an image with the same content.
        cut: how many got the first bits of a longer code.
        lost: id -> why it cannot be encoded.
        switched: whether searches use the new space.
    """

    space: Space
    total: int
    encoded: int = 0
    cut: int = 0
    lost: dict[int, Problem] = field(default_factory=dict)
    switched: bool = False


def reencode(
    collection: Collection,
    checkpoint: Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    engine: str = "torch",
    without_missing: bool = False,
    allow_private: bool = False,
) -> Iterator[Reencoded]:
    """Encode all images of `collection` with `checkpoint`, then let searches use these codes; yields how far it is.

    If an image cannot be encoded, because its file is gone or changed, it ends without the switch; with
    `without_missing` it switches, and searches no longer find such images. `allow_private` is for images behind http(s)
    addresses.

    Raises:
        BadCheckpoint: the checkpoint cannot be used.
        BadConfig: it is the one in use already.
        BadCollection: another process is at it.
    """
    header = load_header(checkpoint)
    header.image_preprocessing()
    check_engine(engine, device=device, precision=precision)  # before anything is begun
    catalog = collection.catalog
    if header.fingerprint == catalog.active_space().fingerprint:
        raise BadConfig(f"{checkpoint} is the checkpoint that {collection.folder} uses already: there is nothing to do")
    with _alone(collection, checkpoint, header) as space:
        report = Reencoded(space, catalog.n_missing(space.id))
        yield report
        source = _longer(collection, space)
        if source is not None:
            yield from _cut(catalog, source, report)
        encoder: Encoder | None = None
        while not report.switched:
            if encoder is None and _missing(catalog, report):
                encoder = Encoder(load_checkpoint(checkpoint), device=device, precision=precision, engine=engine)
            if encoder is not None:
                yield from encode_missing(collection, encoder, report, allow_private=allow_private)
            if report.lost and not without_missing:
                return
            try:
                catalog.switch_space(space.id, allow_missing=bool(report.lost))
            except BadCollection:
                if not _missing(catalog, report):
                    raise
                continue  # added just now
            report.switched = True
        if encoder is not None and report.lost:  # what was added just before the switch
            yield from encode_missing(collection, encoder, report, allow_private=allow_private)
        _build_index(collection)
        yield report


@contextmanager
def _alone(collection: Collection, checkpoint: Path, header: Header) -> Iterator[Space]:
    """The space to be filled, begun by this process or an earlier one; no other process works on it meanwhile."""
    name = f"checkpoint-{header.fingerprint[:16]}.safetensors"
    handle = os.open(collection.folder, os.O_RDONLY)
    lock = -1
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        known = [space for space in collection.catalog.spaces() if space.fingerprint == header.fingerprint]
        path = collection.folder / (known[0].checkpoint if known else name)
        if not path.is_file():
            load_checkpoint(checkpoint)  # whose weights are what its header says
            write_atomically(path, checkpoint.read_bytes())
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadCollection(
                f"another process encodes {collection.folder} with this checkpoint: wait until it is done"
            ) from None
        space = known[0] if known else collection.catalog.begin_space(header.fingerprint, header.n_bits, name)
        fcntl.flock(handle, fcntl.LOCK_UN)
        yield space
    finally:
        os.close(handle)
        if lock >= 0:
            os.close(lock)


def _build_index(collection: Collection) -> None:
    """Write the index of the space that is active by now, of the same kind as that of the space before."""
    with closing(Collection(collection.folder)) as switched:
        switched.build_index(collection.kind)


def _missing(catalog: Catalog, report: Reencoded) -> bool:
    """Whether an image lacks a code that it could get."""
    after = 0
    while page := catalog.missing_in(report.space.id, after=after, limit=BATCH):
        if any(image.id not in report.lost for image in page):
            return True
        after = page[-1].id
    return False


def _longer(collection: Collection, space: Space) -> Space | None:
    """A space whose codes begin with those of `space`."""
    for other in collection.catalog.spaces():
        if other.state != "ready" or other.n_bits <= space.n_bits:
            continue
        try:
            cut = truncate(load_checkpoint(collection.folder / other.checkpoint), space.n_bits)
        except BadCheckpoint:  # lost, or not trained for this length
            continue
        if cut.header.fingerprint == space.fingerprint:
            return other
    return None


def _cut(catalog: Catalog, source: Space, report: Reencoded) -> Iterator[Reencoded]:
    """Give images the first bits of their codes in `source`."""
    space, after = report.space, 0
    while page := catalog.missing_in(space.id, after=after, limit=BATCH):
        longer = catalog.codes_of([image.id for image in page], space_id=source.id)
        found = [image for image in page if image.id in longer]
        if found:
            codes = first_bits(np.stack([longer[image.id][0] for image in found]), space.n_bits)
            rows = [(image.id, code, longer[image.id][1]) for image, code in zip(found, codes, strict=True)]
            report.cut += catalog.add_codes(space.id, rows, hashes=[image.sha256 for image in found])
            yield report
        after = page[-1].id


def first_bits(codes: Codes, n_bits: int) -> Codes:
    """The first `n_bits` bits of packed codes (N, size)."""
    cut = codes[:, : code_size(n_bits)].copy()
    cut[:, -1] &= 0xFF >> (8 * cut.shape[1] - n_bits)
    return cut


def encode_missing(
    collection: Collection, encoder: Encoder, report: Reencoded, *, allow_private: bool = False
) -> Iterator[Reencoded]:
    """Encode what lacks a code, as far as it is not lost."""

    def load(image: StoredImage) -> tuple[tuple[StoredImage, str], Pixels | None]:
        uri = str(collection.file_of(image)) if collection.owns(image) else image.path
        try:
            data = open_uri(uri, allow_private=allow_private)
            if hashlib.sha256(data).hexdigest() != image.sha256:
                return (image, "its file has another content than when it was added"), None
            with encoder.decoding():
                return (image, ""), decode_for(data, encoder.preprocessing, name=image.path)[1]
        except BadImage as error:
            return (image, str(error).removeprefix(f"{image.path} ")), None

    after = 0
    while page := collection.catalog.missing_in(report.space.id, after=after, limit=BATCH):
        after = page[-1].id
        rows, hashes = [], []
        todo = [image for image in page if image.id not in report.lost]
        for (image, problem), code in encoder.encode_stream(todo, load):
            if code is None:
                report.lost[image.id] = Problem(f"image {image.id} ({image.path})", problem)
            else:
                rows.append((image.id, code, encoder.engine))
                hashes.append(image.sha256)
        if rows:
            report.encoded += collection.catalog.add_codes(report.space.id, rows, hashes=hashes)
        if todo:
            yield report
    if _take_over(collection.catalog, report):
        yield report


def _take_over(catalog: Catalog, report: Reencoded) -> bool:
    """Give lost images the code of another image with the same content, whose file was there; whether any got one."""
    lost = [image for image in catalog.get(list(report.lost)) if image is not None]
    found = catalog.codes_of_equals([image.id for image in lost], space_id=report.space.id)
    if not found:
        return False
    hashes = {image.id: image.sha256 for image in lost}
    report.encoded += catalog.add_codes(report.space.id, found, hashes=[hashes[row[0]] for row in found])
    for image_id, _, _ in found:
        del report.lost[image_id]
    return True


def switch_space(folder: Path, space_id: int) -> Space:
    """Let searches of the collection in `folder` use the codes of another space.

    Raises:
        BadConfig: there is no such space.
        BadCollection: an image has no code in it.
        BadCheckpoint: its checkpoint is lost or damaged.
    """
    _drop_stale_index(folder)
    with closing(Catalog(folder / CATALOG)) as catalog:
        known = {space.id: space for space in catalog.spaces()}
        if space_id in known:
            load_checkpoint(folder / known[space_id].checkpoint)  # or nothing could be searched any more
        catalog.switch_space(space_id)
    with closing(Collection(folder)) as switched:
        switched.save_index()
    return known[space_id]


def _drop_stale_index(folder: Path) -> None:
    """Open the collection, which drops an index that is newer than a catalog that was copied back: before the catalog
    grows as new again."""
    Collection(folder).close()


def drop_space(folder: Path, space_id: int) -> None:
    """Forget the codes of a space and delete its checkpoint.

    Raises:
        BadConfig: there is no such space, or it is the active one.
    """
    _drop_stale_index(folder)
    with closing(Catalog(folder / CATALOG)) as catalog:
        names = {space.id: space.checkpoint for space in catalog.spaces()}
        catalog.drop_space(space_id)
        if names[space_id] not in {space.checkpoint for space in catalog.spaces()}:
            (folder / names[space_id]).unlink(missing_ok=True)
