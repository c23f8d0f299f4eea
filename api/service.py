"""The searcher behind the service: loaded in the background, so that the service answers from its first moment."""

import hashlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hashseek.api.problems import NotLoaded, NotReady
from hashseek.api.settings import Settings
from hashseek.indexing.catalog import Change, NewImage, StoredImage
from hashseek.indexing.catalog.records import check_attributes, check_key
from hashseek.indexing.collection import Collection
from hashseek.indexing.index.hamming_index import APPROXIMATE
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadConfig, HashseekError

log = logging.getLogger("hashseek")

RETRY_SECONDS = 30  # before what could not be loaded or merged is tried again
MERGE_SECONDS = 1.0  # between two looks at whether the index should take in what changed
STOP_SECONDS = 5.0  # that the end of the service waits for such a merge
SUFFIX = {
    "image/jpeg": ".jpg",
    "image/mpo": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/bmp": ".bmp",
    "image/tiff": ".tif",
    "image/avif": ".avif",
}


class Service:
    """Holds the searcher once it is loaded, and loads another when the collection has switched to other codes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._searcher: Searcher | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._follower: threading.Thread | None = None
        self._next_try = 0.0
        self._stopped = threading.Event()
        self._merger: threading.Thread | None = None

    def start(self) -> None:
        """Begin to load collection and model in a thread, and to look after the index in another."""
        threading.Thread(target=self._load, name="hashseek-load", daemon=True).start()
        self._merger = threading.Thread(target=self._keep_merged, name="hashseek-merge", daemon=True)
        self._merger.start()

    def stop(self) -> None:
        """Write the index, so that the next start is quick, and close the collection.

        An approximate index that is to be built anew is left to the next start: it may take minutes.
        """
        self._stopped.set()
        if self._follower is not None:
            self._follower.join()
        if self._searcher is None:
            return
        if self._merger is not None:
            self._merger.join(STOP_SECONDS)
            if self._merger.is_alive():
                log.warning("the index was being built anew and was not written: the next start builds it")
                return
        collection = self._searcher.collection
        if not self.settings.read_only:
            try:
                if collection.kind not in APPROXIMATE:  # which were written when they were built
                    collection.save_index()
            except (OSError, HashseekError) as error:
                log.warning("the index was not written and will be rebuilt at the next start: %s", error)
        collection.close()

    @property
    def searcher(self) -> Searcher:
        """The searcher.

        Raises:
            NotReady: it is still being loaded.
            NotLoaded: it could not be loaded, and will not be.
        """
        if self._failure is not None:
            raise NotLoaded(
                f"the collection could not be loaded: {self._failure}; mend that and start the service again"
            )
        searcher = self._searcher
        if searcher is None:
            raise NotReady("the service is starting: its model is being loaded, try again in a second")
        if not searcher.collection.catalog.is_current():
            self._follow(searcher)
        return searcher

    def _load(self) -> None:
        try:
            self._searcher = self._open(self.settings.checkpoint)
        except Exception as error:
            self._failure = str(error)
            log.exception("the collection could not be loaded")

    def _keep_merged(self) -> None:
        """Take what changed into the index once it is much, while requests are answered."""
        wait = MERGE_SECONDS
        while not self._stopped.wait(wait):
            try:
                self._merge()
                wait = MERGE_SECONDS
            except (HashseekError, OSError) as error:  # no collection, or no room: requests say so, too
                wait = RETRY_SECONDS
                log.warning("the segments of the index could not be merged: %s", error)
            except Exception as error:
                wait = RETRY_SECONDS
                log.exception("the segments of the index could not be merged: %s", error)

    def _merge(self) -> None:
        searcher = self._searcher  # held, or its collection could be closed meanwhile
        if searcher is None:
            return
        collection = searcher.collection
        # An approximate index takes so long to build that it is written at once; the others wait for the end.
        if collection.kind in APPROXIMATE and not self.settings.read_only:
            collection.save_index()
        else:
            collection.merge_segments()

    def _open(self, checkpoint: Path | None) -> Searcher:
        collection = Collection(self.settings.collection, read_only=self.settings.read_only)
        try:
            settings = self.settings
            return Searcher.open(
                collection,
                checkpoint=checkpoint,
                device=settings.device,
                precision=settings.precision,
                engine=settings.engine,
            )
        except BaseException:
            collection.close()
            raise

    def _follow(self, old: Searcher) -> None:
        """Open what the collection is now, in a thread; until then, searches are answered from what it was."""
        with self._lock:
            busy = self._follower is not None and self._follower.is_alive()
            if busy or old is not self._searcher or time.monotonic() < self._next_try:
                return
            self._follower = threading.Thread(target=self._replace, args=(old,), name="hashseek-follow", daemon=True)
            self._follower.start()

    def _replace(self, old: Searcher) -> None:
        try:
            # The checkpoint of the settings is that of the codes which were there at the start.
            new = self._open(None)
        except Exception as error:
            self._next_try = time.monotonic() + RETRY_SECONDS
            log.exception("the collection has switched to codes that could not be loaded: %s", error)
            return
        # Requests that began with the old searcher end with it; it is closed when the last one has let go of it.
        weakref.finalize(old, old.collection.close).atexit = False
        self._searcher = new
        log.warning("the collection now answers with the codes of checkpoint %s", new.encoder.fingerprint[:12])


def add_upload(
    searcher: Searcher,
    data: bytes,
    *,
    labels: tuple[str, ...] = (),
    key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> tuple[StoredImage, Change]:
    """Store an uploaded image; its record, and what became of it.

    Raises:
        BadImage: it cannot be decoded; nothing is stored.
        BadConfig: key or attributes are beyond their limits; nothing is stored.
    """
    attributes = attributes or {}
    check_attributes(attributes)
    if key is not None:
        check_key(key)
    collection = searcher.collection
    sha256 = hashlib.sha256(data).hexdigest()
    known = collection.catalog.lookup.ids_by_hash([sha256])
    stored = collection.catalog.get([known[sha256]])[0] if known else None
    if stored is not None and key is None:
        return stored, "known"
    code = collection.catalog.lookup.code_by_hash(sha256)
    if stored is not None and code is not None:
        size, media_type, engine = (stored.width, stored.height), stored.media_type, ""
    else:
        picture = searcher.decode(data, name="the upload")
        [code] = searcher.encoder.encode([picture.image])
        size, media_type, engine = (picture.width, picture.height), picture.media_type, searcher.encoder.engine
    new = NewImage("", sha256, *size, len(data), media_type, labels, code, key, attributes, None, engine)
    image_id, change = collection.add_with_file(new, data, suffix=SUFFIX.get(media_type, ""))
    return collection.catalog.one(image_id), change


def parse_labels(text: str) -> tuple[str, ...]:
    """Labels of a form field, separated by `;`."""
    labels = tuple(dict.fromkeys(part.strip() for part in text.split(";") if part.strip()))
    for label in labels:
        if len(label) > 200:
            raise BadConfig(f"a label has at most 200 characters, not {len(label)}: {label[:40]}...")
    return labels


def parse_attributes(text: str) -> dict[str, Any]:
    """Attributes of a form field, a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"attributes are a JSON object, and this is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadConfig(f"attributes are a JSON object, not {text[:40]}")
    return value
