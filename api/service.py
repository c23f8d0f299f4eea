"""The searcher behind the service: loaded in the background, so that the service answers from its first moment."""

import hashlib
import logging
import threading

from api.problems import NotLoaded, NotReady
from api.settings import Settings
from indexing.catalog import NewImage, StoredImage
from indexing.collection import Collection
from indexing.searcher import Searcher
from retrieval.errors import BadConfig, HashseekError

log = logging.getLogger("hashseek")

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
    """Holds the searcher once it is loaded."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._searcher: Searcher | None = None
        self._failure: str | None = None

    def start(self) -> None:
        """Begin to load collection and model in a thread."""
        threading.Thread(target=self._load, name="hashseek-load", daemon=True).start()

    def stop(self) -> None:
        """Write the index, so that the next start is quick, and close the collection."""
        if self._searcher is None:
            return
        collection = self._searcher.collection
        if not self.settings.read_only:
            try:
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
        if self._searcher is None:
            raise NotReady("the service is starting: its model is being loaded, try again in a second")
        return self._searcher

    def _load(self) -> None:
        try:
            collection = Collection(self.settings.collection, read_only=self.settings.read_only)
            try:
                self._searcher = Searcher.open(
                    collection,
                    checkpoint=self.settings.checkpoint,
                    device=self.settings.device,
                    precision=self.settings.precision,
                )
            except BaseException:
                collection.close()
                raise
        except Exception as error:
            self._failure = str(error)
            log.exception("the collection could not be loaded")


def add_upload(searcher: Searcher, data: bytes, *, labels: tuple[str, ...]) -> tuple[StoredImage, bool]:
    """Store an uploaded image; its record, and whether it is new.

    Raises:
        BadImage: it cannot be decoded; nothing is stored.
    """
    collection = searcher.collection
    sha256 = hashlib.sha256(data).hexdigest()
    known = collection.catalog.known_hashes([sha256])
    stored = collection.catalog.get([known[sha256]])[0] if known else None
    if stored is not None:
        return stored, False
    picture = searcher.decode(data, name="the upload")
    [code] = searcher.encoder.encode([picture.image])
    new = NewImage("", sha256, picture.width, picture.height, len(data), picture.media_type, labels, code)
    image_id, is_new = collection.add_with_file(new, data, suffix=SUFFIX.get(picture.media_type, ""))
    return collection.catalog.one(image_id), is_new


def parse_labels(text: str) -> tuple[str, ...]:
    """Labels of a form field, separated by `;`."""
    labels = tuple(dict.fromkeys(part.strip() for part in text.split(";") if part.strip()))
    for label in labels:
        if len(label) > 200:
            raise BadConfig(f"a label has at most 200 characters, not {len(label)}: {label[:40]}...")
    return labels
