"""A collection that is served: holds its searcher, and keeps it up to date in background threads."""

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote
from weakref import WeakValueDictionary, finalize

from hashseek.api.collections.computed import Computed
from hashseek.api.decoding import Decoders
from hashseek.api.messages.problems import NotLoaded, NotReady, ReadOnly
from hashseek.api.messages.schemas import CollectionSummary
from hashseek.api.monitoring import metrics
from hashseek.api.settings import CATALOG, Settings
from hashseek.indexing.index.hamming_index import SLOW_TO_BUILD
from hashseek.indexing.kept_files import FILES
from hashseek.indexing.milvus_uri import is_in_milvus, parse_uri
from hashseek.indexing.opening import Store, open_store
from hashseek.indexing.searcher import Searcher, open_encoder
from hashseek.retrieval.encoder import Encoder, VectorEncoder
from hashseek.retrieval.errors import BadCollection, HashseekError
from hashseek.retrieval.micro_batches import lower_priority

log = logging.getLogger("hashseek")

RETRY_SECONDS = 30.0  # until a failed load or merge is tried again
FOLLOW_SECONDS = 0.5  # between two checks whether the collection is still the same
MERGE_SECONDS = 1.0  # between two checks whether the index needs a merge
STOP_SECONDS = 5.0  # to wait for a running merge, or for the first load, when the service stops


def why_read_only(settings: Settings) -> str | None:
    """Why the collection, or the folder of collections, may not be changed; None if it may."""
    folder = settings.collection
    if settings.read_only:
        return "the service was started read-only: start it without --read-only to change a collection"
    for path in (folder, folder / CATALOG, folder / FILES):
        if os.access(path, os.F_OK) and not os.access(path, os.W_OK):
            return f"{path} is not writable by the user of the service: make this user its owner to change it"
    return None


class Shared:
    """What the collections of a process share: encoders of the same checkpoint, and processes that decode images."""

    def __init__(self) -> None:
        self.decoders = Decoders(metrics.observe)
        self._encoders: WeakValueDictionary[str, Encoder | VectorEncoder] = WeakValueDictionary()
        self._loading = threading.Lock()

    def searcher(self, collection: Store, settings: Settings, checkpoint: Path | None) -> Searcher:
        """A searcher over `collection`, see `Searcher.open`."""
        with self._loading:
            encoder = self._encoders.get(collection.fingerprint) or open_encoder(
                collection,
                checkpoint,
                device=settings.device,
                precision=settings.precision,
                engine=settings.engine,
            )
            self._encoders[collection.fingerprint] = encoder
        return Searcher(encoder, collection, load=self.decoders.load, observe=metrics.observe)


