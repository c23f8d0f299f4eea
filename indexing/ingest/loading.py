"""Loads sources for `ingest`: worker threads download, read and decode images ahead of the network."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hashseek.indexing.catalog import NewImage, StoredImage
from hashseek.indexing.catalog.records import StoredCode, check_described, is_utf8, same_attributes
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import Found
from hashseek.indexing.uris import is_there, open_uri, stamp_of, stored_path
from hashseek.retrieval.errors import BadConfig, BadImage
from hashseek.retrieval.images import LoadedFile, Pixels, load_file
from hashseek.retrieval.label_files import Problem
from hashseek.retrieval.load_ahead import load_ahead

if TYPE_CHECKING:
    from hashseek.indexing.dry_run import DryRunEncoder, Target
    from hashseek.retrieval.encoder import Encoder

_DOWNLOADS = 16  # at a time; they wait for the network, not for a processor core
_LOOKED_UP = 256  # files looked up in the catalog together
_NO_CODE = StoredCode(np.zeros(0, np.uint8), "", None)  # of an image that is still to be encoded

Fetch = Callable[[str], bytes]


@dataclass(frozen=True)
class LoadedImage:
    """A loaded source.

    Args:
        source: where the image came from.
        image: what to store. None for a file that was not read, because its size and modification time match its
            record.
        pixels: the pixels to encode; None if the content is already stored and `image` has its code.
    """

    source: ImageSource
    image: NewImage | None
    pixels: Pixels | None = None


_Downloaded = tuple[Found | LoadedImage, bytes | BadImage | None]


@dataclass(frozen=True)
class Loader:
    """Loads sources for one run of `ingest`.

    Args:
        store: content that it already holds is neither decoded nor encoded again; None: every image is decoded.
        encoder: will encode the images: they are prepared for it, two batches ahead.
        fetch: returns the content behind a URL, or raises `BadImage`.
    """

    store: "Target | None"
    encoder: "Encoder | DryRunEncoder"
    fetch: Fetch

    def load(self, sources: Iterable[Found | LoadedImage]) -> Iterator[LoadedImage | Problem]:
        """Yield loaded images and problems in the order of the sources, which are read lazily."""
        downloaded = load_ahead(
            sources,
            self._download,
            depth=2 * _DOWNLOADS,
            n_workers=_DOWNLOADS,
            in_worker=lambda item: _url(item) is not None,
        )
        return load_ahead(downloaded, self._load, depth=2 * self.encoder.batch_size)

    def _download(self, found: Found | LoadedImage) -> _Downloaded:
        url = _url(found)
        if url is None:
            return found, None
        try:
            return found, self.fetch(url)
        except BadImage as error:
            return found, error

    def _load(self, downloaded: _Downloaded) -> LoadedImage | Problem:
        found, data = downloaded
        if not isinstance(found, ImageSource):
            return found
        try:
            if isinstance(data, BadImage):
                raise data
            return self._load_image(found, data)
        except (BadImage, BadConfig) as error:
            uri, reason = str(found.uri), str(error)
            # A message about the file alone already starts with its name.
            reason = reason if found.where else reason.removeprefix(f"{uri} ")
            return Problem(found.name, reason, uri=uri, missing=not is_there(uri))

    def _load_image(self, source: ImageSource, data: bytes | None) -> LoadedImage:
        mtime_ns = None
        if data is None:
            data, mtime_ns = _read(Path(source.uri))
        path, sha256 = checked_path(source), hashlib.sha256(data).hexdigest()
        about: StoredImage | LoadedFile
        pixels = None
        if self.store is not None and (known := self.store.by_content(sha256)) is not None:
            about, code = known
        else:
            about, code = load_file(data, self.encoder.preprocessing, name=str(source.uri)), _NO_CODE
            pixels = about.pixels
        image = NewImage(
            path=path,
            sha256=sha256,
            width=about.width,
            height=about.height,
            bytes=len(data),
            media_type=about.media_type,
            labels=source.labels,
            key=source.key,
            adopts=True,
            attributes=source.attributes,
            mtime_ns=mtime_ns,
            **code._asdict(),
        )
        return LoadedImage(source, image, pixels)


def mark_unchanged(store: "Target", sources: Iterable[Found | LoadedImage]) -> Iterator[Found | LoadedImage]:
    """The sources; files whose records have their size, time and all that the sources specify count as loaded.

    A record without a code does not count: its file must be read to encode it.
    """
    remaining = iter(sources)
    while chunk := list(islice(remaining, _LOOKED_UP)):
        files = (one.uri for one in chunk if isinstance(one, ImageSource) and isinstance(one.uri, Path))
        stored = store.records_by_path([path for path in map(stored_path, files) if is_utf8(path)])
        unchanged = {
            file.id: path
            for path, file in stored.items()
            if file.has_code and (file.bytes, file.mtime_ns) == stamp_of(Path(path))
        }
        records = {unchanged[one.id]: one for one in store.get(list(unchanged)) if one is not None}
        for found in chunk:
            if isinstance(found, ImageSource):
                record = records.get(stored_path(found.uri))
                yield found if record is None or not _says_all(record, found) else LoadedImage(found, None)
            else:
                yield found


def _url(found: Found | LoadedImage) -> str | None:
    return found.uri if isinstance(found, ImageSource) and isinstance(found.uri, str) else None


def _read(path: Path) -> tuple[bytes, int | None]:
    """The bytes of an image, and the modification time of its file."""
    before = stamp_of(path)
    data = open_uri(str(path))
    if before != stamp_of(path):
        raise BadImage(f"{path} changed while it was being read: add it again when it is complete")
    return data, None if before is None else before[1]


def checked_path(source: ImageSource) -> str:
    """The path to store; raises `BadImage` or `BadConfig` if something about the image cannot be stored."""
    path = stored_path(source.uri)
    if not is_utf8(path):
        raise BadImage(f"{source.uri} has a name that is not valid UTF-8: rename it")
    check_described(source.labels, source.key, source.attributes)
    return path


def _says_all(record: StoredImage, source: ImageSource) -> bool:
    return (
        source.key in (None, record.key)
        and (not source.labels or set(source.labels) == set(record.labels))
        and (not source.attributes or same_attributes(source.attributes, record.attributes))
    )
