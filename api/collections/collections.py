"""The collections that a process serves: a single one, or each one in a subfolder of a folder."""

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from anyio import CapacityLimiter

from hashseek.api.collections.service import FOLLOW_SECONDS, Service, Shared, why_read_only
from hashseek.api.messages.problems import CollectionExists, ReadOnly, UnknownCollection
from hashseek.api.monitoring import metrics
from hashseek.api.settings import Settings
from hashseek.indexing.collection import open_or_create
from hashseek.retrieval.files import fsync_folder

log = logging.getLogger("hashseek")

MAX_FILE_READS = 8  # stored files (up to 256 MiB each) read at a time; further requests wait without a thread
IN_FLIGHT_SECONDS = 30.0  # requests may take this long to finish before the files of a collection are deleted


class Collections:
    """The collections by name; a single one has the name "". They share encoders and decoders.

    If there are several, new folders are served as soon as they are loaded, and those whose folder is gone are dropped.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._shared = Shared()
        self.decoders = self._shared.decoders
        self.file_reads = CapacityLimiter(MAX_FILE_READS)
        self._services = {name: self._service(name, folder) for name, folder in settings.folders().items()}
        self.several = "" not in self._services
        self._opening = threading.Lock()
        self._stopped = threading.Event()
        self._scanner = threading.Thread(target=self._keep_scanned, name="hashseek-scan", daemon=True)

    def __iter__(self) -> Iterator[Service]:
        return iter([service for _, service in sorted(self._services.copy().items()) if not service.leaving])

    def start(self) -> None:
        """Start to load all collections, each in a thread."""
        metrics.INDEX_SIZE.set_function(lambda: sum(service.n_images or 0 for service in self))
        metrics.QUEUE.set_function(lambda: self.decoders.waiting)
        for service in self:
            service.start()
        if self.several:
            self._scanner.start()

    def stop(self) -> None:
        """Write the indexes, so that the next start is fast, and close the collections."""
        self._stopped.set()
        if self.several:
            self._scanner.join()
        for service in self:
            service.stop()
        self.decoders.close()

    def get(self, name: str) -> Service:
        """The collection with this name.

        Raises:
            UnknownCollection: there is none.
        """
        service = self._services.get(name)
        if service is None or service.leaving:
            raise UnknownCollection(f"there is no collection {name[:80]!r}: /v1/collections lists the existing ones")
        return service

    def check_writable(self) -> None:
        """Raise `ReadOnly` if none may be created or deleted."""
        if reason := why_read_only(self.settings):
            raise ReadOnly(reason)

    def create(self, name: str, *, like: str) -> Service:
        """Create an empty collection with the checkpoint of another one; it stores features if the other one does.

        Raises:
            CollectionExists: the name is taken.
            UnknownCollection: there is no collection with the name of the other one.
        """
        model = self.get(like).searcher.collection
        folder = self.settings.collection / name
        with self._opening:
            if name in self._services or folder.exists():  # one whose folder was moved away is still being closed
                raise CollectionExists(f"there is already a folder {name!r}: choose another name")
            hidden = folder.with_name(f".new-{name}-{secrets.token_hex(4)}")
            try:
                open_or_create(hidden, checkpoint=model.checkpoint, keep_features=model.keeps_features).close()
                hidden.rename(folder)
                fsync_folder(folder.parent)
            except BaseException:  # such as a full disk; half a collection would take the name
                shutil.rmtree(hidden, ignore_errors=True)
                raise
            return self._open(name, folder)

    def delete(self, service: Service) -> None:
        """Close a collection that is `leaving` once its requests have finished, and delete its folder."""
        folder = service.settings.collection
        hidden = folder.with_name(f".deleted-{folder.name}-{secrets.token_hex(4)}")
        self._close(service)
        try:
            folder.rename(hidden)  # at once: whatever a crash leaves behind is no longer a collection
        finally:
            del self._services[service.name]  # before that, the folder would be served again
        if hidden.is_symlink():
            hidden.unlink()
        else:
            shutil.rmtree(hidden)

    def _service(self, name: str, folder: Path) -> Service:
        return Service(replace(self.settings, collection=folder), name, self._shared)

    def _open(self, name: str, folder: Path) -> Service:
        """Serve a collection as soon as it is loaded."""
        service = self._service(name, folder)
        service.start()
        service.loaded.wait()
        self._services[name] = service
        return service

    def _close(self, service: Service) -> None:
        service.loaded.wait()  # otherwise it would open a folder that is gone
        deadline = time.monotonic() + IN_FLIGHT_SECONDS
        while service.in_use and time.monotonic() < deadline:
            time.sleep(0.01)
        service.stop()

    def _keep_scanned(self) -> None:
        """Look for folders that have appeared or disappeared."""
        gone: set[str] = set()
        while not self._stopped.wait(FOLLOW_SECONDS):
            try:
                gone = self._scan(gone)
            except Exception:
                log.exception("cannot look for collections in %s", self.settings.collection)

    def _scan(self, gone_before: set[str]) -> set[str]:
        """Open new collections, close those that are gone twice in a row; returns those that are gone.

        Once is not enough: another folder may be about to take its place.
        """
        found, served = self.settings.subfolders(), {service.name: service for service in self}
        for name in served.keys() & gone_before - found.keys():
            served[name].leaving = True
            self._close(served[name])
            del self._services[name]
            log.warning("the collection %s is gone and is no longer served", name)
        for name in found.keys() - self._services.keys():
            with self._opening:
                if name not in self._services and found[name].exists():
                    self._open(name, found[name])
        return served.keys() - found.keys()