class Service:
    """A collection that is served. Loads in the background, and reloads when the collection changes its model.

    Attributes:
        name: "" if it is served alone.
        url_prefix: the prefix of its paths.
        in_use: number of requests that use its searcher, counted by the event loop.
        leaving: whether it is being closed, so that no request may begin.
        loaded: set when loading has succeeded or failed.
    """

    def __init__(self, settings: Settings, name: str, shared: Shared) -> None:
        self.settings = settings
        self.name = name
        self.url_prefix = f"/collections/{quote(name, safe='')}" if name else ""
        self.in_use, self.leaving, self.loaded = 0, False, threading.Event()
        self._shared = shared
        self.computed = Computed()
        self._read_only = why_read_only(settings)
        self._searcher: Searcher | None = None
        self._failure: str | None = None
        self._stopped = threading.Event()
        self._loader = threading.Thread(target=self._keep_loaded, name="hashseek-load", daemon=True)
        self._merger = threading.Thread(target=self._keep_merged, name="hashseek-merge", daemon=True)

    def start(self) -> None:
        """Load the collection and its model in one thread, and merge index segments in another."""
        self._loader.start()
        self._merger.start()

    def stop(self) -> None:
        """Write the index, so that the next start is fast, and close the collection.

        Rebuilding an approximate index may take minutes, so it is left to the next start.
        """
        self._stopped.set()
        # OpenVINO crashes a process that ends while it loads a network. The first load may also wait for a server.
        self._loader.join(STOP_SECONDS if self._searcher is None else None)
        if self._searcher is None:
            return
        self._merger.join(STOP_SECONDS)
        if self._merger.is_alive():
            log.warning("the index was being rebuilt and was not written: the next start will build it")
            return
        collection = self._searcher.collection
        if not self.read_only:
            try:
                if collection.kind not in SLOW_TO_BUILD:  # those were written when they were built
                    collection.save_index()
            except (OSError, HashseekError) as error:
                log.warning("the index could not be written; the next start will rebuild it: %s", error)
        collection.close()

    @property
    def searcher(self) -> Searcher:
        """The searcher.

        Raises:
            NotReady: it is still loading.
            NotLoaded: loading failed; it is tried again later.
        """
        if self._failure is not None:
            raise NotLoaded(
                f"the collection could not be loaded: {self._failure}; fix or replace it: the service tries again "
                f"every {RETRY_SECONDS:.0f} s"
            )
        searcher = self._searcher
        if searcher is None:
            raise NotReady("the service is starting and still loading its model: try again in a second")
        return searcher

    @property
    def read_only(self) -> bool:
        """Whether it may not be changed."""
        return self._read_only is not None

    def check_writable(self) -> None:
        """Raise `ReadOnly` if it may not be changed."""
        if self._read_only is not None:
            raise ReadOnly(self._read_only)

    @property
    def n_images(self) -> int | None:
        """Images in the index; None until it is loaded, and while it cannot be read."""
        searcher = self._searcher
        with suppress(BadCollection):
            if searcher is not None:
                searcher.collection.check_readable()  # fails within seconds; counting tries for longer
                return len(searcher.collection)
        return None

    def summary(self) -> CollectionSummary:
        """Its entry in a list of collections."""
        collection = None if self._searcher is None else self._searcher.collection
        place = self.settings.collection
        return CollectionSummary(
            name=parse_uri(place).name if is_in_milvus(place) else place.absolute().name,
            url=f"{self.url_prefix}/",
            status="failed" if self._failure else "loading" if collection is None else "ready",
            n_images=self.n_images,
            n_bits=None if collection is None else collection.n_bits,
            fingerprint=None if collection is None else collection.fingerprint,
        )

    def _keep_loaded(self) -> None:
        """Load the collection, and keep it up to date."""
        lower_priority()  # also of OpenVINO's threads, which start here
        wait = 0.0
        while not self._stopped.wait(wait):
            wait = FOLLOW_SECONDS if self._load() else RETRY_SECONDS
            self.loaded.set()

    def _load(self) -> bool:
        """Load the collection, or load it again if another one took its place or the permission to write has changed.

        Returns False if that failed. Until it is done, an earlier searcher answers.
        """
        old = self._searcher  # a local reference, dropped at the end: it would keep the old collection open
        try:
            if old is None:
                self._searcher = self._open(self.settings.checkpoint)
                self._failure = None
            elif not old.collection.is_current() or why_read_only(self.settings) != self._read_only:
                new = self._open(None)  # the checkpoint in the settings belongs to the codes at the start
                # Requests that began with the old searcher end with it. The last one to drop it closes its collection.
                finalize(old, old.collection.close).atexit = False
                self._searcher = new
                fingerprint = new.encoder.fingerprint[:12]
                log.warning(
                    "%s was opened again, with the codes of checkpoint %s", self.settings.collection, fingerprint
                )
        except Exception as error:
            what = f"the {'' if old is None else 'new '}collection {self.settings.collection}"
            if old is not None or str(error) != self._failure:  # not again at every attempt
                log.error("%s could not be loaded: %s", what, error, exc_info=_is_unexpected(error))
            if old is None:
                self._failure = str(error)
            return False
        return True

    def _keep_merged(self) -> None:
        """Merge the segments of the index when enough has changed, while requests are answered."""
        wait = MERGE_SECONDS
        while not self._stopped.wait(wait):
            try:
                self._merge()
                wait = MERGE_SECONDS
            except Exception as error:
                wait = RETRY_SECONDS
                log.warning("the segments of the index could not be merged: %s", error, exc_info=_is_unexpected(error))

    def _merge(self) -> None:
        searcher = self._searcher  # a local reference keeps its collection open
        if searcher is None:
            return
        collection = searcher.collection
        # An index that takes long to build is written at once. The others wait for `stop`.
        if collection.kind in SLOW_TO_BUILD and not self.read_only:
            collection.save_index()
        else:
            collection.merge_segments()

    def _open(self, checkpoint: Path | None) -> Searcher:
        settings, reason = self.settings, why_read_only(self.settings)
        collection = open_store(settings.collection, checkpoint=settings.checkpoint, read_only=reason is not None)
        try:
            searcher = self._shared.searcher(collection, settings, checkpoint)
        except BaseException:
            collection.close()
            raise
        self._read_only = reason
        if reason and not settings.read_only:
            log.warning("a collection is served read-only: %s", reason)
        return searcher


def _is_unexpected(error: Exception) -> bool:
    """Whether its message does not say enough, so that a log needs its traceback."""
    return not isinstance(error, HashseekError | OSError)
