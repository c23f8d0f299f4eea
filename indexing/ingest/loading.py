"""From sources to records and pixels: looked up, downloaded, read and decoded ahead of the network, by threads."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import Catalog, NewImage, StoredImage
from hashseek.indexing.catalog.records import check_attributes, check_key, same_attributes
from hashseek.indexing.ingest.manifests import Source
from hashseek.indexing.ingest.remote import fetch
from hashseek.indexing.ingest.sources import Found
from hashseek.indexing.ingest.uris import open_uri, stored_path
from hashseek.retrieval.encoder import load_ahead
from hashseek.retrieval.errors import BadConfig, BadImage
from hashseek.retrieval.images import Pixels, Preprocessing, decode_for
from hashseek.retrieval.label_files import Problem
from hashseek.retrieval.tar_members import find_member, stored_in

_DOWNLOADS = 16  # at a time: they wait for the network, not for a core
_LOOKED_UP = 256  # files together
_NO_CODE = np.zeros(0, np.uint8)

Fetch = Callable[[str], bytes]
Stamp = tuple[int, int]  # size in bytes and modification time in nanoseconds


@dataclass(frozen=True)
class Trusted:
    """The record that a file agrees with by its size and time, as it was at a generation of the catalog."""

    record: StoredImage
    generation: int


@dataclass(frozen=True)
class Loaded:
    """What became of a source: an image (without code where pixels come with it), a problem, or a file not read.

    What was trusted holds as long as nothing changes the record.
    """

    source: Source
    image: NewImage | None = None
    error: str | None = None
    trusted: Trusted | None = None

    @property
    def problem(self) -> Problem | None:
        """What is wrong; where the message is about a path alone, naming it once is enough."""
        if self.error is None:
            return None
        uri = str(self.source.uri)
        reason = self.error if self.source.where else self.error.removeprefix(f"{uri} ")
        return Problem(self.source.name, reason, uri=uri)


Step = tuple[Loaded | Problem, Pixels | None]


@dataclass(frozen=True)
class _Item:
    """A source on its way: what was downloaded of it, what went wrong, or the record that its file agrees with."""

    source: Source
    data: bytes | None = None
    error: str | None = None
    trusted: Trusted | None = None


def load_sources(
    sources: Iterable[Found],
    *,
    catalog: Catalog | None,
    preprocessing: Preprocessing,
    depth: int,
    trust_mtime: bool = False,
    fetch: Fetch = fetch,
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Step]:
    """Read and decode the sources in order, at most `depth` ahead: (record or problem, pixels to be encoded or None).

    Content whose code is in the catalog comes with that code and without pixels.

    Args:
        sources: drawn from as memory allows.
        catalog: where to look content up, None if there is none yet.
        preprocessing: of the encoder.
        depth: images decoded ahead.
        trust_mtime: files whose size and modification time are those of their record are not read.
        fetch: what gets the content behind an http(s) address, and raises `BadImage` if it cannot.
        decoding: entered while an image is decoded, see `Encoder.decoding`.
    """

    def is_remote(item: _Item | Problem) -> bool:
        return isinstance(item, _Item) and isinstance(item.source.uri, str)

    def download(item: _Item | Problem) -> _Item | Problem:
        if isinstance(item, Problem) or not isinstance(item.source.uri, str):
            return item
        try:
            return replace(item, data=fetch(item.source.uri))
        except BadImage as error:
            return replace(item, error=str(error))

    def load(item: _Item | Problem) -> Step:
        return (item, None) if isinstance(item, Problem) else _load(item, catalog, preprocessing, decoding)

    items = _items(sources, catalog if trust_mtime else None)
    downloaded = load_ahead(items, download, depth=2 * _DOWNLOADS, n_workers=_DOWNLOADS, waits=is_remote)
    return load_ahead(downloaded, load, depth=depth)


def stamp_of(path: Path) -> Stamp | None:
    """Size and modification time of the file that holds an image; None if there is none."""
    with suppress(OSError, ValueError):
        stat = stored_in(path).stat()
        return stat.st_size, stat.st_mtime_ns
    return None


def _load(
    item: _Item,
    catalog: Catalog | None,
    preprocessing: Preprocessing,
    decoding: Callable[[], AbstractContextManager[None]],
) -> Step:
    source = item.source
    if item.error is not None or item.trusted is not None:
        return Loaded(source, error=item.error, trusted=item.trusted), None
    try:
        data, mtime_ns = (item.data, None) if item.data is not None else _read(Path(source.uri))
        image = NewImage(
            path=_checked(source),
            sha256=hashlib.sha256(data).hexdigest(),
            width=0,
            height=0,
            bytes=len(data),
            media_type="",
            labels=source.labels,
            code=_NO_CODE,
            key=source.key,
            attributes=source.attributes,
            mtime_ns=mtime_ns,
        )
        if catalog is not None and (known := _known(catalog, image.sha256)) is not None:
            record, code = known
            size = (record.width, record.height)
            image = replace(image, width=size[0], height=size[1], media_type=record.media_type, code=code)
            return Loaded(source, image), None
        with decoding():
            picture, pixels = decode_for(data, preprocessing, name=str(source.uri))
    except (BadImage, BadConfig) as error:
        return Loaded(source, error=str(error)), None
    image = replace(image, width=picture.width, height=picture.height, media_type=picture.media_type)
    return Loaded(source, image), pixels


def _known(catalog: Catalog, sha256: str) -> tuple[StoredImage, NDArray[np.uint8]] | None:
    """An image of the same content, and its code."""
    code = catalog.lookup.code_by_hash(sha256)
    ids = list(catalog.lookup.ids_by_hash([sha256]).values()) if code is not None else []
    record = catalog.get(ids)[0] if ids else None
    return None if record is None or code is None else (record, code)


def _read(path: Path) -> tuple[bytes, int | None]:
    """The bytes of an image, and when its file was modified (if it has a file of its own)."""
    before = stamp_of(path)
    data = open_uri(str(path))
    if before != stamp_of(path):
        raise BadImage(f"{path} changed while it was read: add it again when it is complete")
    return data, before[1] if before is not None and find_member(path) is None else None


def _checked(source: Source) -> str:
    """The path of its record; `BadImage` or `BadConfig` unless all that is said of the image can be stored."""
    path = stored_path(source.uri)
    if not is_text("".join((path, *source.labels))):
        raise BadImage(f"{source.uri} has a name or label that is not valid UTF-8: rename it")
    if source.key is not None:
        check_key(source.key)
    if source.attributes:
        check_attributes(source.attributes)
    return path


def is_text(text: str) -> bool:
    """Whether `text` can be stored: a file name may hold bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(sources: Iterable[Found], catalog: Catalog | None) -> Iterator[_Item | Problem]:
    """Items of the sources; with a catalog, those whose files are as their records say bring these records."""
    if catalog is None:
        yield from (found if isinstance(found, Problem) else _Item(found) for found in sources)
        return
    remaining = iter(sources)
    while chunk := list(islice(remaining, _LOOKED_UP)):
        generation = catalog.generation()  # before the look: what is committed after it makes another
        records = _unchanged(chunk, catalog)
        for number, found in enumerate(chunk):
            record = records.get(number)
            if isinstance(found, Problem):
                yield found
            else:
                yield _Item(found, trusted=None if record is None else Trusted(record, generation))


