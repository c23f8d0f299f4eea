"""Holds the searcher that the HTTP service answers with, and keeps it up to date in background threads."""

import logging
import threading
import time
import weakref
from pathlib import Path

from hashseek.api.problems import NotLoaded, NotReady
from hashseek.api.settings import Settings
from hashseek.indexing.collection import Collection
from hashseek.indexing.index.hamming_index import APPROXIMATE
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import HashseekError

log = logging.getLogger("hashseek")

RETRY_SECONDS = 30.0  # until a failed load or merge is tried again
MERGE_SECONDS = 1.0  # between two checks whether the index needs a merge
STOP_SECONDS = 5.0  # to wait for a running merge when the service stops


class Service:
    """The searcher of the service. Loads in the background, and loads again when the collection changes its model."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._searcher: Searcher | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._reloader: threading.Thread | None = None
        self._next_reload = 0.0
        self._stopped = threading.Event()
        self._merger = threading.Thread(target=self._keep_merged, name="hashseek-merge", daemon=True)

    def start(self) -> None:
        """Start to load collection and model in one thread, and to merge index segments in another."""
        threading.Thread(target=self._load, name="hashseek-load", daemon=True).start()
        self._merger.start()

    def stop(self) -> None:
        """Write the index, so that the next start is fast, and close the collection.

        An approximate index that needs a rebuild is left to the next start: it may take minutes.
        """
        self._stopped.set()
        if self._reloader is not None:
            self._reloader.join()
        if self._searcher is None:
            return
        self._merger.join(STOP_SECONDS)
        if self._merger.is_alive():
            log.warning("the index was being rebuilt and was not written: the next start builds it")
            return
        collection = self._searcher.collection
        if not self.settings.read_only:
            try:
                if collection.kind not in APPROXIMATE:  # those were written when they were built
                    collection.save_index()
            except (OSError, HashseekError) as error:
                log.warning("the index was not written, the next start rebuilds it: %s", error)
        collection.close()

    @property
    def searcher(self) -> Searcher:
        """The searcher.

        Raises:
            NotReady: it is still loading.
            NotLoaded: loading failed, and will not be tried again.
        """
        if self._failure is not None:
            raise NotLoaded(f"the collection could not be loaded: {self._failure}; fix that and restart the service")
        searcher = self._searcher
        if searcher is None:
            raise NotReady("the service is starting and loads its model: try again in a second")
        if not searcher.collection.catalog.is_current():
            self._reload(searcher)
        return searcher

    def _load(self) -> None:
        try:
            self._searcher = self._open(self.settings.checkpoint)
        except Exception as error:
            self._failure = str(error)
            log.exception("the collection could not be loaded")

    def _keep_merged(self) -> None:
        """Merge the segments of the index when enough has changed. Requests are answered meanwhile."""
        wait = MERGE_SECONDS
        while not self._stopped.wait(wait):
            try:
                self._merge()
                wait = MERGE_SECONDS
            except Exception as error:
                wait = RETRY_SECONDS
                unexpected = not isinstance(error, HashseekError | OSError)
                log.warning("the segments of the index could not be merged: %s", error, exc_info=unexpected)

    def _merge(self) -> None:
        searcher = self._searcher  # a local reference keeps its collection from being closed meanwhile
        if searcher is None:
            return
        collection = searcher.collection
        # An approximate index takes so long to build that it is written at once. The others wait for `stop`.
        if collection.kind in APPROXIMATE and not self.settings.read_only:
            collection.save_index()
        else:
            collection.merge_segments()

    def _open(self, checkpoint: Path | None) -> Searcher:
        settings = self.settings
        collection = Collection(settings.collection, read_only=settings.read_only)
        try:
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

    def _reload(self, old: Searcher) -> None:
        """Open the collection again in a thread. Until that is done, the old searcher answers."""
        with self._lock:
            busy = self._reloader is not None and self._reloader.is_alive()
            if busy or old is not self._searcher or time.monotonic() < self._next_reload:
                return
            self._reloader = threading.Thread(target=self._replace, args=(old,), name="hashseek-reload", daemon=True)
            self._reloader.start()

    def _replace(self, old: Searcher) -> None:
        try:
            new = self._open(None)  # the checkpoint in the settings belongs to the codes at the start
        except Exception as error:
            self._next_reload = time.monotonic() + RETRY_SECONDS
            log.exception("the collection has switched to codes that could not be loaded: %s", error)
            return
        # Requests that began with the old searcher end with it. The last one to drop it closes its collection.
        weakref.finalize(old, old.collection.close).atexit = False
        self._searcher = new
        log.warning("the collection now answers with the codes of checkpoint %s", new.encoder.fingerprint[:12])
