"""Loads sources for `ingest`: worker threads download, read and decode images ahead of the network."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from hashseek.indexing.catalog import Catalog, NewImage, StoredImage
from hashseek.indexing.catalog.records import check_attributes, check_key, same_attributes
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.remote import fetch
from hashseek.indexing.ingest.sources import Found
from hashseek.indexing.ingest.uris import open_uri, stored_path
from hashseek.retrieval.errors import BadConfig, BadImage
from hashseek.retrieval.images import Pixels, Preprocessing, decode_for
from hashseek.retrieval.label_files import Problem
from hashseek.retrieval.load_ahead import load_ahead
from hashseek.retrieval.tar_members import find_member, stored_in

_DOWNLOADS = 16  # at a time; they wait for the network, not for a core
_LOOKED_UP = 256  # files that are looked up in the catalog together
_NO_CODE = np.zeros(0, np.uint8)

Fetch = Callable[[str], bytes]
Stamp = tuple[int, int]  # size in bytes and modification time in nanoseconds


@dataclass(frozen=True)
class LoadedImage:
    """A source that was loaded.

    Args:
        source: where the image came from.
        image: what to store; it has no code yet if pixels came with it.
        unchanged: instead of `image`: the record of a file that was not read, because its size and modification time
            are those of the record.
    """

    source: ImageSource
    image: NewImage | None = None
    unchanged: StoredImage | None = None


Step = tuple[LoadedImage | Problem, Pixels | None]
_Item = tuple[Found, StoredImage | None]  # with its record if the file is unchanged
_Downloaded = tuple[Found, StoredImage | None, bytes | BadImage | None]


@dataclass(frozen=True)
class Loader:
    """Loads sources for one run of `ingest`.

    Args:
        catalog: content that it holds already is neither decoded nor encoded again.
        preprocessing: of the encoder.
        depth: images decoded ahead.
        fetch: returns the content behind a URL, or raises `BadImage`.
        decoding: a context for decoding an image, see `Encoder.decoding`.
    """

    catalog: Catalog
    preprocessing: Preprocessing
    depth: int
    fetch: Fetch = fetch
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext

    def load(self, sources: Iterable[Found], *, trust_mtime: bool = False) -> Iterator[Step]:
        """Yield (loaded image or problem, pixels to encode or None) in the order of the sources, which are read lazily.

        With `trust_mtime`, files with the size and modification time of their record are not read.
        """
        items = self._with_records(sources) if trust_mtime else ((found, None) for found in sources)
        downloaded = load_ahead(
            items, self._download, depth=2 * _DOWNLOADS, n_workers=_DOWNLOADS, in_thread=lambda item: _is_url(item[0])
        )
        return load_ahead(downloaded, self._load, depth=self.depth)

    def _download(self, item: _Item) -> _Downloaded:
        found, record = item
        if isinstance(found, ImageSource) and isinstance(found.uri, str):
            try:
                return found, record, self.fetch(found.uri)
            except BadImage as error:
                return found, record, error
        return found, record, None

    def _load(self, item: _Downloaded) -> Step:
        found, record, data = item
        if isinstance(found, Problem):
            return found, None
        if record is not None:
            return LoadedImage(found, unchanged=record), None
        try:
            if isinstance(data, BadImage):
                raise data
            return self._load_image(found, data)
        except (BadImage, BadConfig) as error:
            uri, reason = str(found.uri), str(error)
            # A message about the file alone already starts with its name.
            return Problem(found.name, reason if found.where else reason.removeprefix(f"{uri} "), uri=uri), None

    def _load_image(self, source: ImageSource, data: bytes | None) -> Step:
        mtime_ns = None
        if data is None:
            data, mtime_ns = _read(Path(source.uri))
        image = NewImage(
            path=_checked_path(source),
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
        if (known := self._with_known_content(image)) is not None:
            return LoadedImage(source, known), None
        with self.decoding():
            picture, pixels = decode_for(data, self.preprocessing, name=str(source.uri))
        image = replace(image, width=picture.width, height=picture.height, media_type=picture.media_type)
        return LoadedImage(source, image), pixels

    def _with_known_content(self, image: NewImage) -> NewImage | None:
        """The image with code and size of a stored image of the same content; None if there is none."""
        code = self.catalog.lookup.code_by_hash(image.sha256)
        ids = list(self.catalog.lookup.ids_by_hash([image.sha256]).values()) if code is not None else []
        record = self.catalog.get(ids)[0] if ids else None
        if record is None or code is None:
            return None
        return replace(image, width=record.width, height=record.height, media_type=record.media_type, code=code)

    def _with_records(self, sources: Iterable[Found]) -> Iterator[_Item]:
        remaining = iter(sources)
        while chunk := list(islice(remaining, _LOOKED_UP)):
            records = self._unchanged(chunk)
            yield from ((found, records.get(number)) for number, found in enumerate(chunk))

    def _unchanged(self, chunk: list[Found]) -> dict[int, StoredImage]:
        """Records, by number in the chunk, that agree with their files and with all that the sources say.

        A record without a code does not count: its file must be read to encode it.
        """
        files: dict[int, tuple[ImageSource, str, Stamp]] = {}
        for number, found in enumerate(chunk):
            if isinstance(found, ImageSource) and isinstance(found.uri, Path) and find_member(found.uri) is None:
                stamp, path = stamp_of(found.uri), stored_path(found.uri)
                if stamp is not None and is_utf8(path):
                    files[number] = (found, path, stamp)
        stored = self.catalog.lookup.records_by_path([path for _, path, _ in files.values()])
        ids: dict[int, int] = {}
        for number, (_, path, stamp) in files.items():
            last = stored[path][-1] if path in stored else None
            if last is not None and last.has_code and (last.bytes, last.mtime_ns) == stamp:
                ids[number] = last.id
        return {
            number: record
            for number, record in zip(ids, self.catalog.get(list(ids.values())), strict=True)
            if record is not None and _says_all(record, files[number][0])
        }


def stamp_of(path: Path) -> Stamp | None:
    """Size and modification time of the file that holds an image; None if it does not exist."""
    with suppress(OSError, ValueError):
        stat = stored_in(path).stat()
        return stat.st_size, stat.st_mtime_ns
    return None


def is_utf8(text: str) -> bool:
    """Whether `text` can be stored: a file name may hold bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_url(found: Found) -> bool:
    return isinstance(found, ImageSource) and isinstance(found.uri, str)


def _read(path: Path) -> tuple[bytes, int | None]:
    """The bytes of an image, and the modification time of its file (None in a tar)."""
    before = stamp_of(path)
    data = open_uri(str(path))
    if before != stamp_of(path):
        raise BadImage(f"{path} changed while it was read: add it again when it is complete")
    return data, before[1] if before is not None and find_member(path) is None else None


def _checked_path(source: ImageSource) -> str:
    """The path to store; raises `BadImage` or `BadConfig` if something about the image cannot be stored."""
    path = stored_path(source.uri)
    if not is_utf8("".join((path, *source.labels))):
        raise BadImage(f"{source.uri} has a name or label that is not valid UTF-8: rename it")
    if source.key is not None:
        check_key(source.key)
    if source.attributes:
        check_attributes(source.attributes)
    return path


def _says_all(record: StoredImage, source: ImageSource) -> bool:
    return (
        source.key in (None, record.key)
        and (not source.labels or set(source.labels) == set(record.labels))
        and (not source.attributes or same_attributes(source.attributes, record.attributes))
    )