def _unchanged(chunk: list[Found], catalog: Catalog) -> dict[int, StoredImage]:
    """Records of the files in a chunk, by number, that say what their sources say, and their size and time.

    An image without a code is none of them: reading it gives it one.
    """
    files: dict[int, tuple[Source, str, Stamp]] = {}
    for number, found in enumerate(chunk):
        if isinstance(found, Source) and isinstance(found.uri, Path) and find_member(found.uri) is None:
            stamp = stamp_of(found.uri)
            path = stored_path(found.uri)
            if stamp is not None and is_text(path):
                files[number] = (found, path, stamp)
    known = catalog.lookup.records_by_path([path for _, path, _ in files.values()])
    last = {n: known[path][-1] for n, (_, path, _) in files.items() if path in known}
    same = {n: r.id for n, r in last.items() if r.has_code and (r.bytes, r.mtime_ns) == files[n][2]}
    return {
        number: record
        for number, record in zip(same, catalog.get(list(same.values())), strict=True)
        if record is not None and _says_all(record, files[number][0])
    }


def _says_all(record: StoredImage, source: Source) -> bool:
    return (
        source.key in (None, record.key)
        and (not source.labels or set(source.labels) == set(record.labels))
        and (not source.attributes or same_attributes(source.attributes, record.attributes))
    )
